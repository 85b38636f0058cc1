// The page classifier.html: a model, images by class, and what becomes of them.
import {
  PROVIDERS, countIn, element, find, numberIn, percent, prepareTraining, providerOf, query, say, showScores, showSteps,
  shown, started,
} from "./common.mjs";
import { countRight, drawPreview, showResult } from "./result.mjs";

const FILES = ["step.json", "step.onnx", "evaluate.onnx", "state.safetensors", "model.onnx"];
const RANGES = {
  unit: { mean: [0], std: [1] },
  signed: { mean: [0.5], std: [0.5] },
  imagenet: { mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225] },
  bytes: { mean: [0], std: [1 / 255] },
};
const PREPROCESSING = ["width", "height", "crop", "layout", "range", "mean", "std"];
const ROWS = 2; // classes that are shown at first
const PART = 16; // images that are read between two messages
const THUMBNAILS = 8;

let files; // of a chosen folder; else the step beside this page is used
let inputs = null;
let count = 0; // of classes
let groups = []; // {name, ids, row} by class
let nextId = 0;
let hasPicture = false;
let isChanged = false; // the images, since they were trained
let judgement = null; // what the model makes of the images set aside
let split = { rows: 0, testRows: 0 };
let isOpening = false;
let hasFailed = false; // to open a model, so that there is none
let provider = "";
let sent = ""; // the preprocessing that the worker has
const contents = new Map(); // what images contain → id

const training = prepareTraining({
  about: () => `${split.rows} images to train, ${split.testRows} set aside, on ${PROVIDERS[provider]}.`,
  prepare,
  judge: async () => {
    judgement = split.rows ? await training.call("judge", { size: inputs.batch ?? 64 }) : null;
    return judgement ? percent(countRight(judgement) / judgement.labels.length) : "–";
  },
  async changed() {
    await showJudgement();
    await guess();
  },
  update,
});
const { call } = training;

/** Shows what can be done, what has been done, and what comes next. */
function update() {
  const { isOpen, running, steps } = training;
  const isFilled = filledGroups().length >= 2;
  for (const id of ["model-fields", "image-fields"]) find(id).disabled = running || !(isOpen || id === "model-fields");
  find("try-fields").disabled = !isOpen;
  find("size").disabled = running || inputs === null || inputs.batch !== null;
  const states = {
    model: isOpen ? "done" : isOpening ? "running" : hasFailed ? "failed" : "open",
    images: !isOpen ? "waiting" : isFilled ? "done" : "open",
    training: running ? "running" : !isOpen || !isFilled ? "waiting" : steps && !isChanged ? "done" : "open",
    result: steps && isOpen && !running ? "done" : "waiting",
  };
  const last = running ? "training" : states.result === "done" ? "result" : null;
  const next = Object.keys(states).find((id) => states[id] === "open") ?? last;
  showSteps(states, { model: "folder-button", images: "tree-button", training: "train", result: "save" }[next]);
}

const filledGroups = () => groups.filter(({ ids }) => ids.length);

/** Shows how good the trained model is. */
async function showJudgement() {
  await showResult(training.steps ? judgement : null, {
    what: split.testRows ? "images set aside" : "images, which it was trained on",
    nameOf: (index) => groups[index]?.name.value ?? `class ${index}`,
    previewsOf: (ids) => call("previews", ids),
  });
}

// ------------------------------------------------------------------------------------ model

/** Opens the step on the chosen provider, or on the other one if that fails; says so. */
async function openStep({ keep = false } = {}) {
  const wanted = find("provider").value;
  const before = { inputs, fields: PREPROCESSING.map(find).map(({ value, disabled }) => ({ value, disabled })) };
  let opened;
  let reason = "";
  const open = async (name) => {
    say(`Opening the model on ${PROVIDERS[name]} …`, "busy");
    opened = await call("open", { provider: name, files, keep, trial: true });
    inputs = await call("inputs");
    if (!keep) showPreprocessing();
    find("provider").value = name;
    sent = "";
    if (!(await useSettings())) throw new Error("the preprocessing is not complete");
    provider = name;
  };
  isOpening = true;
  training.close();
  try {
    await open(wanted).catch(async (error) => {
      if (wanted !== "webgpu" || error.name === "ModelError") throw error;
      await open("wasm");
      reason = `, because the graphics card cannot be used here: ${error.message.replace(/\.$/, "")}`;
    });
    await call("accept");
  } catch (error) {
    await call("restore").catch(() => {}); // there is nothing without a worker
    isOpening = false;
    inputs = before.inputs;
    hasFailed = inputs === null;
    if (inputs !== null) { // training can continue where it was
      find("provider").value = provider;
      PREPROCESSING.forEach((id, at) => Object.assign(find(id), before.fields[at]));
      sent = "";
      await useSettings();
      training.open(await call("rate"), { isNew: false });
    }
    training.update();
    throw error;
  }
  isOpening = hasFailed = false;
  const isPartial = provider === "webgpu" && opened.about.target !== "webgpu";
  find("runs").textContent = `Runs on ${PROVIDERS[provider]}${reason}.` +
    (isPartial ? " The step was exported without --target webgpu, so parts of it may run on the CPU." : "");
  if (!keep) forgetAccuracy();
  training.open(opened.rate, { isNew: !keep });
  if (inputs.batch !== null) find("size").value = inputs.batch;
  const size = `${find("width").value} × ${find("height").value}, ${inputs.channels === 1 ? "gray" : "color"}`;
  find("model-name").textContent =
    `${files ? "The chosen folder" : "The folder of this page"}: ${count} classes, images of ${size}.`;
  showSubject();
  say(find("runs").textContent + (contents.size ? "" : " Add images of each class."));
  await showJudgement();
  await guess();
}

/** Says in the title what is trained. */
function showSubject() {
  const named = groups.filter(({ isNamed, ids }) => isNamed && ids.length).map(({ name }) => name.value);
  const classes = named.length ? shortened(named) : `${count} classes`;
  document.title = `Train an image classifier: ${classes}`;
  find("subject").textContent =
    `From your own images, it learns to tell ${classes} apart, in this tab. They stay on this computer: nothing is uploaded.`;
}

const shortened = (list) => (list.length > 4 ? `${list.slice(0, 3).join(", ")} and ${list.length - 3} more` : list.join(", "));

/** Shows the preprocessing that the inputs suggest. */
function showPreprocessing() {
  const { image, layout, height, width, channels } = inputs;
  for (const [id, value] of [["height", height], ["width", width]]) {
    find(id).value = value ?? 224;
    find(id).disabled = value !== null;
  }
  find("layout").value = layout;
  find("layout").disabled = image.shape.slice(1).some((dim) => typeof dim === "number" && dim <= 4);
  const isLarge = channels === 3 && layout === "NCHW" && Number(find("width").value) >= 200;
  find("range").value = image.type === "uint8" ? "bytes" : isLarge ? "imagenet" : "unit";
  find("range").disabled = image.type === "uint8";
}

/** Returns one number for each channel of a field, or says what is wrong. */
function channelsIn(id, condition, fits) {
  const given = find(id).value;
  const values = given.trim() === "" ? [] : given.split(/[\s,;]+/).filter(Boolean).map(Number);
  const isRight = [1, inputs.channels].includes(values.length) && values.every((value) => Number.isFinite(value) && fits(value));
  find(id).setAttribute("aria-invalid", String(!isRight));
  if (isRight) return Array.from({ length: inputs.channels }, (_, channel) => values[channel] ?? values[0]);
  say(`${id} must be ${condition}, for all channels or each of ${inputs.channels}, ` +
    (given === "" ? "but the field is empty" : `got ${given}`), "error");
  return null;
}

/** Returns the preprocessing, or null after it has said what is wrong. */
function settingsIn() {
  const [width, height] = ["width", "height"].map((id) => countIn(id, id));
  if (width === null || height === null) return null;
  const range = find("range").value;
  if (range !== "other") {
    for (const name of ["mean", "std"]) {
      const values = RANGES[range][name];
      find(name).value = (values.length === inputs.channels ? values : [values[1] ?? values[0]]).join(", ");
    }
  }
  for (const field of ["mean", "std"]) {
    find(field).hidden = document.querySelector(`label[for=${field}]`).hidden = range !== "other";
  }
  const mean = channelsIn("mean", "finite numbers", () => true);
  const std = mean && channelsIn("std", "numbers > 0", (value) => value > 0);
  const crop = find("crop").value === "crop";
  const layout = find("layout").value;
  const chosen = (id) => find(id).selectedOptions[0].textContent;
  find("summary").textContent = `${chosen("provider")}, ${width} × ${height}, ${chosen("layout")}, ${chosen("range")}`;
  return std && { settings: { width, height, crop, mean, std }, inputs: { ...inputs, layout } };
}

/** Sends the preprocessing to the worker; returns whether that was possible. */
async function useSettings() {
  const values = settingsIn();
  if (values === null) return false;
  if (sent === JSON.stringify(values)) return true;
  const isOther = sent !== ""; // than that of the figures shown
  const classes = await call("useImages", values);
  if (classes < 2) throw new Error(`this page needs a model with at least 2 scores for an image, got ${classes}`);
  if (classes !== count) {
    groups.slice(classes).forEach(clear);
    count = classes;
    setRows(Math.min(Math.max(groups.length, ROWS), count));
  }
  sent = JSON.stringify(values);
  if (isOther) forgetAccuracy();
  return true;
}

/** Shows none, until this model has been trained with this preprocessing. */
function forgetAccuracy() {
  split = { rows: 0, testRows: 0 };
  judgement = null;
  find("accuracy").textContent = "–";
}

// ------------------------------------------------------------------------------------ images

/** Shows rows for a number of classes. */
function setRows(length) {
  groups.splice(length).forEach(({ row }) => row.remove());
  while (groups.length < length) {
    const index = groups.length;
    const group = { ids: [], isNamed: false };
    const name = element("input", { type: "text", ariaLabel: `Name of class ${index}` });
    const input = element("input", { type: "file", accept: "image/*", multiple: true });
    const number = element("span", { className: "hint", textContent: "0 images" });
    const remove = element("button", { type: "button", textContent: "Remove", disabled: true });
    const thumbnails = element("div");
    const row = element("li", {}, element("div", { className: "group" }, name,
      element("label", { className: "button" }, "Add images", input), remove),
      element("div", { className: "thumbs" }, number, thumbnails));
    const rename = (text) => {
      name.value = text;
      input.ariaLabel = `Add images of ${text}`;
      remove.ariaLabel = `Remove the images of ${text}`;
    };
    rename(`class ${index}`);
    Object.assign(group, { row, name, rename, number, remove, thumbnails });
    name.oninput = () => {
      group.isNamed = true;
      rename(name.value);
      showSubject();
    };
    name.onchange = shown(showJudgement);
    input.onchange = shown(async () => {
      await addImages([{ group, chosen: chosenIn(input) }]);
    });
    remove.onclick = () => {
      clear(group);
      showCount(group);
      imagesChanged();
      say(`Removed the images of ${name.value}.`);
    };
    takesDrops(row, (dropped) => addImages([{ group, chosen: dropped }]));
    find("classes").append(row);
    groups.push(group);
  }
  find("add-class").hidden = groups.length >= count;
}

/** Lets images be added again. */
function forget(ids) {
  for (const [content, id] of contents) {
    if (ids.includes(id)) contents.delete(content);
  }
}

/** Returns a text that is the same for files of the same bytes only. */
async function contentOf(file) {
  let [one, two] = [0x811c9dc5, 0x9e3779b9];
  for (const byte of new Uint8Array(await file.arrayBuffer())) {
    one = Math.imul(one ^ byte, 0x01000193);
    two = Math.imul((two ^ byte) + (two >>> 15), 0x85ebca6b);
  }
  return `${file.size} ${one} ${two}`;
}

function clear(group) {
  call("removeImages", group.ids);
  forget(group.ids);
  group.ids = [];
  group.thumbnails.replaceChildren();
}

function showCount({ ids, number, remove }) {
  number.textContent = `${ids.length} ${ids.length === 1 ? "image" : "images"}`;
  remove.disabled = ids.length === 0;
}

const isVisible = ({ path, file }) => file !== null && !path.some((part) => part.startsWith("."));

/** Shows what follows from other images. */
function imagesChanged() {
  isChanged = true;
  if (groups.at(-1)?.ids.length && groups.length < count) setRows(groups.length + 1);
  showSubject();
  training.update();
}

/** Adds images to a class; returns how many, and the names of files that were left out. */
async function addTo(group, chosen, progress) {
  const found = { added: 0, failed: [], known: [] }; // known ones would be in the training and set aside
  for (let from = 0; from < chosen.length; from += PART) {
    const part = [];
    progress(from);
    for (const { file, path } of chosen.slice(from, from + PART)) {
      const one = { id: nextId++, file, label: groups.indexOf(group) };
      const content = await contentOf(file).catch(() => `unreadable ${one.id}`);
      if (contents.has(content)) {
        found.known.push(path.at(-1));
        continue;
      }
      contents.set(content, one.id);
      part.push(one);
    }
    const wrong = await call("addImages", part);
    forget(wrong);
    found.failed.push(...part.filter(({ id }) => wrong.includes(id)).map(({ file }) => file.name));
    const ids = part.map(({ id }) => id).filter((id) => !wrong.includes(id));
    const visible = ids.slice(0, Math.max(0, THUMBNAILS - group.ids.length));
    group.ids.push(...ids);
    found.added += ids.length;
    for (const preview of (await call("previews", visible)).filter(Boolean)) {
      group.thumbnails.append(drawPreview(element("canvas", { ariaHidden: "true" }), preview));
    }
    showCount(group);
  }
  return found;
}

/** Adds images to classes, and says what was left out; an addition has a group, or the name of a folder. */
async function addImages(additions, { stray = [], empty = [] } = {}) {
  if (!(await useSettings())) return;
  const all = additions.flatMap(({ chosen }) => chosen).length;
  const [failed, known] = [[], []];
  let [begun, added] = [0, 0];
  for (const { name, group = groupFor(name), chosen } of additions) {
    const progress = (from) => say(`Reading images: ${begun + from} of ${all} …`, "busy");
    const found = await addTo(group, chosen.filter(isVisible), progress);
    begun += chosen.length;
    added += found.added;
    failed.push(...found.failed);
    known.push(...found.known);
    if (name === undefined) continue;
    if (group.ids.length) {
      group.rename(name);
      group.isNamed = true;
    } else if (found.known.length === 0) empty.push(name);
  }
  if (added) imagesChanged();
  const skipped = (list, why) => `Skipped ${counted(list.length, "file")} ${why}: ${names(list)}.`;
  const notices = [
    failed.length && skipped(failed, "that this browser cannot read as images"),
    known.length && skipped(known, "already added"),
    stray.length && skipped(stray, "in no folder of a class"),
    empty.length && `No class was made from ${counted(empty.length, "folder")} without images: ${names(empty)}.`,
  ];
  say(`Added ${counted(added, "image")}.`, added ? "success" : "info", notices.filter(Boolean).join(" "));
}

const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

const names = (list) => list.slice(0, 3).join(", ") + (list.length > 3 ? ", …" : "");

/** Returns the class for a folder: the one with its name, or one that is free. */
function groupFor(name) {
  const known = groups.find((group) => group.name.value === name);
  const free = () => groups.find((group) => !group.isNamed && !group.ids.length);
  if (!known && !free() && groups.length < count) setRows(groups.length + 1);
  return known ?? free();
}

/** Adds the images of folders, each of which is a class. */
async function addFolders(found) {
  const visible = found.filter(isVisible);
  const isNested = new Set(visible.map(({ path }) => path[0])).size === 1 && visible.some(({ path }) => path.length > 2);
  const folders = new Map();
  for (const one of found) {
    const folder = one.path.slice(0, -1)[isNested ? 1 : 0] ?? "";
    if (!folder.startsWith(".")) folders.set(folder, [...(folders.get(folder) ?? []), one]);
  }
  const stray = (folders.get("") ?? []).filter(isVisible).map(({ path }) => path.at(-1));
  folders.delete("");
  if (folders.size === 0) throw new Error("add a folder for each class, or add single images to one of the classes below");
  const mayBeImage = ({ file }) => file.type === "" || file.type.startsWith("image/");
  const additions = [...folders.keys()].sort().map((name) => ({ name, chosen: folders.get(name).filter(isVisible) }));
  const filled = additions.filter(({ chosen }) => chosen.some(mayBeImage));
  const free = groups.filter(({ isNamed, ids }) => !isNamed && !ids.length).length + count - groups.length;
  const added = filled.filter(({ name }) => !groups.some((group) => group.name.value === name));
  if (added.length > free) {
    throw new Error(`the model has ${count} classes, and none is free for the folder '${added[free].name}'`);
  }
  const empty = additions.filter((one) => !filled.includes(one)).map(({ name }) => name);
  await addImages(filled, { stray, empty });
}

const shareIn = () => numberIn("share", "% set aside", "a number from 0 to 90", (value) => value >= 0 && value <= 90);

/** Checks the data of a training, and gives them to the worker. */
async function prepare() {
  const share = shareIn();
  const size = countIn("size", "batch size");
  if (share === null || size === null || !(await useSettings())) return null;
  const filled = filledGroups();
  if (filled.length < 2) throw new Error(`add images to at least 2 classes, got ${filled.length}`);
  const { failed, ...found } = await call("splitImages", share / 100);
  if (failed.length) {
    forget(failed);
    for (const group of groups) {
      group.ids = group.ids.filter((id) => !failed.includes(id));
      showCount(group);
    }
    imagesChanged();
    throw new Error(`${failed.length} images can no longer be read, and were removed; train again without them`);
  }
  split = found;
  isChanged = false;
  find("accuracy-of").textContent = split.testRows ? "accuracy on images set aside" : "accuracy on the training images";
  return { size: inputs.batch ?? size, ordered: query.has("ordered") };
}

// ------------------------------------------------------------------------------------ predictions

async function guess() {
  if (training.running || !hasPicture || !(await useSettings())) return;
  const scores = await call("classifyPicture");
  const best = showScores(find("scores"), scores, groups.map(({ name }) => name.value));
  find("guess").textContent = `That is ${best.name}, with ${percent(best.share)}.`;
}

async function classify(file) {
  if (training.running) throw new Error("stop the training first");
  if (!file || !(await useSettings())) return;
  hasPicture = false;
  find("guess").textContent = "";
  find("scores").replaceChildren();
  find("picture").hidden = true;
  say(`Reading ${file.name} …`, "busy");
  const preview = await call("showPicture", file).catch(() => null);
  if (preview === null) throw new Error(`'${file.name}' is no image that this browser can read`);
  hasPicture = true;
  drawPreview(find("picture"), preview).ariaLabel = `The image to classify: ${file.name}`;
  find("picture").hidden = false;
  await guess();
  say(`Classified ${file.name}.`, "success");
}

// ------------------------------------------------------------------------------------ files

/** Lists the files of a dropped file or folder; one without files has null. */
async function filesOf(entry, parents = []) {
  const path = [...parents, entry.name];
  if (entry.isFile) return [{ path, file: await new Promise((done, fail) => entry.file(done, fail)) }];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const part = await new Promise((done, fail) => reader.readEntries(done, fail)); // in parts of 100
    if (part.length === 0) return found.length ? found : [{ path: [...path, ""], file: null }];
    for (const child of part) found.push(...(await filesOf(child, path)));
  }
}


/** Lets the user drop files and folders on an element: `take` receives them as {file, path}. */
function takesDrops(target, take) {
  const mark = (event) => {
    event.preventDefault();
    event.stopPropagation();
    target.classList.toggle("over", event.type === "dragover");
  };
  target.addEventListener("dragover", mark);
  target.addEventListener("dragleave", mark);
  target.addEventListener("drop", (event) => {
    mark(event);
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean); // at once
    shown(async () => {
      if (training.running) throw new Error("stop the training first");
      await take((await Promise.all(entries.map((entry) => filesOf(entry)))).flat());
    })();
  });
}

/** Chooses WebGPU for a step that was exported for it. */
function suggestProvider(description) {
  const isForGpu = navigator.gpu && /"target":\s*"webgpu"/.test(description);
  find("provider").value = providerOf(isForGpu ? "webgpu" : "wasm");
}

async function chooseStep(found) {
  const known = found.filter(({ path }) => FILES.includes(path.at(-1)));
  const depth = Math.min(...known.map(({ path }) => path.length));
  const parts = known.filter(({ path }) => path.length === depth);
  const missing = FILES.filter((name) => !parts.some(({ path }) => path.at(-1) === name));
  if (missing.length) {
    throw new Error(`the folder lacks ${missing.join(", ")}; choose a folder that \`ortops export-step\` wrote`);
  }
  if (!training.mayEnd()) return;
  const before = files;
  const description = await parts.find(({ path }) => path.at(-1) === "step.json").file.text();
  suggestProvider(description);
  files = Object.fromEntries(await Promise.all(parts.map(async ({ path, file }) => [path.at(-1), await file.arrayBuffer()])));
  try {
    await openStep();
  } catch (error) {
    files = before;
    throw error;
  }
}

const chosenIn = (input) => {
  const chosen = [...input.files].map((file) => ({ file, path: (file.webkitRelativePath || file.name).split("/") }));
  input.value = "";
  return chosen;
};

async function start() {
  find("folder").onchange = shown(() => chooseStep(chosenIn(find("folder"))));
  find("tree").onchange = shown(() => addFolders(chosenIn(find("tree"))));
  find("picture-file").onchange = shown(async () => {
    const [one] = chosenIn(find("picture-file"));
    await classify(one?.file);
  });
  find("add-class").onclick = shown(() => {
    setRows(groups.length + 1);
    groups.at(-1).name.focus();
  });
  find("share").onchange = shown(() => { shareIn(); });
  find("size").onchange = shown(() => { countIn("size", "batch size"); });
  find("provider").onchange = shown(() => openStep({ keep: true }));
  for (const id of PREPROCESSING) {
    find(id).onchange = shown(async () => {
      if (await useSettings()) say(`Settings: ${find("summary").textContent}.`);
      await guess();
    });
  }
  takesDrops(find("model"), chooseStep);
  takesDrops(find("images"), addFolders);
  takesDrops(find("try"), ([first]) => classify(first?.file));
  const described = await fetch("step.json").catch(() => null);
  suggestProvider(described?.ok ? await described.text() : "{}");
  await showJudgement();
  if (described?.ok) await openStep();
  else say("There is no model next to this page. Choose a folder that `ortops export-step` wrote.");
}

started();
update();
shown(start)().finally(() => { document.body.dataset.ready = "1"; });
