// The driver's errors and their messages: node refusals.mjs PACKAGES FOLDER
import assert from "node:assert/strict";
import { readFile, readdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [, , packages, folder] = process.argv;
const require = createRequire(join(resolve(packages), "package.json"));
const ort = require("onnxruntime-node");
const driver = await import(pathToFileURL(resolve(folder, "ortops.mjs")).href);
const { TrainingSession, readSafetensors, writeSafetensors } = driver;

let cases = 0;
const refused = async (call, message, type = "") => {
  await assert.rejects(async () => call(), (error) => {
    assert(error instanceof driver.OrtopsError, error.stack);
    assert.match(error.message, message);
    if (type) assert.equal(error.name, type);
    if (type) assert(error instanceof driver[type]);
    return true;
  });
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
for (const call of ["step", "evaluate", "predict"]) {
  await refused(() => session[call](), /^feeds must be an object of arrays by name, got undefined$/, "ArgumentError");
  await refused(() => session[call](images), /^feeds must be an object of arrays by name, got object$/, "ArgumentError");
  await refused(() => session[call](null), /got null$/, "ArgumentError");
}
await refused(() => session.setState(), /^setState: arrays must be an object of arrays by name/, "ArgumentError");
for (const call of ["step", "evaluate"]) {
  for (const label of [-1, 10, -100n, 1e9]) {
    await refused(() => session[call]({ images, labels: [1, label] }), new RegExp(`^feeds: labels in 'labels' must be from 0 to 9, got ${label}$`), "FeedError");
  }
}
const none = { images: { data: [], dims: [0, 1, 8, 8] }, labels: [] };
await refused(() => session.step(none), /^feeds: 'images' must have at least one row, got shape \[0,1,8,8\]$/, "FeedError");
await refused(() => session.step({ ...good, images: { data: images, dims: [3, 1, 8, 8] } }), /'images': dims \[3,1,8,8\] need 192 numbers, got 128/, "FeedError");
await refused(() => session.step({ ...good, images: { data: images, dims: [-2, 1, 8, 8] } }), /dims must be an array of integers >= 0, got -2,1,8,8/, "FeedError");
await refused(() => session.step({ ...good, images: { data: images, dims: [1, 2, 8, 8] } }), /must be float32\[batch,1,8,8\], got float32\[1,2,8,8\]/, "FeedError");
await refused(() => session.predict({}), /^feeds: input 'images' is missing$/, "FeedError");
await refused(() => TrainingSession.create({}, files), /^create: ort must be the module/, "ArgumentError");
await refused(() => TrainingSession.create(ort), /^create: source must be a folder, or files by name, got undefined$/, "ArgumentError");
await refused(() => create({ "step.json": "{" }), /^step.json is not JSON/, "ModelError");
await refused(() => create({ "step.json": "null" }), /^step.json: the format must be/, "ModelError");
await refused(() => create({ "step.json": json({ files: undefined }) }), /^step.json: files must be an object, got undefined; export or write it again$/, "ModelError");
const absent = join(folder, "absent");
await refused(() => TrainingSession.create(ort, absent), /absent\/step.json cannot be read \(ENOENT/, "ModelError");
await refused(() => TrainingSession.create(ort, pathToFileURL(absent)), /absent\/step.json cannot be read/, "ModelError");
await refused(() => TrainingSession.create(ort, "http://127.0.0.1:1/"), /^http:\/\/127.0.0.1:1\/step.json cannot be read/, "ModelError");
await refused(() => TrainingSession.create(ort, files, null), /^create: options must be an object, got null$/, "ArgumentError");
await refused(() => TrainingSession.create(ort, files, { sessionOptions: "webgpu" }), /^create: sessionOptions must be an object, got webgpu$/, "ArgumentError");
await refused(() => TrainingSession.create(ort, files, { gpustate: true }), /^create: unknown option 'gpustate'; the options are gpuState, stopOnNan, sessionOptions$/, "ArgumentError");
await refused(() => readSafetensors(), /^readSafetensors: file must be an ArrayBuffer or a Uint8Array, got undefined$/, "ArgumentError");
await refused(() => writeSafetensors(), /^writeSafetensors: tensors must be an object of arrays by name/, "ArgumentError");
for (const [given, said] of [
  [{ type: "float", dims: [1], data: new Float32Array(1) }, "float\\[1\\] with 1 numbers"],
  [{ type: "float32", dims: [2], data: new Float32Array(1) }, "float32\\[2\\] with 1 numbers"],
  [{ type: "float32", dims: [1], data: [1] }, "float32\\[1\\] with 1 numbers"],
]) await refused(() => writeSafetensors({ a: given }), new RegExp(`^writeSafetensors: 'a' must have a type.*, got ${said}$`), "ArgumentError");
await refused(() => TrainingSession.create(ort, files, { gpuState: true }), /^gpuState: onnxruntime-node ends the process/, "UnsupportedError");
globalThis.document = {}; // as in a page
ort.env.wasm.proxy = true;
await refused(() => create({}), /^ort.env.wasm.proxy must be false/, "UnsupportedError");
ort.env.wasm.proxy = false;
delete globalThis.document;
// NaN is reported, and the step is not made.
const spoiled = images.slice();
spoiled[3] = NaN;
await refused(() => session.step({ ...good, images: spoiled }), /^step: the loss is NaN: in the batch, 'images' has 1 of 128 values that are not finite; clean the data. The step has not been made/, "DivergedError");
const state = files["state.safetensors"];
await refused(() => readSafetensors(state.subarray(0, 4)), /the header is longer than the file/, "ModelError");
await refused(() => readSafetensors(state.subarray(0, state.length - 1)), /data_offsets must cover the data without gaps and overlaps/);
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

// Predictions need no labels; reset goes back to the export.
const { logits: predicted } = await session.predict({ images });
assert.deepEqual(predicted.data, logits.data);
assert.deepEqual((await session.predict(good)).logits.data, logits.data);
const moved = await session.state();
assert.notDeepEqual(moved["fc2.bias"].data, before["fc2.bias"].data);
await session.reset();
for (const [name, { data, dims }] of Object.entries(await session.state())) {
  assert.deepEqual(data, before[name].data, name);
  assert.deepEqual(dims, before[name].dims, name);
}
await session.step(good);
assert.deepEqual((await session.state())["fc2.bias"].data, after["fc2.bias"].data);
const lax = await TrainingSession.create(ort, files, { stopOnNan: false });
assert.equal((await lax.step({ ...good, images: spoiled })).loss, NaN);
await refused(() => session.setState({ "fc2.bias": new Array(11).fill(0) }), /cannot reshape 11 numbers/, "FeedError");
await session.setState(await lax.state());
await refused(() => session.step(good), /^step: the loss is NaN: check the learning rate \(0.001\); if variables are not finite either, call reset\(\)/, "DivergedError");
await session.reset();
assert((await session.step(good)).loss > 0);
await lax.release();
await session.release();
console.log(`${cases} cases`);
