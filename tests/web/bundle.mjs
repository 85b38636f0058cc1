// Bundles a project that uses the package `ortops`: node bundle.mjs PACKAGES BUNDLER PROJECT
//
// PACKAGES has the bundlers. PROJECT/library.js is bundled as a library for pages, and page.js, which
// starts worker.js, as a page; both go to PROJECT/BUNDLER. Warnings are errors.
import { copyFile, mkdir } from "node:fs/promises";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [, , packages, bundler, folder] = process.argv;
const require = createRequire(join(resolve(packages), "package.json"));
const project = resolve(folder);
const result = join(project, bundler);
const source = (name) => join(project, name);
process.chdir(project);
await mkdir(result, { recursive: true });

const bundles = {
  async webpack() {
    const webpack = require("webpack");
    for (const [entry, library] of [["library", { type: "module" }], ["page", undefined]]) {
      const stats = await new Promise((done, fail) => {
        const compiler = webpack({
          mode: "production", target: ["web", "es2022"], context: project, performance: false,
          entry: { [entry]: source(`${entry}.js`) },
          experiments: { outputModule: true },
          output: { path: result, filename: "[name].js", module: true, library, publicPath: "auto" },
        });
        compiler.run((error, found) => (error ? fail(error) : done(found)));
      });
      const { errors, warnings } = stats.toJson({ all: false, errors: true, warnings: true });
      // onnxruntime-web loads its own WebAssembly with an import that webpack cannot follow.
      const own = warnings.filter(({ moduleName }) => !moduleName?.includes("onnxruntime-web"));
      if (errors.length || own.length) throw new Error(JSON.stringify([...errors, ...own]));
    }
  },
  async esbuild() {
    const { warnings } = await require("esbuild").build({
      entryPoints: ["library", "page", "worker"].map((name) => source(`${name}.js`)),
      bundle: true, format: "esm", platform: "browser", minify: true, outdir: result, logLevel: "silent",
    });
    if (warnings.length) throw new Error(JSON.stringify(warnings));
  },
  async vite() {
    const { build } = await import(pathToFileURL(require.resolve("vite")).href.replace("index.cjs", "node/index.js"));
    const warnings = [];
    const logger = {
      hasWarned: false, info() {}, clearScreen() {}, hasErrorLogged: () => false,
      warn: (text) => warnings.push(text), warnOnce: (text) => warnings.push(text), error: (text) => warnings.push(text),
    };
    const common = { root: project, configFile: false, customLogger: logger, base: "./", worker: { format: "es" } };
    const output = { entryFileNames: "[name].js" };
    await build({
      ...common,
      build: { outDir: result, emptyOutDir: false, lib: { entry: source("library.js"), formats: ["es"], fileName: () => "library.js" } },
    });
    await build({
      ...common, build: {
        outDir: result, emptyOutDir: false, target: "es2022", assetsInlineLimit: 0,
        rollupOptions: { input: source("page.js"), output },
      },
    });
    const own = warnings.filter((text) => text.includes("ortops"));
    if (own.length) throw new Error(own.join("\n"));
  },
};
await bundles[bundler]();

// The bundled driver still reads a folder in Node.
const { TrainingSession } = await import(pathToFileURL(join(result, "library.js")).href);
const session = await TrainingSession.create(require("onnxruntime-node"), join(project, "step"));
const { loss } = await session.step({ images: new Float32Array(2 * 64).fill(0.5), labels: [1, 2] });
console.log(loss);
await session.release();
