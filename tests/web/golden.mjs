// Makes steps from a folder that an earlier version exported, and prints their losses as JSON.
//
//     node golden.mjs PACKAGES RUNTIME FOLDER
//
// FOLDER has the driver and batches.json, a list of objects of nested lists; saved.onnx goes there.
import { readFile, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [, , packages, name, folder] = process.argv;
const require = createRequire(join(resolve(packages), "package.json"));
const loaded = await import(pathToFileURL(require.resolve(name)).href);
const ort = loaded.InferenceSession ? loaded : loaded.default;
const { TrainingSession } = await import(pathToFileURL(resolve(folder, "ortops.mjs")).href);

const shape = (list) => (Array.isArray(list) ? [list.length, ...shape(list[0])] : []);
const tensor = (input, list) => {
  const numbers = [list].flat(Infinity);
  const data = input === "labels" ? BigInt64Array.from(numbers, BigInt) : Float32Array.from(numbers);
  return { data, dims: shape(list) };
};

const session = await TrainingSession.create(ort, folder);
const losses = [];
for (const batch of JSON.parse(await readFile(join(folder, "batches.json"), "utf8"))) {
  const feeds = Object.entries(batch).map(([input, list]) => [input, tensor(input, list)]);
  losses.push((await session.step(Object.fromEntries(feeds))).loss);
}
await writeFile(join(folder, "saved.onnx"), await session.save());
console.log(JSON.stringify(losses));
await session.release();
