"""Derives models from the model of a Function, and opens them on first use."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from ortops._common.garbage_collection import pause_collection
from ortops._common.numbers import Array
from ortops._common.uninterrupted import run_uninterrupted
from ortops.derivatives.builder import Builder
from ortops.derivatives.formulas import (
    add_gradient,
    add_hessian,
    add_hvp,
    add_jacobian,
    add_jvp,
    add_vjp,
)
from ortops.derivatives.residuals import divide
from ortops.derivatives.vmap import Axes, add_axis
from ortops.engine.building.parameters import choose, read_scopes
from ortops.engine.execution.memory import ort_value
from ortops.engine.execution.onnxruntime_sessions import Sessions, errors_as_ours
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.sizes import bind_sizes, sizes_in
from ortops.engine.inference import InferenceSession
from ortops.engine.lowering import (
    infer_computed_types,
    infer_types,
    lower_ir,
    lower_prepared,
    normalize,
    prepare,
)
from ortops.engine.training.input_values import Input
from ortops.errors import FeedError, ModelError, UnsupportedError, did_you_mean
from ortops.graph import convert
from ortops.graph.constants import constant_number, numpy_dtype
from ortops.graph.edit import all_nodes, describe, is_float, set_outputs, values_of
from ortops.graph.faults import is_affected
from ortops.graph.files import external
from ortops.graph.files.messages import has_domain
from ortops.graph.files.serialization import GRADIENT_DOMAIN, name_gradients
from ortops.graph.folding import fold
from ortops.graph.names import Names
from ortops.graph.operators import is_random
from ortops.graph.passes.blocked import is_mostly_blocked
from ortops.graph.passes.order import put_last_results_first
from ortops.graph.weights import lift

Kind: TypeAlias = Literal["outputs", "gradient", "vjp", "jvp", "hvp", "jacobian", "hessian"]
"""What a program computes: the outputs, with derivatives; for ``"jacobian"``, derivatives alone."""

Shape: TypeAlias = tuple[int | None, ...]
"""A shape, with None for unknown sizes."""

Value: TypeAlias = Any
"""An array, or an OrtValue."""

_FORMULAS: Mapping[str, Callable[[Builder], list[str]]] = {
    "gradient": add_gradient,
    "vjp": add_vjp,
    "jvp": add_jvp,
    "hvp": add_hvp,
    "jacobian": add_jacobian,
    "hessian": add_hessian,
}

_BFLOAT16 = "tensor(bfloat16)"

_SHAPES = 4
"""The number of shapes of inputs for which a program may have graphs of their own."""


@dataclass(frozen=True)
class Request:
    """What a program computes.

    Attributes:
        kind: The kind of derivatives.
        wrt: The inputs and weights to differentiate with respect to.
        fed: The weights that are inputs.
    """

    kind: Kind
    wrt: tuple[str, ...]
    fed: tuple[str, ...]


@dataclass(frozen=True)
class _Part:
    """A model in an open session.

    Attributes:
        session: The session.
        inputs: The names of its inputs.
        outputs: The names of its outputs.
        is_bound: Whether it has inputs or outputs that only `compute` can convert.
        is_whole: Whether it has outputs that only `run` can convert: sequences and maps.
    """

    session: InferenceSession
    inputs: Sequence[str]
    outputs: Sequence[str]
    is_bound: bool
    is_whole: bool

    def run(self, feeds: Mapping[str, Array]) -> list[Any]:
        """Returns the outputs for arrays; names that are not inputs are ignored."""
        if self.is_bound and not self.is_whole:
            return [as_array(value) for value in self.compute(feeds).values()]
        if len(feeds) != len(self.inputs):
            feeds = {name: feeds[name] for name in self.inputs if name in feeds}
        try:
            found: list[Any] = self.session.run(self.outputs, feeds)
        except Exception:
            with errors_as_ours():  # entered only here, because it takes longer than a small model
                raise
        return found

    def compute(self, feeds: Mapping[str, Value]) -> dict[str, Value]:
        """Returns the outputs by name, in memory of onnxruntime, which saves copies.

        Args:
            feeds: Arrays, or values that were computed before; names that are not inputs are
                ignored.
        """
        given = {name: feeds[name] for name in self.inputs if name in feeds}
        if self.is_whole or any(map(_is_copied, given.values())):
            return dict(zip(self.outputs, self.run(given), strict=True))
        with errors_as_ours():
            binding = self.session.io_binding()
            for name, value in given.items():
                is_array = isinstance(value, np.ndarray)
                binding.bind_ortvalue_input(name, ort_value(value) if is_array else value)
            for name in self.outputs:
                binding.bind_output(name)
            self.session.run_with_iobinding(binding)
            found = binding.get_outputs_as_ortvaluevector()
        # By index, because its iterator takes ten times as long.
        values = (onnxruntime.OrtValue(found[index]) for index in range(len(self.outputs)))
        return dict(zip(self.outputs, values, strict=True))


def _is_copied(value: Value) -> bool:
    """Whether onnxruntime must copy a value: an array of strings, a sequence, an optional value."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "OUS"
    return not isinstance(value, onnxruntime.OrtValue)


def as_array(value: Value, *, copied: bool = False) -> Any:
    """Returns a computed value as an array; a view of onnxruntime's memory unless ``copied``."""
    if not isinstance(value, onnxruntime.OrtValue):
        return value
    found = _bfloat16(value) if value.data_type() == _BFLOAT16 else value.numpy()
    return found.copy() if copied else found


def _bfloat16(value: onnxruntime.OrtValue) -> Array:
    """Returns a view of a bfloat16 tensor, which onnxruntime does not convert to an array."""
    shape = value.shape()
    memory = (ctypes.c_uint16 * math.prod(shape)).from_address(value.data_ptr())
    memory.owner = value
    return np.frombuffer(memory, ml_dtypes.bfloat16).reshape(shape)


class Program:
    """A derived model, with sessions that are opened for the shapes of its inputs.

    Args:
        model: The model, prepared for lowering; do not use it afterwards.
        sessions: Opens the sessions.
        outputs: The outputs that do not depend on seeds.
        seeds: The seed inputs.
        divided: Whether it has a forward and a backward part.
        lowered: Whether it is run as it is, without optimization passes of ortops.

    Attributes:
        inputs: The inputs by name.
        seeds: The names of the seed inputs.
    """

    def __init__(
        self,
        model: ir.Model,
        sessions: Sessions,
        outputs: Sequence[str],
        seeds: Sequence[str],
        *,
        divided: bool = False,
        lowered: bool = False,
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._outputs = outputs
        self._divided, self._lowered = divided, lowered
        fast = sessions.on_cpu and not lowered
        self._passes = list(sessions.settings.passes) if fast else []
        self.seeds = seeds
        self.inputs = {value.name or "": input_of(value) for value in model.graph.inputs}
        if divided:
            _forget_symbols([value for value in model.graph.inputs if value.name in seeds])
        if not lowered:
            fold(model.graph)
        self._gains = any(each.gains(model, None) for each in self._passes)
        self._general: tuple[_Part, ...] = ()
        self._by_shape: dict[object, tuple[_Part, ...]] = {}
        self._lock = threading.RLock()

    def parts(self, feeds: Mapping[str, Value]) -> tuple[_Part, ...]:
        """Returns the model in open sessions: one, or those of the forward and backward pass."""
        if not self._gains:
            return self._general or self._opened(None)
        key = tuple((n, array.shape) for n, array in feeds.items() if isinstance(array, np.ndarray))
        return self._by_shape.get(key) or self._opened(dict(key))

    def _opened(self, shapes: Mapping[str, tuple[int, ...]] | None) -> tuple[_Part, ...]:
        with self._lock:
            if shapes is not None:
                key = tuple(shapes.items())
                sizes = sizes_in(self._model, shapes)
                if key not in self._by_shape and len(self._by_shape) < _SHAPES:
                    gains = any(each.gains(self._model, sizes) for each in self._passes)
                    self._by_shape[key] = self._open(sizes) if gains else self._opened(None)
                if key in self._by_shape:
                    return self._by_shape[key]
            self._general = self._general or self._open(None)
            return self._general

    def _open(self, sizes: Mapping[str, int] | None) -> tuple[_Part, ...]:
        @pause_collection()
        def opened() -> tuple[_Part, ...]:
            if self._lowered:
                return (self._open_part(self._model),)
            model = self._model.clone()
            if sizes is not None:
                bind_sizes(model, sizes)
            model = lower_prepared(
                model,
                passes=self._passes,
                sizes=sizes,
                feeds=list(self.inputs),
                shown=self._outputs,
            )
            if not self._divided:
                return (self._open_part(model),)
            passes = divide(model, self._outputs, self.seeds)
            return self._open_part(passes.forward), self._open_part(passes.backward)

        # Uninterrupted, because other libraries wrap exceptions of signal handlers in their own.
        return run_uninterrupted(opened)

    def _open_part(self, model: ir.Model) -> _Part:
        graph = model.graph
        put_last_results_first(graph)
        inputs = [value.name or "" for value in graph.inputs]
        outputs = [value.name or "" for value in graph.outputs]
        _put_out_statistics(graph)
        session = self._sessions.open(model, optimize=not is_mostly_blocked(graph))
        results = session.get_outputs()
        is_bound = any(each.type == _BFLOAT16 for each in (*session.get_inputs(), *results))
        is_whole = any(not each.type.startswith("tensor") for each in results)
        return _Part(session, inputs, outputs, is_bound, is_whole)


class Source:
    """The model of a Function, and the programs that are derived from it.

    Args:
        light: The model.
        outputs: The names of the tensors that the Function returns; None for the model's outputs.
        options: Options of onnxruntime.
        providers: The providers of onnxruntime.

    Attributes:
        inputs: The inputs without a default value, by name.
        optional: The inputs with a default value, by name.
        outputs: The returned tensors, by name.
        float_inputs: The names of the floating-point inputs.
        float_outputs: The names of the floating-point outputs.
        weights: All floating-point weights, by name.
        trained: The names of the weights that are trained by default.
        selected: The names of the tensors that the Function returns, if given.
        sess_options: Options of onnxruntime, if given.
        providers: The providers of onnxruntime.
        checked: Types and shapes of arrays that are valid for the inputs.
    """

    def __init__(
        self,
        light: external.LightModel,
        outputs: Sequence[str] | None,
        options: onnxruntime.SessionOptions | None,
        providers: Sequence[Any],
    ) -> None:
        self._original, (self._light, _) = light, lift(light)
        self.sess_options, self.providers = options, providers
        self._sessions = Sessions("onnx", options, providers, Settings())
        self.selected = outputs
        self._model = normalize(self._read())
        infer_computed_types(self._model, in_file=False)
        graph = self._model.graph
        self.outputs = {value.name or "": value for value in graph.outputs}
        given = {value.name or "": value for value in graph.inputs}
        self.inputs = {
            name: input_of(value) for name, value in given.items() if name not in graph.initializers
        }
        self.optional = {n: input_of(v) for n, v in given.items() if n in graph.initializers}
        others = {v.name for v in self._light.proto.graph.output if not _is_tensor(v)}
        self.float_inputs = tuple(n for n in self.inputs if _is_float_tensor(given[n]))
        self.float_outputs = tuple(
            n for n, value in self.outputs.items() if _is_float_tensor(value) and n not in others
        )
        self.weights = {n: v for n, v in graph.initializers.items() if is_float(v)}
        scopes = read_scopes(self.weights.values())
        self.trained = list(choose(self.weights, None, scopes).trained)
        self.checked: set[tuple[Any, ...]] = set()
        self._programs: dict[Request, Program] = {}
        self._lock = threading.RLock()

    def program(self, request: Request) -> Program:
        """Returns a program, which is derived once."""
        program = self._programs.get(request)
        if program is None:
            with self._lock:
                program = self._programs.get(request) or self._derived(request)
                self._programs[request] = program
        return program

    def _read(self, light: external.LightModel | None = None) -> ir.Model:
        """Returns the model with the selected outputs, by default with lifted weights."""
        model = convert.to_ir(light or self._light)
        if self.selected is not None:
            known = values_of(model.graph)
            for name in self.selected:
                if name not in known:
                    offered = [v.name or "" for v in (*model.graph.outputs, *known.values())]
                    hint = did_you_mean(name, dict.fromkeys(offered))
                    raise ModelError(f"outputs: the model has no tensor '{name}'; {hint}")
            set_outputs(model.graph, [known[name] for name in self.selected])
        return model

    def _derived(self, request: Request) -> Program:
        if request.kind == "outputs":  # the model as it is, so that results are bit-equal
            is_lifted = request.fed or self.selected
            model = self._read(self._light if is_lifted else self._original)
            _feed(model.graph, request.fed)
            if has_domain(self._light.proto):
                model = lower_ir(model)
            elif is_affected(self._model.graph):
                model = prepare(model)
            return Program(model, self._sessions, list(self.outputs), [], lowered=True)
        model, outputs, seeds = self._model_for(request)
        divided = request.kind == "vjp"
        return Program(prepare(model), self._sessions, outputs, seeds, divided=divided)

    def serialized(self) -> bytes:
        """Returns the model with its weights."""
        return external.serialize(self._original.attached())

    def value(self, name: str) -> Array:
        """Returns the value of a weight."""
        tensor = self.weights[name].const_value
        assert tensor is not None
        return tensor.numpy()

    def output_shapes(self, shapes: Mapping[str, Sequence[int | None]]) -> list[Shape | None]:
        """Returns the shapes of the outputs that the model states, given those of the inputs.

        Args:
            shapes: The shapes of inputs by name; None for unknown sizes.

        Returns:
            For each output, its shape, with None for unknown sizes; None for an unknown rank.
        """
        sizes = {
            dim: size
            for name, shape in shapes.items()
            for dim, size in zip(self.inputs[name].dims or (), shape, strict=False)
            if isinstance(dim, str)
        }
        return [
            None
            if (dims := input_of(value).dims) is None
            else tuple(dim if isinstance(dim, int) else sizes.get(dim or "") for dim in dims)
            for value in self.outputs.values()
        ]

    def random_node(self) -> ir.Node | None:
        """Returns a node that draws random numbers, or None."""
        return next(filter(_draws, all_nodes(self._model.graph)), None)

    def refuse_random(self, bridge: str, why: str) -> None:
        """Raises an UnsupportedError if the model draws random numbers, which a bridge forbids."""
        if (node := self.random_node()) is not None:
            raise UnsupportedError(
                f"{bridge}: {describe(node)} draws random numbers, {why}; switch off its training "
                "mode, or make the random numbers an input of the model"
            )

    def derived(self, request: Request) -> Source:
        """Returns a source with all inputs of a program, and its derivatives as outputs.

        For the kind ``"outputs"``, it has the same outputs and reads weights as inputs.
        """
        if request.kind == "outputs":
            model = self._read()
            _feed(model.graph, request.fed)
        else:
            model, outputs, _ = self._model_for(request)
            graph = model.graph
            set_outputs(graph, [value for value in graph.outputs if value.name not in outputs])
        light = external.move_aside(model)
        name_gradients(light.proto)
        return Source(light, None, self.sess_options, self.providers)

    def mapped(self, in_axes: Axes, out_axes: Axes, length: int | None) -> Source:
        """Returns a source with an axis more; see `ortops.derivatives.vmap`."""
        model = self._read()
        model = lower_ir(model) if has_domain(self._light.proto) else normalize(model)
        infer_types(model)
        add_axis(model, in_axes, out_axes, length)
        return Source(external.move_aside(model), None, self.sess_options, self.providers)

    def _model_for(self, request: Request) -> tuple[ir.Model, list[str], list[str]]:
        """Returns a derived model, its outputs without derivatives, and its seed inputs."""
        model = self._model.clone()
        graph = model.graph
        _feed(graph, request.fed)
        inputs = list(graph.inputs)
        builder = Builder(model, list(request.wrt), self.float_outputs)
        added = _FORMULAS[request.kind](builder)
        seeds = [value for value in graph.inputs if value not in inputs]
        outputs = [] if request.kind == "jacobian" else list(self.outputs)
        known = {value.name: value for value in graph.outputs}
        set_outputs(graph, [known[name] for name in (*outputs, *added)])
        graph.opset_imports.setdefault(GRADIENT_DOMAIN, 1)
        return model, outputs, [value.name or "" for value in seeds]


class _Text(Input):
    """An input of strings."""

    def fit(self, given: object, sizes: dict[str, tuple[int, str]]) -> Array:
        """Converts a string, or an array-like of strings, to an array of objects."""
        array = np.asarray(given, object)
        wrong = next((each for each in array.flat if not isinstance(each, str)), None)
        if wrong is not None:
            raise FeedError(f"feeds: '{self.name}' must have strings, got the value {wrong!r:.80}")
        if self.dims is not None:
            self._check_shape(array.shape, self.dims, sizes)
        return array


class _Other(Input):
    """An input that is not a tensor, such as a sequence: a list of arrays."""

    def fit(self, given: object, sizes: dict[str, tuple[int, str]]) -> Any:
        """Returns a value as it is, because onnxruntime checks it."""
        if isinstance(given, np.ndarray) and str(self.unbound).startswith("Sequence"):
            raise FeedError(
                f"feeds: '{self.name}' must be a list of arrays, because it is a {self.unbound}, "
                "got an array"
            )
        return given


def input_of(value: ir.Value) -> Input:
    """Returns what an input accepts."""
    kind = Input
    dims = None
    if value.shape is not None:
        dims = tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)
    unbound = None if isinstance(value.type, ir.TensorType | None) else str(value.type)
    if unbound is not None:
        kind = _Other
    elif value.dtype == ir.DataType.STRING:
        kind = _Text
    return kind(value.name or "", numpy_dtype(value), dims, unbound)


def _is_tensor(value: onnx.ValueInfoProto) -> bool:
    """Whether an output in a file may be a tensor; onnx-ir drops the types of maps."""
    return value.type.WhichOneof("value") in (None, "tensor_type")


def _is_float_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType | None) and is_float(value)


def _draws(node: ir.Node) -> bool:
    """Whether a node may draw random numbers: Dropout does so in training mode alone."""
    if node.op_type != "Dropout":
        return is_random(node.op_type)
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is not None and constant_number(mode) != 0


def _feed(graph: ir.Graph, names: Sequence[str]) -> None:
    """Makes initializers the last inputs, without a default value."""
    for name in names:
        value = graph.initializers.pop(name)
        value.const_value = None
        if value in graph.inputs:
            graph.inputs.remove(value)
        graph.inputs.append(value)


def _put_out_statistics(graph: ir.Graph) -> None:
    """Makes the statistics of BatchNormalization in training mode outputs.

    Otherwise, onnxruntime writes them into the memory of the ones that the node reads, so that the
    next run finds others.
    """
    names = Names(graph)
    for node in graph:
        if node.op_type != "BatchNormalization" or not node.attributes.get_int("training_mode", 0):
            continue
        for value in node.outputs[1:]:
            value.name = value.name or names.unique("statistic")
            if not value.is_graph_output():
                value.type = value.type or node.outputs[0].type
                graph.outputs.append(value)


def _forget_symbols(seeds: Sequence[ir.Value]) -> None:
    """Makes symbolic sizes of seeds unknown.

    Passes may compute a size anywhere from an input that has it. The forward pass has no seeds.
    """
    for seed in seeds:
        if seed.shape is not None:
            seed.shape = ir.Shape([dim if isinstance(dim, int) else None for dim in seed.shape])
