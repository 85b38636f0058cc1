// Runs a training step that `ortops export-step` wrote, with any onnxruntime for JavaScript.
// No dependencies: the caller passes onnxruntime-node or onnxruntime-web.

const FORMAT = "ortops.step";
const VERSION = 1;
const OPTIONS = ["gpuState", "stopOnNan", "sessionOptions"];
const FILES = ["step.onnx", "evaluate.onnx", "state.safetensors", "model.onnx"];

// Tables that are asked for names in files have no prototype, which has names, too.
const ARRAYS = {
  __proto__: null,
  bool: Uint8Array,
  float16: globalThis.Float16Array ?? Uint16Array,
  float32: Float32Array,
  float64: Float64Array,
  int8: Int8Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  uint64: BigUint64Array,
};
const SAFETENSORS = {
  __proto__: null,
  bool: "BOOL", float16: "F16", float32: "F32", float64: "F64",
  int8: "I8", int16: "I16", int32: "I32", int64: "I64",
  uint8: "U8", uint16: "U16", uint32: "U32", uint64: "U64",
};
const TYPES = { __proto__: null, ...Object.fromEntries(Object.entries(SAFETENSORS).map(([type, name]) => [name, type])) };

/** Base class of the errors of this driver. */
export class OrtopsError extends Error {
  constructor(message, options) {
    super(message.replace(/[\p{C}\u2028\u2029]/gu, escape), options); // text of files may drive terminals
  }

  get name() {
    return this.constructor.errorName; // minifiers rename classes
  }

  static errorName = "OrtopsError";
}

/** An argument has an invalid type or value. */
export class ArgumentError extends OrtopsError {
  static errorName = "ArgumentError";
}

/** A file is missing or invalid, or does not belong to the others. */
export class ModelError extends OrtopsError {
  static errorName = "ModelError";
}

/** onnxruntime's JavaScript API cannot do what was asked for. */
export class UnsupportedError extends OrtopsError {
  static errorName = "UnsupportedError";
}

/** Arrays do not fit the model. */
export class FeedError extends OrtopsError {
  static errorName = "FeedError";
}

/** The loss became NaN or infinite. */
export class DivergedError extends OrtopsError {
  static errorName = "DivergedError";
}

/** A call overlaps with another one, or follows `release`. */
export class StateError extends OrtopsError {
  static errorName = "StateError";
}

const escape = (character) => `\\u{${character.codePointAt().toString(16)}}`;
const count = (dims) => dims.reduce((product, dim) => product * dim, 1);
const bytesOf = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);

/** Frees tensors on a device, which the garbage collector does not free. */
const free = (tensors) => {
  for (const tensor of new Set(tensors)) {
    if (["gpu-buffer", "ml-tensor", "texture"].includes(tensor.location)) tensor.dispose();
  }
};

/** A training session, loaded from a folder that `ortops export-step` wrote. See `ortops.d.mts`. */
export class TrainingSession {
  #ort;
  #about;
  #files;
  #options;
  #stopOnNan;
  #step;
  #evaluate = null;
  #state;
  #busy = "";
  #released = false;

  /** Creates a session. */
  static async create(ort, source, options = {}) {
    checkOptions(ort, options);
    const { gpuState = false, stopOnNan = true, sessionOptions = {} } = options;
    const about = parse("step.json", await read(source, "step.json"));
    if (about?.format !== FORMAT || about.version !== VERSION) {
      throw new ModelError(
        `step.json: the format must be '${FORMAT}', version ${VERSION}, got ${shown(about?.format)}, ` +
          `version ${shown(about?.version)}; export the step with the version of ortops that this driver is from`,
      );
    }
    DESCRIPTION(about, "step.json:");
    const files = {};
    for (const [name, { bytes, crc32 }] of Object.entries(about.files)) {
      files[name] = await read(source, name);
      if (files[name].length !== bytes || checksum(files[name]) !== crc32) {
        throw new ModelError(
          `${name}: size or checksum differs from step.json; keep the files of one export ` +
            "together, or export again",
        );
      }
    }
    for (const [name, { type }] of Object.entries(about.variables)) {
      if (!(type in ARRAYS)) {
        throw new UnsupportedError(
          `variable '${name}' has type ${type}, which onnxruntime's JavaScript API does not ` +
            "support; export a float32 model",
        );
      }
    }
    checkPlaces(about, files["model.onnx"].length);
    const session = new TrainingSession();
    session.#ort = ort;
    session.#about = about;
    session.#files = files;
    session.#options = sessionOptions;
    session.#stopOnNan = stopOnNan;
    session.#state = session.#tensors(readSafetensors(files["state.safetensors"], "state.safetensors"));
    const places = gpuState ? { preferredOutputLocation: session.#locations() } : {};
    session.#step = await ort.InferenceSession.create(files["step.onnx"], { ...sessionOptions, ...places });
    checkNames(session.#step, "step.onnx", about.step.feeds, about.variables, [
      ["step.loss", about.step.loss], ...about.step.outputs.map((name) => ["step.outputs", name]),
      ...Object.entries(about.variables).map(([name, { next }]) => [`variables.${name}.next`, next]),
    ]);
    delete files["step.onnx"]; // not read again
    delete files["state.safetensors"];
    return session;
  }

  /** The content of step.json. */
  get about() {
    return this.#about;
  }

  /** Runs one training step. */
  async step(feeds) {
    const { step, variables } = this.#about;
    return this.#exclusive("step", async () => {
      const inputs = this.#inputs(this.#step, step.feeds, feeds);
      const found = await this.#step.run(inputs);
      const shown = Object.fromEntries(step.outputs.map((name) => [name, found[name]]));
      try {
        if (step.loss !== null) shown.loss = numberOf(found[step.loss]);
        if (this.#stopOnNan && shown.loss !== undefined && !Number.isFinite(shown.loss)) {
          throw new DivergedError(this.#divergence(shown.loss, inputs));
        }
      } catch (error) {
        free(Object.values(found));
        throw error;
      }
      const changed = Object.entries(variables).filter(([, { next }]) => next !== null);
      this.#replace(Object.fromEntries(changed.map(([name, { next }]) => [name, found[next]])));
      return shown;
    });
  }

  /** Computes the loss and the model's outputs for a batch, in inference mode. */
  async evaluate(feeds) {
    const { losses, feeds: described } = this.#about.evaluate;
    return this.#exclusive("evaluate", async () => {
      const { found, shown } = await this.#forward((session) => this.#inputs(session, described, feeds));
      if (losses.length === 0) return shown;
      const parts = losses.map(({ name, weight }) => weight * numberOf(found[name]));
      return { ...shown, loss: parts.reduce((sum, part) => sum + part, 0) };
    });
  }

  /** Computes the model's outputs for a batch without labels, in inference mode. */
  async predict(feeds) {
    const { predict, feeds: described } = this.#about.evaluate;
    return this.#exclusive("predict", async () => {
      if (predict === undefined) {
        throw new ModelError("predict: step.json was written by an older ortops; export the step again");
      }
      const read = described.filter(({ name }) => predict.includes(name));
      const others = described.filter(({ name }) => !predict.includes(name));
      const { shown } = await this.#forward((session) => {
        const sizes = new Map();
        const inputs = this.#inputs(session, read, feeds, sizes);
        const rows = Object.hasOwn(inputs, read[0]?.name) ? inputs[read[0].name].dims[0] : 1;
        // The outputs do not depend on these inputs, but onnxruntime requires them.
        return { ...inputs, ...Object.fromEntries(others.map((f) => [f.name, this.#placeholder(f, sizes, rows)])) };
      });
      return shown;
    });
  }

  /** Returns the training to the state of the export. */
  async reset() {
    return this.#exclusive("reset", async () => {
      const initial = Object.entries(this.#about.variables).map(([name, { type, shape, places }]) => {
        const [offset, length] = places[0] ?? [0, 0];
        const { buffer } = this.#files["model.onnx"].slice(offset, offset + length);
        return [name, new this.#ort.Tensor(type, new ARRAYS[type](buffer), shape)];
      });
      this.#replace(Object.fromEntries(initial));
    });
  }

  /** The learning rate of the next step. */
  get learningRate() {
    return numberOf(this.#state[this.#learningRates()[0]]);
  }

  set learningRate(value) {
    const set = this.#learningRates().map((name) => {
      const { type } = this.#about.variables[name];
      const tensor = Number.isFinite(value) && value >= 0 && this.#tensor(name, type, [value], []);
      if (!tensor || !Number.isFinite(numberOf(tensor))) {
        throw new ArgumentError(`learningRate must be a finite ${type} number >= 0, got ${value}`);
      }
      return [name, tensor];
    });
    this.#replace(Object.fromEntries(set));
  }

  /** Copies of the variables, by name. */
  async state() {
    return this.#exclusive("state", async () => this.#download());
  }

  /** Sets variables. */
  async setState(arrays) {
    return this.#exclusive("setState", async () => {
      const { variables } = this.#about;
      checkMapping("setState: arrays", arrays);
      for (const name of Object.keys(arrays)) {
        if (!Object.hasOwn(variables, name)) throw new ArgumentError(`setState: unknown variable '${name}'`);
        const { of, role } = variables[name];
        if (role === "master" && !Object.hasOwn(arrays, of)) {
          throw new ArgumentError(`setState: '${name}' is the float32 copy of '${of}'; set both`);
        }
      }
      for (const [name, { of, role }] of Object.entries(variables)) {
        if (role === "master" && Object.hasOwn(arrays, of) && !Object.hasOwn(arrays, name)) {
          throw new ArgumentError(`setState: '${of}' has a float32 copy, '${name}'; set both`);
        }
      }
      const set = Object.entries(arrays).map(([name, value]) => {
        const { type, shape } = variables[name];
        return [name, this.#checked({ name, type, shape }, value, "variable")];
      });
      // Copies, because the caller may still change the arrays.
      const copies = set.map(([name, { type, data, dims }]) => [
        name, this.#tensor(name, type, data.slice(), dims),
      ]);
      this.#replace(Object.fromEntries(copies));
    });
  }

  /** Returns model.onnx with the current state written into it. */
  async save() {
    return this.#exclusive("save", async () => {
      const result = this.#files["model.onnx"].slice();
      for (const [name, { data }] of Object.entries(await this.#download())) {
        const content = bytesOf(data);
        for (const [offset, length] of this.#about.variables[name].places) {
          if (content.length !== length) {
            throw new ModelError(`variable '${name}': expected ${length} bytes, got ${content.length}`);
          }
          result.set(content, offset);
        }
      }
      return result;
    });
  }

  /** Returns the current state as a safetensors file. */
  async saveState() {
    return this.#exclusive("saveState", async () => writeSafetensors(await this.#download()));
  }

  /** Frees the memory of onnxruntime's sessions. */
  async release() {
    return this.#exclusive("release", async () => {
      this.#released = true;
      free(Object.values(this.#state));
      [this.#state, this.#files] = [{}, {}];
      try {
        await this.#step.release();
      } finally {
        await this.#evaluate?.release();
      }
    });
  }

  // Calls must not overlap: a second one would read variables that the first is about to replace.
  async #exclusive(name, run) {
    this.#checkOpen(name);
    if (this.#busy) {
      throw new StateError(`${name}: a call of '${this.#busy}' is still running; await it first`);
    }
    this.#busy = name;
    try {
      return await run();
    } finally {
      this.#busy = "";
    }
  }

  #checkOpen(name) {
    if (this.#released) throw new StateError(`${name}: the session has been released; create a new one`);
  }

  #learningRates() {
    this.#checkOpen("learningRate");
    const { learning_rates: rates } = this.#about;
    if (rates.length === 0) {
      throw new UnsupportedError("learningRate: no variable holds it; set the variables that the training uses instead");
    }
    return rates;
  }

  #tensors(arrays) {
    const entries = Object.entries(this.#about.variables).map(([name, { type, shape }]) => {
      const found = arrays[name];
      if (!Object.hasOwn(arrays, name) || found.type !== type || `${found.dims}` !== `${shape}`) {
        throw new ModelError(`state.safetensors: '${name}' of type ${type}[${shape}] is missing`);
      }
      return [name, this.#tensor(name, type, found.data, shape)];
    });
    return Object.fromEntries(entries);
  }

  #tensor(name, type, data, dims) {
    return new this.#ort.Tensor(type, convert(name, type, data), dims);
  }

  // Sets variables, and frees their old tensors.
  #replace(tensors) {
    const old = Object.keys(tensors).map((name) => this.#state[name]);
    Object.assign(this.#state, tensors);
    const kept = new Set(Object.values(this.#state));
    free(old.filter((tensor) => !kept.has(tensor)));
  }

  // Outputs that are returned are on the CPU. So are integers, because the GPU's provider has few
  // kernels for them, and learning rates, because they are read and set synchronously.
  #locations() {
    const { learning_rates: rates } = this.#about;
    const places = Object.fromEntries(this.#about.step.outputs.map((name) => [name, "cpu"]));
    for (const [name, { next, type }] of Object.entries(this.#about.variables)) {
      if (next !== null && !(next in places)) {
        const isKept = ["float32", "float16"].includes(type) && !rates.includes(name);
        places[next] = isKept ? "gpu-buffer" : "cpu";
      }
    }
    return places;
  }

  // Afterwards the variables are on the CPU: a downloaded tensor is no longer on the device, and its
  // buffer would leak if `getData` were not asked to release it.
  async #download() {
    const tensors = [...new Set(Object.values(this.#state))];
    const downloads = await Promise.allSettled(tensors.map((tensor) => tensor.getData(true)));
    const failed = downloads.find(({ status }) => status === "rejected");
    if (failed) throw failed.reason;
    const data = new Map(tensors.map((tensor, index) => [tensor, downloads[index].value]));
    const entries = Object.entries(this.#state).map(([name, tensor]) => [
      name, new this.#ort.Tensor(tensor.type, data.get(tensor).slice(), tensor.dims),
    ]);
    return Object.fromEntries(entries);
  }

  async #forward(inputsOf) {
    if (this.#evaluate === null) {
      const file = this.#files["evaluate.onnx"];
      this.#evaluate = await this.#ort.InferenceSession.create(file, this.#options);
      const { feeds, outputs, losses } = this.#about.evaluate;
      checkNames(this.#evaluate, "evaluate.onnx", feeds, this.#about.variables, [
        ...Object.entries(outputs).map(([name, output]) => [`evaluate.outputs.${name}`, output]),
        ...losses.map(({ name }) => ["evaluate.losses", name]),
      ]);
      delete this.#files["evaluate.onnx"]; // not read again
    }
    const found = await this.#evaluate.run(inputsOf(this.#evaluate));
    const outputs = Object.entries(this.#about.evaluate.outputs);
    return { found, shown: Object.fromEntries(outputs.map(([name, output]) => [name, found[output]])) };
  }

  #inputs(session, described, feeds, sizes = new Map()) {
    checkMapping("feeds", feeds);
    const names = new Set(described.map(({ name }) => name));
    const known = new Set([...this.#about.step.feeds, ...this.#about.evaluate.feeds].map((f) => f.name));
    for (const name of Object.keys(feeds)) {
      if (!known.has(name)) {
        throw new FeedError(`feeds: unknown input '${name}'; the inputs are ${[...names].join(", ")}`);
      }
    }
    const inputs = {};
    for (const feed of described) {
      const { name } = feed;
      if (!Object.hasOwn(feeds, name)) throw new FeedError(`feeds: input '${name}' is missing`);
      const tensor = this.#checked(feed, feeds[name], "input", sizes);
      if (tensor.dims[0] === 0) {
        throw new FeedError(`feeds: '${name}' must have at least one row, got shape [${tensor.dims}]`);
      }
      for (const accepted of feed.labels ?? []) checkLabels(name, tensor, accepted);
      inputs[name] = tensor;
    }
    for (const name of session.inputNames) {
      if (Object.hasOwn(this.#state, name)) inputs[name] = this.#state[name];
    }
    return inputs;
  }

  // Zeros for an input that no output depends on.
  #placeholder({ name, type, shape }, sizes, rows) {
    if (shape === null || !(type in ARRAYS)) {
      throw new UnsupportedError(`predict: '${name}' has no known shape and type; use evaluate`);
    }
    const dims = shape.map((dim, axis) =>
      typeof dim === "number" ? dim : sizes.get(dim) ?? (axis === 0 ? rows : 1));
    return new this.#ort.Tensor(type, new ARRAYS[type](count(dims)), dims);
  }

  // Why the loss is not finite.
  #divergence(loss, inputs) {
    const wrong = this.#about.step.feeds.flatMap(({ name, type }) => {
      const { data, location } = inputs[name];
      if (!["float32", "float64"].includes(type) || (location ?? "cpu") !== "cpu") return [];
      const missing = data.reduce((sum, value) => sum + !Number.isFinite(value), 0);
      return missing ? [`'${name}' has ${missing} of ${data.length} values that are not finite`] : [];
    });
    const rate = this.#about.learning_rates.length ? ` (${Number(this.learningRate.toPrecision(6))})` : "";
    const look = wrong.length
      ? `in the batch, ${wrong.join(", ")}; clean the data`
      : `check the learning rate${rate}; if variables are not finite either, call reset() or setState()`;
    return `step: the loss is ${loss}: ${look}. The step has not been made. Pass stopOnNan: false to continue anyway`;
  }

  // Accepts a tensor, {data, dims}, or data if at most one dimension is unknown.
  #checked({ name, type, shape }, value, what, sizes = new Map()) {
    let tensor = value;
    if (!(value instanceof this.#ort.Tensor)) {
      const data = value?.data ?? value;
      if (data?.length === undefined) {
        throw new FeedError(`${what} '${name}' must be a tensor, an array, or {data, dims}`);
      }
      const array = convert(name, type, data);
      const dims = value.dims ?? dimsOf(name, shape, array.length, sizes);
      if (!Array.isArray(dims) || !dims.every((dim) => Number.isInteger(dim) && dim >= 0)) {
        throw new FeedError(`${what} '${name}': dims must be an array of integers >= 0, got ${dims}`);
      }
      if (count(dims) !== array.length) {
        throw new FeedError(`${what} '${name}': dims [${dims}] need ${count(dims)} numbers, got ${array.length}`);
      }
      tensor = new this.#ort.Tensor(type, array, dims);
    }
    const wanted = shape === null ? `${type} of any shape` : `${type}[${shape}]`;
    const expected = `${what} '${name}' must be ${wanted}, got ${tensor.type}[${tensor.dims}]`;
    if (tensor.type !== type) throw new FeedError(expected);
    if (shape === null) return tensor;
    if (tensor.dims.length !== shape.length) throw new FeedError(expected);
    shape.forEach((dim, axis) => {
      const size = tensor.dims[axis];
      if (typeof dim === "string") {
        if (sizes.has(dim) && sizes.get(dim) !== size) {
          throw new FeedError(`${expected}; '${dim}' is ${sizes.get(dim)} in another input`);
        }
        sizes.set(dim, size);
      } else if (dim !== null && dim !== size) {
        throw new FeedError(expected);
      }
    });
    return tensor;
  }
}

function checkOptions(ort, options) {
  if (typeof ort?.Tensor !== "function" || typeof ort.InferenceSession?.create !== "function") {
    throw new ArgumentError(
      "create: ort must be the module onnxruntime-web or onnxruntime-node; use `import * as ort from …`",
    );
  }
  for (const [what, value] of [["options", options], ["sessionOptions", options?.sessionOptions ?? {}]]) {
    if (typeof value !== "object" || value === null) {
      throw new ArgumentError(`create: ${what} must be an object, got ${value}`);
    }
  }
  const unknown = Object.keys(options).find((name) => !OPTIONS.includes(name));
  if (unknown !== undefined) {
    throw new ArgumentError(`create: unknown option '${unknown}'; the options are ${OPTIONS.join(", ")}`);
  }
  const { gpuState = false, sessionOptions = {} } = options;
  if (sessionOptions.preferredOutputLocation !== undefined) {
    throw new ArgumentError(
      "sessionOptions must not contain preferredOutputLocation, which the driver sets; use " +
        "gpuState: true to keep the variables on the GPU",
    );
  }
  if (gpuState && ort.env?.versions?.node) {
    throw new UnsupportedError(
      "gpuState: onnxruntime-node ends the process when it reads variables that are on a GPU; leave " +
        "out gpuState, so that the variables are copied to the GPU in each step",
    );
  }
  const providers = (sessionOptions.executionProviders ?? []).map((one) => one?.name ?? one);
  if (gpuState && !providers.includes("webgpu")) {
    throw new ArgumentError(
      `gpuState: sessionOptions.executionProviders must contain 'webgpu', got [${providers}]; with others, ` +
        "variables are never on the GPU",
    );
  }
  if (ort.env?.wasm?.proxy && typeof document !== "undefined") {
    throw new UnsupportedError(
      "ort.env.wasm.proxy must be false, because it takes the memory of the variables away; to keep " +
        "the page responsive, run the driver itself in a Worker",
    );
  }
}

function checkMapping(what, arrays) {
  if (typeof arrays !== "object" || arrays === null || Array.isArray(arrays) || ArrayBuffer.isView(arrays)) {
    const given = arrays === null ? "null" : Array.isArray(arrays) ? "an array" : typeof arrays;
    throw new ArgumentError(`${what} must be an object of arrays by name, got ${given}`);
  }
}

/** Refuses class numbers that the loss does not accept; kernels would read other memory. */
function checkLabels(name, tensor, { classes, ignored }) {
  if (!["cpu", "cpu-pinned"].includes(tensor.location ?? "cpu")) {
    throw new FeedError(`feeds: labels in '${name}' must be on the CPU, got ${tensor.location}`);
  }
  for (const value of tensor.data) {
    const label = Number(value);
    if (label !== ignored && (label < 0 || (classes !== null && label >= classes))) {
      const allowed = classes === null ? ">= 0" : `from 0 to ${classes - 1}`;
      const extra = ignored === null ? "" : ` or ${ignored}, which is ignored`;
      throw new FeedError(`feeds: labels in '${name}' must be ${allowed}${extra}, got ${label}`);
    }
  }
}

function dimsOf(name, shape, length, sizes) {
  const dims = (shape ?? [null]).map((dim) => (typeof dim === "number" ? dim : sizes.get(dim) ?? null));
  const open = dims.flatMap((dim, axis) => (dim === null ? [axis] : []));
  if (open.length > 1) {
    throw new FeedError(`input '${name}': the shape [${shape}] has several unknown dimensions; pass {data, dims}`);
  }
  for (const axis of open) {
    const rest = count(dims.filter((dim) => dim !== null));
    dims[axis] = rest === 0 ? 0 : length / rest;
  }
  if (!dims.every(Number.isInteger) || count(dims) !== length) {
    throw new FeedError(`input '${name}': cannot reshape ${length} numbers to [${shape}]`);
  }
  return dims;
}

function convert(name, type, data) {
  const Type = ARRAYS[type];
  if (Type === undefined) throw new FeedError(`'${name}' has type ${type}; pass an onnxruntime tensor`);
  if (data instanceof Type) return data;
  if (type === "float16" && Type === Uint16Array) {
    throw new FeedError(`'${name}' has type float16, but this JavaScript engine has no Float16Array; pass the bits as a Uint16Array`);
  }
  const isFloat = type.startsWith("float");
  if (isFloat && ArrayBuffer.isView(data)) return Type.from(data, Number);
  const held = new Type(1);
  return Type.from(data, (value, index) => {
    if (!["number", "bigint", "boolean"].includes(typeof value)) {
      const given = Array.isArray(value) ? "an array" : value === null ? "null" : typeof value;
      throw new FeedError(
        `'${name}' must be a flat array of numbers, or {data, dims} with one, but element ` +
          `${index} is ${given}`,
      );
    }
    if (isFloat) return Number(value);
    if (typeof value === "number" && !Number.isInteger(value)) {
      throw new FeedError(`'${name}' has type ${type} and must contain integers, got ${value}`);
    }
    held[0] = typeof held[0] === "bigint" ? BigInt(value) : Number(value);
    if (BigInt(held[0]) !== BigInt(value) || (type === "bool" && held[0] > 1)) {
      throw new FeedError(`'${name}': ${value} is out of range for ${type}`);
    }
    return held[0];
  });
}

const numberOf = ({ type, data: [first] }) =>
  type === "float16" && ARRAYS.float16 === Uint16Array ? ofHalf(first) : Number(first);

/** Converts the bits of a float16 to a number. */
function ofHalf(bits) {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

// ---------------------------------------------------------------------------------- files

async function read(source, file) {
  if (!["string", "object"].includes(typeof source) || source === null) {
    throw new ArgumentError(`create: source must be a folder, or files by name, got ${source}`);
  }
  if (typeof source === "object" && !(source instanceof URL)) {
    const content = source[file];
    if (content === undefined) throw new ModelError(`${file} is missing among the given files`);
    if (typeof content === "string") return new TextEncoder().encode(content);
    if (!(content instanceof ArrayBuffer) && !ArrayBuffer.isView(content)) {
      throw new ModelError(`${file} must be text or bytes, got ${shown(content)}`);
    }
    return content instanceof ArrayBuffer ? new Uint8Array(content) : bytesOf(content);
  }
  const folder = String(source).replace(/\/?$/, "/");
  const isRemote = /^(https?|blob|data):/.test(folder);
  if (globalThis.process?.versions?.node && !isRemote) {
    const name = "node:fs/promises"; // not a literal, so that bundlers for pages leave it alone
    const { readFile, realpath, stat } = await import(/* webpackIgnore: true */ /* @vite-ignore */ name);
    const [parent, path] = folder.startsWith("file:") ? [new URL(folder), new URL(file, folder)] : [folder, folder + file];
    const real = await realpath(path).catch(unreadable(path));
    const above = (await realpath(parent)).replace(/[\\/]$/, "");
    const isInside = real.startsWith(above) && /[\\/]/.test(real[above.length]);
    if (!isInside || !(await stat(real)).isFile()) {
      throw new ModelError(`${path} must be a file of the folder, not a link that leads out or a pipe; copy it there`);
    }
    return bytesOf(await readFile(real).catch(unreadable(path)));
  }
  const response = await fetch(folder + file).catch(unreadable(folder + file));
  if (!response.ok) throw new ModelError(`${folder}${file}: ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

const unreadable = (place) => (error) => {
  throw new ModelError(`${place} cannot be read (${error.message})`, { cause: error });
};

function parse(name, bytes) {
  try {
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch (error) {
    throw new ModelError(`${name} is not JSON (${error.message})`, { cause: error });
  }
}

// ---------------------------------------------------------------------------------- forms of JSON

/** What a message says of a value in a file. */
function shown(value) {
  if (typeof value === "string") return `'${value.slice(0, 80)}'`;
  if (typeof value !== "object" || value === null) return String(value);
  return Array.isArray(value) ? "an array" : "an object";
}

/** A form is a function (value, place) that raises a ModelError unless the value has the form. */
const form = (what, fits) => (value, place) => {
  if (!fits(value)) throw new ModelError(`${place} must be ${what}, got ${shown(value)}; export or write it again`);
};
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const isName = (value) => typeof value === "string" && value !== "__proto__"; // which objects cannot hold as others
const OBJECT = form("an object", (value) => typeof value === "object" && value !== null && !Array.isArray(value));
const ARRAY = form("an array", Array.isArray);
const COUNT = form("an integer >= 0", isCount);
const NUMBER = form("a finite number", Number.isFinite);
const TEXT = form("text", (value) => typeof value === "string");
const NAME = form("text", isName);
const DIMENSION = form("an integer >= 0, text or null", (value) => value === null || isName(value) || isCount(value));
const optional = (of) => (value, place) => value === undefined || of(value, place);
const orNull = (of) => (value, place) => value === null || of(value, place);
const within = (place, name) => (place.endsWith(":") ? `${place} ${name}` : `${place}.${name}`);
const list = (of) => (value, place) => {
  ARRAY(value, place);
  value.forEach((one, at) => of(one, within(place, at)));
};
const map = (of) => (value, place) => {
  OBJECT(value, place);
  for (const [name, one] of Object.entries(value)) {
    NAME(name, `${place}: a name`);
    of(one, within(place, name));
  }
};
const record = (fields) => (value, place) => {
  OBJECT(value, place);
  for (const [name, of] of Object.entries(fields)) of(Object.hasOwn(value, name) ? value[name] : undefined, within(place, name));
};
const fixed = (length, what) => (value, place) => {
  list(COUNT)(value, place);
  form(what, () => value.length === length)(value, place);
};

const FEED = record({
  name: NAME, type: TEXT, shape: orNull(list(DIMENSION)),
  labels: optional(list(record({ classes: orNull(COUNT), ignored: orNull(NUMBER) }))),
});
const DESCRIPTION = record({
  files: (value, place) => {
    OBJECT(value, place);
    const names = [...FILES, ...Object.keys(value)];
    const other = names.find((name) => !FILES.includes(name) || !Object.hasOwn(value, name));
    if (other !== undefined) form(FILES.join(", "), () => false)(other, place);
    map(record({ bytes: COUNT, crc32: COUNT }))(value, place);
  },
  step: record({ feeds: list(FEED), outputs: list(NAME), loss: orNull(NAME) }),
  evaluate: record({
    feeds: list(FEED), predict: optional(list(NAME)), outputs: map(NAME),
    losses: list(record({ name: NAME, weight: NUMBER })),
  }),
  learning_rates: list(NAME),
  variables: map(record({
    type: TEXT, shape: list(COUNT), next: orNull(NAME), role: TEXT, of: optional(NAME),
    places: list(fixed(2, "[offset, length]")),
  })),
});

const TENSOR = record({
  dtype: form(`one of ${Object.keys(TYPES).join(", ")}`, (value) => typeof value === "string" && value in TYPES),
  shape: list(COUNT),
  data_offsets: fixed(2, "[begin, end]"),
});

/** Refuses places in model.onnx that are not there, or of several variables, and rates that are no numbers. */
function checkPlaces({ variables, learning_rates: rates }, length) {
  const spans = [];
  for (const [name, { type, shape, places }] of Object.entries(variables)) {
    const bytes = count(shape) * ARRAYS[type].BYTES_PER_ELEMENT;
    const wrong = places.find(([offset, size]) => size !== bytes || offset + size > length);
    if (wrong) form(`[offset, ${bytes}] within model.onnx`, () => false)(`[${wrong}]`, `step.json: variables.${name}.places`);
    spans.push(...places.filter(([, size]) => size));
  }
  spans.sort(([a], [b]) => a - b);
  if (spans.some(([offset, size], at) => at + 1 < spans.length && offset + size > spans[at + 1][0])) {
    throw new ModelError("step.json: places of variables must not overlap; export the step again");
  }
  for (const name of rates) {
    const fits = Object.hasOwn(variables, name) && count(variables[name].shape) === 1 && variables[name].type.startsWith("float");
    form("numbers among the variables", () => fits)(name, "step.json: learning_rates");
  }
}

/** Refuses a description that names other inputs and outputs than a graph has. */
function checkNames({ inputNames, outputNames, inputMetadata = [] }, file, feeds, variables, outputs) {
  const place = `step.json: ${file.split(".")[0]}.feeds`;
  const described = new Set(feeds.map(({ name }) => name));
  const missing = inputNames.find((name) => !described.has(name) && !Object.hasOwn(variables, name));
  if (missing !== undefined) throw new ModelError(`${place} must contain '${missing}', an input of ${file}; export the step again`);
  for (const { name } of feeds) form(`an input of ${file}`, () => inputNames.includes(name))(name, place);
  const isOther = ({ name, type, shape }) => { // onnxruntime-web before 1.23 does not say what inputs are
    const known = inputMetadata.find((input) => input.name === name);
    return known?.isTensor && (known.type !== type || (shape !== null && known.shape.length !== shape.length));
  };
  const other = [...feeds, ...Object.entries(variables).map(([name, described]) => ({ ...described, name }))].find(isOther);
  if (other) throw new ModelError(`step.json: '${other.name}' has another type or rank in ${file}; export the step again`);
  for (const [where, name] of outputs) {
    orNull(form(`an output of ${file}`, (value) => outputNames.includes(value)))(name, `step.json: ${where}`);
  }
}

/** Reads a safetensors file: {type, dims, data} by name; `source` names it in messages. */
export function readSafetensors(file, source = "safetensors") {
  if (!(file instanceof ArrayBuffer) && !ArrayBuffer.isView(file)) {
    throw new ArgumentError(`readSafetensors: file must be an ArrayBuffer or a Uint8Array, got ${file}`);
  }
  const bytes = file instanceof ArrayBuffer ? new Uint8Array(file) : bytesOf(file);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const begin = 8 + (bytes.length < 8 ? NaN : Number(view.getBigUint64(0, true)));
  if (!(begin <= bytes.length)) throw new ModelError(`${source}: the header is longer than the file`);
  const header = parse(`${source}: the header`, bytes.subarray(8, begin));
  OBJECT(header, `${source}: the header`);
  delete header.__metadata__;
  map(TENSOR)(header, `${source}:`);
  const spans = Object.values(header).map(({ data_offsets: span }) => span).sort(([a, b], [c, d]) => a - c || b - d);
  if (`${[0, ...spans.map(([, to]) => to)]}` !== `${[...spans.map(([from]) => from), bytes.length - begin]}`) {
    throw new ModelError(`${source}: data_offsets must cover the data without gaps and overlaps; write the file again`);
  }
  const entries = Object.entries(header).map(([name, { dtype, shape, data_offsets: [from, to] }]) => {
    const type = TYPES[dtype];
    const content = bytes.slice(begin + from, begin + to); // a copy, because typed arrays need alignment
    if (content.length !== count(shape) * ARRAYS[type].BYTES_PER_ELEMENT) {
      throw new ModelError(`${source}: '${name}' has ${content.length} bytes, which do not match ${type}[${shape}]`);
    }
    return [name, { type, dims: shape, data: new ARRAYS[type](content.buffer) }];
  });
  return Object.fromEntries(entries);
}

/** Writes tensors, by name, as a safetensors file. */
export function writeSafetensors(tensors) {
  checkMapping("writeSafetensors: tensors", tensors);
  const header = {};
  let end = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
    if (!(type in SAFETENSORS) || !ArrayBuffer.isView(data) || data.length !== count(dims)) {
      throw new ArgumentError(
        `writeSafetensors: '${name}' must have a type of safetensors and a typed array of as many ` +
          `numbers as its dims, got ${type}[${dims}] with ${data?.length} numbers`,
      );
    }
    const begin = end;
    end += data.byteLength;
    header[name] = { dtype: SAFETENSORS[type], shape: [...dims], data_offsets: [begin, end] };
  }
  let text = new TextEncoder().encode(JSON.stringify(header));
  const padded = new Uint8Array(Math.ceil(text.length / 8) * 8).fill(32);
  padded.set(text);
  text = padded;
  const result = new Uint8Array(8 + text.length + end);
  new DataView(result.buffer).setBigUint64(0, BigInt(text.length), true);
  result.set(text, 8);
  for (const [name, { data }] of Object.entries(tensors)) {
    result.set(bytesOf(data), 8 + text.length + header[name].data_offsets[0]);
  }
  return result;
}

let table = null;

/** Computes the CRC-32 that zlib computes. */
function checksum(bytes) {
  table ??= Uint32Array.from({ length: 256 }, (_, value) => {
    for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
    return value;
  });
  let sum = 0xffffffff;
  for (const byte of bytes) sum = (sum >>> 8) ^ table[(sum ^ byte) & 255];
  return ~sum >>> 0;
}
