"""Tries ortops on folders of language models that tools write, and writes a table of the results.

    python scripts/language_models.py [--only llama] [--optimum PYTHON] [--write]

needs the optional groups export and genai (`pip install ortops[export,genai]`). Optimum needs other
versions: install optimum-onnx in an environment of its own and give its interpreter. ``--write``
replaces the table in ortops/docs/llm.md; without it, the table is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

import ortops
from ortops.engine.check import check
from ortops.llm import FineTuning
from ortops.llm.folder import open_folder, sliding_windows
from scripts.language_model_files import KINDS, SIZES, Kind, write_checkpoint

__all__ = ["COLUMNS", "Trial", "main", "table"]

Array = npt.NDArray[Any]

PAGE = Path(__file__).parents[1] / "ortops" / "docs" / "llm.md"
BEGIN = "<!-- written by scripts/language_models.py -->"
END = "<!-- end -->"

PROMPT = [104, 105, 33]
ROWS = [[*PROMPT, 97, 98, 99, 256], [104, 111, 33, 100, 101, 102, 256]]
"""What is learned: both rows have 7 tokens."""

_STEP = 5e-3
"""What one activation of 8 bits changes, of the largest logit: products of quantized weights round
activations, and numbers that differ by 1e-7 can be rounded to neighbours."""

DONE, NOT_TRIED = "✓", "–"


class Trial:
    """One kind of folder, and what ortops does with it.

    Each method of `COLUMNS` returns `DONE`, `NOT_TRIED`, or what was refused or is wrong.

    Args:
        kind: The kind.
        folder: Its folder.
        loss: The loss of `ROWS` that transformers computes in float32.
    """

    def __init__(self, kind: Kind, folder: Path, loss: float) -> None:
        self.kind, self.opened, self.loss = kind, open_folder(folder), loss
        self.tuned = folder.parent / "tuned"
        self.is_half = "16" in kind.form or "f16" in kind.form
        self.tuning: FineTuning | None = None

    def check(self) -> str:
        """`ortops check` finds no problem."""
        found = check(self.opened.model, loss=ortops.losses.NextToken(self.opened.logits))
        return found.problems[0] if found.problems else DONE

    def full(self) -> str:
        """All weights are trained; the saved model has the loss of the session."""
        if not self.kind.is_float:
            return NOT_TRIED
        loss = ortops.losses.NextToken(self.opened.logits, ignore_index=-100)
        model = ortops.build_training_model(
            onnx.load(self.opened.model), loss=loss, optimizer=ortops.optimizers.Adam(2e-3)
        )
        session = ortops.TrainingSession(model)
        feeds = _feeds(session.inputs)
        losses = [float(session.step(feeds)["loss"]) for _ in range(25)]
        self._compare("first loss", losses[0], self.stock_loss(self.opened.model))
        if not losses[-1] < losses[0] / 2:
            return f"the loss does not fall: {losses[0]:.3f}, {losses[-1]:.3f}"
        path = self.tuned.parent / "full.onnx"
        onnx.save(session.inference_model(), path)
        self._compare("saved loss", session.evaluate([feeds])["loss"], self.stock_loss(path))
        return DONE

    def lora(self) -> str:
        """An adapter is trained, with the loss of stock onnxruntime at first."""
        tuning = FineTuning(self.opened.path, rank=8, alpha=16, learning_rate=5e-3)
        # Without quantization, the loss equals transformers'.
        stock = self.stock_loss(self.opened.model)
        if self.kind.is_float:
            self._compare("loss of onnxruntime", stock, self.loss)
        self._compare("first loss", tuning.evaluate(ROWS)["loss"], stock)
        history = tuning.fit(ROWS, epochs=40, progress=False)
        first, last = history[0]["loss"], history[-1]["loss"]
        if not last < first / 4:
            return f"the loss does not fall: {first:.3f}, {last:.3f}"
        tuning.save(self.tuned)
        self.tuning = tuning
        return DONE

    def served(self) -> str:
        """Stock onnxruntime computes the session's logits, and the old ones without adapter."""
        if self.tuning is None:
            return NOT_TRIED
        file = self.tuned / self.opened.model.relative_to(self.opened.path)
        adapter = self.tuned / "adapter.onnx_adapter"
        self._compare("logits", self.logits(file), self.logits(self.opened.model))
        feeds = _feeds(self.tuning.session.inputs)
        del feeds["labels"]
        expected = self.tuning.session.predict(feeds, outputs=self.opened.logits)
        self._compare("logits with adapter", self.logits(file, adapter), expected)
        return DONE

    def genai(self) -> str:
        """onnxruntime-genai continues the prompt as stock onnxruntime, with and without adapter."""
        if self.tuning is None or not (self.tuned / "genai_config.json").exists():
            return NOT_TRIED
        for adapter in ("", "adapter.onnx_adapter"):
            found = generated(self.tuned, PROMPT, adapter)
            expected = self.greedy(adapter)
            if found != expected[: len(found)] or not found:
                with_it = "with" if adapter else "without"
                return f"tokens {with_it} adapter: {found}, onnxruntime {expected}"
        return DONE

    def greedy(self, adapter: str, count: int = 4) -> list[int]:
        """Returns the most likely tokens after the prompt by stock onnxruntime, without a cache."""
        file = self.tuned / self.opened.model.relative_to(self.opened.path)
        tokens = list(PROMPT)
        for _ in range(count):
            path = self.tuned / adapter if adapter else None
            tokens.append(int(self.logits(file, path, [tokens])[0, -1].argmax()))
        return tokens[len(PROMPT) :]

    def stock_loss(self, file: Path) -> float:
        """Returns the loss of `ROWS`, in float64 from the logits of stock onnxruntime."""
        scores = self.logits(file).astype(np.float64)[:, :-1]
        scores -= scores.max(-1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        return float(-np.take_along_axis(scores, np.array(ROWS)[:, 1:, None], -1).mean())

    def logits(
        self, file: Path, adapter: Path | None = None, rows: Sequence[Sequence[int]] = ROWS
    ) -> Array:
        """Returns the logits of rows that stock onnxruntime computes."""
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        session = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
        options, loaded = onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
        if adapter:
            loaded.Load(str(adapter))
            options.add_active_adapter(loaded)
        feeds = _feeds([value.name for value in session.get_inputs()], rows)
        feeds.pop("labels", None)
        windows = sliding_windows(self.opened)
        for value in session.get_inputs():
            if value.name.startswith("past"):
                length = windows.get(value.name, 0)
                shape = (len(rows), SIZES["num_key_value_heads"], length, SIZES["head_dim"])
                half = value.type == "tensor(float16)"
                feeds[value.name] = np.zeros(shape, np.float16 if half else np.float32)
        return session.run([self.opened.logits], feeds, options)[0].astype(np.float32)

    def _compare(self, what: str, found: Any, expected: Any) -> None:
        tolerance = 1e-4 if self.kind.is_float else _STEP
        if self.is_half:
            tolerance = 3e-2
        error = float(np.abs(np.asarray(found, np.float64) - expected).max())
        if not error < tolerance * np.abs(expected).max():
            raise WrongError(f"{what} differs by {error:.2g}")


class WrongError(Exception):
    """A number differs from the expected one."""


COLUMNS: Mapping[str, Callable[[Trial], str]] = {
    "`ortops check`": Trial.check,
    "all weights": Trial.full,
    "LoRA": Trial.lora,
    "adapter in onnxruntime": Trial.served,
    "adapter in onnxruntime-genai": Trial.genai,
}


def generated(folder: Path, prompt: Sequence[int], adapter: str = "", count: int = 4) -> list[int]:
    """Returns the tokens with which onnxruntime-genai continues a prompt."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(folder))
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=SIZES["max_position_embeddings"], do_sample=False)
    generator = onnxruntime_genai.Generator(model, parameters)
    if adapter:
        adapters = onnxruntime_genai.Adapters(model)
        adapters.load(str(folder / adapter), "tuned")
        generator.set_active_adapter(adapters, "tuned")
    generator.append_tokens(np.array(prompt, np.int32))
    found = []
    while not generator.is_done() and len(found) < count:
        generator.generate_next_token()
        found.append(int(generator.get_next_tokens()[0]))
    return found


def _feeds(names: Any, rows: Sequence[Sequence[int]] = ROWS) -> dict[str, Array]:
    ids = np.array(rows, np.int64)
    known = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.tile(np.arange(ids.shape[1]), (len(rows), 1)),
        "labels": ids,
    }
    return {name: array for name, array in known.items() if name in names}


def try_kind(kind: Kind, checkpoints: Path, optimum: str) -> list[str]:
    """Returns the cells of a kind, one for each of `COLUMNS`."""
    with tempfile.TemporaryDirectory() as place:
        loss = _checkpoint(checkpoints / kind.architecture, kind.architecture)
        folder = Path(place, "folder")
        try:
            kind.write(checkpoints / kind.architecture, folder, optimum)
        except Exception as error:  # of any tool
            return [f"not written: {_short(error)}"] + [NOT_TRIED] * (len(COLUMNS) - 1)
        trial = Trial(kind, folder, loss)
        cells = []
        for attempt in COLUMNS.values():
            try:
                cells.append(attempt(trial))
            except Exception as error:  # the table says it
                cells.append(_short(error))
        return cells


_LOSSES: dict[Path, float] = {}


def _checkpoint(folder: Path, architecture: str) -> float:
    """Writes a checkpoint once; returns its loss."""
    if folder not in _LOSSES:
        import torch

        module = write_checkpoint(folder, architecture)
        ids = torch.tensor(ROWS)
        with torch.no_grad():
            scores = module(ids).logits[:, :-1].flatten(0, 1)
        _LOSSES[folder] = torch.nn.functional.cross_entropy(scores, ids[:, 1:].flatten()).item()
    return _LOSSES[folder]


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "\\|") or type(error).__name__
    return text if isinstance(error, ortops.OrtopsError | WrongError) else f"{text:.400}"


def table(cells: Mapping[Kind, Sequence[str]]) -> str:
    """Returns the Markdown table, with what was refused below it; equal rows are merged."""
    notes: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for kind, found in cells.items():
        short = [
            cell if cell in (DONE, NOT_TRIED) else f"no ({notes.setdefault(cell, len(notes) + 1)})"
            for cell in found
        ]
        rows.setdefault((kind.tool, kind.form, *short), []).append(kind.architecture)
    lines = [
        f"| written by | weights | architecture | {' | '.join(COLUMNS)} |",
        "| --- " * (3 + len(COLUMNS)) + "|",
    ]
    for (tool, form, *found), names in rows.items():
        lines.append(f"| {tool} | {form} | {', '.join(names)} | {' | '.join(found)} |")
    lines += [""] * bool(notes) + [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join(lines)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    logging.getLogger("ortops").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="kinds that contain this text")
    parser.add_argument(
        "--optimum", metavar="PYTHON", default="", help="an interpreter with Optimum"
    )
    parser.add_argument(
        "--write", action="store_true", help="replace the table in the documentation"
    )
    options = parser.parse_args(arguments)
    cells = {}
    with tempfile.TemporaryDirectory() as place, _quietly():
        for kind in KINDS:
            name = f"{kind.tool}, {kind.form}, {kind.architecture}"
            if options.only.lower() not in name.lower() or (kind.optimum and not options.optimum):
                continue
            cells[kind] = try_kind(kind, Path(place), options.optimum)
            print(f"{name}: {' | '.join(cells[kind])}", flush=True)
    found = table(cells)
    print(found)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
