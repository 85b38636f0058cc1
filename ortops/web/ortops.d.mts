// Types of ortops.mjs. `Ort` is the part of onnxruntime-common that it uses, so that nothing has to
// be installed: onnxruntime-node and onnxruntime-web both fit.

/** An array of the types that tensors have, or numbers that are converted. */
export type Numbers = ArrayLike<number> | ArrayLike<bigint>;

/** A tensor of onnxruntime. */
export interface Tensor {
  readonly type: string;
  readonly dims: readonly number[];
  readonly data: any;
  readonly location: string;
  getData(releaseData?: boolean): Promise<any>;
  dispose(): void;
}

/** What `import * as ort from "onnxruntime-web"` or `"onnxruntime-node"` gives. */
export interface Ort {
  Tensor: new (type: any, data: any, dims?: readonly number[]) => Tensor;
  InferenceSession: { create(model: Uint8Array, options?: any): Promise<any> };
}

/**
 * A batch by the names of the inputs: tensors, `{data, dims}`, or arrays, whose shape is found where
 * no more than one dimension is open. Numbers are converted to the type of the input; those that an
 * integer type has not, and what is no number, are refused.
 */
export type Feeds = Record<string, Tensor | { data: Numbers; dims: readonly number[] } | Numbers>;

/** The loss as a number, and the outputs of the model as tensors. */
export type Outputs = { loss: number } & Record<string, any>;

/** A folder (path in Node, URL in a page), or the contents of its files by name. */
export type Source = string | URL | Record<string, string | Uint8Array | ArrayBuffer>;

export interface Options {
  /** Whether variables stay on the GPU from step to step (execution provider `webgpu`). */
  gpuState?: boolean;
  /**
   * Options of `ort.InferenceSession.create`, such as `{executionProviders: ["webgpu"]}`; all but
   * `preferredOutputLocation`, which `gpuState` decides.
   */
  sessionOptions?: Record<string, any>;
}

/** What `step.json` says; see `ortops.export_step`. */
export interface Description {
  format: string;
  version: number;
  target: string | null;
  files: Record<string, { bytes: number; crc32: number }>;
  step: { feeds: Feed[]; outputs: string[]; loss: string | null };
  evaluate: {
    feeds: Feed[];
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

/** An input: its dimensions are numbers, symbols, or null. */
export interface Feed {
  name: string;
  type: string;
  shape: (number | string | null)[] | null;
}

/**
 * A training. Calls follow each other: one that begins before the one before has finished is refused.
 */
export class TrainingSession {
  private constructor();

  /**
   * Opens a training.
   *
   * @throws Error if a file is missing, or not the one that step.json was written with.
   */
  static create(ort: Ort, source: Source, options?: Options): Promise<TrainingSession>;

  readonly about: Description;

  /**
   * Makes one training step.
   *
   * @throws Error if the feeds do not fit, or onnxruntime fails; then nothing has changed.
   */
  step(feeds: Feeds): Promise<Outputs>;

  /** Computes the loss and the outputs of a batch in inference mode, and changes nothing. */
  evaluate(feeds: Feeds): Promise<Outputs>;

  /** The learning rate of the next step; part of the state, and saved. */
  learningRate: number;

  /** Returns copies of the variables by name. */
  state(): Promise<Record<string, Tensor>>;

  /** Sets variables; those that are not named stay. */
  setState(arrays: Feeds): Promise<void>;

  /**
   * Returns the trainable model with the present state: a `.onnx` file that onnxruntime runs as the
   * trained model, and whose training `ortops.TrainingSession` goes on with.
   */
  save(): Promise<Uint8Array>;

  /** Returns the present state as a safetensors file. */
  saveState(): Promise<Uint8Array>;

  /**
   * Frees the memory of onnxruntime's sessions, and of the variables on the GPU. Calls afterwards are
   * refused.
   */
  release(): Promise<void>;
}

/** Returns the arrays of a safetensors file by name. */
export function readSafetensors(
  file: Uint8Array | ArrayBuffer,
): Record<string, { type: string; dims: number[]; data: any }>;

/** Returns a safetensors file of tensors by name. */
export function writeSafetensors(
  tensors: Record<string, { type: string; dims: readonly number[]; data: any }>,
): Uint8Array;
