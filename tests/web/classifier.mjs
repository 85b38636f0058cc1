// Loads classifier.html in a frame, trains in it as a user would, and reports to the server. The query
// string is passed on to the page.
const frame = document.createElement("iframe");
frame.style = "width: 1000px; height: 760px; border: 0";
frame.src = `classifier.html${location.search}`;
document.body.append(frame);
const wait = async (condition) => {
  while (!condition()) await new Promise((done) => setTimeout(done, 20));
};
const send = (path, body) => fetch(path, { method: "POST", body });

/** An image of one color: the file of a row of a class. */
async function imageOf(label, row) {
  const canvas = new OffscreenCanvas(20, 10);
  const context = canvas.getContext("2d");
  const color = [5 * row, 5 * row, 5 * row];
  color[label] = 255 - 5 * row;
  context.fillStyle = `rgb(${color})`;
  context.fillRect(0, 0, 20, 10);
  return new File([await canvas.convertToBlob()], `${label}-${row}.png`, { type: "image/png" });
}
const placed = (file, path) => Object.defineProperty(file, "webkitRelativePath", { value: path });

try {
  await wait(() => frame.contentDocument?.body?.dataset.ready);
  const page = frame.contentDocument;
  const get = (id) => page.getElementById(id);
  const text = (id) => get(id).textContent;
  const isError = () => get("status").dataset.kind === "error";
  if (isError()) throw new Error(text("status"));
  const found = { opened: text("status"), model: text("model-name"), summary: text("summary"), fallback: get("fallback") };

  /** What comes next: the states of the steps, and the buttons that stand out. */
  const next = () => [".state", ".primary"].map((chosen) => [...page.querySelectorAll(chosen)].map((each) => each.textContent.trim()).join(", "));
  const rowsShown = () => get("classes").children.length;
  const isLost = () => !frame.contentWindow.dispatchEvent(new frame.contentWindow.Event("beforeunload", { cancelable: true }));
  const downloads = () => [get("save").disabled, get("save-state").disabled, isLost()];
  found.next = { start: next() };
  found.rows = [rowsShown()];
  found.downloads = [downloads()];
  const kinds = [];
  new MutationObserver(() => kinds.push(get("status").dataset.kind)).observe(get("status"), { attributes: true });
  /** What the page says, of what kind, and what else is to be known. */
  const message = () => [text("status"), get("status").dataset.kind, text("notice")];

  // The chart without steps has a sentence instead of numbers, and nothing is wider than a phone.
  const drawn = [];
  const { fillText } = frame.contentWindow.CanvasRenderingContext2D.prototype;
  frame.contentWindow.CanvasRenderingContext2D.prototype.fillText = function keep(...values) {
    drawn.push(values[0]);
    fillText.apply(this, values);
  };
  frame.style.width = "390px";
  await wait(() => drawn.length);
  found.drawn = [...new Set(drawn)];
  found.width = page.documentElement.scrollWidth;
  found.trainAt = get("train").getBoundingClientRect().bottom + frame.contentWindow.scrollY;

  /** Does something, and returns what the page says then. */
  const said = async (action, { ends = () => true } = {}) => {
    page.getElementById("status").textContent = "";
    action();
    await wait(() => text("status") && !text("status").endsWith("…") && ends());
    return text("status");
  };
  const change = (id, value) => {
    get(id).value = value;
    get(id).dispatchEvent(new frame.contentWindow.Event("change"));
  };
  const choose = (input, files) => {
    const transfer = new DataTransfer();
    files.forEach((file) => transfer.items.add(file));
    input.files = transfer.files;
    input.dispatchEvent(new frame.contentWindow.Event("change"));
  };
  const entryOf = (file) => ({ isFile: true, name: file.name, file: (done) => done(file) });
  const folderOf = (name, files) => ({
    isFile: false, name, createReader: () => {
      const parts = [files.slice(0, 2), files.slice(2), []]; // as Chromium returns them
      return { readEntries: (done) => done(parts.shift().map(entryOf)) };
    },
  });
  const drop = (target, entries) => target.dispatchEvent(Object.assign(
    new frame.contentWindow.Event("drop", { cancelable: true }),
    { dataTransfer: { items: entries.map((entry) => ({ webkitGetAsEntry: () => entry })) } },
  ));
  const click = (id) => get(id).click();

  // What is missing or wrong is said.
  found.refused = [await said(() => click("train"))];
  await said(() => change("range", "other"));
  found.refused.push(await said(() => change("std", "0")));
  await said(() => change("std", "0.25"));
  found.refused.push(await said(() => change("mean", "")));
  found.refused.push(await said(() => change("mean", "1, 2")));
  found.preprocessing = await said(() => change("mean", "0.5"));
  for (const [id, value] of [["epochs", "0"], ["size", ""], ["share", "91"]]) {
    const before = get(id).value;
    get(id).value = value;
    found.refused.push(await said(() => click("train")));
    change(id, before); // which is right: the error goes
    await wait(() => !isError());
  }

  // Two classes from a folder, one by dropping a folder, and single images.
  const rows = async (label, from, to) =>
    Promise.all(Array.from({ length: to - from }, (_, row) => imageOf(label, from + row)));
  const [first, second, third] = await Promise.all([rows(0, 0, 10), rows(1, 0, 10), rows(2, 0, 5)]);
  third[4] = await imageOf(0, 11); // set aside, and of another class
  const notes = new File(["no image"], "notes.txt", { type: "text/plain" });
  const adds = async (action) => {
    await said(action);
    return message();
  };
  found.added = [await adds(() => drop(get("images"), [folderOf("texts", [notes]), folderOf("empty", [])]))];
  found.added.push(await adds(() => choose(get("tree"), [
    ...second.map((file) => placed(file, `colors/b green/${file.name}`)),
    ...first.map((file) => placed(file, `colors/a red/${file.name}`)),
    placed(notes, "colors/a red/notes.txt"), placed(new File([""], ".hidden"), "colors/.hidden"),
    placed(new File(["no image"], "1.png", { type: "image/png" }), "colors/aa broken/1.png"),
  ])));
  found.rows.push(rowsShown());
  found.next.images = next();
  found.added.push(await adds(() => drop(get("images"), [folderOf("c blue", third)])));
  const last = get("classes").lastElementChild;
  const more = await rows(2, 5, 10);
  found.added.push(await adds(() => choose(last.querySelector("[type=file]"), more)));
  last.querySelector("button").click();
  found.emptied = last.querySelector(".hint").textContent;
  await said(() => drop(last, third.concat(more).map(entryOf)));
  found.classes = [...get("classes").children].map((row) =>
    `${row.querySelector("[type=text]").value}: ${row.querySelector(".hint").textContent}`);
  found.full = await said(() => drop(get("images"), [folderOf("d", third)]));

  // Training, predictions, and files.
  get("size").value = 8;
  get("epochs").value = 2;
  change("rate", "0.01");
  found.trained = await said(() => {
    click("train");
    found.next.running = next();
  }, { ends: () => page.body.dataset.trained || isError() });
  found.next.trained = next();
  found.downloads.push(downloads());
  found.verdict = text("verdict");
  found.table = [...page.querySelectorAll("table tr")].map((row) => [...row.children].map((cell) => cell.textContent));
  found.mistakes = [...page.querySelectorAll(".mistakes figure")].map((each) => each.textContent);
  found.pictures = [...page.querySelectorAll(".mistakes canvas")].map(({ width, height }) => [width, height]);
  found.title = page.title;
  await wait(() => text("steps") === page.body.dataset.trained); // with the next frame
  const [unseen] = await rows(1, 3, 4);
  await said(() => choose(get("picture-file"), [notes]));
  kinds.length = 0;
  found.classified = await said(() => drop(get("try"), [entryOf(unseen)]));
  found.kinds = [...kinds];
  found.shown = [get("picture").width, get("picture").height];
  found.guess = text("guess").replace(/[\d.]+ %/, "");
  found.wrongPicture = await said(() => choose(get("picture-file"), [notes]));
  const saved = (id) => new Promise((done) => {
    frame.contentWindow.HTMLAnchorElement.prototype.click = function click() {
      done(fetch(this.href).then((file) => file.arrayBuffer()));
    };
    click(id);
  });
  // Another folder would end a training that was not downloaded: the page asks.
  const parts = ["step.json", "step.onnx", "evaluate.onnx", "state.safetensors", "model.onnx"];
  const exported = async (folder) => Promise.all(parts.map(async (name) =>
    placed(new File([await (await fetch(`${folder}${name}`)).arrayBuffer()], name), `exported/${name}`)));
  const files = await exported("");
  const asked = new Promise((done) => {
    frame.contentWindow.confirm = (question) => {
      done(question);
      return false;
    };
  });
  choose(get("folder"), files);
  found.asked = await asked;
  await send("model.onnx", await saved("save"));
  found.downloads.push(downloads());
  await send("state.safetensors", await saved("save-state"));

  // A folder of another kind of model leaves the training as it was, and images that are there are not added.
  const figures = () => [text("steps"), text("accuracy"), text("loss"), text("guess"), get("rate").value, get("std").value];
  const wrong = await exported("wrong/");
  const before = figures();
  found.wrongFolder = await said(() => choose(get("folder"), wrong), { ends: () => isError() && !get("train").disabled });
  found.unchanged = JSON.stringify(before) === JSON.stringify(figures());
  await send("unchanged.onnx", await saved("save"));
  const again = await imageOf(0, 7);
  const other = await imageOf(2, 11);
  const renamed = new File([again], "copy.png", { type: "image/png" });
  found.twice = [await adds(() => choose(get("tree"), first.map((file) => placed(file, `colors/a red/${file.name}`)))),
    await adds(() => drop(last, [entryOf(renamed), entryOf(other), entryOf(renamed)]))];
  found.next.changed = next();
  last.querySelector("button").click();
  await said(() => drop(last, third.concat(more).map(entryOf))); // removed images can be added again
  found.classesAgain = [...get("classes").children].map((row) => row.querySelector(".hint").textContent);

  // A rate that cannot be used is said, and nothing is trained with another one.
  found.rates = [await said(() => change("rate", "1e300")), await said(() => click("train")), text("steps")];
  await said(() => change("rate", "1e-60"));
  found.rates.push(get("rate").value);
  await said(() => change("rate", "0.01"));

  // Another provider goes on with the state.
  found.provider = await said(() => change("provider", get("provider").value === "wasm" ? "webgpu" : "wasm"),
    { ends: () => !get("train").disabled });
  found.kept = text("steps");
  await send("kept.safetensors", await saved("save-state"));

  // A loss that is not finite, and back to the start.
  change("rate", "1e30");
  found.diverged = await said(() => click("train"), { ends: isError });
  await wait(() => !get("reset").disabled);
  found.reset = [await said(() => click("reset"), { ends: () => text("steps") === "0" }), get("rate").value];

  // A folder that is chosen.
  found.downloads.push(downloads());
  found.incomplete = await said(() => choose(get("folder"), files.slice(1)));
  found.chosen = await said(() => choose(get("folder"), files), { ends: () => !get("train").disabled });
  found.model2 = text("model-name");
  found.untrained = [text("steps"), text("accuracy")];
  get("epochs").value = 1;
  found.again = await said(() => click("train"));
  get("tree").focus({ focusVisible: true });
  found.focus = frame.contentWindow.getComputedStyle(get("tree-button")).outlineStyle;
  const named = (field) => field.ariaLabel || field.labels?.length || field.textContent.trim();
  found.names = [...get("classes").querySelectorAll("[type=file], button")].slice(-2).map((field) => field.ariaLabel);
  found.unnamed = [...page.querySelectorAll("input, select, button, canvas:not([aria-hidden])")].filter((field) => !named(field)).map(({ id }) => id);
  await send("report", JSON.stringify(found));
} catch (error) {
  await send("report", JSON.stringify({ error: String(error.stack ?? error) }));
}
