"""Reports what training a model would do, and what prevents it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx
import onnx_ir as ir

from ortops import losses
from ortops.engine.building.builder import Plan, plan_training
from ortops.engine.building.groups import Groups
from ortops.engine.building.parameters import quantized
from ortops.engine.building.preparation import (
    BatchNormalization,
    prepare_for_training,
    refused_without_weights,
)
from ortops.engine.building.readers import readers
from ortops.engine.execution import tables
from ortops.engine.lowering import lower_prepared, prepare
from ortops.engine.summary import SHOWN, by_module, by_reason, first, short_shape, text_of
from ortops.engine.trainable.metadata import entry_names, training_metadata
from ortops.engine.trainable.step_graph import flatten
from ortops.errors import OrtopsError
from ortops.graph import convert, faults
from ortops.graph.adapters import adapter_of
from ortops.graph.autodiff.expansion import expand
from ortops.graph.autodiff.registry import StructuralRule, ZeroRule
from ortops.graph.autodiff.rules import RULES
from ortops.graph.edit import all_nodes, describe, is_float, mapped_tensor
from ortops.graph.files import loading
from ortops.graph.files.loading import ModelLike
from ortops.graph.nesting import inner_graphs
from ortops.graph.passes import passes_for
from ortops.graph.shapes import infer_shapes
from ortops.graph.squashing import squashed
from ortops.losses.scene import default_output
from ortops.optimizers import SGD, Optimizer, UpdateRule


@dataclass(frozen=True)
class Report:
    """The result of `check`.

    Attributes:
        opset: The model's opset.
        converted_to: The opset that the model is converted to for training, or None.
        parameters: The parameters that would be trained, by name, with types and shapes as text.
        readers: The nodes that read each parameter; several if it is tied.
        parameter_count: The total number of elements of the parameters.
        reasons: The other floating-point initializers, and why they would not be trained.
        quantized: Integer weights, and the nodes that read them.
        inputs: Floating-point inputs that an output depends on differentiably.
        other_inputs: The other inputs.
        outputs: The model's outputs, with types, shapes and what computes them.
        adapter: The adapter from `ortops.lora`, as text; empty if there is none.
        loss: The loss of this report: the given one, or one that fits.
        fitting: Losses of `ortops.losses` that fit the output they would read.
        schedule: The learning-rate schedule, as text; empty if there is none.
        clipping: The gradient clipping, as text; empty if there is none.
        averaging: The averaging of parameters, as text; empty if there is none.
        groups: The parameters with optimizer settings of their own, and these settings.
        said: Automatic choices, one sentence each.
        kept: What is near to nodes that a pass would replace by faster ones, and the difference;
            only if asked for.
        problems: Why the model cannot be trained: nodes without a gradient rule, and other reasons
            why `ortops.build_training_model` or `ortops.TrainingSession` would reject the model.
    """

    opset: int
    converted_to: int | None = None
    parameters: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    parameter_count: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    quantized: dict[str, str] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    other_inputs: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    adapter: str = ""
    loss: str = ""
    fitting: list[str] = field(default_factory=list)
    schedule: str = ""
    clipping: str = ""
    averaging: str = ""
    groups: dict[str, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def constants(self) -> list[str]:
        """The floating-point initializers that would not be trained."""
        return list(self.reasons)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as a JSON-serializable dictionary."""
        return asdict(self)

    def __str__(self) -> str:
        return self.text()

    def text(self, everything: bool = False) -> str:
        """Returns the report as text.

        Args:
            everything: Whether long lists are complete. By default, parameters are counted by
                module, and other items by kind, if there are more than 20.
        """
        lines = [f"opset {self.opset}"]
        if self.converted_to is not None:
            lines[0] += f", converted to {self.converted_to} for training"
        shown = [(n, what if everything else short_shape(what)) for n, what in self.outputs.items()]
        lines += _some([f"output {name}: {what}" for name, what in shown], everything)
        if self.adapter:
            lines.append(f"adapter (ortops.lora): {self.adapter}")
        if self.fitting:
            lines.append(f"losses that fit: {', '.join(self.fitting)}, and weighted sums")
        if self.loss:
            lines.append(f"loss of this report: {self.loss}")
        lines += self._trained(everything)
        for title, text in (
            ("learning rate", self.schedule),
            ("gradient clipping", self.clipping),
            ("parameter averaging", self.averaging),
        ):
            if text:
                lines.append(f"{title}: {text}")
        for title, reasons in (
            ("floating-point initializers that are not trained", self.reasons),
            ("quantized weights, which are not trained", self.quantized),
        ):
            listed = [f"  {name} {reason}" for name, reason in reasons.items()]
            if reasons:
                long = len(listed) > SHOWN and not everything
                lines += [f"{title}: {len(reasons)}", *(by_reason(reasons) if long else listed)]
        for title, names in (
            ("differentiable inputs", self.inputs),
            ("other inputs", self.other_inputs),
        ):
            if names:
                more = [] if everything else names[SHOWN:]
                also = f" and {len(more)} more (--all lists all)" if more else ""
                lines.append(f"{title}: {', '.join(names[: len(names) - len(more)])}{also}")
        lines += _some(self.said, everything)
        if self.kept:
            title = "nodes that are near to those that a pass makes faster, and the difference"
            lines += [f"{title}: {len(self.kept)}"]
            lines += _some([f"  {each}" for each in self.kept], everything)
        if self.problems:
            listed = [f"  {each}" for each in self.problems]
            lines += [f"problems: {len(self.problems)}", *_some(listed, everything)]
        else:
            lines.append("no problems: ready to train")
        return text_of(lines)

    def _trained(self, everything: bool) -> list[str]:
        """Returns lines about the parameters."""
        tied = {name: by for name, by in self.readers.items() if len(by) > 1}
        lines = [
            f"trainable parameters: {self.parameter_count:,} in {len(self.parameters)} tensors"
        ]
        if len(self.parameters) > SHOWN and not everything:
            lines[0] += ", by module (--all lists all)"
            lines += by_module(self.parameters)
            if tied:
                lines.append(f"  {len(tied)} of the tensors are read by several nodes")
            if self.groups:
                lines.append(f"  {len(self.groups)} have optimizer settings of their own")
            return lines
        for name, kind in self.parameters.items():
            several = f"read by {len(tied[name])} nodes" if name in tied else ""
            parts = [kind, several, self.groups.get(name, "")]
            lines.append("  ".join(["", name, *(part for part in parts if part)]))
        return lines


def _some(lines: list[str], everything: bool) -> list[str]:
    """Returns the first of some lines, or all."""
    return lines if everything else first(lines)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings of ortops' logger."""
    logger = logging.getLogger("ortops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@loading.blame_model
def check(
    model: ModelLike,
    *,
    loss: losses.LossLike | None = None,
    trainable: Sequence[str] | None = None,
    inputs: losses.Inputs | None = None,
    batch_normalization: BatchNormalization = "auto",
    optimizer: str | Optimizer | type[Optimizer] | UpdateRule | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    ema_decay: float | None = None,
    groups: Groups | None = None,
    verbose: bool = False,
) -> Report:
    """Reports what training a model would do, and what prevents it.

    Makes the plan that `ortops.build_training_model` would write, and differentiates it. For a
    model that is already trainable, reports the parameters that its algorithm trains.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        loss: As for `ortops.build_training_model`; by default one that fits the first
            floating-point output.
        trainable: As for `ortops.build_training_model`.
        inputs: As for `ortops.build_training_model`.
        batch_normalization: As for `ortops.build_training_model`.
        optimizer: As for `ortops.build_training_model`; by default plain SGD. If none of
            ``optimizer``, ``clip_norm``, ``clip_value``, ``ema_decay`` and ``groups`` is given, the
            report describes those of a model that is already trainable.
        clip_norm: As for `ortops.build_training_model`.
        clip_value: As for `ortops.build_training_model`.
        ema_decay: As for `ortops.build_training_model`.
        groups: As for `ortops.build_training_model`.
        verbose: Whether the report says which nodes passes almost replaced.

    Returns:
        A report; ``ortops check`` prints ``str(report)``, and with ``--all``
        ``report.text(everything=True)``.

    Raises:
        ModelError: If the model is invalid, or cannot be converted to a supported opset.

    Example:
        >>> import numpy as np
        >>> from ortops import Tape
        >>> with Tape(name="linear") as tape:
        ...     x = tape.input("x", np.float32, ["batch", 2])
        ...     y = tape.output(x @ tape.initializer("w", np.ones((2, 1), np.float32)), "y")
        >>> print(check(tape.model()))
        opset 21
        output y: FLOAT[batch,1]
        losses that fit: MeanSquaredError, L1, BinaryCrossEntropyWithLogits, and weighted sums
        loss of this report: MeanSquaredError
        trainable parameters: 2 in 1 tensors
          w  FLOAT[2,1]
        differentiable inputs: x
        no problems: ready to train
    """
    light = convert.load_light(model)
    if why := refused_without_weights(light):
        return _report_of_refusal(light.proto, why)
    report = _inference_report(light.proto, convert.to_ir(light))
    about, left = _about(light.proto, trainable), tables.left_in_file(light)
    existing: dict[str, Any] = {}
    if (optimizer, clip_norm, clip_value, ema_decay, groups) == (None,) * 5:
        found = training_metadata(light.proto)
        existing = {name: getattr(found, name) for name in ("schedule", "clipping", "averaging")}
        existing["groups"] = dict(found.groups)
    try:
        prepared = prepare_for_training(
            light, _trained(light.proto, trainable), batch_normalization
        )
        output = default_output(prepared.graph.outputs)
        fitting = [] if output is None else _fitting(output)
        chosen = (fitting or ["MeanSquaredError"])[0] if loss is None else loss
        own = set(all_nodes(prepared.graph))
        plan = plan_training(
            prepared,
            loss=chosen,
            optimizer=SGD() if optimizer is None else optimizer,
            inputs=inputs,
            clip_norm=clip_norm,
            clip_value=clip_value,
            ema_decay=ema_decay,
            groups=groups,
        )
    except OrtopsError as error:
        return replace(report, problems=report.problems or [str(error)])
    problems, kept = _outcome(plan, verbose)
    parameters = {v.name or "": f"{v.dtype}{v.shape}" for v in plan.parameters}
    return replace(
        report,
        parameters=parameters,
        readers=_readers(plan.parameters, own),
        parameter_count=sum(math.prod(_shape(value)) for value in plan.parameters),
        reasons=dict(plan.reasons),
        loss=chosen if isinstance(chosen, str) else _name(chosen),
        fitting=fitting,
        **(existing | plan.notes),
        said=[
            *about,
            *plan.said,
            *faults.said(light.proto),
            *tables.said({name: left[name] for name in left if name not in parameters}),
        ],
        kept=kept,
        problems=report.problems or problems,
    )


def _readers(parameters: Iterable[ir.Value], own: Container[ir.Node]) -> dict[str, list[str]]:
    """Returns which of a model's own nodes read each parameter."""
    return {
        v.name or "": [str(each) for each in readers(v) if each.node in own] for v in parameters
    }


def _about(proto: onnx.ModelProto, trainable: Sequence[str] | None) -> list[str]:
    """Returns which of several training algorithms the report is about."""
    first, *others = entry_names(proto)
    if not others or trainable is not None:
        return []
    listed = ", ".join(f"'{name}'" for name in others)
    algorithm = f"the report is about the training algorithm '{first}'"
    return [f"{algorithm}; the file also has {listed} (`ortops inspect` shows them)"]


def _inference_report(proto: onnx.ModelProto, work: ir.Model) -> Report:
    """Returns the part of the report that does not depend on a training algorithm.

    Args:
        proto: The model.
        work: The same model; changed.
    """
    opset = work.graph.opset_imports[""]
    with quiet():  # making the plan logs the same messages
        work = prepare(work)
    refused = _expand(work)
    graph = work.graph
    given = {value.name for value in proto.graph.initializer}
    graph_inputs = [value for value in graph.inputs if value.name not in given]
    initializers = [value for name, value in graph.initializers.items() if name in given]
    floats = [value for value in (*graph_inputs, *initializers) if is_float(value)]
    reached, smooth = set[ir.Value](), set[ir.Value]()
    for value in graph.outputs:
        if is_float(value):
            reached |= RULES.ancestors(value)
            smooth |= RULES.ancestors(value, lambda node: not _is_differentiable(node))
    active = RULES.active_values(graph, floats)
    adapter = adapter_of(proto.metadata_props)
    return Report(
        opset=opset,
        converted_to=None if opset >= convert.MINIMUM_OPSET else convert.MINIMUM_OPSET,
        quantized=quantized(initializers),
        inputs=[v.name or "" for v in graph_inputs if v in floats and v in smooth],
        other_inputs=[v.name or "" for v in graph_inputs if v not in floats or v not in smooth],
        outputs={value.name or "": _kind(value) for value in graph.outputs},
        adapter="" if adapter is None else str(adapter),
        problems=refused
        or [
            _problem(node)
            for node in graph
            if not reached.isdisjoint(node.outputs) and not active.isdisjoint(node.outputs)
            for node in _with_inner(node)
            if not _is_differentiable(node)
        ],
    )


def _report_of_refusal(proto: onnx.ModelProto, why: str) -> Report:
    """Returns the report on a model without weights, which may have gigabytes of attributes."""
    outputs = [ir.serde.deserialize_value_info_proto(v, None) for v in proto.graph.output]
    imports = {entry.domain: entry.version for entry in proto.opset_import}
    return Report(
        opset=imports.get("", imports.get("ai.onnx", convert.MINIMUM_OPSET)),
        other_inputs=[value.name for value in proto.graph.input],
        outputs={value.name or "": _kind(value) for value in outputs},
        problems=[why],
    )


def _trained(proto: onnx.ModelProto, trainable: Sequence[str] | None) -> Sequence[str] | None:
    """Removes the training_info of a model, in place; returns what its first entry trains."""
    names = {tensor.name for tensor in proto.graph.initializer}
    statistics = {
        name
        for node in proto.graph.node
        if node.op_type == "BatchNormalization"
        for name in node.input[3:5]
    }
    updated = [b.key for info in list(proto.training_info)[:1] for b in info.update_binding]
    del proto.training_info[:]
    trained = [name for name in updated if name in names - statistics]
    return trained if trained and trainable is None else trainable


def _kind(value: ir.Value) -> str:
    """Returns the type and shape of an output, and the activation that computes it, as text."""
    mapped = mapped_tensor(value)
    if mapped is not None:
        return f"maps from '{mapped.name}', {_kind(mapped)}"
    found = squashed(value)
    shape = "" if value.shape is None else str(value.shape)
    text = f"{value.dtype}{shape}" if isinstance(value.type, ir.TensorType) else str(value.type)
    if found is None:
        return text
    sources = ", ".join(f"'{logits.name}'" for logits in found.all_logits)
    source = f" of {sources}" if sources else ""
    what = "log-probabilities" if found.kind == "log_softmax" else "probabilities"
    return f"{text}, {what} from {describe(found.node)}{source}"


def _fitting(output: ir.Value) -> list[str]:
    """Returns losses that fit an output, the most likely first."""
    found = squashed(output)
    numbers = ["MeanSquaredError", "L1"]
    rank = None if output.shape is None else len(output.shape)
    axis = 1 if found is None or found.axis is None else found.axis
    classes = ["SoftmaxCrossEntropy"]
    if output.shape is not None and (len(output.shape) < 2 or output.shape[axis] == 1):
        classes = []
    # Sequences of scores, (time, batch, classes) or (batch, time, classes), and maps of classes.
    of_labels = found is None or (found.kind != "sigmoid" and not found.opposite)
    more = ["CTC", "NextToken"] if rank == 3 and classes and of_labels else []
    more += ["Dice"] if rank is not None and rank >= 4 else []
    if found is None:
        return [*numbers, *classes, "BinaryCrossEntropyWithLogits", *more]
    if found.kind == "sigmoid" and not found.opposite:
        return ["BinaryCrossEntropyWithLogits", *numbers, *more]
    return [*(classes or ["BinaryCrossEntropy"]), *numbers, *more]


def _name(loss: object) -> str:
    name = getattr(loss, "name", None) or getattr(loss, "__name__", None)
    return name if isinstance(name, str) else type(loss).__name__


def _expand(work: ir.Model) -> list[str]:
    """Lowers the training domain and expands operators that have a definition but no rule.

    Returns:
        The error, if that is not possible.
    """
    try:
        lower_prepared(work)
        if expand(work, RULES, everywhere=True):
            infer_shapes(work)
    except OrtopsError as error:
        return [str(error)]
    return []


def _shape(value: ir.Value) -> tuple[int, ...]:
    return () if value.const_value is None else tuple(value.const_value.shape.numpy())


def _with_inner(node: ir.Node) -> Iterator[ir.Node]:
    """Yields a node and the nodes of the graphs inside it."""
    yield node
    for graph in inner_graphs(node):
        for inner in graph:
            yield from _with_inner(inner)


def _is_differentiable(node: ir.Node) -> bool:
    """Whether a node has a rule that supports all its attributes, or never passes a gradient."""
    rule = RULES.find(node)
    if isinstance(rule, ZeroRule | StructuralRule):
        return True
    if not any(is_float(value) for value in node.inputs if value is not None):
        return not node.inputs or rule is not None
    return rule is not None and set(node.attributes) <= rule.attributes


def _problem(node: ir.Node) -> str:
    rule = RULES.find(node)
    if reason := RULES.refusal(node):
        return f"{describe(node)}: {reason}"
    if rule is None:
        where = f" of domain '{node.domain}'" if node.domain else ""
        return f"{describe(node)}: there is no gradient rule for {node.op_type}{where}"
    assert not isinstance(rule, ZeroRule | StructuralRule)
    unknown = sorted(set(node.attributes) - rule.attributes)
    return f"{describe(node)}: the gradient rule does not support the attribute '{unknown[0]}'"


def _outcome(plan: Plan, verbose: bool) -> tuple[list[str], list[str]]:
    """Differentiates a plan, and lets passes work on it if asked for.

    Returns:
        The error, if there is one, and what passes would have replaced but for a difference.
    """
    found: dict[str, list[str]] = {}
    try:
        made = plan.write()
        plan.differentiate(made)
        if verbose:
            lower_prepared(flatten(made).model, passes=passes_for("session"), refusals=found)
    except OrtopsError as error:
        return [str(error)], []
    kept = {f"{name}: {why}": None for name, reasons in found.items() for why in reasons}
    return [], list(kept)
