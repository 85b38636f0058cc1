// What images.mjs makes of pixels, without a browser: node images.mjs FOLDER
import assert from "node:assert/strict";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const { Images, inputsOf } = await import(pathToFileURL(resolve(join(process.argv[2], "images.mjs"))).href);

let drawn = [];
globalThis.createImageBitmap = async (file) => {
  if (file === "text") throw new Error("no image");
  return { ...file, close() {} };
};
globalThis.OffscreenCanvas = class {
  getContext() {
    return {
      fillRect() {},
      drawImage: (bitmap, ...places) => { drawn.push(places); this.color = bitmap.color; },
      getImageData: (x, y, width, height) => ({
        // red grows from pixel to pixel
        data: Uint8ClampedArray.from({ length: 4 * width * height }, (_, at) =>
          at % 4 === 0 ? this.color[0] + at / 4 : at % 4 === 3 ? 255 : this.color[at % 4]),
      }),
    };
  }
};

const feed = (name, type, shape) => ({ name, type, shape });
const stepOf = (image, ...targets) => ({
  step: { feeds: [image, ...targets] }, evaluate: { predict: image.name === "" ? [] : [image.name] },
});
const labels = feed("labels", "int64", ["batch"]);
const inputs = (...values) => {
  const { layout, batch, channels, height, width } = inputsOf(stepOf(...values));
  return [layout, batch, channels, height, width];
};

// What the shapes say, and what they leave open.
assert.deepEqual(inputs(feed("x", "float32", ["batch", 3, 8, 6]), labels), ["NCHW", null, 3, 8, 6]);
assert.deepEqual(inputs(feed("x", "uint8", [4, 8, 6, 3]), labels), ["NHWC", 4, 3, 8, 6]);
assert.deepEqual(inputs(feed("x", "float32", ["batch", null, null, 1]), labels), ["NHWC", null, 1, null, null]);
assert.deepEqual(inputs(feed("x", "float16", ["batch", "c", "h", "w"]), labels), ["NCHW", null, 3, null, null]);
for (const [image, targets, message] of [
  [feed("x", "float32", ["batch", 64]), [labels], /with 4 dimensions .*, got 'x' float32\[batch,64\]; train/],
  [feed("x", "int64", ["batch", 3, 8, 8]), [labels], /got 'x' int64\[batch,3,8,8\]/],
  [feed("x", "float32", null), [labels], /got 'x' float32\[\?\]/],
  [feed("x", "float32", ["batch", 5, 8, 8]), [labels], /1, 3 or 4 channels, got 'x' float32\[batch,5,8,8\]/],
  [feed("", "float32", ["batch", 3, 8, 8]), [], /got none; train/],
  [feed("x", "float32", ["batch", 3, 8, 8]), [], /one input of classes, got none$/],
  [feed("x", "float32", ["batch", 3, 8, 8]), [labels, feed("weight", "float32", ["batch"])], /got 'labels', 'weight'$/],
]) assert.throws(() => inputsOf(stepOf(image, ...targets)), message);

const file = (...color) => ({ width: 4, height: 2, color });
const settings = { width: 2, height: 2, crop: true, mean: [0, 0, 0], std: [1, 1, 1] };

// Channels first, in float, with one class number for each image.
let images = new Images();
images.use(inputsOf(stepOf(feed("x", "float32", ["batch", 3, 2, 2]), labels)), 3, { ...settings, mean: [0.5, 0, 0], std: [0.25, 1, 2] });
assert.deepEqual(await images.add([{ id: 7, file: file(51, 102, 204), label: 2 }, { id: 8, file: "text", label: 0 }]), [8]);
assert.deepEqual(drawn, [[0, 0, 4, 2, 0, 0, 4, 2], [1, 0, 2, 2, 0, 0, 2, 2]]); // a preview, and the middle
assert.deepEqual(await images.split(0), []);
assert.equal(drawn.length, 2); // not decoded again
const [preview, none] = images.previews([7, 8]);
assert.deepEqual([preview.width, preview.height, preview.data.length, none], [4, 2, 32, undefined]);
const close = (found, expected) => expected.forEach((value, at) => assert(Math.abs(found[at] - value) < 1e-6, `${found}`));
let { x, labels: found } = images.batch([0]);
assert.deepEqual(x.dims, [1, 3, 2, 2]);
assert(x.data instanceof Float32Array);
close(x.data, [...[51, 52, 53, 54].map((red) => (red / 255 - 0.5) / 0.25), ...new Array(4).fill(0.4), ...new Array(4).fill(0.4)]);
assert.deepEqual(found, { data: [2], dims: [1] });

// Another size is decoded anew; what can no longer be read is left out.
drawn = [];
await images.add([{ id: 9, file: file(0, 0, 0), label: 1 }]);
images.use(inputsOf(stepOf(feed("x", "float32", ["batch", 3, "h", "w"]), labels)), 3, { ...settings, width: 4, crop: false });
assert.deepEqual(await images.split(0), []);
assert.deepEqual(drawn, [[0, 0, 4, 2, 0, 0, 4, 2], [1, 0, 2, 2, 0, 0, 2, 2], ...new Array(4).fill([0, 0, 4, 2, 0, 0, 4, 2])]);
images.remove([7]);
await images.split(0);
assert.equal(images.rows, 1);

// Channels last, in bytes, four at a time: images are repeated. One row for each class.
images = new Images();
images.use(inputsOf(stepOf(feed("x", "uint8", [4, 2, 2, 3]), feed("targets", "float32", [4, 3]))), 3, settings);
await images.add([0, 1, 2].map((label) => ({ id: label, file: file(10 * label, 1, 2), label })));
await images.split(0);
({ x, targets: found } = images.batch([2, 0]));
assert.deepEqual(x.dims, [4, 2, 2, 3]);
const pixels = (red) => [0, 1, 2, 3].flatMap((more) => [red + more, 1, 2]);
assert.deepEqual(x.data, Uint8Array.from([20, 0, 20, 0].flatMap(pixels)));
assert.deepEqual(found.dims, [4, 3]);
assert.deepEqual([...found.data], [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0]);
const test = images.testBatch(1, 3);
assert.deepEqual([test.labels, test.ids], [[1, 2], [1, 2]]);
assert.equal(test.feeds.x.dims[0], 4);

// Gray is the luma of ITU-R BT.601.
images = new Images();
images.use(inputsOf(stepOf(feed("x", "float32", ["batch", 1, 1, 1]), labels)), 2, { ...settings, width: 1, height: 1 });
drawn = [];
const shown = await images.show({ ...file(200, 100, 50), width: 16000, height: 4000 });
assert.deepEqual([shown.width, shown.height], [448, 112]); // the longer side is that of a preview
close((await images.pictureFeeds()).x.data, [(0.299 * 200 + 0.587 * 100 + 0.114 * 50) / 255]);
assert.equal(drawn.length, 2); // decoded once
await assert.rejects(images.show("text"));
close(images.blackFeeds().x.data, [0]);

// A share of each class is set aside, spread over its images.
await images.add(Array.from({ length: 12 }, (_, id) => ({ id, file: file(0, 0, 0), label: id < 10 ? 0 : 1 })));
for (const [share, test] of [[0, 0], [0.2, 2], [0.3, 3], [0.5, 6], [0.9, 10]]) {
  await images.split(share);
  assert.deepEqual([images.rows, images.testRows], [12 - test, test], `${share}`);
}
console.log("images");
