// Trains in a Worker for index.html, so that the page stays responsive.
//
// The page sends {id, call, values}; the answer is {id, result} or {id, error}. Calls run one after
// the other, except `stop` and `setRate`, which apply to a training that runs. Training reports
// {losses, milliseconds} in between.
import { TrainingSession, readSafetensors } from "./ortops.mjs";

const ROWS = 64;
const REPORT = 50; // milliseconds between reports
const here = new URL(".", import.meta.url);

let session;
let data;
let target;
let stopped = false;

function rowsOf(arrays, from, to) {
  return Object.fromEntries(Object.entries(arrays).map(([name, { data: values, dims }]) => {
    const size = values.length / dims[0];
    return [name, { data: values.subarray(from * size, to * size), dims: [to - from, ...dims.slice(1)] }];
  }));
}

function shuffled(arrays) {
  const order = Array.from({ length: arrays[target].dims[0] }, (_, index) => index);
  for (let last = order.length - 1; last > 0; last -= 1) {
    const other = Math.floor(Math.random() * (last + 1));
    [order[last], order[other]] = [order[other], order[last]];
  }
  return Object.fromEntries(Object.entries(arrays).map(([name, { type, dims, data: values }]) => {
    const size = values.length / dims[0];
    const mixed = new values.constructor(values.length);
    order.forEach((row, to) => mixed.set(values.subarray(row * size, (row + 1) * size), to * size));
    return [name, { type, dims, data: mixed }];
  }));
}

/** Returns the model's first output, row by row. */
async function scoresOf(feeds) {
  const found = await session.predict(feeds);
  const { data: scores, dims } = found[Object.keys(session.about.evaluate.outputs)[0]];
  const width = dims.at(-1);
  return Array.from({ length: dims[0] }, (_, row) =>
    [...scores.subarray(row * width, (row + 1) * width)].map(Number));
}

const calls = {
  async open({ provider, runtime }) {
    const place = new URL(runtime, here).href;
    const ort = await import(place).catch((error) => {
      throw new Error(`cannot load onnxruntime-web from ${place} (${error.message}); see the source of index.html`);
    });
    session = await TrainingSession.create(ort, here, {
      gpuState: provider === "webgpu", sessionOptions: { executionProviders: [provider] },
    });
    const [train, test] = await Promise.all(["train", "test"].map(async (name) => {
      const response = await fetch(new URL(`${name}.safetensors`, here));
      if (!response.ok) throw new Error(`${name}.safetensors: ${response.status}; put the data next to this page`);
      return readSafetensors(await response.arrayBuffer());
    }));
    data = { train, test };
    const { feeds } = session.about.step;
    target = feeds.at(-1).name;
    return { feeds, rows: train[target].dims[0], testRows: test[target].dims[0], rate: calls.rate() };
  },

  rate: () => (session.about.learning_rates.length ? session.learningRate : null),

  setRate(value) {
    session.learningRate = value;
  },

  stop() {
    stopped = true;
  },

  async train({ epochs, ordered }) {
    stopped = false;
    let pending = [];
    let times = [];
    let last = performance.now();
    const report = async () => {
      postMessage({ losses: pending, milliseconds: times });
      [pending, times, last] = [[], [], performance.now()];
      await new Promise((done) => setTimeout(done)); // lets `stop` and `setRate` arrive
    };
    const total = data.train[target].dims[0];
    try {
      for (let epoch = 0; epoch < epochs && !stopped; epoch += 1) {
        const arrays = ordered ? data.train : shuffled(data.train);
        for (let from = 0; from < total && !stopped; from += ROWS) {
          const begin = performance.now();
          const { loss } = await session.step(rowsOf(arrays, from, Math.min(from + ROWS, total)));
          times.push(performance.now() - begin);
          pending.push(loss);
          if (performance.now() - last > REPORT) await report();
        }
      }
    } finally {
      await report();
    }
  },

  /** Returns the share of test rows whose class has the largest score. */
  async accuracy() {
    const total = data.test[target].dims[0];
    let right = 0;
    for (let from = 0; from < total; from += 256) {
      const { [target]: labels, ...feeds } = rowsOf(data.test, from, Math.min(from + 256, total));
      const rows = await scoresOf(feeds);
      right += rows.filter((row, at) => row.indexOf(Math.max(...row)) === Number(labels.data[at])).length;
    }
    return right / total;
  },

  classify: async (feeds) => (await scoresOf(feeds))[0],

  save: () => session.save(),

  reset: () => session.reset(),
};

let queue = Promise.resolve();

self.onmessage = ({ data: { id, call, values } }) => {
  const run = async () => {
    try {
      const result = await calls[call](values);
      postMessage({ id, result }, result instanceof Uint8Array ? [result.buffer] : []);
    } catch (error) {
      postMessage({ id, error: { name: error.name, message: error.message } });
    }
  };
  if (["stop", "setRate"].includes(call)) run();
  else queue = queue.then(run);
};
