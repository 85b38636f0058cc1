// Opens the pages with addresses that name code, and reports to the server what they say and what ran.
//
// `?other=PORT` is a second server, whose code is named too, and `?runtime` its place of onnxruntime-web.
const other = `127.0.0.1:${new URLSearchParams(location.search).get("other")}`;
const code = 'new BroadcastChannel("attack").postMessage(import.meta.url); export default 1;';
const ran = [];
new BroadcastChannel("attack").onmessage = ({ data }) => ran.push(data);
const blob = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
const inline = `data:text/javascript,${encodeURIComponent(code)}`;
const query = (value) => `?ort=${encodeURIComponent(value)}`;
const places = [
  inline, ` ${inline}`, inline.replace("data", "DATA"), inline.replace("data", "da\tta"), blob,
  `javascript:${code}`, `//${other}/evil.mjs`, `http://${other}/evil.mjs`, `http:\\\\${other}\\evil.mjs`,
  `/\\${other}/evil.mjs`, `http://user:secret@${location.host}/evil.mjs`, `http:evil.mjs`, "/evil.mjs", "evil.mjs",
  "./ort/../evil.mjs", "ort/%2e%2e/evil.mjs", `http://${location.host}@${other}/evil.mjs`, "http://[", "",
  "filesystem:http://127.0.0.1/evil.mjs", "<img src=x onerror=alert(1)>",
];
const addresses = [
  ...places.map(query), `${query("./ort/ort.wasm.min.mjs")}&${query(inline).slice(1)}`,
  `?provider=${encodeURIComponent(`/../../evil.mjs?`)}`, "?provider=constructor",
];
const harmless = ["", `#ort=${inline}`, `?runtime=${inline}#${inline}`, query("./ort/ort.wasm.min.mjs")];

/** Opens a page, and returns what it says when it is ready, and its frame. */
async function open(page) {
  const frame = document.createElement("iframe");
  frame.src = page;
  document.body.append(frame);
  while (!frame.contentDocument?.body?.dataset.ready) await new Promise((done) => setTimeout(done, 20));
  return { said: frame.contentDocument.getElementById("status").textContent, frame };
}

/** What a page that was taken over can still do. */
async function escapes({ contentWindow: page, contentDocument: content }) {
  const done = [];
  try {
    done.push(page.eval("'eval'"));
  } catch {
    // as it should be
  }
  for (const source of [inline, blob, `http://${other}/evil.mjs`]) {
    const script = Object.assign(content.createElement("script"), { type: "module", src: source });
    const failed = new Promise((found) => { script.onerror = script.onload = ({ type }) => found(type); });
    content.body.append(script);
    if ((await failed) === "load") done.push(`script ${source}`);
  }
  const script = content.createElement("script");
  script.textContent = "document.body.dataset.inline = 1";
  content.body.append(script);
  if (content.body.dataset.inline) done.push("inline script");
  for (const source of [`http://${other}/evil.mjs`, inline]) {
    await page.fetch(source, { mode: "no-cors" }).then(() => done.push(`fetch ${source}`), () => {});
  }
  for (const source of [inline, blob]) {
    await new Promise((found) => {
      const worker = new page.Worker(source, { type: "module" });
      setTimeout(found, 50);
      worker.onerror = found;
    });
  }
  return done;
}

/** What the worker makes of messages that name code. */
async function asked(values) {
  const worker = new Worker("worker.mjs", { type: "module" });
  const answer = new Promise((done) => { worker.onmessage = ({ data }) => done(data.error?.message ?? "opened"); });
  worker.postMessage({ id: 1, call: "open", values });
  const said = await answer;
  worker.terminate();
  return said;
}

try {
  const report = { refused: {}, opened: {}, escapes: {}, ran };
  for (const page of ["index.html", "classifier.html"]) {
    for (const address of addresses) {
      const { said, frame } = await open(page + address);
      report.refused[`${page}${address}`] = said;
      frame.remove();
    }
    for (const address of harmless) {
      const { said, frame } = await open(page + address);
      report.opened[`${page}${address}`] = said;
      if (address === "") report.escapes[page] = await escapes(frame);
      frame.remove();
    }
  }
  report.messages = [
    await asked({ provider: "wasm", runtime: inline }), await asked({ provider: "wasm", runtime: `http://${other}/evil.mjs` }),
    await asked({ provider: "../../evil.mjs?", runtime: inline }), await asked({ provider: ["wasm"] }),
  ];
  await new Promise((done) => setTimeout(done, 100)); // for messages on their way
  await fetch("report", { method: "POST", body: JSON.stringify(report) });
} catch (error) {
  await fetch("report", { method: "POST", body: JSON.stringify({ error: String(error.stack ?? error) }) });
}
