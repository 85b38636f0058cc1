"""The main program of a child process with limits, which `child_process` starts.

It imports nothing of the package, so that it starts fast, and answers requests one after another.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

READY = b"ready\n"
"""What the process says when it has started."""


def _limit_memory(size: int) -> None:
    """Limits how much the process grows, in bytes."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        size += pages * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (size if hard < 0 else min(size, hard), hard))
    except (ImportError, OSError, ValueError):  # the system has no such limit
        pass


def _serve(program: str) -> None:
    """Answers requests with the function ``answer`` of a program, until there are no more."""
    spec: Any = importlib.util.spec_from_file_location("program", program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # where what a library prints disturbs nothing
    sink.write(READY)
    sink.flush()
    with Path(os.devnull).open("w") as nowhere:
        while line := source.readline():
            request, size, seconds, memory = json.loads(line)
            _limit_memory(size + memory)
            body = source.read(size)
            # A thread that needs nothing of Python ends the process, with status 1.
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            try:
                found, buffers = module.answer(request, body)
                line = json.dumps(["", found, [len(each) for each in buffers]]).encode()
            except BaseException as error:  # of onnxruntime, Rust, …
                problem = str(error).strip() or type(error).__name__
                line, buffers = json.dumps([problem, None, []]).encode(), []
            faulthandler.cancel_dump_traceback_later()
            sink.write(line + b"\n")
            sink.writelines(buffers)
            sink.flush()


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    _serve(sys.argv[2])
