// Drives a training step that `ortops export-step` wrote, on any onnxruntime for JavaScript.
// There are no dependencies: whoever calls passes onnxruntime-node or onnxruntime-web.

const FORMAT = "ortops.step";
const VERSION = 1;

const ARRAYS = {
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
  bool: "BOOL", float16: "F16", float32: "F32", float64: "F64",
  int8: "I8", int16: "I16", int32: "I32", int64: "I64",
  uint8: "U8", uint16: "U16", uint32: "U32", uint64: "U64",
};
const TYPES = Object.fromEntries(Object.entries(SAFETENSORS).map(([type, name]) => [name, type]));

const count = (dims) => dims.reduce((product, dim) => product * dim, 1);
const bytesOf = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);

/** Frees tensors that lie on a device, which the garbage collector does not do. */
const free = (tensors) => {
  for (const tensor of new Set(tensors)) {
    if (["gpu-buffer", "ml-tensor", "texture"].includes(tensor.location)) tensor.dispose();
  }
};

/** A training that a folder of `ortops export-step` describes. See `ortops.d.mts`. */
export class TrainingSession {
  #ort;
  #about;
  #files;
  #options;
  #gpuState;
  #step;
  #evaluate = null;
  #state;
  #busy = "";
  #released = false;

  /** Opens a training. */
  static async create(ort, source, { gpuState = false, sessionOptions = {} } = {}) {
    if (sessionOptions.preferredOutputLocation !== undefined) {
      throw new Error(
        "sessionOptions.preferredOutputLocation is decided by the driver; leave it out, and set " +
          "gpuState: true to keep the variables on the GPU",
      );
    }
    const about = JSON.parse(new TextDecoder().decode(await read(source, "step.json")));
    if (about.format !== FORMAT || about.version !== VERSION) {
      throw new Error(
        `step.json: its format is '${about.format}', version ${about.version}; '${FORMAT}', ` +
          `version ${VERSION} is accepted, so export the step with the ortops of this file`,
      );
    }
    const files = {};
    for (const [name, { bytes, crc32 }] of Object.entries(about.files)) {
      files[name] = await read(source, name);
      if (files[name].length !== bytes || checksum(files[name]) !== crc32) {
        throw new Error(
          `${name}: it is not the file that step.json was written with; keep the files of an ` +
            "export together, or export anew",
        );
      }
    }
    for (const [name, { type }] of Object.entries(about.variables)) {
      if (!(type in ARRAYS)) {
        throw new Error(
          `variable '${name}' is ${type}, which onnxruntime's JavaScript has no tensors of; ` +
            "export a model of float32",
        );
      }
    }
    const session = new TrainingSession();
    session.#ort = ort;
    session.#about = about;
    session.#files = files;
    session.#options = sessionOptions;
    session.#gpuState = gpuState;
    session.#state = session.#tensors(readSafetensors(files["state.safetensors"]));
    const options = { ...sessionOptions };
    if (gpuState) options.preferredOutputLocation = session.#locations();
    session.#step = await ort.InferenceSession.create(files["step.onnx"], options);
    delete files["step.onnx"]; // nobody reads them again
    delete files["state.safetensors"];
    return session;
  }

  /** What step.json says. */
  get about() {
    return this.#about;
  }

  /** Makes one training step. */
  async step(feeds) {
    const { step, variables } = this.#about;
    return this.#alone("step", async () => {
      const inputs = this.#inputs(this.#step, step.feeds, feeds);
      const found = await this.#step.run(inputs);
      const shown = Object.fromEntries(step.outputs.map((name) => [name, found[name]]));
      try {
        if (step.loss !== null) shown.loss = numberOf(found[step.loss]);
      } catch (error) {
        free(Object.values(found));
        throw error;
      }
      const changed = Object.entries(variables).filter(([, { next }]) => next !== null);
      this.#replace(Object.fromEntries(changed.map(([name, { next }]) => [name, found[next]])));
      return shown;
    });
  }

  /** Computes the loss and the model's outputs of a batch in inference mode. */
  async evaluate(feeds) {
    const { evaluate } = this.#about;
    return this.#alone("evaluate", async () => {
      this.#evaluate ??= await this.#ort.InferenceSession.create(
        this.#files["evaluate.onnx"],
        this.#options,
      );
      const inputs = this.#inputs(this.#evaluate, evaluate.feeds, feeds);
      const found = await this.#evaluate.run(inputs);
      const shown = Object.fromEntries(
        Object.entries(evaluate.outputs).map(([name, output]) => [name, found[output]]),
      );
      if (evaluate.losses.length === 0) return shown;
      const parts = evaluate.losses.map(({ name, weight }) => weight * numberOf(found[name]));
      return { ...shown, loss: parts.reduce((sum, part) => sum + part, 0) };
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
        throw new Error(`learningRate is ${value}; a finite number >= 0 of ${type} is accepted`);
      }
      return [name, tensor];
    });
    this.#replace(Object.fromEntries(set));
  }

  /** Copies of the variables, by name. */
  async state() {
    return this.#alone("state", async () => this.#download());
  }

  /** Sets variables. */
  async setState(arrays) {
    return this.#alone("setState", async () => {
      const { variables } = this.#about;
      for (const name of Object.keys(arrays)) {
        if (!Object.hasOwn(variables, name)) throw new Error(`setState: there is no variable '${name}'`);
        const { of, role } = variables[name];
        if (role === "master" && !Object.hasOwn(arrays, of)) {
          throw new Error(`setState: '${name}' is the float32 value of '${of}'; set both`);
        }
      }
      for (const [name, { of, role }] of Object.entries(variables)) {
        if (role === "master" && Object.hasOwn(arrays, of) && !Object.hasOwn(arrays, name)) {
          throw new Error(`setState: '${of}' has a float32 value '${name}'; set both`);
        }
      }
      const set = Object.entries(arrays).map(([name, value]) => {
        const { type, shape } = variables[name];
        return [name, this.#checked({ name, type, shape }, value, "variable")];
      });
      // Copies: what is given stays the caller's.
      const copies = set.map(([name, { type, data, dims }]) => [
        name, this.#tensor(name, type, data.slice(), dims),
      ]);
      this.#replace(Object.fromEntries(copies));
    });
  }

  /** Returns model.onnx with the present state in it. */
  async save() {
    return this.#alone("save", async () => {
      const result = this.#files["model.onnx"].slice();
      for (const [name, { data }] of Object.entries(await this.#download())) {
        const content = bytesOf(data);
        for (const [offset, length] of this.#about.variables[name].places) {
          if (content.length !== length) {
            throw new Error(`variable '${name}' has ${content.length} bytes, not ${length}`);
          }
          result.set(content, offset);
        }
      }
      return result;
    });
  }

  /** Returns the present state as a safetensors file. */
  async saveState() {
    return this.#alone("saveState", async () => writeSafetensors(await this.#download()));
  }

  /** Frees the memory of onnxruntime's sessions. */
  async release() {
    return this.#alone("release", async () => {
      this.#released = true;
      free(Object.values(this.#state));
      try {
        await this.#step.release();
      } finally {
        await this.#evaluate?.release();
      }
    });
  }

  // A second call would read the variables that the first one is about to replace.
  async #alone(name, run) {
    this.#refuseReleased(name);
    if (this.#busy) {
      throw new Error(`${name}: '${this.#busy}' has not finished; await it first`);
    }
    this.#busy = name;
    try {
      return await run();
    } finally {
      this.#busy = "";
    }
  }

  #refuseReleased(name) {
    if (this.#released) throw new Error(`${name}: the session was released; create another one`);
  }

  #learningRates() {
    this.#refuseReleased("learningRate");
    const { learning_rates: rates } = this.#about;
    if (rates.length === 0) {
      throw new Error("learningRate: the training has none in a variable; set what it uses");
    }
    return rates;
  }

  #tensors(arrays) {
    const entries = Object.entries(this.#about.variables).map(([name, { type, shape }]) => {
      const found = arrays[name];
      if (!Object.hasOwn(arrays, name) || found.type !== type || `${found.dims}` !== `${shape}`) {
        throw new Error(`state.safetensors: it has no '${name}' of ${type}[${shape}]`);
      }
      return [name, this.#tensor(name, type, found.data, shape)];
    });
    return Object.fromEntries(entries);
  }

  #tensor(name, type, data, dims) {
    return new this.#ort.Tensor(type, convert(name, type, data), dims);
  }

  // Sets variables, and frees what they were.
  #replace(tensors) {
    const old = Object.keys(tensors).map((name) => this.#state[name]);
    Object.assign(this.#state, tensors);
    const kept = new Set(Object.values(this.#state));
    free(old.filter((tensor) => !kept.has(tensor)));
  }

  // What is fetched is on the CPU; so are integers, of which the GPU's provider has few kernels, and
  // learning rates, which are read and set without waiting.
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

  // The variables go on from the CPU: a tensor that was downloaded is not on the device any more,
  // and unless `getData` is told to release its buffer, nothing does.
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

  #inputs(session, described, feeds) {
    const names = new Set(described.map(({ name }) => name));
    const known = new Set([...this.#about.step.feeds, ...this.#about.evaluate.feeds].map((f) => f.name));
    for (const name of Object.keys(feeds)) {
      if (!known.has(name)) {
        throw new Error(`feeds: there is no input '${name}'; there are ${[...names].join(", ")}`);
      }
    }
    const sizes = new Map();
    const inputs = {};
    for (const feed of described) {
      if (!Object.hasOwn(feeds, feed.name)) throw new Error(`feeds: '${feed.name}' is missing`);
      inputs[feed.name] = this.#checked(feed, feeds[feed.name], "input", sizes);
    }
    for (const name of session.inputNames) {
      if (!Object.hasOwn(inputs, name)) inputs[name] = this.#state[name];
    }
    return inputs;
  }

  // A tensor, {data, dims}, or data of which at most one dimension is not known.
  #checked({ name, type, shape }, value, what, sizes = new Map()) {
    let tensor = value;
    if (!(value instanceof this.#ort.Tensor)) {
      const data = value?.data ?? value;
      if (data?.length === undefined) {
        throw new Error(`${what} '${name}': give a tensor, an array, or {data, dims}`);
      }
      const array = convert(name, type, data);
      tensor = new this.#ort.Tensor(type, array, value.dims ?? dimsOf(name, shape, array.length, sizes));
    }
    const expected = `${what} '${name}': it is ${tensor.type}[${tensor.dims}]; ${type}` +
      (shape === null ? " of any shape" : `[${shape}]`) + " is accepted";
    if (tensor.type !== type) throw new Error(expected);
    if (shape === null) return tensor;
    if (tensor.dims.length !== shape.length) throw new Error(expected);
    shape.forEach((dim, axis) => {
      const size = tensor.dims[axis];
      if (typeof dim === "string") {
        if (sizes.has(dim) && sizes.get(dim) !== size) {
          throw new Error(`${expected}, and '${dim}' is ${sizes.get(dim)} in another input`);
        }
        sizes.set(dim, size);
      } else if (dim !== null && dim !== size) {
        throw new Error(expected);
      }
    });
    return tensor;
  }
}

function dimsOf(name, shape, length, sizes) {
  const dims = (shape ?? [null]).map((dim) => (typeof dim === "number" ? dim : sizes.get(dim) ?? null));
  const open = dims.flatMap((dim, axis) => (dim === null ? [axis] : []));
  if (open.length > 1) {
    throw new Error(`input '${name}': the dimensions of [${shape}] are not known; give {data, dims}`);
  }
  for (const axis of open) {
    const rest = count(dims.filter((dim) => dim !== null));
    dims[axis] = rest === 0 ? 0 : length / rest;
  }
  if (!dims.every(Number.isInteger) || count(dims) !== length) {
    throw new Error(`input '${name}': ${length} numbers do not fill [${shape}]`);
  }
  return dims;
}

function convert(name, type, data) {
  const Type = ARRAYS[type];
  if (Type === undefined) throw new Error(`'${name}' is ${type}; give a tensor of onnxruntime`);
  if (data instanceof Type) return data;
  if (type === "float16" && Type === Uint16Array) {
    throw new Error(`'${name}' is float16, which this JavaScript has not; give a Uint16Array of bits`);
  }
  const isFloat = type.startsWith("float");
  if (isFloat && ArrayBuffer.isView(data)) return Type.from(data, Number);
  const held = new Type(1);
  return Type.from(data, (value, index) => {
    if (!["number", "bigint", "boolean"].includes(typeof value)) {
      const given = Array.isArray(value) ? "an array" : value === null ? "null" : typeof value;
      throw new Error(
        `'${name}': its element ${index} is ${given}; a flat array of numbers is accepted, ` +
          "or {data, dims} with one",
      );
    }
    if (isFloat) return Number(value);
    if (typeof value === "number" && !Number.isInteger(value)) {
      throw new Error(`'${name}' is ${type}, and has ${value} in it; integers are accepted`);
    }
    held[0] = typeof held[0] === "bigint" ? BigInt(value) : Number(value);
    if (BigInt(held[0]) !== BigInt(value) || (type === "bool" && held[0] > 1)) {
      throw new Error(`'${name}' is ${type}, which has no ${value}`);
    }
    return held[0];
  });
}

const numberOf = ({ type, data: [first] }) =>
  type === "float16" && ARRAYS.float16 === Uint16Array ? ofHalf(first) : Number(first);

/** The number that the bits of a float16 are. */
function ofHalf(bits) {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
}

// ---------------------------------------------------------------------------------- files

async function read(source, name) {
  if (typeof source === "object" && !(source instanceof URL)) {
    const content = source[name];
    if (content === undefined) throw new Error(`${name}: it is not among the files that were given`);
    if (typeof content === "string") return new TextEncoder().encode(content);
    return content instanceof ArrayBuffer ? new Uint8Array(content) : bytesOf(content);
  }
  const folder = String(source).replace(/\/?$/, "/");
  const isRemote = /^(https?|blob|data):/.test(folder);
  if (globalThis.process?.versions?.node && !isRemote) {
    const { readFile } = await import("node:fs/promises");
    return bytesOf(await readFile(folder.startsWith("file:") ? new URL(name, folder) : folder + name));
  }
  const response = await fetch(folder + name);
  if (!response.ok) throw new Error(`${folder}${name}: ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

/** Returns the arrays of a safetensors file as {type, dims, data} by name. */
export function readSafetensors(file) {
  const bytes = file instanceof ArrayBuffer ? new Uint8Array(file) : bytesOf(file);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const begin = 8 + Number(view.getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, begin)));
  delete header.__metadata__;
  const entries = Object.entries(header).map(([name, { dtype, shape, data_offsets: [from, to] }]) => {
    const type = TYPES[dtype];
    if (type === undefined) throw new Error(`safetensors: '${name}' is ${dtype}, which is not known`);
    const content = bytes.slice(begin + from, begin + to); // a copy, so that it is aligned
    if (content.length !== count(shape) * ARRAYS[type].BYTES_PER_ELEMENT) {
      throw new Error(`safetensors: '${name}' has ${content.length} bytes, which do not fill [${shape}]`);
    }
    return [name, { type, dims: shape, data: new ARRAYS[type](content.buffer) }];
  });
  return Object.fromEntries(entries);
}

/** Returns a safetensors file of tensors by name. */
export function writeSafetensors(tensors) {
  const header = {};
  let end = 0;
  for (const [name, { type, dims, data }] of Object.entries(tensors)) {
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

/** CRC-32 as in zlib. */
function checksum(bytes) {
  table ??= Uint32Array.from({ length: 256 }, (_, value) => {
    for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
    return value;
  });
  let sum = 0xffffffff;
  for (const byte of bytes) sum = (sum >>> 8) ^ table[(sum ^ byte) & 255];
  return ~sum >>> 0;
}
