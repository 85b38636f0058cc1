// Trains in a Worker, from the folder whose address it is sent.
import * as ort from "onnxruntime-web/wasm";
import { FeedError, TrainingSession } from "ortops";

self.onmessage = async ({ data: folder }) => {
  try {
    ort.env.wasm.numThreads = 1;
    ort.env.wasm.wasmPaths = new URL("ort/", folder).href;
    const session = await TrainingSession.create(ort, new URL("step", folder));
    const { loss } = await session.step({ images: new Float32Array(2 * 64).fill(0.5), labels: [1, 2] });
    const error = await session.step({ images: new Float32Array(64), labels: [-1] }).catch((e) => e);
    const bytes = await session.save();
    await session.release();
    self.postMessage({ loss, bytes: bytes.length, refused: error instanceof FeedError && error.name });
  } catch (error) {
    self.postMessage({ error: String(error.stack ?? error) });
  }
};
