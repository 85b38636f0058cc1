"""Reports what tuning the language model of a folder would do, and what prevents it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ortops.engine.building.parameters import quantized, why_not
from ortops.engine.check import check, quiet
from ortops.engine.execution import tables
from ortops.engine.summary import text_of
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.session import TrainingSession
from ortops.errors import OrtopsError, UnsupportedError
from ortops.graph.adapters import adapter_of
from ortops.graph.convert import load_light, to_ir
from ortops.graph.files.external import LightModel
from ortops.graph.files.serialization import to_proto
from ortops.graph.passes.rematerialization import SAID
from ortops.llm.encoders import encoder_of, first_of, has_classes, tasks_of
from ortops.llm.estimates import Forecast, attention_of, forecast
from ortops.llm.examples import IGNORED
from ortops.llm.folder import GENAI_CONFIG, Folder, open_folder, refuse_norms
from ortops.llm.generation import Sampling
from ortops.llm.graphs import (
    is_pruned,
    may_see_later_tokens,
    refuse_experts,
    refuse_others,
    without_pruning,
)
from ortops.llm.tuning import FineTuning, peak_memory, words_of
from ortops.lora.addition import adapted, read_base
from ortops.lora.targets import Target, chosen
from ortops.losses import NextToken

_RANK = 8

_BATCH = 4, 512
"""The numbers of rows and tokens of `ortops.llm.FineTuning.fit`."""

_STEPS = 3
"""The steps that are measured."""

_ROUNDS, _GENERATED = 5, 32
"""How often each form of a tuned model generates, and how many tokens."""


@dataclass(frozen=True)
class Measurement:
    """What a few steps needed.

    Attributes:
        rows: The number of rows per step.
        tokens: The number of tokens per row.
        steps: The number of measured steps, after a first one, which takes longer.
        seconds: The mean time per step.
        tokens_per_second: The number of tokens of all rows per second.
        peak_memory: The largest memory of the process until then in bytes; None on Windows.
    """

    rows: int
    tokens: int
    steps: int
    seconds: float
    tokens_per_second: float
    peak_memory: int | None

    def __str__(self) -> str:
        memory = self.peak_memory
        peak = "" if memory is None else f", peak memory of the process {memory / 1e6:,.0f} MB"
        return (
            f"measured, {self.steps} steps of rank 8 with {self.rows} × {self.tokens} tokens: "
            f"{self.tokens_per_second:,.0f} tokens per second, {self.seconds:.2g} s per step{peak}"
        )


@dataclass(frozen=True)
class Serving:
    """How fast the two forms of a tuned model generate.

    Attributes:
        prompt: The number of tokens of the prompt.
        tokens: The number of tokens that were generated behind it, one at a time.
        merged: The median number of tokens per second of the model that is merged.
        adapter: That of the model with its adapter beside it.
        ratio: How many times as fast the merged model is, the median over the rounds.
        rounds_again: Whether merging quantizes weights again.
    """

    prompt: int
    tokens: int
    merged: float
    adapter: float
    ratio: float
    rounds_again: bool

    def __str__(self) -> str:
        if self.ratio > 1.05:  # smaller differences are not worth it
            advice = "serve the merged model: save(folder, merged=True), or ortops tune --merge"
            if self.rounds_again:
                advice += "; merging rounds the quantized weights again"
        else:
            advice = (
                "serve the model with its adapter: it is as fast, and adapters can be exchanged"
            )
        return (
            f"measured, {self.tokens} tokens behind a prompt of {self.prompt}, medians of "
            f"{_ROUNDS} rounds: merged {self.merged:,.1f} tokens per second, with the adapter "
            f"{self.adapter:,.1f} (ratio {self.ratio:.2f})\n{advice}"
        )


@dataclass(frozen=True)
class Report:
    """What `ortops.llm.FineTuning` does with a folder.

    Attributes:
        folder: The folder.
        model: The file of the model, relative to it.
        caches: The inputs with keys and values of earlier tokens; they are empty in training.
        inputs: The other inputs.
        loss: The loss; empty for a text encoder.
        layers: The number of layers that get an adapter by default, by the end of their names.
        adapter_size: The number of values of an adapter of rank 8 on these layers.
        weights: The number of floating-point values in weights, adapters apart.
        quantized: The number of quantized weights.
        tasks: The tasks for which a text encoder can be trained; none for a language model.
        recompute: What a step computes again by default.
        said: Remarks.
        estimated: What a step needs, counted; of forms of attention that were measured.
        measured: What a few steps needed, on request.
        served: How fast a tuned model generates, on request.
        problems: Why the model cannot be tuned.
    """

    folder: str
    model: str
    caches: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    loss: str = ""
    layers: dict[str, int] = field(default_factory=dict)
    adapter_size: int = 0
    weights: int = 0
    quantized: int = 0
    tasks: list[str] = field(default_factory=list)
    recompute: str = "elementwise"
    said: list[str] = field(default_factory=list)
    estimated: Forecast | None = None
    measured: Measurement | None = None
    served: Serving | None = None
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a JSON-serializable dictionary."""
        return asdict(self)

    def __str__(self) -> str:
        floats = f"weights: {self.weights:,} floating-point values"
        weights = f"{floats}, {self.quantized} quantized matrices"
        again = f"{SAID}; --recompute none keeps them"
        problems = [f"problems: {len(self.problems)}", *(f"  {each}" for each in self.problems)]
        if not self.loss:
            ready = f"no problems: ready for ortops tune --task {' or '.join(self.tasks)}"
            inputs = f"inputs: {', '.join(self.inputs)}"
            end = [ready] if self.tasks else problems
            return text_of([f"text encoder {self.model}", inputs, weights, again, *self.said, *end])
        shown = f"{self.caches[0]} … {self.caches[-1]}" if self.caches else "none"
        layers = ", ".join(f"{name} × {count}" for name, count in self.layers.items())
        lines = [
            f"language model {self.model}",
            f"inputs: {', '.join(self.inputs)}",
            f"caches, empty in training: {len(self.caches)} ({shown})",
            f"loss: {self.loss}",
            f"layers that get an adapter: {layers or 'none'}",
            f"adapter of rank {_RANK}: {self.adapter_size:,} values",
            weights,
            again,
            *self.said,
        ]
        needs = [each for each in (self.estimated, self.measured, self.served) if each is not None]
        lines += [line for each in needs for line in str(each).splitlines()]
        if self.problems:
            lines += problems
        elif self.served is None:
            lines.append("no problems: ready for ortops tune")
        return text_of(lines)


def is_language_model(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has the settings or the tokenizer of a language model."""
    return any((Path(folder) / name).is_file() for name in (GENAI_CONFIG, "tokenizer.json"))


def check_folder(path: str | os.PathLike[str], measured: tuple[int, int] | None = None) -> Report:
    """Reports what tuning would do with a folder.

    Args:
        path: The folder.
        measured: The numbers of rows and of tokens per row with which a few steps are measured. By
            default, nothing is trained. For a folder that `ortops.llm.FineTuning.save` wrote with
            an adapter, the two forms that can be served are measured instead, with one row and a
            prompt of so many tokens.

    Raises:
        ArgumentError: If there is no such folder.
        ModelError: If the folder has no model, or its files are not valid.

    Example:
        >>> from ortops.llm.checking import check_folder
        >>> report = check_folder("model")  # doctest: +SKIP
        >>> report.layers, report.adapter_size, report.problems  # doctest: +SKIP
        ({'qkv_proj': 2, 'o_proj': 2, 'gate_proj': 2, 'up_proj': 2, 'down_proj': 2}, 7168, [])
    """
    folder = open_folder(path)
    light = load_light(folder.model)
    work = to_ir(light)
    left = tables.left_in_file(light)
    report = _described(folder, light, work, left)
    if measured is not None and adapter_of(light.proto.metadata_props) is not None:
        try:
            with quiet():
                return replace(report, served=_compare(folder, measured[1]))
        except OrtopsError as error:
            report.problems.append(str(error))
            return report
    if report.tasks:
        return _of_encoder(folder, light, report)
    try:
        refuse_others(light.proto, folder)
        found = chosen(work, "all-linear")
        report.layers.update(Counter(target.module.rpartition(".")[2] for target in found))
        with quiet():
            whole = read_base(without_pruning(light))
            model = to_proto(adapted(whole, _RANK, 2 * _RANK, "all-linear"))
            loss = NextToken(folder.logits, ignore_index=IGNORED)
            refuse_experts(model)
            report.problems.extend(check(model, loss=loss).problems)
            if not report.problems and not folder.parts and may_see_later_tokens(light.proto):
                FineTuning(folder.model, rank=1)  # which computes whether it does
    except OrtopsError as error:
        report.problems.append(str(error))
        return report
    try:
        refuse_norms(light.proto)
    except UnsupportedError as error:
        report.said.append(str(error))
    result = replace(report, adapter_size=_RANK * sum(sum(target.sizes) for target in found))
    if measured is None and not result.problems:
        result = _estimated(result, folder, work, words_of(light, folder), found, left)
    if measured is None or result.problems:
        return result
    try:
        with quiet():
            return replace(result, measured=_measure(folder, *measured))
    except UnsupportedError as error:
        result.said.append(str(error))
        return result


def _described(
    folder: Folder, light: LightModel, work: ir.Model, left: Mapping[str, int]
) -> Report:
    """Returns what a report says of the file, without training."""
    graph = work.graph
    names = [value.name or "" for value in graph.inputs if not value.is_initializer()]
    caches = [name for name in names if name.startswith("past")]
    floats = [v for v in graph.initializers.values() if v.dtype and v.dtype.is_floating_point()]
    fixed = quantized(graph.initializers.values())
    tasks = [] if folder.parts else tasks_of(folder, light)
    report = Report(
        str(folder.path),
        folder.model.relative_to(folder.path).as_posix(),
        caches,
        [name for name in names if name not in caches],
        "" if tasks else f"NextToken of output '{folder.logits}'",
        weights=sum(_count(value) for value in floats),
        quantized=len(fixed),
        tasks=tasks,
    )
    matrices = [v for v in floats if v.shape and len(v.shape) > 1 and not why_not(v)]
    if fixed and not matrices:
        report.said.append(
            "without an adapter, only normalizations would be trained: all matrices are quantized"
        )
    report.said.extend(tables.said(left))
    if is_pruned(light):
        report.said.append("the file computes the logits of the last token only; tuning, of all")
    return report


def _estimated(
    report: Report,
    folder: Folder,
    work: ir.Model,
    words: int | None,
    found: Sequence[Target],
    left: Mapping[str, int],
) -> Report:
    """Returns a report with what a step needs, or why it is not estimated."""
    heads = (folder.genai.get("decoder") or folder.config).get("num_attention_heads")
    attention = attention_of(work.graph, heads if isinstance(heads, int) else None)
    context = folder.context_length or 2**31
    if folder.parts or not words:
        attention = "the model has an encoder" if folder.parts else "its vocabulary is not known"
    if isinstance(attention, str):
        report.said.append(f"memory is not estimated: {attention}; measure it with --measure")
        return report
    assert words
    tensors = [v.const_value for v in work.graph.initializers.values() if v.const_value]
    sizes = sum(tensor.nbytes for tensor in tensors), sum(left.values())
    weights = *sizes, folder.model.stat().st_size
    shape = _BATCH[0], min(_BATCH[1], context), context
    counted = forecast([t.sizes for t in found], attention, weights, words, shape)
    return replace(report, estimated=counted)


def _of_encoder(folder: Folder, light: LightModel, report: Report) -> Report:
    """Returns the report of a text encoder without the tasks that a computation rules out."""
    refused = []
    for task in list(report.tasks):
        needs_labels = task == "classification" and not has_classes(folder.model)
        labels = ["0", "1"] if needs_labels else None
        given: dict[str, Any] = {"task": task, "labels": labels}
        try:
            encoder = encoder_of(folder, light, {**given, "loss": None})
            if report.quantized or first_of(folder, light, encoder):
                with quiet():
                    FineTuning(folder.model, rank=1, **given)  # which computes it
        except OrtopsError as error:
            report.tasks.remove(task)
            refused.append(f"not for {task}: {error}")
    if not report.tasks:
        return replace(report, problems=refused)
    report.said.extend(refused)
    return report


def _count(value: ir.Value) -> int:
    tensor = value.const_value
    return 0 if tensor is None else int(tensor.size)


def _measure(folder: Folder, rows: int, tokens: int) -> Measurement:
    """Trains an adapter of rank 8 for a few steps on random tokens; nothing is saved.

    Args:
        folder: The folder.
        rows: The number of rows per step.
        tokens: The number of tokens per row, at most the model's context length.

    Raises:
        UnsupportedError: If the model has an encoder.
    """
    if folder.parts:
        raise UnsupportedError("not measured: models with an encoder are not supported")
    tuning = FineTuning(folder.model, rank=8)
    length = max(2, min(tokens, folder.context_length or tokens))
    shape = (_STEPS + 1) * rows, length
    data = np.random.default_rng(0).integers(2, size=shape).tolist()
    clock = _Clock()
    tuning.fit(data, 1, rows, length, shuffle=False, progress=False, callbacks=[clock])
    seconds = (clock.times[-1] - clock.times[0]) / _STEPS
    return Measurement(rows, length, _STEPS, seconds, rows * length / seconds, peak_memory())


def _compare(folder: Folder, tokens: int) -> Serving:
    """Generates with both forms of a tuned model in turns.

    Args:
        folder: The folder.
        tokens: The number of tokens of the prompt, of which the model's context length leaves out
            those to generate.
    """
    forms = FineTuning.load(folder.path)._server.forms()
    limit = folder.context_length or tokens + _GENERATED
    count = max(1, min(_GENERATED, limit // 2))
    prompt = np.random.default_rng(0).integers(2, size=max(1, min(tokens, limit - count))).tolist()
    speeds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(_ROUNDS + 1):
        for name in sorted(forms, reverse=turn % 2 == 0):
            decoder = replace(forms[name])  # with an empty cache
            first = decoder.continued(prompt, 1, (), Sampling())
            begin = time.perf_counter()
            decoder.continued(first, count, (), Sampling())
            speeds[name].append(count / (time.perf_counter() - begin))
    rates = {name: np.array(found[1:]) for name, found in speeds.items()}  # the first warms up
    merged, adapter = (float(np.median(rates[name])) for name in ("merged", "adapter"))
    ratio = float(np.median(rates["merged"] / rates["adapter"]))
    again = any(node.op_type == "MatMulNBits" for node in load_light(folder.model).proto.graph.node)
    return Serving(len(prompt), count, merged, adapter, ratio, again)


class _Clock(Callback):
    """Notes when each step ends.

    Attributes:
        times: The times in seconds.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, record: Record, session: TrainingSession) -> None:
        """Notes the time."""
        self.times.append(time.perf_counter())
