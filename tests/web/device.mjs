// What the driver leaves on a device, whose tensors are counted: node device.mjs PACKAGES FOLDER
//
// Sessions are those of onnxruntime-node. What is to stay on the device becomes a tensor of
// onnxruntime whose data are lent by a buffer, as onnxruntime-web makes it on WebGPU.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [, , packages, folder] = process.argv;
const require = createRequire(join(resolve(packages), "package.json"));
const node = require("onnxruntime-node");
const { TrainingSession } = await import(pathToFileURL(resolve(folder, "ortops.mjs")).href);

const live = new Set();
const failures = { run: false, download: "", release: false };
const released = [];

function onDevice({ type, dims, data }, name) {
  const buffer = { name, data };
  live.add(buffer);
  return node.Tensor.fromGpuBuffer(buffer, {
    dataType: type,
    dims,
    download: async () => {
      await new Promise((done) => setTimeout(done));
      assert(live.has(buffer), `${name} is read after it was freed`);
      if (failures.download === name) throw new Error(`${name} is lost`);
      return data.slice();
    },
    dispose: () => assert(live.delete(buffer), `${name} is freed twice`),
  });
}

class InferenceSession {
  static async create(model, options) {
    const result = new InferenceSession();
    const { preferredOutputLocation, executionProviders, ...others } = options;
    assert.deepEqual(executionProviders, ["webgpu"]);
    result.places = preferredOutputLocation ?? {};
    result.session = await node.InferenceSession.create(model, others);
    result.inputNames = result.session.inputNames;
    result.outputNames = result.session.outputNames;
    return result;
  }

  async run(feeds) {
    if (failures.run) throw new Error("the device is lost");
    const inputs = Object.entries(feeds).map(([name, tensor]) => {
      if (tensor.location !== "gpu-buffer") return [name, tensor];
      assert(live.has(tensor.gpuBuffer), `${name} is read after it was freed`);
      return [name, new node.Tensor(tensor.type, tensor.gpuBuffer.data, tensor.dims)];
    });
    const found = await this.session.run(Object.fromEntries(inputs));
    return Object.fromEntries(Object.entries(found).map(([name, tensor]) => [
      name, this.places[name] === "gpu-buffer" ? onDevice(tensor, name) : tensor,
    ]));
  }

  async release() {
    released.push(this);
    if (failures.release) throw new Error("cannot be released");
    await this.session.release();
  }
}

const ort = { Tensor: node.Tensor, InferenceSession };
const sessionOptions = { executionProviders: ["webgpu"] };
const open = () => TrainingSession.create(ort, folder, { gpuState: true, sessionOptions });
const plain = await TrainingSession.create(node, folder);
const feeds = { images: new Float32Array(2 * 64).fill(0.5), labels: [1, 2] };
const same = async (one, other) => {
  const [found, expected] = [await one.state(), await other.state()];
  assert.deepEqual(Object.keys(found), Object.keys(expected));
  for (const [name, { data }] of Object.entries(found)) assert.deepEqual(data, expected[name].data, name);
};

// Steps keep one tensor of each variable.
const session = await open();
assert.equal(live.size, 0);
await session.step(feeds);
const kept = live.size;
assert(kept >= 8, `${kept} variables are on the device`);
for (let count = 0; count < 3; count += 1) {
  await session.step(feeds);
  assert.equal(live.size, kept);
}
await session.evaluate(feeds);
assert.equal(live.size, kept);

// What is fetched leaves the device, and is as if it had never been there.
for (let count = 0; count < 4; count += 1) await plain.step(feeds);
for (const fetchAll of ["state", "save", "saveState"]) {
  await session[fetchAll]();
  assert.equal(live.size, 0, fetchAll);
  await session.step(feeds);
  await plain.step(feeds);
  assert.equal(live.size, kept, fetchAll);
}
const state = await session.state();
await same(session, plain);
state["fc2.bias"].data.fill(7); // the caller's own
await same(session, plain);

// What is set takes the place of what was on the device.
await session.step(feeds);
await plain.step(feeds);
const before = await plain.state();
await session.setState({ "fc2.bias": before["fc2.bias"] });
assert.equal(live.size, kept - 1);
await assert.rejects(session.setState({ "fc2.weight": before["fc2.weight"], "fc2.bias": [1] }));
assert.equal(live.size, kept - 1);
session.learningRate = 0.01;
plain.learningRate = 0.01;
assert.equal(live.size, kept - 1);
await session.step(feeds);
await plain.step(feeds);
assert.equal(live.size, kept);

// Errors half-way change nothing, and leave nothing behind.
failures.run = true;
await assert.rejects(session.step(feeds), /the device is lost/);
await assert.rejects(session.evaluate(feeds), /the device is lost/);
failures.run = false;
assert.equal(live.size, kept);
[failures.download] = [...live].map(({ name }) => name);
for (const fetchAll of ["state", "save", "saveState"]) {
  await assert.rejects(session[fetchAll](), / is lost$/);
  assert.equal(live.size, 1, fetchAll); // all others could be fetched
}
failures.download = "";
await same(session, plain);
await session.step(feeds);
await plain.step(feeds);
await same(session, plain);

// A loss that cannot be read, as on a device that is lost after a run.
await session.step(feeds);
const { step } = session.about;
const { loss } = step;
step.loss = Object.values(session.about.variables).find(({ next }) => next?.includes("bias")).next;
await assert.rejects(session.step(feeds));
step.loss = loss;
assert.equal(live.size, kept);
await plain.step(feeds);
await same(session, plain);

// In the end nothing is left, whatever fails.
await session.step(feeds);
failures.release = true;
released.length = 0;
await assert.rejects(session.release(), /cannot be released/);
assert.equal(released.length, 2);
assert.equal(live.size, 0);
for (const call of ["state", "save", "saveState", "step", "evaluate", "release"]) {
  await assert.rejects(session[call](feeds), new RegExp(`^StateError: ${call}: the session has been released; cre`));
}
assert.throws(() => session.learningRate, /learningRate: the session has been released; create a new one/);
await assert.rejects(
  TrainingSession.create(ort, folder, { sessionOptions: { preferredOutputLocation: "gpu-buffer" } }),
  /^ArgumentError: sessionOptions must not contain preferredOutputLocation, which the driver sets; use gpuState: true/,
);
for (const [providers, given] of [[undefined, ""], [[{ name: "wasm" }], "wasm"]]) {
  await assert.rejects(
    TrainingSession.create(ort, folder, { gpuState: true, sessionOptions: { executionProviders: providers } }),
    new RegExp(`^ArgumentError: gpuState: .* must contain 'webgpu', got \\[${given}\\]; with others, variables`),
  );
}
console.log(`${kept} variables`);
