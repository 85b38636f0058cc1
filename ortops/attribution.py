"""Attributions: models that also output which parts of their input a prediction depends on.

Each function takes a classifier and returns it with the additional output ``attribution``, in
standard operators only, so that an explanation is served like a prediction, in any language and in
a browser.

Token ids have no gradient. What is explained is then the embedding that they choose, and the
attribution is a score for each token: the sum over its embedding.

The explained score is an element of each row of the model's first floating-point output, of shape
[batch, classes]:

===================  =========================================================================
``target``           the score of
===================  =========================================================================
None                 the class with the highest score in each row
an integer           this class
``"input"``          the class in an additional int64 input ``target`` [batch]
===================  =========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortops._common.arguments import boolean, number, text, whole_number
from ortops._common.numbers import Array
from ortops.derivatives.builder import Builder, for_each
from ortops.engine.building.readers import readers
from ortops.engine.lowering import infer_computed_types, lower_ir, normalize
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph import convert
from ortops.graph.autodiff.grad import grad
from ortops.graph.edit import (
    ancestor_nodes,
    copy_node,
    dependent_values,
    is_float,
    nodes_between,
)
from ortops.graph.files.loading import ModelLike, blame_model
from ortops.graph.files.serialization import GRADIENT_DOMAIN, to_proto
from ortops.graph.operators import CONVOLUTIONS, ELEMENTWISE
from ortops.graph.shapes import reshape_like
from ortops.graph.tensor import Tape, Tensor, op, shape_of, zeros_like

__all__ = ["grad_cam", "integrated_gradients", "saliency", "smooth_grad"]

_WITHOUT_RANDOM = 22
"""From this opset on, onnxruntime's only operator that draws random numbers is Dropout."""

_BITS = 24
"""The number of random bits of a uniformly distributed float32."""

Target: TypeAlias = int | Literal["input"] | None
"""Which score of each row is explained; see `ortops.attribution`."""

Baseline: TypeAlias = npt.ArrayLike | Literal["input"]
"""The input without information; see `integrated_gradients`."""


@blame_model
def saliency(
    model: ModelLike,
    *,
    target: Target = None,
    absolute: bool = True,
    input: str | Sequence[str] | None = None,  # noqa: A002 (the word of ONNX)
    output: str | None = None,
) -> onnx.ModelProto:
    """Returns a model that also outputs the gradient of a score with respect to the input.

    Args:
        model: A ModelProto, its bytes or its path; it is not modified. The result has no
            training_info.
        target: Which score is explained; see `ortops.attribution`.
        absolute: Whether to return absolute values, as the paper does.
        input: The name of the input to explain, or a list of names; by default, the first
            floating-point input, or else the first with token ids. Other inputs, such as an
            attention mask, stay as they are.
        output: The name of the scores; by default, the first floating-point output. Logits are
            better than probabilities, whose gradients vanish for certain predictions.

    Returns:
        A new model with an output ``attribution`` of the shape and dtype of the input, or of the
        shape of the ids; ``attribution_<input>`` for each of several.

    Raises:
        ArgumentError: If an argument is not valid.
        ModelError: If the model is invalid, or has no such input or output.
        UnsupportedError: If an operator has no gradient.

    Source: Simonyan et al., Deep Inside Convolutional Networks, 2013, https://arxiv.org/abs/1312.6034

    Example:
        >>> from ortops.docs import examples
        >>> model = saliency(examples.lenet())
        >>> onnx.helper.printable_value_info(model.graph.output[-1])
        '%attribution[FLOAT, batchx1x8x8]'
    """
    scene = _Scene(model, target, input, output)
    boolean("absolute", absolute)
    with scene.tape:
        slopes = grad(scene.score, scene.xs)
        return scene.write([op.Abs(slope) if absolute else slope for slope in slopes])


@blame_model
def integrated_gradients(
    model: ModelLike,
    *,
    steps: int = 50,
    baseline: Baseline | Mapping[str, Baseline] = 0.0,
    target: Target = None,
    input: str | Sequence[str] | None = None,  # noqa: A002 (the word of ONNX)
    output: str | None = None,
) -> onnx.ModelProto:
    """Returns a model that also outputs integrated gradients.

    For each element, this is (x − baseline) · ∫₀¹ ∂score / ∂x at baseline + α (x − baseline) dα,
    computed by Gauss–Legendre quadrature. The attributions of a row add up to the difference of its
    scores at the input and at the baseline, up to the error of the quadrature. Several inputs move
    together, on one path; those that are not named stay as they are.

    Args:
        model: See `saliency`.
        steps: The number of points of the quadrature. The model runs once per point, one after the
            other.
        baseline: The input without information: a number, an array that is broadcast to the input,
            or ``"input"`` for an additional input ``baseline`` of the same shape, called
            ``baseline_<input>`` for each of several. A dict has one for each input by name, 0.0
            where it lacks one. Of token ids, integers are ids, such as that of the padding, and
            floats are elements of embeddings, such as the zeros by default.
        target: See `saliency`. The class is that of the input, not of the points.
        input: See `saliency`.
        output: See `saliency`.

    Returns:
        See `saliency`.

    Raises:
        ArgumentError: See `saliency`.
        ModelError: See `saliency`.
        UnsupportedError: See `saliency`.

    Source: Sundararajan et al., Axiomatic Attribution for Deep Networks, 2017,
    https://arxiv.org/abs/1703.01365

    Example:
        >>> from ortops.docs import examples
        >>> model = integrated_gradients(examples.lenet(), baseline="input", target="input")
        >>> [value.name for value in model.graph.input]
        ['images', 'target', 'baseline']
    """
    whole_number("steps", steps, 1)
    scene = _Scene(model, target, input, output)
    with scene.tape:
        starts = scene.baselines(baseline)
        nodes, weights = (each / 2 for each in np.polynomial.legendre.leggauss(steps))
        paths = [x - start for x, start in zip(scene.xs, starts, strict=True)]

        def weighted(tape: Tape, position: Tensor, weight: Tensor) -> list[Tensor]:
            given = [
                tape.tensor(start.value) + position.astype(path.dtype) * tape.tensor(path.value)
                for start, path in zip(starts, paths, strict=True)
            ]
            return [weight.astype(slope.dtype) * slope for slope in scene.slopes(tape, given)]

        points = [np.asarray(each, scene.x.dtype) for each in (nodes + 0.5, weights)]
        constants = [scene.tape.constant(each) for each in points]
        means = for_each(scene.tape, constants, weighted, start=[zeros_like(x) for x in scene.xs])
        return scene.write([path * mean for path, mean in zip(paths, means, strict=True)])


@blame_model
def smooth_grad(
    model: ModelLike,
    *,
    samples: int = 25,
    noise: float = 0.15,
    seed: int | None = None,
    absolute: bool = True,
    target: Target = None,
    input: str | Sequence[str] | None = None,  # noqa: A002 (the word of ONNX)
    output: str | None = None,
) -> onnx.ModelProto:
    """Returns a model that also outputs the mean of `saliency` over noisy copies of the input.

    Args:
        model: See `saliency`.
        samples: The number of noisy copies. The model runs once per copy, one after the other.
        noise: The standard deviation of the normally distributed noise, as a fraction of the range
            (maximum − minimum) of each row of the input.
        seed: A seed of the noise. onnxruntime continues the sequence from run to run, and starts it
            again in a new session. By default, each session has other noise.
        absolute: See `saliency`.
        target: See `saliency`. The class is that of the input, not of the noisy copies.
        input: See `saliency`.
        output: See `saliency`.

    Returns:
        See `saliency`.

    Raises:
        ArgumentError: See `saliency`.
        ModelError: See `saliency`.
        UnsupportedError: See `saliency`.

    Source: Smilkov et al., SmoothGrad, 2017, https://arxiv.org/abs/1706.03825

    Example:
        >>> from ortops.docs import examples
        >>> model = smooth_grad(examples.lenet(), samples=10, noise=0.1)
        >>> [value.name for value in model.graph.output]
        ['logits', 'attribution']
    """
    whole_number("samples", samples, 1)
    number("noise", noise, minimum=0.0)
    if seed is not None:
        whole_number("seed", seed)
    boolean("absolute", absolute)
    scene = _Scene(model, target, input, output)
    with scene.tape:
        deviations = []
        for x in scene.xs:
            axes = list(range(1, scene.rank(x)))
            spread = op.ReduceMax(x, axes, keepdims=1) - op.ReduceMin(x, axes, keepdims=1)
            deviations.append(spread * noise)

        def noisy(tape: Tape, share: Tensor) -> list[Tensor]:
            points = []
            for place, (x, deviation) in enumerate(zip(scene.xs, deviations, strict=True)):
                given = tape.tensor(x.value)
                drawn = _normal(given, None if seed is None else seed + place, scene.opset)
                points.append(given + drawn * tape.tensor(deviation.value))
            slopes = scene.slopes(tape, points)
            return [share.astype(s.dtype) * (op.Abs(s) if absolute else s) for s in slopes]

        shares = scene.tape.constant(np.full(samples, 1 / samples, scene.x.dtype))
        zeros = [zeros_like(x) for x in scene.xs]
        return scene.write(list(for_each(scene.tape, [shares], noisy, start=zeros)))


@blame_model
def grad_cam(
    model: ModelLike,
    *,
    layer: str | None = None,
    upsample: bool = True,
    target: Target = None,
    input: str | None = None,  # noqa: A002 (the word of ONNX)
    output: str | None = None,
) -> onnx.ModelProto:
    """Returns a model that also outputs a class activation map (Grad-CAM).

    The map is relu(Σ over channels of a · mean(∂score / ∂a)), where a are the activations of a
    layer, and the mean is over its positions.

    Args:
        model: See `saliency`.
        layer: The name of a node or tensor with activations of shape [batch, channels, …]; by
            default, the output of the last convolution before the scores.
        upsample: Whether the map is interpolated linearly to the height and width of the input;
            otherwise, it has those of the layer.
        target: See `saliency`.
        input: The name of the input; by default, the first floating-point input.
        output: See `saliency`.

    Returns:
        A new model with an output ``attribution`` of shape [batch, 1, height, width]. The input may
        be [batch, channels, height, width] or [batch, height, width, channels].

    Raises:
        ArgumentError: See `saliency`.
        ModelError: See `saliency`; or if there is no such layer, or no convolution.
        UnsupportedError: See `saliency`.

    Source: Selvaraju et al., Grad-CAM, 2016, https://arxiv.org/abs/1610.02391

    Example:
        >>> from ortops.docs import examples
        >>> model = grad_cam(examples.lenet())
        >>> onnx.helper.printable_value_info(model.graph.output[-1])
        '%attribution[FLOAT, batchx1x8x8]'
    """
    boolean("upsample", upsample)
    if input is not None:
        text("input", input)
    scene = _Scene(model, target, input, output)
    with scene.tape:
        activations = scene.layer(layer)
        axes = list(range(2, scene.rank(activations)))
        weights = op.ReduceMean(grad(scene.score, activations), axes, keepdims=1)
        found = op.Relu(op.ReduceSum(weights * activations, [1], keepdims=1))
        if upsample:
            found = scene.resized(found, activations)
        return scene.write([found])


def _normal(like: Tensor, seed: int | None, opset: int) -> Tensor:
    """Returns normally distributed numbers of the shape and dtype of a tensor."""
    if opset < _WITHOUT_RANDOM:
        return op.RandomNormalLike(like, seed=None if seed is None else float(seed))
    shape = op.Concat([2, _BITS], shape_of(like), axis=0)
    ones = op.Expand(np.float32(1), shape)
    # The mask, because onnxruntime removes a Dropout in a subgraph if only its output is read.
    _, mask = op.Dropout(ones, np.float32(0.5), True, outputs=2, seed=seed)
    bits = mask.astype(np.float32)
    values = np.float32(0.5) ** np.arange(1, _BITS + 1, dtype=np.float32)
    uniform = op.ReduceSum(bits * values.reshape(-1, *[1] * like.ndim), [1], keepdims=0)
    first, second = (op.Gather(uniform, np.int64(index), axis=0) for index in (0, 1))
    radius = op.Sqrt(np.float32(-2) * op.Log(np.float32(1) - first))  # the Box–Muller transform
    return (radius * op.Cos(np.float32(2 * np.pi) * second)).astype(like.dtype)


class _Scene:
    """A classifier to which an attribution is added.

    Args:
        model: See `saliency`.
        target: See `saliency`.
        names: The name of the input to explain, or several, or None.
        output: The name of the scores, or None.

    Attributes:
        tape: The tape for new nodes.
        xs: The inputs to explain.
        x: The first of them.
        score: The sum of the explained scores of all rows.
        opset: The version of the default operator set.
    """

    def __init__(
        self,
        model: ModelLike,
        target: Target,
        names: str | Sequence[str] | None,
        output: str | None,
    ) -> None:
        if output is not None:
            text("output", output)
        self._model = normalize(convert.to_ir(convert.load_light(model)))
        infer_computed_types(self._model)
        self._ids: dict[str, tuple[ir.Value, ir.Value]] = {}
        given = self._embedded(names)
        builder = Builder(self._model, given, output, arguments=("input", "output"))
        self.tape = builder.tape
        self.xs = builder.xs[: 1 if names is None else None]
        self.x, self._scores = self.xs[0], builder.ys[0]
        self.opset = self.tape.graph.opset_imports[""]
        self._nodes = list(self.tape.graph)
        with self.tape:
            self._classes = self._target(target)
            self.score = self._explained(self._scores)

    def _embedded(self, names: str | Sequence[str] | None) -> Any:
        """Returns names of tensors to explain: in place of inputs with token ids, embeddings."""
        graph = self._model.graph
        inputs = {v.name or "": v for v in graph.inputs if v.name not in graph.initializers}
        if names is None and not any(map(is_float, inputs.values())):
            names = next((name for name, value in inputs.items() if _embeddings(value)), None)
        if names is None or not isinstance(names, str | list | tuple):
            return names
        found: list[Any] = [names] if isinstance(names, str) else [*names]
        for place, name in enumerate(found):
            if isinstance(name, str) and name in inputs and not is_float(inputs[name]):
                made = _embeddings(inputs[name])
                if len(made) != 1:
                    raise ModelError(
                        f"input: '{name}' is of type {inputs[name].type} and must be the ids of "
                        f"one embedding, got {len(made)}; pass the name of a floating-point tensor"
                    )
                found[place] = made[0].name
                self._ids[made[0].name or ""] = inputs[name], made[0]
        return found

    def _label(self, x: Tensor) -> str:
        """Returns the name of an input to explain."""
        return (self._ids[x.name][0].name if x.name in self._ids else x.name) or ""

    def _target(self, target: Target) -> Tensor | None:
        """Returns the explained class of each row [batch, 1]; None for scores without classes."""
        scores = self._scores
        rank = self.rank(scores)
        if rank > 2:
            raise ModelError(
                f"output: '{scores.name}' must have the shape [batch, classes], got {scores!r}; "
                "pass the name of another tensor as output="
            )
        if rank < 2:
            if target is not None:
                raise ArgumentError(f"target must be None for {scores!r}, which has no classes")
            return None
        if target is None:
            return op.ArgMax(scores, axis=1, keepdims=1)
        if isinstance(target, str) and target == "input":
            batch = (self.x.shape or (None,))[0]
            return op.Unsqueeze(self.tape.input("target", np.int64, [batch]), [1])
        count = (scores.shape or (None, None))[1]
        last = count - 1 if isinstance(count, int) else None
        try:
            chosen = whole_number("target", target, 0, last)
        except ArgumentError as error:
            raise ArgumentError(f"{error}; or pass None or 'input'") from None
        rows = op.Concat(op.Shape(scores, end=1), [1], axis=0)
        return op.Expand(np.array([[chosen]]), rows)

    def slopes(self, tape: Tape, points: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the gradients of the score at other inputs, for the classes of the given ones.

        Args:
            tape: The tape of a subgraph, to which the model is copied.
            points: The other inputs.
        """
        moved = {x.value: point.value for x, point in zip(self.xs, points, strict=True)}
        return grad(self._explained(self._moved(tape, moved, self._scores.value)), list(points))

    def _moved(self, tape: Tape, copies: dict[ir.Value, ir.Value], end: ir.Value) -> Tensor:
        """Returns a tensor as the model computes it from other values than its own."""
        starts = list(copies)
        nodes = nodes_between(self._nodes, starts, end)
        reached = dependent_values(nodes, starts)
        for node in nodes:
            if not reached.isdisjoint(node.outputs):
                copy = copy_node(node, copies)
                copies |= dict(zip(node.outputs, copy.outputs, strict=True))
                tape.append(copy)
        return tape.tensor(copies.get(end, end))

    def _explained(self, scores: Tensor) -> Tensor:
        """Returns the sum of the explained scores."""
        if self._classes is not None:
            classes = scores.tape.tensor(self._classes.value)
            scores = op.GatherElements(scores, classes, axis=1)
        return scores.sum()

    def baselines(self, given: Any) -> list[Tensor]:
        """Returns the baselines of integrated gradients, of the shapes of the inputs."""
        if not isinstance(given, Mapping):
            return [self._baseline(x, given) for x in self.xs]
        names = [self._label(x) for x in self.xs]
        for name in given:
            if name not in names:
                raise ArgumentError(
                    f"baseline: '{name!s:.80}' is no input to explain; "
                    + did_you_mean(str(name), names)
                )
        return [self._baseline(x, given.get(self._label(x), 0.0)) for x in self.xs]

    def _baseline(self, x: Tensor, given: Any) -> Tensor:
        is_input = isinstance(given, str) and given == "input"
        try:
            array: Array = np.asarray(0 if is_input else given)
            array = array if array.dtype.kind in "iu" else array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"baseline must be a number, an array or 'input', got {given!r:.80}"
            ) from error
        is_ids = array.dtype.kind in "iu" and x.name in self._ids
        ids, embedding = self._ids[x.name] if is_ids else (x.value, x.value)
        like = self.tape.tensor(ids)
        dims = like.shape or ()
        fits = len(array.shape) <= len(dims) and all(
            size == 1 or dim == size or not isinstance(dim, int)
            for size, dim in zip(array.shape[::-1], dims[::-1], strict=False)
        )
        if not fits:
            raise ArgumentError(
                f"baseline has the shape {list(array.shape)}, which cannot be broadcast to {like!r}"
            )
        if is_input:
            name = "baseline" if len(self.xs) == 1 else f"baseline_{self._label(x)}"
            start = reshape_like(self.tape.input(name, like.dtype, like.shape), like)
        else:
            start = op.Expand(array.astype(like.dtype), shape_of(like)).with_shape_of(like)
        return self._moved(self.tape, {ids: start.value}, embedding).with_shape_of(x)

    def layer(self, name: str | None) -> Tensor:
        """Returns the activations of a layer."""
        if name is None:
            found = self._last_convolution()
        else:
            text("layer", name)
            by_name = {node.name: node.outputs[0] for node in self._nodes if node.name}
            by_name |= {
                value.name: value for node in self._nodes for value in node.outputs if value.name
            }
            if name not in by_name:
                hint = did_you_mean(name, filter(None, by_name))
                raise ModelError(f"layer: the model has no node or tensor '{name}'; {hint}")
            found = by_name[name]
        tensor = self.tape.tensor(found)
        if not is_float(found) or self.rank(tensor) < 3:
            raise ModelError(
                f"layer: '{found.name}' must be a floating-point tensor [batch, channels, …], got "
                f"{tensor!r}"
            )
        return tensor

    def _last_convolution(self) -> ir.Value:
        """Returns the output of the last convolution that the scores depend on."""
        wanted = ancestor_nodes(self._scores.value, set())
        found = [n for n in self._nodes if n in wanted and n.op_type in CONVOLUTIONS]
        if not found:
            raise ModelError("layer: the model has no convolution; pass the name of a layer")
        return found[-1].outputs[0]

    def resized(self, found: Tensor, activations: Tensor) -> Tensor:
        """Returns a map [batch, 1, …] with the height and width of the input."""
        x = self.x
        rank = self.rank(activations)
        if self.rank(x) != rank:
            raise ModelError(
                f"grad_cam: the input {x!r} and the layer {activations!r} have different ranks, so "
                "the map cannot be upsampled; pass upsample=False"
            )
        first = 1 if _is_channels_last(x.value) else 2
        sizes = op.Shape(x, start=first, end=first + rank - 2)
        shape = op.Concat(op.Shape(found, end=2), sizes, axis=0)
        resized: Tensor = op.Resize(
            *(found, None, None, shape),
            mode="linear",
            coordinate_transformation_mode="half_pixel",
        )
        dims = x.shape or ()
        return resized.with_shape([dims[0], 1, *dims[first : first + rank - 2]])

    def rank(self, tensor: Tensor) -> int:
        """Returns the rank of a tensor.

        Raises:
            ModelError: If it is unknown.
        """
        if tensor.shape is None:
            raise ModelError(
                f"the rank of '{tensor.name}' is unknown; declare its shape in the model's inputs"
            )
        return len(tensor.shape)

    def write(self, attributions: Sequence[Tensor]) -> onnx.ModelProto:
        """Returns the model with the attributions as its last outputs."""
        for x, attribution in zip(self.xs, attributions, strict=True):
            if x.name in self._ids:
                attribution = op.ReduceSum(attribution, [-1], keepdims=0)
            name = "attribution" if len(self.xs) == 1 else f"attribution_{self._label(x)}"
            self.tape.output(attribution, name)
        self._model.graph.opset_imports.setdefault(GRADIENT_DOMAIN, 1)
        return to_proto(lower_ir(self._model))


def _embeddings(ids: ir.Value) -> list[ir.Value]:
    """Returns the embeddings of token ids: rows of tables that are chosen by them alone."""
    nodes = dict.fromkeys(reader.node for reader in readers(ids) if reader.index == 1)
    made = (n.outputs[0] for n in nodes if n.op_type in ("Gather", "GatherBlockQuantized"))
    return [value for value in made if is_float(value)]


def _is_channels_last(value: ir.Value) -> bool:
    """Whether images are [batch, height, width, channels]: transposed before they are convolved."""
    pending, seen = [value], {value}
    while pending:
        for use in pending.pop(0).uses():
            node = use.node
            if node.op_type == "Transpose":
                perm = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
                return perm == [0, len(perm) - 1, *range(1, len(perm) - 1)]
            if node.op_type in CONVOLUTIONS:
                return False
            if node.op_type in ELEMENTWISE or node.op_type == "Pad":
                pending += [each for each in node.outputs if each not in seen]
                seen.update(node.outputs)
    return False
