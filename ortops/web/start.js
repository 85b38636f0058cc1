// Says in plain words why a page does not start. It is a classic script, because browsers load no modules from file://.
(() => {
  const fail = (text) => {
    const status = document.getElementById("status");
    status.textContent = text;
    status.dataset.kind = "error";
    document.getElementById("fallback").dataset.now = "";
    document.querySelector("main").hidden = true; // nothing in there works
    document.body.dataset.ready = "1";
  };
  if (location.protocol === "file:") {
    fail("This page was opened as a file, and browsers do not run its scripts then. Open it from a web server.");
  }
  const isStarted = () => document.getElementById("fallback") === null; // common.mjs removes it
  addEventListener("error", (event) => {
    if (isStarted() || location.protocol === "file:") return;
    if (!(event.target instanceof HTMLScriptElement)) {
      if (event.message) fail(`This page could not start: ${event.message}. Use a current version of your browser.`);
      return;
    }
    const missing = performance.getEntriesByType("resource").filter(({ responseStatus }) => responseStatus >= 400);
    const names = missing.map(({ name }) => name.split("/").at(-1)).join(", ");
    fail(names
      ? `This page could not start, because the server does not have ${names}. Put the file next to the page, or export again with --web.`
      : "This page could not start: a script next to it is missing, or the server does not send .mjs files as JavaScript.");
  }, true);
})();
