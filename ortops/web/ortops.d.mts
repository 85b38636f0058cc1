// Types of ortops.mjs. `Ort` declares the part of onnxruntime-common that the driver uses, so nothing has
// to be installed. onnxruntime-node and onnxruntime-web both implement it.

/** A typed array, or numbers that are converted to the element type of the tensor. */
export type Numbers = ArrayLike<number> | ArrayLike<bigint>;

/**
 * The bytes of a file, in an ArrayBuffer: what `new Blob([…])` and `fetch` take in every version of
 * TypeScript. Since 5.7, that is `Uint8Array<ArrayBuffer>`, which older versions do not have.
 */
export type Bytes = ReturnType<Uint8Array["slice"]>;

/** Base class of the errors of this driver; `name` is the name of the class. */
export class OrtopsError extends Error {}

/** An argument has an invalid type or value. */
export class ArgumentError extends OrtopsError {}

/** A file is missing or invalid, or does not belong to the others. */
export class ModelError extends OrtopsError {}

/** onnxruntime's JavaScript API cannot do what was asked for. */
export class UnsupportedError extends OrtopsError {}

/** Arrays do not fit the model. */
export class FeedError extends OrtopsError {}

/** The loss became NaN or infinite. */
export class DivergedError extends OrtopsError {}

/** A call overlaps with another one, or follows `release`. */
export class StateError extends OrtopsError {}

/** An onnxruntime tensor. */
export interface Tensor {
  readonly type: string;
  readonly dims: readonly number[];
  readonly data: any;
  readonly location: string;
  getData(releaseData?: boolean): Promise<any>;
  dispose(): void;
}

/** The module that `import * as ort from "onnxruntime-web"` or `"onnxruntime-node"` imports. */
export interface Ort {
  Tensor: new (type: any, data: any, dims?: readonly number[]) => Tensor;
  InferenceSession: { create(model: Uint8Array, options?: any): Promise<any> };
}

/**
 * A batch: by input name a tensor, `{data, dims}`, or an array, whose shape is inferred if at most one
 * dimension is unknown. Numbers are converted to the type of the input. Numbers out of the range of
 * an integer type, and elements that are not numbers, raise an error.
 */
export type Feeds = Record<string, Tensor | { data: Numbers; dims: readonly number[] } | Numbers>;

/** The loss as a number, and the model's outputs as tensors. */
export type Outputs = { loss: number } & Record<string, any>;

/** A folder (a path in Node, a URL in a page), or the contents of its files by name. */
export type Source = string | URL | Record<string, string | Uint8Array | ArrayBuffer>;

export interface Options {
  /**
   * Whether variables stay on the GPU between steps: onnxruntime-web with the execution provider
   * `webgpu` in `sessionOptions`; with others it is refused. onnxruntime-node cannot read such
   * variables, so the driver refuses it there.
   */
  gpuState?: boolean;
  /**
   * Whether a step whose loss is NaN or infinite raises a DivergedError instead of changing the
   * variables; true by default.
   */
  stopOnNan?: boolean;
  /**
   * Options for `ort.InferenceSession.create`, for example `{executionProviders: ["webgpu"]}`. The
   * driver sets `preferredOutputLocation` itself, depending on `gpuState`.
   */
  sessionOptions?: Record<string, any>;
}

/** The content of `step.json`; see `ortops.export_step`. */
export interface Description {
  format: string;
  version: number;
  target: string | null;
  files: Record<string, { bytes: number; crc32: number }>;
  step: { feeds: Feed[]; outputs: string[]; loss: string | null };
  evaluate: {
    feeds: Feed[];
    /** The feeds that the outputs depend on. Older exports do not have it. */
    predict?: string[];
    variables: string[];
    outputs: Record<string, string>;
    losses: { name: string; weight: number; count: string | null; sum: boolean }[];
  };
  learning_rates: string[];
  counter: string | null;
  variables: Record<
    string,
    {
      type: string;
      shape: number[];
      next: string | null;
      role: string;
      of?: string;
      places: [number, number][];
    }
  >;
}

/** An input. Dimensions are numbers, symbols, or null if unknown. */
export interface Feed {
  name: string;
  type: string;
  shape: (number | string | null)[] | null;
  /** The class numbers that the losses accept: 0 to `classes` - 1, and `ignored`. */
  labels?: { classes: number | null; ignored: number | null }[];
}

/**
 * A training session. Await each call before the next one: overlapping calls raise an error.
 */
export class TrainingSession {
  private constructor();

  /**
   * Creates a session.
   *
   * @throws ArgumentError if an argument is invalid.
   * @throws ModelError if a file cannot be read, or does not match its checksum in step.json.
   * @throws UnsupportedError if onnxruntime's JavaScript API has no tensors of a variable's type; for
   *   `gpuState` with onnxruntime-node; and for `ort.env.wasm.proxy` (use a Worker of your own).
   */
  static create(ort: Ort, source: Source, options?: Options): Promise<TrainingSession>;

  readonly about: Description;

  /**
   * Runs one training step.
   *
   * @throws FeedError if the feeds do not match the inputs, are empty, or have class numbers out of
   *   range; DivergedError if the loss is NaN or infinite; or an error of onnxruntime. The state is
   *   then unchanged.
   */
  step(feeds: Feeds): Promise<Outputs>;

  /** Computes the loss and the outputs for a batch in inference mode. The state does not change. */
  evaluate(feeds: Feeds): Promise<Outputs>;

  /** Computes the outputs for a batch in inference mode. Labels are not required. */
  predict(feeds: Feeds): Promise<Record<string, any>>;

  /** Returns all variables to their values in the export. */
  reset(): Promise<void>;

  /** The learning rate of the next step. It is part of the state and is saved. */
  learningRate: number;

  /** Returns copies of the variables by name. */
  state(): Promise<Record<string, Tensor>>;

  /** Sets variables. Others keep their values. */
  setState(arrays: Feeds): Promise<void>;

  /**
   * Returns the trainable model with the current state: a `.onnx` file. onnxruntime runs it as the
   * trained model, and `ortops.TrainingSession` resumes training from it.
   */
  save(): Promise<Bytes>;

  /** Returns the current state as a safetensors file. */
  saveState(): Promise<Bytes>;

  /**
   * Frees the memory of the onnxruntime sessions and of the variables on the GPU. Later calls raise
   * an error.
   */
  release(): Promise<void>;
}

/**
 * Reads a safetensors file: arrays by name. `source` names the file in messages.
 *
 * @throws ArgumentError for other arguments; ModelError if the file is not valid.
 */
export function readSafetensors(
  file: Uint8Array | ArrayBuffer,
  source?: string,
): Record<string, { type: string; dims: number[]; data: any }>;

/**
 * Writes tensors, by name, as a safetensors file.
 *
 * @throws ArgumentError if an array does not have its type or its shape.
 */
export function writeSafetensors(
  tensors: Record<string, { type: string; dims: readonly number[]; data: any }>,
): Bytes;
