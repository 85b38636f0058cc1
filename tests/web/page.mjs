// Loads the page in a frame, trains in it as a user would, and reports to the server. The query
// string is passed on to the page.
const frame = document.createElement("iframe");
frame.style = "width: 1000px; height: 760px; border: 0";
frame.src = `index.html${location.search}`;
document.body.append(frame);
const wait = async (condition) => {
  while (!condition()) await new Promise((done) => setTimeout(done, 50));
};
const send = (path, body) => fetch(path, { method: "POST", body });
try {
  await wait(() => frame.contentDocument?.body?.dataset.ready);
  const page = frame.contentDocument;
  const status = page.getElementById("status");
  if (status.dataset.kind === "error") throw new Error(status.textContent);
  const epochs = page.getElementById("epochs");
  const refusedEpochs = ["0", "", "1.5"].map((value) => {
    epochs.value = value;
    page.getElementById("train").click();
    return [status.textContent, epochs.getAttribute("aria-invalid")].join("; ");
  });
  epochs.value = 3;
  const next = () => [".state", ".primary"].map((chosen) => [...page.querySelectorAll(chosen)].map((each) => each.textContent).join(", "));
  const steps = [page.querySelector("h1").textContent, page.getElementById("save").disabled, ...next()];
  const curve = page.getElementById("curve");
  const names = [curve.getAttribute("aria-label")];
  page.getElementById("train").click();
  let longest = 0;
  let last = performance.now();
  const frames = (now) => {
    longest = Math.max(longest, now - last);
    last = now;
    requestAnimationFrame(frames);
  };
  requestAnimationFrame(frames);
  await wait(() => page.body.dataset.trained || status.dataset.kind === "error");
  if (status.dataset.kind === "error") throw new Error(status.textContent);
  const longestFrame = longest;
  await wait(() => page.getElementById("steps").textContent === page.body.dataset.trained); // with the next frame
  names.push(curve.getAttribute("aria-label").replace(/from.*/, ""));
  const drawing = page.getElementById("drawing");
  const box = drawing.getBoundingClientRect();
  const point = (type, x, y) => drawing.dispatchEvent(new frame.contentWindow.PointerEvent(type, {
    pointerId: 1, clientX: box.left + x * box.width, clientY: box.top + y * box.height,
  }));
  drawing.setPointerCapture = () => {}; // there is no real pointer
  point("pointerdown", 0.5, 0.15);
  for (let turn = 1; turn <= 24; turn += 1) {
    const angle = (2 * Math.PI * turn) / 24;
    point("pointermove", 0.5 + 0.2 * Math.sin(angle), 0.5 - 0.35 * Math.cos(angle));
  }
  point("pointerup", 0.5, 0.15);
  await wait(() => page.getElementById("guess").textContent);
  point("pointerup", 0.5, 0.15); // while the first is being evaluated: calls are queued
  const rate = page.getElementById("rate");
  const set = (value) => {
    rate.value = value;
    rate.dispatchEvent(new frame.contentWindow.Event("change"));
    return status.textContent;
  };
  const before = rate.value;
  const refused = [set(""), set("-1")];
  set(before);
  const saved = new Promise((done) => {
    frame.contentWindow.HTMLAnchorElement.prototype.click = function click() {
      done(fetch(this.href).then((file) => file.arrayBuffer()));
    };
  });
  page.getElementById("save").click();
  await send("model.onnx", await saved);
  if (status.dataset.kind === "error") throw new Error(status.textContent);
  const text = (id) => page.getElementById(id).textContent;
  const found = {
    steps: Number(text("steps")), accuracy: Number.parseFloat(text("accuracy")) / 100,
    milliseconds: Number.parseFloat(text("time")), guess: text("guess"), status: text("status"),
    isolated: globalThis.crossOriginIsolated, refused, refusedEpochs, names, longestFrame,
    start: steps, next: next(), verdict: text("verdict"),
    table: [...page.querySelectorAll("tbody tr")].map((row) => [...row.querySelectorAll("td")].map((cell) => Number(cell.textContent))),
  };

  // By keyboard: a vertical stroke.
  page.getElementById("clear").click();
  const key = (name) => drawing.dispatchEvent(new frame.contentWindow.KeyboardEvent("keydown", { key: name }));
  [" ", ...new Array(8).fill("ArrowDown"), " "].forEach(key);
  await wait(() => text("guess"));
  found.keyboard = text("guess");
  found.marker = getComputedStyle(page.getElementById("pen")).display;
  found.pen = drawing.getAttribute("aria-label");

  // A learning rate that is too large, and back to the start.
  set("1e30");
  page.getElementById("train").click();
  await wait(() => status.dataset.kind === "error");
  found.diverged = status.textContent;
  await wait(() => !page.getElementById("reset").disabled);
  page.getElementById("reset").click();
  await wait(() => status.textContent.startsWith("Reset") && text("steps") === "0");
  found.reset = [text("steps"), rate.value, curve.getAttribute("aria-label")];
  await send("report", JSON.stringify(found));
} catch (error) {
  await send("report", JSON.stringify({ error: String(error.stack ?? error) }));
}
