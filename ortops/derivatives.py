"""Derivatives as a tool of their own: a model in, a model out that has its derivatives too.

Each function takes a model and returns a new one, whose outputs are the model's own and then the
derivatives, and whose inputs are the model's own and then the seeds:

========  ==============  ================  ============  ========================================
function  inputs          outputs           shaped like   which are
========  ==============  ================  ============  ========================================
gradient                  ``d_<y>_d_<x>``   x             ∂ sum(y) / ∂x
vjp       ``seed_<y>``    ``vjp_<x>``       x             ∂ (Σ over y of sum(seed · y)) / ∂x
jvp       ``seed_<x>``    ``jvp_<y>``       y             Σ over x of ∂y/∂x · seed
hvp       ``seed_<x>``    ``hvp_<x>``       x             Σ over x' of ∂² sum(y) / ∂x∂x' · seed'
jacobian                  ``d_<y>_d_<x>``   y, then x     ∂y / ∂x
========  ==============  ================  ============  ========================================

A seed has the shape and dtype of its tensor. A name that is taken gets a number behind it, as in
``seed_x_1``. By default y is the first floating-point output, and x are all floating-point inputs;
others are chosen by name, several of each.

What these functions emit are nodes of the domain's Gradient beside standard ones, or only standard
ones with ``lowered=True``. Both can be given to these functions again, trained and served.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from ortops.autodiff.grad import grad, of_shape
from ortops.errors import ModelError, did_you_mean
from ortops.graph import convert
from ortops.graph.convert import ModelLike
from ortops.graph.edit import is_float
from ortops.graph.serialization import (
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
"""Derivatives on a tape from seeds."""

_SEEDS = "seeds"


@convert.blame_model
def gradient(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that puts out the gradient of an output too.

    Args:
        model: A ModelProto, its bytes or its path; not changed. One below opset 21 is converted to
            it, and a message says so; functions are inlined.
        xs: The names of the tensors that it is differentiated with respect to: inputs,
            initializers, or tensors between, none of which is computed from another. All
            floating-point inputs that have no default by default.
        y: The name of the tensor that is differentiated, which counts as the sum of its elements,
            or several names; the first floating-point output by default.
        lowered: Whether the result has standard nodes only, as `ortops.lower` makes them, rather
            than nodes of the domain's Gradient.

    Returns:
        A new model with an output ``d_<y>_d_<x>`` for each y and x, of the shape and dtype of x.
        External data stay external, relative to the folder of the given file.

    Raises:
        ModelError: If the model is not legal, has no such tensor, or one of another type, or if an
            x is computed from another.
        UnsupportedError: With ``lowered``, if an operator between has no gradient.

    Example:
        >>> from models import mlp
        >>> model = gradient(mlp.mlp((4, 16, 2)))
        >>> [value.name for value in model.graph.output]
        ['logits', 'd_logits_d_images']
    """
    scene = _Scene(model, xs, y)
    with scene.tape:
        for each in scene.ys:
            for x, slope in zip(scene.xs, grad(each, scene.xs), strict=True):
                scene.put_out(slope, f"d_{each.name}_d_{x.name}")
    return scene.write(lowered)


@convert.blame_model
def vjp(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    seeds: int | bool | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that puts out vector-Jacobian products too: reverse mode.

    Args:
        model: See `gradient`.
        xs: See `gradient`.
        y: See `gradient`.
        seeds: How many seeds one run takes, True for any number: the input and the outputs then
            have a leading axis for them, and all share one forward pass; a run has at least one.
            By default it is one, without that axis.
        lowered: See `gradient`.

    Returns:
        A new model with an input ``seed_<y>`` for each y and an output ``vjp_<x>`` for each x, of
        their shapes and dtypes.

    Raises:
        ModelError: See `gradient`; or if ``seeds`` is no positive number.
        UnsupportedError: See `gradient`.

    Example:
        >>> from models import mlp
        >>> model = vjp(mlp.mlp((4, 16, 2)), seeds=3)
        >>> ends = model.graph.input[-1], model.graph.output[-1]
        >>> [onnx.helper.printable_value_info(value) for value in ends]
        ['%seed_logits[FLOAT, 3xbatchx2]', '%vjp_images[FLOAT, 3xbatchx4]']
    """
    scene = _Scene(model, xs, y, seeds)

    def pulled_back(tape: Tape, *seeds: Tensor) -> Sequence[Tensor]:
        return grad(_dot(tape, scene.ys, seeds, scene.ys), [_on(tape, x) for x in scene.xs])

    with scene.tape:
        for x, product in zip(scene.xs, scene.for_seeds(scene.ys, pulled_back), strict=True):
            scene.put_out(product, f"vjp_{x.name}")
    return scene.write(lowered)


@convert.blame_model
def jvp(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    seeds: int | bool | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that puts out Jacobian-vector products too: what forward mode computes.

    A vector-Jacobian product is linear in its vector, and the transpose of that linear map is the
    map wanted, so it is differentiated once more, by its vector. Nothing of the backward pass is
    left when that is lowered, but for what the map itself reads.

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
        ModelError: See `vjp`.
        UnsupportedError: See `gradient`.

    Example:
        >>> from models import mlp
        >>> model = jvp(mlp.mlp((4, 16, 2)))
        >>> [value.name for value in (*model.graph.input, *model.graph.output)]
        ['images', 'seed_images', 'logits', 'jvp_logits']
    """
    scene = _Scene(model, xs, y, seeds)
    with scene.tape:
        vectors = [op.Identity(zeros_like(each)).with_shape_of(each) for each in scene.ys]
        products = grad(_dot(scene.tape, scene.ys, vectors, scene.ys), scene.xs)

        def pushed_forward(tape: Tape, *seeds: Tensor) -> Sequence[Tensor]:
            return grad(_dot(tape, products, seeds, scene.xs), [_on(tape, v) for v in vectors])

        for each, product in zip(scene.ys, scene.for_seeds(scene.xs, pushed_forward), strict=True):
            scene.put_out(product, f"jvp_{each.name}")
    return scene.write(lowered)


@convert.blame_model
def hvp(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    seeds: int | bool | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that puts out products of a Hessian and vectors too.

    Args:
        model: See `gradient`.
        xs: See `gradient`.
        y: See `gradient`. The Hessian is that of their sum, by all xs together.
        seeds: See `vjp`.
        lowered: See `gradient`.

    Returns:
        A new model with an input ``seed_<x>`` and an output ``hvp_<x>`` for each x, of its shape
        and dtype.

    Raises:
        ModelError: See `vjp`.
        UnsupportedError: See `gradient`.

    Example:
        >>> from models import mlp
        >>> model = hvp(mlp.mlp((4, 16, 2)))
        >>> [value.name for value in (*model.graph.input, *model.graph.output)]
        ['images', 'seed_images', 'logits', 'hvp_images']
    """
    scene = _Scene(model, xs, y, seeds)
    with scene.tape:
        slopes = grad(_total([each.sum() for each in scene.ys]), scene.xs)

        def product(tape: Tape, *seeds: Tensor) -> Sequence[Tensor]:
            return grad(_dot(tape, slopes, seeds, scene.xs), [_on(tape, x) for x in scene.xs])

        for x, result in zip(scene.xs, scene.for_seeds(scene.xs, product), strict=True):
            scene.put_out(result, f"hvp_{x.name}")
    return scene.write(lowered)


@convert.blame_model
def jacobian(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that puts out the Jacobian of an output too.

    It has a row for each element of y, of which there is at least one: as many backward passes,
    which share one forward pass. The Jacobian of `gradient` is the Hessian.

    Args:
        model: See `gradient`.
        xs: See `gradient`.
        y: See `gradient`.
        lowered: See `gradient`.

    Returns:
        A new model with an output ``d_<y>_d_<x>`` for each y and x, of shape y.shape + x.shape.

    Raises:
        ModelError: See `gradient`.
        UnsupportedError: See `gradient`.

    Example:
        >>> from models import mlp
        >>> model = jacobian(mlp.mlp((4, 16, 2)))
        >>> onnx.helper.printable_value_info(model.graph.output[-1])
        '%d_logits_d_images[FLOAT, batchx2xbatchx4]'
    """
    scene = _Scene(model, xs, y)
    with scene.tape:
        for each in scene.ys:
            for x, result in zip(scene.xs, _jacobians(scene.tape, each, scene.xs), strict=True):
                scene.put_out(result, f"d_{each.name}_d_{x.name}")
    return scene.write(lowered)


def _jacobians(tape: Tape, y: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the Jacobians of y by each x: the gradients of all its elements."""
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


class _Scene:
    """A model that derivatives are added to.

    Args:
        model: See `gradient`.
        xs: See `gradient`.
        y: See `gradient`.
        seeds: See `vjp`.

    Attributes:
        tape: Where nodes go.
        xs: The tensors that are differentiated with respect to.
        ys: The tensors that are differentiated.
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
        if seeds is not None and (not isinstance(seeds, int | np.integer) or seeds < 1):
            raise ModelError(
                f"seeds is {seeds!r}; a number from 1 on is accepted, True for any number of "
                "seeds, None for one without an axis"
            )
        self._seeds = seeds if seeds is None or seeds is True else int(seeds)
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
        """Makes a tensor an output, under the name or one with a number behind it."""
        self.tape.output(tensor, name)

    def for_seeds(self, likes: Sequence[Tensor], formula: Formula) -> Sequence[Tensor]:
        """Returns derivatives for seeds, which become inputs, each with the shape of a tensor."""
        axis: list[Dim] = []
        if self._seeds is True:
            axis = [self._symbol()]
        elif self._seeds is not None:
            axis = [self._seeds]
        inputs = []
        for like in likes:
            shape = like.shape
            made = self.tape.input(f"seed_{like.name}", like.dtype, [*axis, *(shape or ())])
            if shape is None:
                made.value.shape = None
            inputs.append(made)
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
        for info in self._proto.training_info:  # one by one: `extend` takes none of 2 GB
            result.training_info.add().CopyFrom(info)
        return result

    def _symbol(self) -> str:
        """Returns a symbol that no size of the model has."""
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
                f"y: the model has no floating-point output, but {listed}; name another tensor "
                "in y="
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
                f"xs: the model has no floating-point input, but {listed}; name other tensors in "
                "xs=, such as what an embedding puts out"
            )
        return found

    def _named(self, role: str, names: str | Sequence[str]) -> Sequence[ir.Value]:
        """Returns tensors of the main graph by name."""
        graph = self.tape.graph
        values = [*graph.inputs, *graph.initializers.values()]
        values += [value for node in graph for value in node.outputs]
        known = {value.name: value for value in values if value.name}
        if not isinstance(names, Iterable):
            raise ModelError(f"{role} is {names!r}; names of tensors are accepted")
        named = [names] if isinstance(names, str) else list(names)
        if not named:
            raise ModelError(f"{role} is empty; name at least one tensor, or leave it out")
        for name in named:
            if not isinstance(name, str):
                raise ModelError(f"{role}: {name!r} is no string; names of tensors are accepted")
            if name not in known:
                raise ModelError(
                    f"{role}: the main graph has no tensor '{name}'; {did_you_mean(name, known)}"
                )
            if named.count(name) > 1:
                raise ModelError(f"{role}: '{name}' is named twice; name it once")
        return [self._checked(role, known[name]) for name in named]

    def _checked(self, role: str, value: ir.Value) -> ir.Value:
        """Returns a tensor that has a derivative."""
        kind = value.type
        if kind is None:
            raise ModelError(
                f"{role}: the type of tensor '{value.name}' is unknown; add a value_info for it"
            )
        if not isinstance(kind, ir.TensorType) or not is_float(value):
            raise ModelError(
                f"{role}: tensor '{value.name}' is of type {kind}; a floating-point tensor is "
                "accepted"
            )
        return value


def _on(tape: Tape, tensor: Tensor) -> Tensor:
    """Returns a tensor as nodes on a tape, which may be of a graph inside, read it."""
    return tape.tensor(tensor.value)


def _dot(
    tape: Tape, tensors: Sequence[Tensor], weights: Sequence[Tensor], likes: Sequence[Tensor]
) -> Tensor:
    """Returns Σ tensors · weights, a number; both have the shapes of ``likes``."""
    terms = [
        (_on(tape, tensor) * of_shape(weight, _on(tape, like))).sum()
        for tensor, weight, like in zip(tensors, weights, likes, strict=True)
    ]
    return _total(terms)


def _total(numbers: Sequence[Tensor]) -> Tensor:
    """Returns the sum of scalars, which may be of several types."""
    first = numbers[0]
    return functools.reduce(operator.add, [number.astype(first.dtype) for number in numbers])


def _for_each(tape: Tape, sequences: Sequence[Tensor], formula: Formula) -> Sequence[Tensor]:
    """Emits a Scan: what a formula makes of each slice of some tensors, along their first axis.

    Args:
        tape: Where the node goes.
        sequences: The tensors, of equal length.
        formula: Takes the tape of the body and a slice of each; what else it reads comes from
            outside, computed once.

    Returns:
        Its results, each with a leading axis.
    """
    imports = dict(tape.graph.opset_imports)
    body = Tape(ir.Graph([], [], nodes=[], opset_imports=imports, name="each"), names=tape.names)
    slices = []
    for sequence in sequences:
        shape = sequence.shape
        slices.append(body.input(f"{sequence.name}_each", sequence.dtype, (shape or ())[1:]))
        if shape is None:
            slices[-1].value.shape = None
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
