// Trains from an exported folder, and prints what came of it as JSON.
//
//     node train.mjs RUNTIME FOLDER DATA RESULT
//
// RUNTIME is a folder of npm with the packages, and the package: `.web onnxruntime-node`. DATA is a
// folder of train.safetensors and test.safetensors, RESULT where model.onnx and state.safetensors go.
import { readFile, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [, , packages, name, folder, data, result] = process.argv;
const require = createRequire(join(resolve(packages), "package.json"));
const loaded = await import(pathToFileURL(require.resolve(name)).href);
const ort = loaded.InferenceSession ? loaded : loaded.default;
if (name === "onnxruntime-web") ort.env.wasm.numThreads = 1;
const { TrainingSession, readSafetensors } = await import(
  pathToFileURL(resolve(folder, "ortops.mjs")).href
);
const { train, evaluate } = await import(new URL("loop.mjs", import.meta.url));

const read = async (file) => readSafetensors(await readFile(join(data, file)));
const session = await TrainingSession.create(ort, folder);
const report = await train(session, await read("train.safetensors"), 3, 64);
Object.assign(report, await evaluate(session, await read("test.safetensors")));
await writeFile(join(result, "model.onnx"), await session.save());
await writeFile(join(result, "state.safetensors"), await session.saveState());
console.log(JSON.stringify(report));
await session.release();
