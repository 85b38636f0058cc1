// Images as the data of a classifier: which inputs they are for, and how their pixels become tensors.

const CHANNELS = [1, 3, 4];
const AT_ONCE = 4; // images that are decoded at the same time: each may need a gigabyte
const [THUMBNAIL, PICTURE] = [96, 448]; // longer sides of previews, in pixels

/**
 * Finds the inputs for images and for their classes.
 *
 * @param about The content of step.json.
 * @returns `{image, target, layout, batch, channels, height, width}`; what the model leaves open is null.
 */
export function inputsOf({ step: { feeds }, evaluate: { predict = [] } }) {
  const images = feeds.filter(({ name }) => predict.includes(name));
  const targets = feeds.filter(({ name }) => !predict.includes(name));
  const [image] = images;
  const shapes = images.map(({ name, type, shape }) => `'${name}' ${type}[${shape ?? "?"}]`).join(", ");
  const refuse = () => {
    throw new Error(
      "this page needs a model with one input of images, float or uint8 with 4 dimensions (batch, channels, " +
        `height, width, or channels last) and 1, 3 or 4 channels, got ${shapes || "none"}; train others with ` +
        "Python or the driver",
    );
  };
  if (images.length !== 1 || image.shape?.length !== 4 || !["float16", "float32", "uint8"].includes(image.type)) refuse();
  if (targets.length !== 1) {
    throw new Error(
      `this page needs a loss with one input of classes, got ${targets.map(({ name }) => `'${name}'`).join(", ") || "none"}`,
    );
  }
  const [batch, second, third, fourth] = image.shape.map((dim) => (typeof dim === "number" ? dim : null));
  const isLast = CHANNELS.includes(fourth) && !CHANNELS.includes(second);
  const [channels, height, width] = isLast ? [fourth, second, third] : [second, third, fourth];
  if (channels !== null && !CHANNELS.includes(channels)) refuse();
  const layout = isLast ? "NHWC" : "NCHW";
  return { image, target: targets[0], layout, batch, channels: channels ?? 3, height, width };
}

/** Draws a part of an image in a size, and returns its pixels as RGBA. */
function draw(bitmap, part, width, height) {
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff"; // behind what is transparent
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, ...part, 0, 0, width, height);
  return context.getImageData(0, 0, width, height).data;
}

/** Decodes an image once: its pixels in the size of the input, and a preview `{data, width, height}`. */
async function decode(file, { width, height, crop }, longest) {
  const bitmap = await createImageBitmap(file);
  try {
    const scale = Math.max(width / bitmap.width, height / bitmap.height);
    const [wide, tall] = crop ? [width / scale, height / scale] : [bitmap.width, bitmap.height];
    const part = [(bitmap.width - wide) / 2, (bitmap.height - tall) / 2, wide, tall];
    const smaller = Math.min(1, longest / Math.max(bitmap.width, bitmap.height));
    const sides = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * smaller)));
    const data = draw(bitmap, [0, 0, bitmap.width, bitmap.height], ...sides);
    return { pixels: draw(bitmap, part, width, height), preview: { data, width: sides[0], height: sides[1] } };
  } finally {
    bitmap.close();
  }
}

/** Images by number, with their classes: what a training reads. */
export class Images {
  isOfClasses = true;
  #images = new Map(); // number → {id, file, label, pixels, preview, size}
  #picture = null; // {file, pixels, preview, size}, which is no part of the data
  #settings;
  #inputs;
  #classes;
  #train = [];
  #test = [];

  /** Sets the model, and how pixels become numbers: (pixel / 255 - mean) / std, for each channel. */
  use(inputs, classes, settings) {
    [this.#inputs, this.#classes, this.#settings] = [inputs, classes, settings];
  }

  /** Adds images `{id, file, label}`, and returns the numbers of those that cannot be decoded. */
  async add(images) {
    images.forEach(({ id, file, label }) => this.#images.set(id, { id, file, label }));
    return this.#decode(images.map(({ id }) => id));
  }

  remove(ids) {
    ids.forEach((id) => this.#images.delete(id));
  }

  /** Returns small images of those that are there. */
  previews(ids) {
    return ids.map((id) => this.#images.get(id)?.preview);
  }

  /** Decodes a file that is no part of the data, and returns a small image of it. */
  async show(file) {
    this.#picture = null;
    const picture = { file };
    await this.#read(picture, PICTURE);
    this.#picture = picture;
    return picture.preview;
  }

  /** Decodes anew what has another size, and sets a share of each class aside. */
  async split(share) {
    const failed = await this.#decode([...this.#images.keys()]);
    const seen = new Map();
    [this.#train, this.#test] = [[], []];
    for (const image of this.#images.values()) {
      const index = seen.get(image.label) ?? 0;
      seen.set(image.label, index + 1);
      const apart = (images) => Math.floor(images * share + 1e-9); // of so many images
      const isApart = apart(index + 1) > apart(index);
      (isApart ? this.#test : this.#train).push(image);
    }
    return failed;
  }

  get rows() {
    return this.#train.length;
  }

  get testRows() {
    return this.#test.length;
  }

  /** The feeds of a step. */
  batch(rows) {
    const images = rows.map((row) => this.#train[row]);
    const padded = this.#padded(images);
    return { [this.#inputs.image.name]: this.#tensor(padded), [this.#inputs.target.name]: this.#targets(padded) };
  }

  /** The feeds of a prediction, and the classes; of the images set aside, or of all if there are none. */
  testBatch(from, to) {
    const images = (this.testRows ? this.#test : this.#train).slice(from, to);
    return {
      feeds: { [this.#inputs.image.name]: this.#tensor(this.#padded(images)) },
      labels: images.map(({ label }) => label),
      ids: images.map(({ id }) => id),
    };
  }

  /** The feeds of a prediction for the file that `show` has decoded. */
  async pictureFeeds() {
    await this.#read(this.#picture, PICTURE);
    return this.#feeds(this.#picture);
  }

  /** The feeds of a prediction for a black image. */
  blackFeeds() {
    const { width, height } = this.#settings;
    return this.#feeds({ pixels: new Uint8ClampedArray(4 * width * height) });
  }

  #feeds(image) {
    return { [this.#inputs.image.name]: this.#tensor(this.#padded([image])) };
  }

  /** Decodes an image, unless it has the size of the input. */
  async #read(image, longest) {
    const { width, height, crop } = this.#settings;
    const size = `${width} ${height} ${crop}`;
    if (image.size !== size) Object.assign(image, await decode(image.file, this.#settings, longest), { size });
  }

  async #decode(ids) {
    const failed = [];
    const decodeOne = async (id) => {
      const image = this.#images.get(id);
      if (image === undefined) return;
      try {
        await this.#read(image, THUMBNAIL);
      } catch {
        failed.push(id);
        this.#images.delete(id);
      }
    };
    for (let from = 0; from < ids.length; from += AT_ONCE) {
      await Promise.all(ids.slice(from, from + AT_ONCE).map(decodeOne));
    }
    return failed;
  }

  // A model whose batch has a fixed size gets images repeatedly.
  #padded(images) {
    const { batch } = this.#inputs;
    return batch === null ? images : Array.from({ length: batch }, (_, row) => images[row % images.length]);
  }

  #tensor(images) {
    const { image, channels, layout } = this.#inputs;
    const { width, height, mean, std } = this.#settings;
    const area = width * height;
    const Type = image.type === "uint8" ? Uint8Array : Float32Array;
    const data = new Type(images.length * channels * area);
    const [pixelStep, channelStep] = layout === "NHWC" ? [channels, 1] : [1, area];
    images.forEach(({ pixels }, row) => {
      for (let channel = 0; channel < channels; channel += 1) {
        const [scale, shift] = [1 / (255 * std[channel]), mean[channel] / std[channel]];
        let at = row * channels * area + channel * channelStep;
        for (let pixel = 0; pixel < 4 * area; pixel += 4, at += pixelStep) {
          const value = channels === 1
            ? 0.299 * pixels[pixel] + 0.587 * pixels[pixel + 1] + 0.114 * pixels[pixel + 2]
            : pixels[pixel + channel];
          data[at] = Type === Uint8Array ? Math.round(value) : value * scale - shift;
        }
      }
    });
    const size = layout === "NHWC" ? [height, width, channels] : [channels, height, width];
    return { data, dims: [images.length, ...size] };
  }

  #targets(images) {
    const { target } = this.#inputs;
    const labels = images.map(({ label }) => label);
    if (!target.type.startsWith("float")) {
      return { data: labels, dims: [labels.length, ...new Array(Math.max((target.shape?.length ?? 1) - 1, 0)).fill(1)] };
    }
    const data = new Float32Array(labels.length * this.#classes); // one-hot
    labels.forEach((label, row) => { data[row * this.#classes + label] = 1; });
    return { data, dims: [labels.length, this.#classes] };
  }
}
