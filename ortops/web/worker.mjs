// Trains in a Worker for the pages, so that they stay responsive.
//
// A page sends {id, call, values}; the answer is {id, result} or {id, error}. Calls run one after
// the other, except `stop` and `setRate`, which apply to a training that runs. Training reports
// {losses, milliseconds} in between.
import { TrainingSession, readSafetensors } from "./ortops.mjs";
import { Images, inputsOf } from "./images.mjs";
import { runtimeOf } from "./runtime.mjs";

const REPORT = 50; // milliseconds between reports
const here = new URL(".", import.meta.url);

let session = null;
let previous; // the session to return to while another one is on trial; else undefined
let data;
let stopped = false;
const images = new Images();

/** Arrays of train.safetensors and test.safetensors: what a training reads. */
class Arrays {
  constructor(train, test, target) {
    Object.assign(this, { train, test, target: target.name });
    this.isOfClasses = /^u?int/.test(target.type);
    this.rows = train[target.name].dims[0];
    this.testRows = test[target.name].dims[0];
  }

  batch(rows) {
    return Object.fromEntries(Object.entries(this.train).map(([name, { data: values, dims }]) => {
      const size = values.length / dims[0];
      const chosen = new values.constructor(rows.length * size);
      rows.forEach((row, at) => chosen.set(values.subarray(row * size, (row + 1) * size), at * size));
      return [name, { data: chosen, dims: [rows.length, ...dims.slice(1)] }];
    }));
  }

  testBatch(from, to) {
    const { [this.target]: labels, ...feeds } = Object.fromEntries(
      Object.entries(this.test).map(([name, { data: values, dims }]) => {
        const size = values.length / dims[0];
        return [name, { data: values.subarray(from * size, to * size), dims: [to - from, ...dims.slice(1)] }];
      }),
    );
    return { feeds, labels: labels.data };
  }
}

/** Refuses arrays that are not those of the feeds, with as many rows each. */
function arraysOf(arrays, file) {
  const names = session.about.step.feeds.map(({ name }) => name);
  const missing = names.find((name) => !Object.hasOwn(arrays, name) || !arrays[name].dims.length);
  if (missing !== undefined) throw new Error(`${file}: '${missing}' is missing; it needs an array with rows for each input`);
  const chosen = names.map((name) => [name, arrays[name]]);
  const rows = new Set(chosen.map(([, { dims }]) => dims[0]));
  if (rows.size !== 1 || rows.has(0)) throw new Error(`${file}: arrays must have as many rows, and at least one, got ${[...rows].join(", ")}`);
  return Object.fromEntries(chosen);
}

function shuffle(order) {
  for (let last = order.length - 1; last > 0; last -= 1) {
    const other = Math.floor(Math.random() * (last + 1));
    [order[last], order[other]] = [order[other], order[last]];
  }
}

/** Returns the model's first output, row by row. */
async function scoresOf(feeds) {
  const found = await session.predict(feeds);
  const [name] = Object.keys(session.about.evaluate.outputs);
  const { data: scores, dims } = found[name];
  if (dims.length !== 2) throw new Error(`the output '${name}' must be [rows, classes], got [${dims}]`);
  const width = dims[1];
  return Array.from({ length: dims[0] }, (_, row) =>
    [...scores.subarray(row * width, (row + 1) * width)].map(Number));
}

/** Says in plain words why a step cannot be opened, and what to do; `place` is that of onnxruntime-web. */
function explained(error, place) {
  const [, file, state] = /\/([\w.]+): (\d{3})(?: |$)/.exec(error.message) ?? [];
  const unreachable = /\/([\w.]+) cannot be read/.exec(error.message)?.[1];
  if (error.name === "ModelError" && file) {
    error.message = `${file} is missing next to this page (the server answers ${state}): put all files there that ` +
      "`ortops export-step … --web` wrote";
  } else if (error.name === "ModelError" && unreachable) {
    error.message = `${unreachable} cannot be read: the server of this page does not answer; start it again, and reload this page`;
  } else if (/no available backend found/.test(error.message)) {
    error.message = `onnxruntime-web cannot start (${error.message}): put all files of its npm package's \`dist\` into ` +
      `${new URL(".", place)}, and reload this page`;
  }
  return error;
}

const calls = {
  /**
   * Opens a step: `files` by name, or those beside this file. `keep` continues with the present state. On
   * `trial`, the present session stays until `accept` or `restore`.
   */
  async open({ provider, files = here, keep = false, trial = false }) {
    const place = runtimeOf(provider); // not what a message says
    if (provider === "webgpu" && !(await navigator.gpu?.requestAdapter())) {
      throw new Error("this browser has no WebGPU device");
    }
    const ort = await import(place).catch(() => {
      throw new Error(`onnxruntime-web, which runs the model, cannot be loaded from ${place}: put the files of its npm ` +
        `package's \`dist\` into ${new URL(".", place)}, and reload this page; or export again with \`--runtime PLACE\``);
    });
    const next = await TrainingSession.create(ort, files, {
      gpuState: provider === "webgpu", sessionOptions: { executionProviders: [provider] },
    }).catch((error) => { throw explained(error, place); });
    const present = previous ?? session;
    if (keep && present) {
      const state = await present.state();
      await next.setState(Object.fromEntries(Object.entries(state).map(([name, { data: values, dims }]) =>
        [name, { data: values, dims }])));
    }
    if (previous === undefined) previous = session;
    else await session?.release();
    session = next;
    if (!trial) await calls.accept();
    return { about: session.about, rate: calls.rate() };
  },

  /** Goes on with the session that is on trial. */
  async accept() {
    await previous?.release();
    previous = undefined;
  },

  /** Returns to the session before a trial. */
  async restore() {
    if (previous === undefined) return;
    await session?.release();
    [session, previous] = [previous, undefined];
  },

  /** Reads the arrays beside this file. */
  async readArrays() {
    const found = await Promise.allSettled(["train", "test"].map(async (name) => {
      const response = await fetch(new URL(`${name}.safetensors`, here));
      if (!response.ok) {
        throw new Error(`${name}.safetensors is missing next to this page (the server answers ${response.status}): write the ` +
          "data there, with one array for each input; ortops.graph.safetensors writes such files");
      }
      return arraysOf(readSafetensors(await response.arrayBuffer(), `${name}.safetensors`), `${name}.safetensors`);
    }));
    const failed = found.find(({ status }) => status === "rejected"); // the first in order, not in time
    if (failed) throw failed.reason;
    const [train, test] = found.map(({ value }) => value);
    data = new Arrays(train, test, session.about.step.feeds.at(-1));
    return { rows: data.rows, testRows: data.testRows };
  },

  /** Finds the inputs for images. */
  inputs: () => inputsOf(session.about),

  /** Sets how images become tensors; returns the number of classes. */
  async useImages({ inputs, settings }) {
    images.use(inputs, 0, settings);
    const [scores] = await scoresOf(images.blackFeeds());
    images.use(inputs, scores.length, settings);
    return scores.length;
  },

  addImages: (added) => images.add(added),

  removeImages: (ids) => images.remove(ids),

  /** Sets a share of the images aside, and makes them the data. */
  async splitImages(share) {
    const failed = await images.split(share);
    data = images;
    return { failed, rows: data.rows, testRows: data.testRows };
  },

  previews: (ids) => images.previews(ids),

  /** Decodes the image that is classified from now on; returns a small one. */
  showPicture: (file) => images.show(file),

  classifyPicture: async () => (await scoresOf(await images.pictureFeeds()))[0],

  rate: () => (session.about.learning_rates.length ? session.learningRate : null),

  /** Sets the learning rate; returns it as the training has it. */
  setRate(value) {
    session.learningRate = value;
    return calls.rate();
  },

  stop() {
    stopped = true;
  },

  /** Trains for an epoch; returns false if it was stopped. */
  async train({ ordered = false, size = 64 }) {
    stopped = false;
    let pending = [];
    let times = [];
    let last = performance.now();
    const report = async () => {
      postMessage({ losses: pending, milliseconds: times });
      [pending, times, last] = [[], [], performance.now()];
      await new Promise((done) => setTimeout(done)); // lets `stop` and `setRate` arrive
    };
    const order = Array.from({ length: data.rows }, (_, row) => row);
    if (!ordered) shuffle(order);
    try {
      for (let from = 0; from < order.length && !stopped; from += size) {
        const begin = performance.now();
        const { loss } = await session.step(data.batch(order.slice(from, from + size)));
        times.push(performance.now() - begin);
        pending.push(loss);
        if (performance.now() - last > REPORT) await report();
      }
    } finally {
      await report();
    }
    return !stopped;
  },

  /**
   * Returns the class of each row, the one with the largest score, and the number of its image: of test rows, or of
   * all if there are none. Null if the targets are no classes.
   */
  async judge({ size = 256 } = {}) {
    if (!data.isOfClasses) return null;
    const total = data.testRows || data.rows;
    const found = { labels: [], guesses: [], ids: [] };
    for (let from = 0; from < total; from += size) {
      const { feeds, labels, ids = [] } = data.testBatch(from, Math.min(from + size, total));
      const rows = await scoresOf(feeds);
      found.labels.push(...Array.from(labels, Number));
      found.guesses.push(...Array.from(labels, (_, at) => rows[at].indexOf(Math.max(...rows[at]))));
      found.ids.push(...ids);
    }
    return found;
  },

  classify: async (feeds) => (await scoresOf(feeds))[0],

  save: () => session.save(),

  saveState: () => session.saveState(),

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
