// Which module of onnxruntime-web runs, for pages and worker. `ortops export-step --runtime` writes
// another place here; the address of a page cannot choose one, because the module runs with the
// rights of the page.

const PLACE = "./ort/";

/** Returns the address of the module for a provider. */
export function runtimeOf(provider) {
  if (!["wasm", "webgpu"].includes(provider)) {
    throw new Error(`provider must be 'wasm' or 'webgpu', got '${provider}'`);
  }
  const module = new URL(`ort.${provider}.min.mjs`, new URL(PLACE, import.meta.url));
  const isChosen = /^https?:\/\//.test(PLACE); // by the export
  if (!/^https?:$/.test(module.protocol) || !(isChosen || module.origin === self.location.origin)) {
    throw new Error(`onnxruntime-web must be on the server of this page, got ${module}; export with --runtime`);
  }
  return module.href;
}
