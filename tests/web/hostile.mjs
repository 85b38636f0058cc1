// Files of an export that somebody has changed: node hostile.mjs PACKAGES FOLDER SCRATCH
//
// Each one is refused with an error of the driver that names file and field, or works.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { cp, readFile, rm, symlink, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { crc32 } from "node:zlib";

const [, , packages, folder, scratch] = process.argv;
const require = createRequire(join(resolve(packages), "package.json"));
const node = require("onnxruntime-node");
const driver = await import(pathToFileURL(resolve(folder, "ortops.mjs")).href);
const { TrainingSession, readSafetensors } = driver;

const names = ["step.json", "step.onnx", "evaluate.onnx", "state.safetensors", "model.onnx"];
const files = Object.fromEntries(await Promise.all(names.map(async (name) => [name, await readFile(join(folder, name))])));
const about = JSON.parse(String(files["step.json"]));

// Sessions of onnxruntime are made once: what is tried here are the files beside them.
const made = new Map();
const ort = {
  Tensor: node.Tensor,
  InferenceSession: {
    async create(content) {
      if (!made.has(content.length)) made.set(content.length, await node.InferenceSession.create(content));
      return made.get(content.length);
    },
  },
};
const batch = { images: { data: new Float32Array(64).fill(0.5), dims: [1, 1, 8, 8] }, labels: [1] };

const wrong = [];
let cases = 0;

/** Tries files; says what is wrong with the error, if `pattern` is given or there is one. */
async function attempt(row, changed, pattern) {
  cases += 1;
  try {
    const session = await TrainingSession.create(ort, { ...files, ...changed });
    await session.step(batch);
    await session.evaluate(batch);
    await session.predict(batch);
    await session.save();
    session.learningRate = 0.5;
    await session.state();
    await session.saveState();
    await session.reset();
    if (pattern) wrong.push(`${row}: taken`);
  } catch (error) {
    const isRight = error instanceof driver.OrtopsError && /^[^\p{C}\u2028\u2029]*$/u.test(error.message);
    if (!isRight) wrong.push(`${row}: ${error.stack}`);
    else if (pattern && !pattern.test(error.message)) wrong.push(`${row}: ${error.message}`);
  }
}

/** A copy of the description with another value at a place; `undefined` removes it. */
function changed(place, value) {
  const copy = structuredClone(about);
  const owner = place.slice(0, -1).reduce((part, name) => part[name], copy);
  if (value === undefined) delete owner[place.at(-1)];
  else Object.defineProperty(owner, place.at(-1), { value, enumerable: true, configurable: true, writable: true });
  return { "step.json": JSON.stringify(copy) };
}

const value = { toString: null, valueOf: null };
const variable = "fc2.bias";
const rows = {
  "a file outside": [["files", "../outside.bin"], { bytes: 1, crc32: 1 }, /^step.json: files must be .*, got '..\/outside.bin'/],
  "an absolute file": [["files", "/etc/passwd"], { bytes: 1, crc32: 1 }, /^step.json: files must be .*, got '\/etc\/passwd'/],
  "a file elsewhere": [["files", "http://127.0.0.1/x"], { bytes: 1, crc32: 1 }, /^step.json: files must be /],
  "a file of the prototype": [["files", "__proto__"], { bytes: 1, crc32: 1 }, /^step.json: files must be /],
  "no file": [["files", "model.onnx"], undefined, /^step.json: files must be /],
  "files of null": [["files", "model.onnx"], null, /^step.json: files.model.onnx must be an object, got null/],
  "no length": [["files", "model.onnx", "bytes"], null, /^step.json: files.model.onnx.bytes must be an integer >= 0, got null/],
  "null": [["evaluate"], null, /^step.json: evaluate must be an object, got null/],
  "a list": [["variables"], [], /^step.json: variables must be an object, got an array/],
  "no variable": [["variables", variable], null, /^step.json: variables.fc2.bias must be an object, got null/],
  "a type of the prototype": [["variables", variable, "type"], "constructor", /^variable 'fc2.bias' has type constructor,/],
  "another type of it": [["variables", variable, "type"], "__proto__", /^variable 'fc2.bias' has type __proto__,/],
  "half a row": [["variables", variable, "shape"], [0.5, 20], /^step.json: variables.fc2.bias.shape.0 must be an integer >= 0, got 0.5/],
  "no places": [["variables", variable, "places"], null, /^step.json: variables.fc2.bias.places must be an array, got null/],
  "a place before the file": [["variables", variable, "places"], [[-4, 40]], /^step.json: variables.fc2.bias.places.0.0 must be an integer >= 0, got -4/],
  "a place behind the file": [["variables", variable, "places"], [[2 ** 40, 40]], /^step.json: variables.fc2.bias.places must be .*model.onnx/],
  "a place of another length": [["variables", variable, "places"], [[0, 39]], /^step.json: variables.fc2.bias.places must be /],
  "the place of another": [["variables", variable, "places"], [[about.variables["fc1.bias"].places[0][0], 40]], /^step.json: places of variables must not overlap/],
  "no value next": [["variables", variable, "next"], "missing", /^step.json: variables.fc2.bias.next must be an output of step.onnx, got 'missing'/],
  "no such loss": [["step", "loss"], "toString", /^step.json: step.loss must be an output of step.onnx, got 'toString'/],
  "no such rate": [["learning_rates"], ["constructor"], /^step.json: learning_rates must be .*variables, got 'constructor'/],
  "a rate that is no number": [["learning_rates"], ["fc2.bias"], /^step.json: learning_rates must be .*, got 'fc2.bias'/],
  "no such output": [["evaluate", "outputs"], { logits: "x" }, /^step.json: evaluate.outputs.logits must be an output of evaluate.onnx, got 'x'/],
  "a feed of null": [["step", "feeds", 0], null, /^step.json: step.feeds.0 must be an object, got null/],
  "a feed without a name": [["step", "feeds", 0, "name"], undefined, /^step.json: step.feeds.0.name must be text, got undefined/],
  "an escape": [["step", "feeds", 0, "type"], "\u001b]0;owned\u0007\nforged", /^/],
  "a feed too few": [["step", "feeds"], [], /^step.json: step.feeds /],
  "a value without text": [["format"], value, /^step.json: the format must be 'ortops.step', version 1, got an object/],
};
for (const [row, [place, content, pattern]] of Object.entries(rows)) await attempt(row, changed(place, content), pattern);

// Each value of the description, replaced by others.
const OTHERS = [undefined, null, -1, 0.5, 1e300, true, "", "__proto__", "constructor", "\u001b[31m\n", [], [null], [[]], {}, value];
const places = [];
(function list(part, place) {
  if (place.length) places.push(place);
  if (typeof part === "object" && part !== null) {
    Object.keys(part).slice(0, place.length ? 4 : 9).forEach((name) => list(part[name], [...place, Array.isArray(part) ? Number(name) : name]));
  }
})(about, []);
for (const place of places) for (const other of OTHERS) await attempt(`${place.join(".")} = ${JSON.stringify(other)}`, changed(place, other));

// The state.
const state = files["state.safetensors"];
const size = Number(state.readBigUInt64LE());
const header = JSON.parse(String(state.subarray(8, 8 + size)));
const content = state.subarray(8 + size);
const stateOf = (text, data = content, length = undefined) => {
  const bytes = Buffer.from(typeof text === "string" ? text : JSON.stringify(text));
  const begin = Buffer.alloc(8);
  begin.writeBigUInt64LE(BigInt(length ?? bytes.length));
  return Buffer.concat([begin, bytes, data]);
};
const headerOf = (name, change) => ({ ...header, [name]: { ...header[name], ...change } });
const [begin, end] = header[variable].data_offsets;
const states = {
  "null": ["null", /the header must be an object, got null/],
  "a list": ["[]", /the header must be an object, got an array/],
  "no JSON": ["{", /the header is not JSON/],
  "a tensor of null": [{ ...header, [variable]: null }, /fc2.bias must be an object, got null/],
  "a type of the prototype": [headerOf(variable, { dtype: "constructor" }), /fc2.bias.dtype must be one of BOOL, .*, got 'constructor'/],
  "another": [headerOf(variable, { dtype: "__proto__" }), /fc2.bias.dtype must be one of .*, got '__proto__'/],
  "toString": [headerOf(variable, { dtype: "toString" }), /fc2.bias.dtype must be one of .*, got 'toString'/],
  "a list as type": [headerOf(variable, { dtype: ["F32"] }), /fc2.bias.dtype must be one of .*, got an array/],
  "half rows": [headerOf(variable, { shape: [0.5, 20] }), /fc2.bias.shape.0 must be an integer >= 0, got 0.5/],
  "negative rows": [headerOf(variable, { shape: [-2, -5] }), /fc2.bias.shape.0 must be an integer >= 0, got -2/],
  "no shape": [headerOf(variable, { shape: null }), /fc2.bias.shape must be an array, got null/],
  "too many": [headerOf(variable, { shape: [2 ** 53] }), /fc2.bias.shape.0 must be an integer >= 0, got 9007199254740992/],
  "negative offsets": [headerOf(variable, { data_offsets: [begin - content.length - 8, end - content.length - 8] }), /fc2.bias.data_offsets.0 must be an integer >= 0, got -/],
  "three offsets": [headerOf(variable, { data_offsets: [begin, end, end] }), /fc2.bias.data_offsets must be \[begin, end\]/],
  "no offsets": [headerOf(variable, { data_offsets: null }), /fc2.bias.data_offsets must be an array, got null/],
  "backwards": [headerOf(variable, { data_offsets: [end, begin] }), /without gaps and overlaps/],
  "overlapping": [headerOf(variable, { data_offsets: [0, end - begin] }), /without gaps and overlaps/],
  "behind the file": [headerOf(variable, { data_offsets: [content.length, content.length + 40] }), /without gaps and overlaps/],
};
const refusedState = async (row, bytes, pattern) => {
  const described = { ...about, files: { ...about.files, "state.safetensors": { bytes: bytes.length, crc32: crc32(bytes) } } };
  const both = { "state.safetensors": bytes, "step.json": JSON.stringify(described) };
  await attempt(row, both, new RegExp(`^state.safetensors: .*${pattern.source}`, pattern.flags));
  assert.throws(() => readSafetensors(bytes), (error) => {
    if (!(error instanceof driver.ModelError) || !pattern.test(error.message)) wrong.push(`${row}: ${error.stack}`);
    return true;
  });
};
for (const [row, [text, pattern]] of Object.entries(states)) await refusedState(`state: ${row}`, stateOf(text), pattern);
await refusedState("state: more data", stateOf(header, Buffer.concat([content, Buffer.alloc(4)])), /without gaps and overlaps/);
for (const length of [2n ** 64n - 1n, 2n ** 63n, BigInt(state.length), BigInt(state.length - 7)]) {
  await refusedState(`state: a header of ${length}`, stateOf(header, content, length), /the header is longer than the file/);
}
await refusedState("state: an empty file", Buffer.alloc(0), /the header is longer than the file/);
await refusedState("state: latin-1", stateOf(header, content).fill(0xff, 9, 12), /the header is not JSON/);

// What is given as files, and folders.
await attempt("null as a file", { "model.onnx": null }, /^model.onnx must be text or bytes, got null/);
await attempt("a number as a file", { "model.onnx": 5 }, /^model.onnx must be text or bytes, got 5/);
const copy = join(scratch, "copy");
await cp(folder, copy, { recursive: true, filter: (path) => !path.endsWith("ort") });
await writeFile(join(scratch, "outside.bin"), files["model.onnx"]);
await rm(join(copy, "model.onnx"));
const open = (row, pattern) => assert.rejects(TrainingSession.create(ort, copy), (error) => {
  cases += 1;
  if (!(error instanceof driver.ModelError) || !pattern.test(error.message)) wrong.push(`${row}: ${error.stack}`);
  return true;
});
await symlink("../outside.bin", join(copy, "model.onnx"));
await open("a link that leads out", /model.onnx must be a file of the folder/);
await rm(join(copy, "model.onnx"));
execFileSync("mkfifo", [join(copy, "model.onnx")]);
await open("a pipe", /model.onnx must be a file of the folder/);

assert.deepEqual(wrong, []);
console.log(`${cases} cases at ${places.length} places`);
