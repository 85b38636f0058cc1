// Starts the worker beside it, and reports to the server what it answers.
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const report = (found) => fetch("/report", { method: "POST", body: JSON.stringify(found) });
worker.onmessage = ({ data }) => report(data);
worker.onerror = ({ message }) => report({ error: `worker: ${message}` });
worker.postMessage(new URL("/", location.href).href);
