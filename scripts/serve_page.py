"""Builds and serves the page that trains digits in a browser tab."""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
from pathlib import Path

import ortops
from models import digits
from models.lenet import lenet
from ortops.graph.safetensors import write_safetensors

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / ".web/node_modules/onnxruntime-web/dist"


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files with the headers that let WebAssembly use several threads."""

    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        """Adds the headers for cross-origin isolation."""
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()


def assemble(folder: Path) -> None:
    """Writes the page, the training step, the digits and onnxruntime-web into a folder."""
    model = ortops.build_training_model(lenet(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    ortops.export_step(model, folder, web=True, overwrite=True)  # it has no other use
    for name, samples in digits.load()._asdict().items():
        write_safetensors(folder / f"{name}.safetensors", samples._asdict())
    shutil.copytree(RUNTIME, folder / "ort", dirs_exist_ok=True)


def main() -> None:
    """Serves the page until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder to write the page to")
    parser.add_argument("port", type=int, nargs="?", default=8000)
    options = parser.parse_args()
    if not RUNTIME.is_dir():
        sys.exit("onnxruntime-web is missing: ./scripts/web_environment installs it, with npm")
    assemble(options.folder)
    handler = functools.partial(Handler, directory=str(options.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", options.port), handler) as server:
        print(f"train digits at http://127.0.0.1:{server.server_port}/ (press Ctrl-C to stop)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
