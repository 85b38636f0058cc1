// The page index.html: a model, the arrays beside it, and a board to draw on.
import {
  PROVIDERS, find, percent, prepareTraining, providerOf, query, say, showScores, showSteps, shown, started,
} from "./common.mjs";
import { countRight, showResult } from "./result.mjs";

const GRID = 4; // samples per pixel of the image, in each direction
let about = "";
let pictured; // the input for images; only images with one channel can be drawn
let image = null;
let hasFailed = false;
let judgement = null; // what the model makes of the test rows; null if its targets are no classes

const training = prepareTraining({
  about: () => about,
  prepare: async () => ({ ordered: query.has("ordered") }),
  async judge() {
    judgement = await training.call("judge");
    return judgement ? percent(countRight(judgement) / judgement.labels.length) : "–";
  },
  async changed() {
    await showJudgement();
    await guess();
  },
  update,
});

/** Shows what can be done, what has been done, and what comes next. */
function update() {
  const { isOpen, running, steps } = training;
  const isDone = isOpen && !running && steps > 0;
  showSteps({
    model: isOpen ? "done" : hasFailed ? "failed" : "running",
    training: running ? "running" : isDone ? "done" : isOpen ? "open" : "waiting",
    result: isDone ? "done" : "waiting",
  }, isDone ? "save" : isOpen && "train");
}

async function showJudgement() {
  await showResult(training.steps ? judgement : null, { what: "test rows", nameOf: String });
  if (training.steps && judgement === null) {
    find("verdict").textContent = "The targets are no classes, so the loss alone says how good the model is.";
  }
}

/** Says in the title what is trained. */
function showSubject({ step: { feeds }, evaluate: { predict = [], outputs } }) {
  const sizes = (shape) => shape.slice(1).map((dim) => dim ?? "?").join("\u00a0×\u00a0"); // of a row
  const shapeOf = ({ name, shape }) => (shape?.length > 1 ? `${name} (${sizes(shape)})` : name);
  const inputs = feeds.filter(({ name }) => predict.includes(name)).map(shapeOf).join(", ");
  const targets = feeds.filter(({ name }) => !predict.includes(name)).map(shapeOf).join(", ");
  document.title = find("subject").previousElementSibling.textContent =
    `Train a model: ${inputs || targets} → ${Object.keys(outputs).join(", ")}`;
}

async function start() {
  await showJudgement();
  const provider = providerOf("wasm");
  say(`Opening the model on ${PROVIDERS[provider]} …`, "busy");
  const { about: description, rate } = await training.call("open", { provider });
  showSubject(description);
  const { rows, testRows } = await training.call("readArrays");
  about = `${rows} training rows, ${testRows} test rows, on ${PROVIDERS[provider]}.`;
  find("model-name").textContent = `The model of this folder: ${about}`;
  pictured = description.step.feeds.find(({ shape, type }) =>
    type === "float32" && shape?.length === 4 && shape[1] === 1 && shape.slice(2).every(Number.isInteger));
  if (pictured) {
    prepareDrawing(pictured.shape[2], pictured.shape[3], (found) => {
      image = found;
      if (image !== null) shown(guess)();
    });
  }
  await training.refresh();
  say(about);
  training.open(rate);
}

async function guess() {
  if (training.running || !pictured || image === null) return;
  const feeds = { [pictured.name]: { data: image, dims: [1, ...pictured.shape.slice(1)] } };
  const best = showScores(find("scores"), await training.call("classify", feeds), []);
  find("guess").textContent = `That is ${best.name}.`;
}

/** Downsamples the drawing in the way the data set was made: its bounding box fills the image. */
function imageOf(canvas, height, width) {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const isInk = (x, y) => data[4 * (y * canvas.width + x)] < 128;
  let [x0, x1, y0, y1] = [canvas.width, -1, canvas.height, -1];
  for (let y = 0; y < canvas.height; y += 1) {
    for (let x = 0; x < canvas.width; x += 1) {
      if (isInk(x, y)) [x0, x1, y0, y1] = [Math.min(x0, x), Math.max(x1, x), Math.min(y0, y), Math.max(y1, y)];
    }
  }
  if (x1 < 0) return null;
  const size = Math.max((x1 - x0 + 1) / width, (y1 - y0 + 1) / height); // pixels of the drawing per pixel of the image
  const [middleX, middleY] = [(x0 + x1 + 1) / 2, (y0 + y1 + 1) / 2];
  const image = new Float32Array(height * width);
  for (let index = 0; index < image.length; index += 1) {
    for (let part = 0; part < GRID * GRID; part += 1) {
      const column = (index % width) + ((part % GRID) + 0.5) / GRID - width / 2;
      const row = Math.floor(index / width) + (Math.floor(part / GRID) + 0.5) / GRID - height / 2;
      const [x, y] = [Math.floor(middleX + column * size), Math.floor(middleY + row * size)];
      const inside = x >= 0 && y >= 0 && x < canvas.width && y < canvas.height;
      if (inside && isInk(x, y)) image[index] += 1 / (GRID * GRID);
    }
  }
  return image;
}

/** Lets the user draw with a pointer or with keys; `change` receives the image, or null. */
function prepareDrawing(height, width, change) {
  const drawing = find("drawing");
  [drawing.width, drawing.height] = [width * 28, height * 28];
  const context = drawing.getContext("2d", { willReadFrequently: true });
  let pen = { x: drawing.width / 2, y: drawing.height / 4, down: false };
  const finish = () => change(imageOf(drawing, height, width));
  const begin = (x, y) => {
    context.lineWidth = drawing.width / 9;
    context.lineCap = context.lineJoin = "round";
    context.strokeStyle = "#000";
    context.beginPath();
    context.moveTo(x, y);
  };
  const to = (x, y) => {
    context.lineTo(x, y);
    context.stroke();
  };
  const clear = () => {
    context.fillStyle = "#fff";
    context.fillRect(0, 0, drawing.width, drawing.height);
    pen.down = false;
    find("pen").hidden = true;
    find("guess").textContent = "";
    find("scores").replaceChildren();
    change(null);
  };
  clear();
  find("drawer").hidden = false;
  find("clear").onclick = clear;
  const at = (event) => {
    const box = drawing.getBoundingClientRect();
    return [((event.clientX - box.left) * drawing.width) / box.width,
      ((event.clientY - box.top) * drawing.height) / box.height];
  };
  drawing.onpointerdown = (event) => {
    drawing.setPointerCapture(event.pointerId);
    begin(...at(event));
    drawing.onpointermove = (next) => to(...at(next));
  };
  drawing.onpointerup = drawing.onpointercancel = () => {
    drawing.onpointermove = null;
    finish();
  };
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  drawing.onkeydown = (event) => {
    if (event.key === " ") {
      event.preventDefault();
      pen.down = !pen.down;
      if (pen.down) {
        begin(pen.x, pen.y);
        to(pen.x, pen.y);
      } else finish();
    } else if (event.key in moves) {
      event.preventDefault();
      const [right, down] = moves[event.key];
      pen.x = Math.min(Math.max(pen.x + right * 14, 14), drawing.width - 14);
      pen.y = Math.min(Math.max(pen.y + down * 14, 14), drawing.height - 14);
      if (pen.down) to(pen.x, pen.y);
    } else return;
    find("pen").hidden = false;
    find("pen").toggleAttribute("data-down", pen.down);
    find("pen").style.left = `${(100 * pen.x) / drawing.width}%`;
    find("pen").style.top = `${(100 * pen.y) / drawing.height}%`;
    const percent = (value, whole) => Math.round((100 * value) / whole);
    drawing.setAttribute("aria-label", `Drawing area, pen ${pen.down ? "down" : "up"} at ` +
      `${percent(pen.x, drawing.width)} % from the left, ${percent(pen.y, drawing.height)} % from the top`);
  };
}

started();
update();
shown(() => start().catch((error) => {
  hasFailed = true;
  update();
  throw error;
}))().finally(() => { document.body.dataset.ready = "1"; });
