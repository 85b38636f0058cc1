"""A headless Chromium that runs a page, and a server of files that hears from it."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
SWIFTSHADER = (
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--enable-features=Vulkan",
)


WEB = Path(__file__).parents[1] / ".web"
"""Where scripts/web_environment puts the packages of npm."""

MODULES = Path(__file__).parent / "web"
"""What drives the page, and sessions in Node."""


def page_of(folder: Path, script: str = "page.mjs") -> Path:
    """Puts onnxruntime-web, and what drives a page, beside it, as ``test.html``."""
    shutil.copy(MODULES / script, folder / "test.mjs")
    (folder / "test.html").write_text(
        "<!doctype html><body><script type=module src=test.mjs></script>"
    )
    if not (folder / "ort").exists():
        (folder / "ort").symlink_to(WEB / "node_modules" / "onnxruntime-web" / "dist")
    return folder


class _Handler(SimpleHTTPRequestHandler):
    """Serves files, isolated as threads of WebAssembly need it, and keeps what is posted."""

    extensions_map = {  # noqa: RUF012 - as the base class has it
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def __init__(self, *arguments: Any, posted: dict[str, bytes], done: Any, **more: Any) -> None:
        self.posted, self.done = posted, done
        super().__init__(*arguments, **more)

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.posted[self.path.rsplit("/", 1)[-1]] = content
        self.send_response(204)
        self.end_headers()
        if self.path.endswith("/report"):
            self.done.set()

    def log_message(self, *values: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # a browser opens more connections at once than 5


def run_page(
    folder: Path, page: str, *options: str, seconds: float = 240
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Opens a page of a folder, and waits for what it posts to ``report``.

    Args:
        folder: What is served.
        page: Its address in there.
        options: Further options of Chromium.
        seconds: How long at most.

    Returns:
        The report, and everything that was posted by name.
    """
    assert CHROMIUM is not None
    posted: dict[str, bytes] = {}
    done = threading.Event()
    handler = partial(_Handler, directory=folder, posted=posted, done=done)
    with _Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = subprocess.Popen(
                [
                    *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-dev-shm-usage"),
                    *(f"--user-data-dir={profile}", "--window-size=1040,800", *options),
                    f"http://127.0.0.1:{server.server_port}/{page}",
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                finished = done.wait(seconds)
            finally:
                browser.terminate()
                browser.wait()
                server.shutdown()
    if not finished:
        raise TimeoutError(f"{page}: nothing was reported within {seconds} s")
    report = json.loads(posted["report"])
    if "error" in report:
        raise RuntimeError(report["error"])
    return report, posted
