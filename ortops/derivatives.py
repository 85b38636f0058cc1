"""Derivatives of a model: functions that return the model with additional derivative outputs.

Each function takes a model and returns a new one. The derivatives are appended to its outputs, and
the seeds to its inputs:

========  ==============  ================  ============  ========================================
function  inputs          outputs           shaped like   which are
========  ==============  ================  ============  ========================================
gradient                  ``d_<y>_d_<x>``   x             ∂ sum(y) / ∂x
vjp       ``seed_<y>``    ``vjp_<x>``       x             ∂ (Σ over y of sum(seed · y)) / ∂x
jvp       ``seed_<x>``    ``jvp_<y>``       y             Σ over x of ∂y/∂x · seed
hvp       ``seed_<x>``    ``hvp_<x>``       x             Σ over x' of ∂² sum(y) / ∂x∂x' · seed'
jacobian                  ``d_<y>_d_<x>``   y, then x     ∂y / ∂x
========  ==============  ================  ============  ========================================

A seed has the shape and dtype of its tensor. A name that is already used gets a numeric suffix, as
in ``seed_x_1``. By default, y is the first floating-point output and x are all floating-point
inputs; pass names to select one or more other tensors.

The returned models contain Gradient nodes in addition to standard nodes, or only standard nodes
with ``lowered=True``. Both can be differentiated again, trained and served.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import onnx
import onnx_ir as ir

from ortops.arguments import whole_number
from ortops.autodiff.grad import grad, of_shape
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph import convert
from ortops.graph.convert import ModelLike
from ortops.graph.edit import is_float
from ortops.graph.files.serialization import (
    BOUND_DOMAIN,
    GRADIENT_DOMAIN,
    algorithm_names,
    name_tensors,
    to_proto,
)
from ortops.graph.tensor import Dim, Names, Tape, Tensor, op, shape_of, zeros_like
from ortops.losses.compute import default_output
from ortops.lowering import infer_types, lower_ir, normalize

__all__ = ["gradient", "hvp", "jacobian", "jvp", "vjp"]

Formula: TypeAlias = Callable[..., Sequence[Tensor]]
"""Emits derivatives on a tape, given the seeds."""

_SEEDS = "seeds"


@convert.blame_model
def gradient(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that also outputs the gradient of an output.

    Args:
        model: A ModelProto, its bytes or its path; it is not modified. A model with an opset below
            21 is converted to opset 21, which is logged. Functions are inlined.
        xs: The names of the tensors to differentiate with respect to: inputs, initializers or
            intermediate tensors, which must not depend on each other. By default, all
            floating-point inputs without a default value.
        y: The name of the tensor to differentiate, or several names. The elements of a tensor are
            summed. By default, the first floating-point output.
        lowered: Whether to lower the result to standard nodes (see `ortops.lower`) instead of
            keeping Gradient nodes.

    Returns:
        A new model with an output ``d_<y>_d_<x>`` for each y and x, of the shape and dtype of x.
        External data stay external, relative to the folder of the given file.

    Raises:
        ArgumentError: If ``xs`` or ``y`` are not names of tensors.
        ModelError: If the model is invalid, if a tensor does not exist or is not floating-point,
            or if an x depends on another.
        UnsupportedError: With ``lowered``, if an operator between x and y has no gradient.

    Example:
        >>> from models import mlp
        >>> model = gradient(mlp.mlp((4, 16, 2)))
        >>> [value.name for value in model.graph.output]
        ['logits', 'd_logits_d_images']
    """
    builder = _Builder(model, xs, y)
    with builder.tape:
        for each in builder.ys:
            for x, slope in zip(builder.xs, grad(each, builder.xs), strict=True):
                builder.put_out(slope, f"d_{each.name}_d_{x.name}")
    return builder.write(lowered)


@convert.blame_model
def vjp(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    seeds: int | bool | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that also outputs vector-Jacobian products (reverse mode).

    Args:
        model: See `gradient`.
        xs: See `gradient`.
        y: See `gradient`.
        seeds: The number of seeds per run, or True for any number of at least one. Seeds and
            products then have a leading axis, and share one forward pass. By default, there is one
            seed, without that axis.
        lowered: See `gradient`.

    Returns:
        A new model with an input ``seed_<y>`` for each y and an output ``vjp_<x>`` for each x, of
        their shapes and dtypes.

    Raises:
        ArgumentError: See `gradient`; or if ``seeds`` is not a positive integer or a boolean.
        ModelError: See `gradient`.
        UnsupportedError: See `gradient`.

    Example:
        >>> from models import mlp
        >>> model = vjp(mlp.mlp((4, 16, 2)), seeds=3)
        >>> ends = model.graph.input[-1], model.graph.output[-1]
        >>> [onnx.helper.printable_value_info(value) for value in ends]
        ['%seed_logits[FLOAT, 3xbatchx2]', '%vjp_images[FLOAT, 3xbatchx4]']
    """
    builder = _Builder(model, xs, y, seeds)

    def pulled_back(tape: Tape, *seeds: Tensor) -> Sequence[Tensor]:
        return grad(_dot(tape, builder.ys, seeds, builder.ys), [_on(tape, x) for x in builder.xs])

    with builder.tape:
        for x, product in zip(builder.xs, builder.for_seeds(builder.ys, pulled_back), strict=True):
            builder.put_out(product, f"vjp_{x.name}")
    return builder.write(lowered)


@convert.blame_model
def jvp(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    seeds: int | bool | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that also outputs Jacobian-vector products (forward mode).

    They are computed by reverse mode applied twice: a vector-Jacobian product is linear in its
    vector, and its transpose, obtained by differentiating with respect to that vector, is the
    Jacobian-vector product. After lowering, only those parts of the backward pass remain that the
    product reads.

    Args:
        model: See `gradient`.
        xs: See `gradient`.
        y: See `gradient`.
        seeds: See `vjp`.
        lowered: See `gradient`.

    Returns:
        A new model with an input ``seed_<x>`` for each x and an output ``jvp_<y>`` for each y, of
        their shapes and dtypes.

    Raises:
        ArgumentError: See `vjp`.
        ModelError: See `gradient`.
        UnsupportedError: See `gradient`.

    Example:
        >>> from models import mlp
        >>> model = jvp(mlp.mlp((4, 16, 2)))
        >>> [value.name for value in (*model.graph.input, *model.graph.output)]
        ['images', 'seed_images', 'logits', 'jvp_logits']
    """
    builder = _Builder(model, xs, y, seeds)
    with builder.tape:
        vectors = [op.Identity(zeros_like(each)).with_shape_of(each) for each in builder.ys]
        products = grad(_dot(builder.tape, builder.ys, vectors, builder.ys), builder.xs)

        def pushed_forward(tape: Tape, *seeds: Tensor) -> Sequence[Tensor]:
            return grad(_dot(tape, products, seeds, builder.xs), [_on(tape, v) for v in vectors])

        for each, product in zip(
            builder.ys, builder.for_seeds(builder.xs, pushed_forward), strict=True
        ):
            builder.put_out(product, f"jvp_{each.name}")
    return builder.write(lowered)


@convert.blame_model
def hvp(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    seeds: int | bool | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that also outputs Hessian-vector products.

    Args:
        model: See `gradient`.
        xs: See `gradient`.
        y: See `gradient`. The Hessian of the sum of all ys with respect to all xs is used.
        seeds: See `vjp`.
        lowered: See `gradient`.

    Returns:
        A new model with an input ``seed_<x>`` and an output ``hvp_<x>`` for each x, of its shape
        and dtype.

    Raises:
        ArgumentError: See `vjp`.
        ModelError: See `gradient`.
        UnsupportedError: See `gradient`.

    Example:
        >>> from models import mlp
        >>> model = hvp(mlp.mlp((4, 16, 2)))
        >>> [value.name for value in (*model.graph.input, *model.graph.output)]
        ['images', 'seed_images', 'logits', 'hvp_images']
    """
    builder = _Builder(model, xs, y, seeds)
    with builder.tape:
        slopes = grad(_total([each.sum() for each in builder.ys]), builder.xs)

        def product(tape: Tape, *seeds: Tensor) -> Sequence[Tensor]:
            return grad(_dot(tape, slopes, seeds, builder.xs), [_on(tape, x) for x in builder.xs])

        for x, result in zip(builder.xs, builder.for_seeds(builder.xs, product), strict=True):
            builder.put_out(result, f"hvp_{x.name}")
    return builder.write(lowered)


@convert.blame_model
def jacobian(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that also outputs the Jacobian of an output.

    It runs one backward pass for each element of y, which must not be empty; all of them share one
    forward pass. The Jacobian of a `gradient` is the Hessian.

    Args:
        model: See `gradient`.
        xs: See `gradient`.
        y: See `gradient`.
        lowered: See `gradient`.

    Returns:
        A new model with an output ``d_<y>_d_<x>`` for each y and x, of shape y.shape + x.shape.

    Raises:
        ArgumentError: See `gradient`.
        ModelError: See `gradient`.
        UnsupportedError: See `gradient`.

    Example:
        >>> from models import mlp
        >>> model = jacobian(mlp.mlp((4, 16, 2)))
        >>> onnx.helper.printable_value_info(model.graph.output[-1])
        '%d_logits_d_images[FLOAT, batchx2xbatchx4]'
    """
    builder = _Builder(model, xs, y)
    with builder.tape:
        for each in builder.ys:
            for x, result in zip(
                builder.xs, _jacobians(builder.tape, each, builder.xs), strict=True
            ):
                builder.put_out(result, f"d_{each.name}_d_{x.name}")
    return builder.write(lowered)


def _jacobians(tape: Tape, y: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the Jacobians of y with respect to each x: the gradients of all elements of y."""
    if y.shape == ():
        return grad(y, xs)
    elements = op.Reshape(y, [-1])

    def row(inner: Tape, number: Tensor) -> Sequence[Tensor]:
        element = op.Gather(_on(inner, elements), number, axis=0)
        return grad(element, [_on(inner, x) for x in xs])

    results = []
    rows = _for_each(tape, [op.Range(0, op.Size(y), 1)], row)
    for x, stacked in zip(xs, rows, strict=True):
        shape = op.Concat(shape_of(y), shape_of(x), axis=0)
        result = op.Reshape(stacked, shape, allowzero=1)
        if y.shape is not None and x.shape is not None:
            result = result.with_shape([*y.shape, *x.shape])
        results.append(result)
    return results


class _Builder:
    """Adds derivatives to a model.

    Args:
        model: See `gradient`.
        xs: See `gradient`.
        y: See `gradient`.
        seeds: See `vjp`.

    Attributes:
        tape: The tape for new nodes.
        xs: The tensors to differentiate with respect to.
        ys: The tensors to differentiate.
    """

    def __init__(
        self,
        model: ModelLike,
        xs: str | Sequence[str] | None,
        y: str | Sequence[str] | None,
        seeds: int | bool | None = None,
    ) -> None:
        if seeds is False:
            seeds = None
        what = "seeds (a number, True or None)"
        self._seeds = seeds if seeds is None or seeds is True else whole_number(what, seeds, 1)
        self._proto, folder = convert.load(model)
        self._model = normalize(convert.to_ir(self._proto, folder))
        infer_types(self._model)
        graph = self._model.graph
        names = Names(graph)
        for name in algorithm_names(self._proto):
            names.take(name)
        self.tape = Tape(graph, names=names)
        self.ys = [self.tape.tensor(value) for value in self._ys(y)]
        self.xs = [self.tape.tensor(value) for value in self._xs(xs)]

    def put_out(self, tensor: Tensor, name: str) -> None:
        """Makes a tensor an output, with a numeric suffix if the name is already used."""
        self.tape.output(tensor, name)

    def for_seeds(self, likes: Sequence[Tensor], formula: Formula) -> Sequence[Tensor]:
        """Adds a seed input for each tensor, and returns the derivatives for these seeds."""
        axis: list[Dim] = []
        if self._seeds is True:
            axis = [self._symbol()]
        elif self._seeds is not None:
            axis = [self._seeds]
        inputs = []
        for like in likes:
            shape = None if like.shape is None else [*axis, *like.shape]
            inputs.append(self.tape.input(f"seed_{like.name}", like.dtype, shape))
        return _for_each(self.tape, inputs, formula) if axis else formula(self.tape, *inputs)

    def write(self, lowered: bool) -> onnx.ModelProto:
        """Returns the model."""
        imports = self.tape.graph.opset_imports
        imports.setdefault(GRADIENT_DOMAIN, 1)
        result = to_proto(lower_ir(self._model) if lowered else self._model)
        if name_tensors(result.graph.node):
            for entry in list(result.opset_import):
                if entry.domain == BOUND_DOMAIN:
                    result.opset_import.remove(entry)
        for info in self._proto.training_info:  # one by one: `extend` fails for messages of 2 GB
            result.training_info.add().CopyFrom(info)
        return result

    def _symbol(self) -> str:
        """Returns a name for a symbolic dimension that the model does not use."""
        taken = Names()
        for value in (*self.tape.graph.inputs, *(each.value for each in (*self.xs, *self.ys))):
            for dim in value.shape or ():
                taken.take(str(dim))
        return taken.unique(_SEEDS)

    def _ys(self, names: str | Sequence[str] | None) -> Sequence[ir.Value]:
        if names is not None:
            return self._named("y", names)
        graph = self.tape.graph
        value = default_output(graph.outputs)
        if value is None:
            listed = ", ".join(f"'{v.name}' ({v.type or 'unknown'})" for v in graph.outputs)
            raise ModelError(
                f"y: the model has no floating-point output, only {listed}; pass the name of "
                "another tensor as y="
            )
        return [self._checked("y", value)]

    def _xs(self, names: str | Sequence[str] | None) -> Sequence[ir.Value]:
        graph = self.tape.graph
        if names is not None:
            return self._named("xs", names)
        inputs = [value for value in graph.inputs if value.name not in graph.initializers]
        found = [v for v in inputs if isinstance(v.type, ir.TensorType) and is_float(v)]
        if not found:
            listed = ", ".join(f"'{v.name}' ({v.type or 'unknown'})" for v in inputs) or "none"
            raise ModelError(
                f"xs: the model has no floating-point input, only {listed}; pass names of other "
                "tensors as xs=, for example the output of an embedding"
            )
        return found

    def _named(self, role: str, names: str | Sequence[str]) -> Sequence[ir.Value]:
        """Returns tensors of the main graph by name."""
        graph = self.tape.graph
        values = [*graph.inputs, *graph.initializers.values()]
        values += [value for node in graph for value in node.outputs]
        known = {value.name: value for value in values if value.name}
        if not isinstance(names, Iterable):
            raise ArgumentError(f"{role} must be one or more names of tensors, got {names!r}")
        named = [names] if isinstance(names, str) else list(names)
        if not named:
            raise ArgumentError(f"{role} is empty; name at least one tensor, or omit {role}")
        for name in named:
            if not isinstance(name, str):
                raise ArgumentError(f"{role} must be one or more names of tensors, got {name!r}")
            if name not in known:
                raise ModelError(
                    f"{role}: the main graph has no tensor '{name}'; {did_you_mean(name, known)}"
                )
            if named.count(name) > 1:
                raise ArgumentError(f"{role}: '{name}' is listed twice; list it once")
        return [self._checked(role, known[name]) for name in named]

    def _checked(self, role: str, value: ir.Value) -> ir.Value:
        """Returns a tensor, if it is floating-point."""
        kind = value.type
        if kind is None:
            raise ModelError(
                f"{role}: the type of tensor '{value.name}' is unknown; add a value_info for it"
            )
        if not isinstance(kind, ir.TensorType) or not is_float(value):
            raise ModelError(
                f"{role}: tensor '{value.name}' must be a floating-point tensor, got type {kind}"
            )
        return value


def _on(tape: Tape, tensor: Tensor) -> Tensor:
    """Returns a tensor for use on a tape, which may belong to a subgraph."""
    return tape.tensor(tensor.value)


def _dot(
    tape: Tape, tensors: Sequence[Tensor], weights: Sequence[Tensor], likes: Sequence[Tensor]
) -> Tensor:
    """Returns the scalar Σ tensors · weights; both have the shapes of ``likes``."""
    terms = [
        (_on(tape, tensor) * of_shape(weight, _on(tape, like))).sum()
        for tensor, weight, like in zip(tensors, weights, likes, strict=True)
    ]
    return _total(terms)


def _total(numbers: Sequence[Tensor]) -> Tensor:
    """Returns the sum of scalars, which may have different types."""
    first = numbers[0]
    return functools.reduce(operator.add, [number.astype(first.dtype) for number in numbers])


def _for_each(tape: Tape, sequences: Sequence[Tensor], formula: Formula) -> Sequence[Tensor]:
    """Emits a Scan that applies a formula to each slice of some tensors along the first axis.

    Args:
        tape: The tape for the node.
        sequences: The tensors, of equal length.
        formula: A function of the tape of the body and a slice of each tensor. Other tensors that
            it reads come from the outer graph and are computed once.

    Returns:
        The results, each with a leading axis.
    """
    body = tape.subgraph("each")
    slices = [
        body.input(f"{each.name}_each", each.dtype, each.shape and each.shape[1:])
        for each in sequences
    ]
    with body:
        results = [op.Identity(result) for result in formula(body, *slices)]
    for result in results:
        body.graph.outputs.append(result.value)
    node = ir.Node(
        "",
        "Scan",
        [sequence.value for sequence in sequences],
        [ir.AttrGraph("body", body.graph), ir.AttrInt64("num_scan_inputs", len(sequences))],
        num_outputs=len(results),
    )
    tape.append(node)
    length = sequences[0].shape[0] if sequences[0].shape else None
    for output, result in zip(node.outputs, results, strict=True):
        output.type = result.value.type
        if result.shape is not None:
            output.shape = ir.Shape([length, *result.shape])
    return [tape.tensor(output) for output in node.outputs]
