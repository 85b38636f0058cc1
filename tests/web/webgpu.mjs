// A few steps on WebGPU, reported to the server: `?state` keeps the variables there.
import { TrainingSession, readSafetensors } from "./ortops.mjs";
import { evaluate, train } from "./loop.mjs";

const send = (path, body) => fetch(path, { method: "POST", body });
try {
  const ort = await import("./ort/ort.webgpu.min.mjs");
  ort.env.wasm.numThreads = 1;
  const session = await TrainingSession.create(ort, new URL(".", location.href), {
    gpuState: location.search === "?state",
    sessionOptions: { executionProviders: ["webgpu"] },
  });
  const read = async (name) => {
    const arrays = readSafetensors(await (await fetch(`${name}.safetensors`)).arrayBuffer());
    return Object.fromEntries(Object.entries(arrays).map(([key, { data, dims }]) => [
      key, { data: data.subarray(0, (data.length / dims[0]) * 128), dims: [128, ...dims.slice(1)] },
    ]));
  };
  const data = await read("train");
  const first = await train(session, data, 1, 32);
  await session.state(); // which takes variables off the device, in the midst of the training
  const report = await train(session, data, 1, 32);
  report.losses.unshift(...first.losses);
  Object.assign(report, await evaluate(session, await read("test")));
  await send("model.onnx", await session.save());
  await session.release();
  await send("report", JSON.stringify(report));
} catch (error) {
  await send("report", JSON.stringify({ error: String(error.stack ?? error) }));
}
