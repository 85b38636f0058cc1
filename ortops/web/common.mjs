// What the pages have in common: messages, steps, fields, the Worker, the curve and the buttons that train.
import { runtimeOf } from "./runtime.mjs";

export const query = new URLSearchParams(location.search);
export const find = (id) => document.getElementById(id);
export const percent = (share) => `${(100 * share).toFixed(1)} %`;

/** Makes an element with children. */
export function element(tag, properties, ...children) {
  const result = Object.assign(document.createElement(tag), properties);
  result.append(...children);
  return result;
}

/** What computes, in plain words. */
export const PROVIDERS = { webgpu: "the graphics card (WebGPU)", wasm: "the CPU (WebAssembly)" };

let messages = 0;

/** Says something: "info", "busy", "success" or "error"; `notice` is what else is to be known. Code is in backquotes. */
export function say(text, kind = "info", notice = "") {
  messages += 1;
  find("status").replaceChildren(...text.split("`").map((part, at) => (at % 2 ? element("code", { textContent: part }) : part)));
  find("status").dataset.kind = kind;
  find("notice").textContent = notice;
}

/** Makes a handler of events that says why it failed, and takes an earlier error away where it did not. */
export const shown = (task) => async (...values) => {
  const before = messages;
  try {
    await task(...values);
    if (messages === before && find("status").dataset.kind === "error") say("");
  } catch (error) {
    const [cause] = error.message.split(/[;.] /); // the rest is for programs
    say(error.name === "DivergedError" ? `${cause}. Reset returns to the start.` : error.message, "error");
  }
};

/**
 * Shows the state of each step, and which button comes next: a step is "done", "open", "running" or "failed", or it is
 * "waiting" for the first that is not done.
 */
export function showSteps(states, primary) {
  const open = Object.values(states).findIndex((state) => !["done", "waiting"].includes(state)) + 1;
  const waiting = open ? `Waits for step ${open}` : "Waits";
  const words = { done: "Done", open: "Now", running: "Running", failed: "Failed", waiting };
  for (const [id, state] of Object.entries(states)) {
    const title = find(id).querySelector("h2");
    if (!title.querySelector(".state")) {
      title.append(element("span", { className: "state" }));
    }
    find(id).dataset.state = state;
    title.querySelector(".state").textContent = words[state];
  }
  for (const element of document.querySelectorAll(".primary")) element.classList.remove("primary");
  if (primary) find(primary).classList.add("primary");
}

/** Takes the text away that is there for a page whose scripts do not run. */
export const started = () => find("fallback")?.remove();

/** Returns the number in a field, or says what is wrong and returns null. */
export function numberIn(id, name, condition, fits) {
  const field = find(id);
  const given = field.validity.badInput ? "something else" : field.value;
  const value = field.valueAsNumber;
  const isRight = Number.isFinite(value) && fits(value);
  field.setAttribute("aria-invalid", String(!isRight));
  if (isRight) return value;
  say(`${name} must be ${condition}, ${given === "" ? "but the field is empty" : `got ${given}`}`, "error");
  return null;
}

export const countIn = (id, name) =>
  numberIn(id, name, "an integer >= 1", (value) => Number.isInteger(value) && value >= 1);

/** Returns the provider in the page's address, or the suggested one. The address cannot choose code. */
export function providerOf(suggested) {
  const provider = query.get("provider") ?? suggested;
  const module = runtimeOf(provider);
  const link = document.createElement("a"); // resolves an address, and never throws
  for (const asked of query.getAll("ort")) {
    link.href = asked;
    if (link.href !== module) {
      throw new Error(`the address of this page cannot choose onnxruntime-web, got ort=${asked}; export with --runtime PLACE`);
    }
  }
  return provider;
}

/** Starts worker.mjs, and returns what calls it; `onProgress` receives what it reports in between. */
export function startWorker(onProgress) {
  const worker = new Worker(new URL("worker.mjs", import.meta.url), { type: "module" });
  const open = new Map(); // calls without an answer
  let calls = 0;
  let missing = null; // the error of a worker that never ran
  worker.onmessage = ({ data }) => {
    if (data.losses) {
      onProgress(data);
      return;
    }
    const { resolve, reject } = open.get(data.id);
    open.delete(data.id);
    if (data.error) reject(Object.assign(new Error(data.error.message), data.error));
    else resolve(data.result);
  };
  worker.onerror = (event) => {
    event.preventDefault();
    const error = new Error(event.message
      ? `the worker failed: ${event.message}`
      : "worker.mjs, or a file that it needs, cannot be loaded: put all files of the export next to this page");
    if (!event.message) missing = error;
    open.forEach(({ reject }) => reject(error));
    open.clear();
    if (find("status").dataset.kind !== "error") say(error.message, "error"); // what is said already was first
  };
  return (name, values) => new Promise((resolve, reject) => {
    if (missing) reject(missing);
    calls += 1;
    open.set(calls, { resolve, reject });
    worker.postMessage({ id: calls, call: name, values });
  });
}

export function download(bytes, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([bytes]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // some browsers read the URL later
}

const short = (value) =>
  value !== 0 && (Math.abs(value) >= 1e4 || Math.abs(value) < 1e-2) ? value.toExponential(1) : value.toFixed(2);

function plot(canvas, losses) {
  const scale = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  [canvas.width, canvas.height] = [width * scale, height * scale];
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.body);
  context.scale(scale, scale);
  context.font = "13px system-ui, sans-serif";
  context.fillStyle = context.strokeStyle = style.color;
  canvas.setAttribute("aria-label", losses.length
    ? `Loss per step: ${losses.length} steps, from ${short(losses[0])} to ${short(losses.at(-1))}`
    : "Loss per step: no steps yet");
  if (losses.length === 0) {
    context.textAlign = "center";
    context.fillText("The loss of each step appears here.", width / 2, height / 2);
    return;
  }
  const most = losses.reduce((a, b) => Math.max(a, b), 0.1);
  const ticks = [0, 0.5, 1].map((share) => ({ share, text: short(most * share) }));
  const [top, right, bottom] = [12, 12, 26];
  const left = 14 + Math.max(...ticks.map(({ text }) => context.measureText(text).width));
  const [inner, tall] = [width - left - right, height - top - bottom];
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const { share, text } of ticks) {
    const y = top + tall * (1 - share);
    context.globalAlpha = 0.25;
    context.strokeRect(left, y, inner, 0);
    context.globalAlpha = 1;
    context.fillText(text, left - 6, y);
  }
  context.fillText(`step ${losses.length}`, left + inner, height - bottom / 2);
  context.textAlign = "left";
  context.fillText("loss by step", left, height - bottom / 2);
  context.fillStyle = context.strokeStyle = matchMedia("(prefers-color-scheme: dark)").matches ? "#6db3f2" : "#1766b3";
  context.lineWidth = 2;
  context.beginPath();
  const stride = Math.max(1, Math.floor(losses.length / Math.max(inner, 1))); // a point per pixel
  for (let step = 0; step < losses.length; step += stride) {
    const x = left + (inner * step) / Math.max(losses.length - 1, 1);
    context.lineTo(x, top + tall * (1 - losses[step] / most));
  }
  context.stroke();
  if (losses.length === 1) context.fillRect(left - 2, top + tall * (1 - losses[0] / most) - 2, 4, 4);
}

/** Shows the probability of each class, or of the five largest if there are many; returns the largest. */
export function showScores(list, scores, names) {
  const sum = scores.reduce((a, b) => a + b, 0);
  const areShares = scores.every((score) => score >= 0) && Math.abs(sum - 1) < 1e-3; // after a Softmax
  const most = Math.max(...scores);
  const powers = areShares ? scores : scores.map((score) => Math.exp(score - most));
  const total = powers.reduce((a, b) => a + b, 0);
  const rows = powers.map((power, index) => ({ share: power / total, name: names[index] ?? index }));
  const best = rows[scores.indexOf(most)];
  const visible = rows.length > 12 ? [...rows].sort((a, b) => b.share - a.share).slice(0, 5) : rows;
  list.replaceChildren(...visible.map(({ share, name }) => {
    const bar = element("i", {});
    bar.style.width = `${100 * share}%`;
    return element("div", { role: "listitem" }, element("span", { textContent: name }),
      element("span", { ariaHidden: "true" }, bar), element("span", { textContent: percent(share) }));
  }));
  return best;
}

/**
 * Lets the buttons of a page train, stop, reset and download.
 *
 * `page` has `about()`, a sentence about data and provider; `prepare()`, which returns the values for the
 * worker's `train`, or null after it has said what is wrong; `judge()`, which finds out how good the model
 * is, and returns the accuracy as a text; `changed()`, which is called whenever the weights have changed; and
 * `update()`, which is called whenever something else has.
 */
export function prepareTraining(page) {
  let losses = [];
  let times = [];
  let running = false;
  let drawn = false;
  let epoch = 0;
  let isOpen = false;
  let isSaved = true; // nothing is lost with this tab
  const draw = () => {
    if (drawn) return; // at most once a frame
    drawn = true;
    requestAnimationFrame(() => {
      drawn = false;
      find("steps").textContent = losses.length;
      find("loss").textContent = losses.length ? losses.at(-1).toFixed(4) : "–";
      const sorted = [...times].sort((a, b) => a - b);
      find("time").textContent = sorted.length ? `${sorted[Math.floor(sorted.length / 2)].toFixed(1)} ms` : "–";
      plot(find("curve"), losses);
    });
  };
  const setSaved = (saved) => {
    isSaved = saved;
    globalThis.onbeforeunload = saved ? null : (event) => event.preventDefault(); // the browser asks
  };
  const call = startWorker(({ losses: next, milliseconds }) => {
    losses.push(...next);
    if (next.length) setSaved(false);
    times = [...times, ...milliseconds].slice(-500);
    draw();
  });
  const rateIn = () => numberIn("rate", "learning rate", "a finite number >= 0", (value) => value >= 0);
  const showRate = (value) => {
    find("rate").disabled = value === null;
    find("rate").value = value === null ? "" : Number(value.toPrecision(6));
  };
  const refresh = async () => {
    find("accuracy").textContent = await page.judge();
  };
  const update = () => {
    find("train").textContent = running ? "Stop" : losses.length ? "Train more" : "Train";
    find("train").disabled = !isOpen;
    find("reset").disabled = !isOpen || running;
    for (const id of ["save", "save-state"]) {
      if (find(id)) find(id).disabled = !isOpen || running || losses.length === 0;
    }
    page.update();
  };
  const setBusy = (isBusy) => {
    running = isBusy;
    update();
  };
  /** Sets the rate that the field says, or says why not; returns whether it is set. */
  const setRate = async () => {
    const value = rateIn();
    if (value === null) return false;
    try {
      const used = await call("setRate", value);
      if (Math.abs(used - value) > 1e-6 * value) showRate(used); // as of one that is too small for float32
    } catch (error) {
      find("rate").setAttribute("aria-invalid", "true");
      error.message = error.message.replace("learningRate", "learning rate");
      throw error;
    }
    return true;
  };
  find("rate").onchange = shown(async () => {
    if ((await setRate()) && !running) say(page.about());
  });
  find("epochs").onchange = shown(() => { countIn("epochs", "epochs"); });
  find("train").onclick = shown(async () => {
    if (running) {
      await call("stop");
      return;
    }
    const epochs = countIn("epochs", "epochs");
    if (epochs === null || (!find("rate").disabled && rateIn() === null)) return;
    setBusy(true);
    say("Training …", "busy");
    try {
      if (!find("rate").disabled) await setRate();
      const values = await page.prepare();
      if (values === null) return;
      for (epoch = 1; epoch <= epochs && running; epoch += 1) {
        say(`Training: epoch ${epoch} of ${epochs} …`, "busy");
        try {
          running = await call("train", values);
        } finally {
          await refresh(); // steps before one that fails have been made
        }
      }
      const accuracy = find("accuracy").textContent;
      const known = accuracy === "–" ? "" : `; ${find("accuracy-of").textContent} ${accuracy}`;
      say(`Trained ${losses.length} steps${known}. ${page.about()}`, "success");
    } finally {
      setBusy(false);
    }
    await page.changed();
    document.body.dataset.trained = losses.length;
  });
  find("reset").onclick = shown(async () => {
    await call("reset");
    [losses, times] = [[], []];
    setSaved(true);
    update();
    showRate(await call("rate"));
    draw();
    await refresh();
    await page.changed();
    say(`Reset to the start. ${page.about()}`);
  });
  const saves = (id, name, file) => {
    if (!find(id)) return;
    find(id).onclick = shown(async () => {
      download(await call(name), file);
      setSaved(true);
      say(`${file} goes to your downloads.`, "success");
    });
  };
  saves("save", "save", "trained.onnx");
  saves("save-state", "saveState", "state.safetensors");
  new ResizeObserver(draw).observe(find("curve"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return {
    call,
    refresh,
    update,
    get running() {
      return running;
    },
    get isOpen() {
      return isOpen;
    },
    get steps() {
      return losses.length;
    },
    /** Whether nothing is lost with this training, or the user agrees to lose it. */
    mayEnd: () => isSaved || confirm("The trained model was not downloaded. Go on without it?"),
    /** Enables the buttons for a session that is open. */
    open(rate, { isNew = true } = {}) {
      if (isNew) {
        [losses, times] = [[], []];
        setSaved(true);
      }
      showRate(rate);
      draw();
      isOpen = true;
      update();
    },
    /** Disables them. */
    close() {
      isOpen = false;
      update();
    },
  };
}
