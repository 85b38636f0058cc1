// The driver's errors and their messages: node refusals.mjs PACKAGES FOLDER
import assert from "node:assert/strict";
import { readFile, readdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [, , packages, folder] = process.argv;
const require = createRequire(join(resolve(packages), "package.json"));
const ort = require("onnxruntime-node");
const { TrainingSession, readSafetensors } = await import(pathToFileURL(resolve(folder, "ortops.mjs")).href);

let cases = 0;
const refused = async (call, message) => {
  await assert.rejects(async () => call(), { message });
  cases += 1;
};

const files = {};
for (const name of await readdir(folder)) {
  if (/\.(onnx|json|safetensors)$/.test(name)) files[name] = await readFile(join(folder, name));
}
const session = await TrainingSession.create(ort, files);
const images = new Float32Array(2 * 64).fill(0.5);
const good = { images, labels: [1, 2] };
const before = await session.state();
const create = (changed) => TrainingSession.create(ort, { ...files, ...changed });

const json = (change) => JSON.stringify(Object.assign(JSON.parse(String(files["step.json"])), change));
await refused(() => create({ "step.json": json({ version: 2 }) }), /must be 'ortops.step', version 1, got 'ortops.step', version 2; export the step with/);
const broken = Uint8Array.from(files["model.onnx"]);
broken[broken.length >> 1] ^= 1;
await refused(() => create({ "model.onnx": broken }), /^model.onnx: size or checksum differs from step.json; keep/);
await refused(() => create({ "step.onnx": undefined }), /^step.onnx is missing among the given files$/);
await refused(() => session.step({ images }), /^feeds: input 'labels' is missing$/);
await refused(() => session.step({ ...good, image: images }), /unknown input 'image'; the inputs are images, labels/);
await refused(() => session.step({ images: images.subarray(1), labels: [1, 2] }), /cannot reshape 127 numbers to/);
await refused(() => session.step({ images, labels: [1] }), /'labels': cannot reshape 1 numbers to|'labels' must be int64/);
await refused(() => session.step({ images, labels: [1, 2.5] }), /'labels' has type int64 and must contain integers, got 2.5/);
for (const [wrong, given] of [[[[1, 2]], "an array"], ["12", "string"], [[null], "null"], [new Array(2), "undefined"]]) {
  for (const name of ["images", "labels"]) {
    const message = new RegExp(`^'${name}' must be a flat array of numbers.* but element 0 is ${given}$`);
    await refused(() => session.step({ ...good, [name]: { data: wrong, dims: [wrong.length] } }), message);
  }
}
await refused(() => session.step({ images, labels: [1, 1e300] }), /'labels': 1e\+300 is out of range for int64/);
await refused(() => session.step({ images, labels: [1, 2n ** 63n] }), /'labels': 9223372036854775808 is out of range for int64/);
await refused(
  () => session.step({ images, labels: new ort.Tensor("int32", new Int32Array([1, 2]), [2]) }),
  /input 'labels' must be int64\[batch\], got int32\[2\]/,
);
await refused(() => { session.learningRate = -1; }, /learningRate must be a finite float32 number >= 0, got -1/);
await refused(() => { session.learningRate = 1e39; }, /learningRate must be a finite float32 number >= 0, got 1e\+39/);
await refused(() => session.setState({ toString: [1] }), /unknown variable 'toString'/);
await refused(() => session.setState({ weight: [1] }), /unknown variable 'weight'/);
await refused(() => session.setState({ "fc2.bias": [1, 2] }), /cannot reshape 2 numbers to \[10\]/);
const state = files["state.safetensors"];
await refused(() => readSafetensors(state.subarray(0, state.length - 1)), /has \d+ bytes, which do not match float32/);
const first = session.step(good);
await refused(() => session.step(good), /^step: a call of 'step' is still running; await it first$/);
await first;

// What was refused has changed nothing; one step was made.
const after = await session.state();
assert.deepEqual(Object.keys(after), Object.keys(before));
assert.equal(after.step.data[0], before.step.data[0] + 1n);

// What was read can be set, and a step that is made again is the same.
const repeated = await session.step(good);
await session.setState(after);
session.learningRate = 0.5;
assert.equal(session.learningRate, 0.5);
await session.setState({ learning_rate: after.learning_rate });
assert.equal((await session.step(good)).loss, repeated.loss);
const { loss, logits } = await session.evaluate(good);
assert.equal((await session.evaluate(good)).loss, loss);
assert.deepEqual(logits.dims, [2, 10]);
console.log(`${cases} cases`);
