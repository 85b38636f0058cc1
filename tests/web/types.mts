// What TypeScript has to accept, with either package of onnxruntime.
import * as node from "onnxruntime-node";
import * as ort from "onnxruntime-web";
import { DivergedError, OrtopsError, TrainingSession, writeSafetensors } from "ortops";

const session = await TrainingSession.create(ort, new URL("https://example.org/step/"), {
  stopOnNan: false,
  sessionOptions: { executionProviders: ["webgpu"] },
});
await TrainingSession.create(node, "./step");
const { loss }: { loss: number } = await session.step({ images: new Float32Array(64), labels: [1] });
const { logits } = await session.predict({ images: { data: new Float32Array(64), dims: [1, 1, 8, 8] } });
const file: Blob = new Blob([await session.save()]);
const state: Blob = new Blob([await session.saveState(), writeSafetensors({ logits })]);
await session.reset();
try {
  await session.evaluate({ images: new ort.Tensor("float32", new Float32Array(64), [1, 1, 8, 8]) });
} catch (error) {
  if (error instanceof DivergedError) throw new OrtopsError(error.message);
}
// @ts-expect-error: feeds are required
await session.step();
export { file, loss, state };
