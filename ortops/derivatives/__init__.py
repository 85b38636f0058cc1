"""Derivatives of a model: functions that return the model with additional derivative outputs.

Each function takes a model and returns a new one. The derivatives are appended to its outputs, and
the seeds to its inputs:

==========  ==============  ================  ============  ========================================
function    inputs          outputs           shaped like   which are
==========  ==============  ================  ============  ========================================
gradient                    ``d_<y>_d_<x>``   x             ∂ sum(y) / ∂x
cotangents                  ``d_<y>_d_<x>``   x             the same; the xs may depend on others
vjp         ``seed_<y>``    ``vjp_<x>``       x             ∂ (Σ over y of sum(seed · y)) / ∂x
jvp         ``seed_<x>``    ``jvp_<y>``       y             Σ over x of ∂y/∂x · seed
hvp         ``seed_<x>``    ``hvp_<x>``       x             Σ over x' of ∂² sum(y) / ∂x∂x' · seed'
jacobian                    ``d_<y>_d_<x>``   y, then x     ∂y / ∂x
==========  ==============  ================  ============  ========================================

A seed has the shape and dtype of its tensor. A name that is already used gets a numeric suffix, as
in ``seed_x_1``. By default, y is the first floating-point output and x are all floating-point
inputs; pass names to select one or more other tensors.

The returned models contain Gradient nodes in addition to standard nodes, or only standard nodes
with ``lowered=True``. Both can be differentiated again, trained and served.

`vmap` returns a model that computes all entries along a new axis of its inputs, and
`per_sample_gradient` one that computes the gradient of each row's own loss by the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import onnx
import onnx_ir as ir

from ortops._common.arguments import whole_number
from ortops.derivatives.builder import Builder
from ortops.derivatives.casadi_files import casadi
from ortops.derivatives.formulas import (
    add_cotangents,
    add_gradient,
    add_hvp,
    add_jacobian,
    add_jvp,
    add_vjp,
)
from ortops.derivatives.loss_graphs import model_with_loss
from ortops.derivatives.per_sample import per_sample_gradient
from ortops.derivatives.vmap import Axes, add_axis
from ortops.engine.lowering import infer_computed_types, infer_types, lower_ir, normalize
from ortops.errors import ArgumentError
from ortops.graph import convert
from ortops.graph.files import loading
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import has_domain
from ortops.graph.files.serialization import (
    GRADIENT_DOMAIN,
    algorithm_names,
    name_gradients,
    to_proto,
)
from ortops.losses import Inputs, LossLike
from ortops.surgery.reading import refuse_training

__all__ = [
    "casadi",
    "cotangents",
    "gradient",
    "hvp",
    "jacobian",
    "jvp",
    "per_sample_gradient",
    "vjp",
    "vmap",
]


@loading.blame_model
def gradient(
    model: ModelLike,
    *,
    xs: str | Sequence[str] | None = None,
    y: str | Sequence[str] | None = None,
    loss: LossLike | Literal[True] | None = None,
    inputs: Inputs | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that also outputs the gradient of an output, or of a loss.

    Args:
        model: A ModelProto, its bytes or its path; it is not modified. A model with an opset below
            21 is converted to opset 21, which is logged. Functions are inlined.
        xs: The names of the tensors to differentiate with respect to: inputs, initializers or
            intermediate tensors, which must not depend on each other. By default, all
            floating-point inputs without a default value.
        y: The name of the tensor to differentiate, or several names. The elements of a tensor are
            summed. By default, the first floating-point output.
        loss: A loss to differentiate instead of ``y``, as in `ortops.build_training_model`. True is
            the loss that a trainable file was built with. The result has the loss's inputs, such as
            ``labels``, the output ``loss``, and no training_info. The model runs in inference mode:
            Dropout drops nothing, and BatchNormalization uses running statistics.
        inputs: Inputs that the loss declares; see `ortops.build_training_model`.
        lowered: Whether to lower the result to standard nodes (see `ortops.lower`) instead of
            keeping Gradient nodes.

    Returns:
        A new model with an output ``d_<y>_d_<x>`` for each y and x, of the shape and dtype of x;
        with a loss, ``d_loss_d_<x>``. External data stay external, relative to the folder of the
        given file.

    Raises:
        ArgumentError: If ``xs`` or ``y`` are not names of tensors, or there is a loss as well as y.
        ModelError: If the model is invalid, if a tensor does not exist or is not floating-point,
            if an x depends on another (see `cotangents`), or the loss does not fit the model.
        UnsupportedError: With ``lowered``, if an operator between x and y has no gradient.

    Example:
        >>> from ortops.docs import examples
        >>> model = gradient(examples.mlp((4, 16, 2)))
        >>> [value.name for value in model.graph.output]
        ['logits', 'd_logits_d_images']
        >>> model = gradient(examples.mlp((4, 16, 2)), loss="SoftmaxCrossEntropy")
        >>> [value.name for value in (*model.graph.input, *model.graph.output)]
        ['images', 'labels', 'logits', 'loss', 'd_loss_d_images']
    """
    if loss is None:
        if inputs is not None:
            raise ArgumentError("gradient: inputs are those of a loss; pass loss=, too")
        return _with_outputs(model, add_gradient, lowered, xs, y)
    if y is not None:
        raise ArgumentError("gradient: give y or loss, not both: each is what is differentiated")
    if loss is True and inputs is not None:
        raise ArgumentError("gradient: the loss of the file has its inputs; leave out inputs=")
    work, name, added = model_with_loss(model, loss, inputs)
    add_gradient(Builder(work, xs, name, added=added))
    return _finished(work, lowered)


@loading.blame_model
def cotangents(
    model: ModelLike,
    xs: str | Sequence[str],
    *,
    y: str | Sequence[str] | None = None,
    lowered: bool = False,
) -> onnx.ModelProto:
    """Returns a model that also outputs the gradient of an output by any tensors, in one pass.

    Unlike in `gradient`, the tensors may depend on one another, such as the outputs of all layers:
    the gradient by one of them includes what reaches y through the others.

    Args:
        model: See `gradient`.
        xs: The names of the tensors to differentiate with respect to: floating-point inputs,
            initializers or intermediate tensors of the main graph.
        y: See `gradient`. There is one backward pass for each y.
        lowered: Whether to lower the result to standard nodes. Otherwise, it has a Gradient node
            for all tensors that no other x is computed from, one for those after these, and so
            on, because those of one node must not depend on each other; `ortops.lower` and
            `ortops.InferenceSession` compute all of them in one backward pass.

    Returns:
        A new model with an output ``d_<y>_d_<x>`` for each y and x, of the shape and dtype of x. It
        is zero if y does not depend on x.

    Raises:
        ArgumentError: See `gradient`.
        ModelError: If the model is invalid, or if a tensor does not exist, is in the body of
            another node, or is not floating-point.
        UnsupportedError: See `gradient`.

    Example:
        >>> from ortops.docs import examples
        >>> model = cotangents(examples.mlp((4, 16, 2)), ["images", "fc1.weight", "logits"])
        >>> [value.name for value in model.graph.output]
        ['logits', 'd_logits_d_images', 'd_logits_d_fc1.weight', 'd_logits_d_logits']
    """
    return _with_outputs(model, add_cotangents, lowered, xs, y)


@loading.blame_model
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
        >>> from ortops.docs import examples
        >>> model = vjp(examples.mlp((4, 16, 2)), seeds=3)
        >>> ends = model.graph.input[-1], model.graph.output[-1]
        >>> [onnx.helper.printable_value_info(value) for value in ends]
        ['%seed_logits[FLOAT, 3xbatchx2]', '%vjp_images[FLOAT, 3xbatchx4]']
    """
    return _with_outputs(model, add_vjp, lowered, xs, y, seeds)


@loading.blame_model
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
        >>> from ortops.docs import examples
        >>> model = jvp(examples.mlp((4, 16, 2)))
        >>> [value.name for value in (*model.graph.input, *model.graph.output)]
        ['images', 'seed_images', 'logits', 'jvp_logits']
    """
    return _with_outputs(model, add_jvp, lowered, xs, y, seeds)


@loading.blame_model
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
        >>> from ortops.docs import examples
        >>> model = hvp(examples.mlp((4, 16, 2)))
        >>> [value.name for value in (*model.graph.input, *model.graph.output)]
        ['images', 'seed_images', 'logits', 'hvp_images']
    """
    return _with_outputs(model, add_hvp, lowered, xs, y, seeds)


@loading.blame_model
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
        >>> from ortops.docs import examples
        >>> model = jacobian(examples.mlp((4, 16, 2)))
        >>> onnx.helper.printable_value_info(model.graph.output[-1])
        '%d_logits_d_images[FLOAT, batchx2xbatchx4]'
    """
    return _with_outputs(model, add_jacobian, lowered, xs, y)


@loading.blame_model
def vmap(
    model: ModelLike, in_axes: Axes = 0, out_axes: Axes = 0, *, size: int | None = None
) -> onnx.ModelProto:
    """Returns a model that computes the outputs for all entries along a new axis of its inputs.

    The results equal those of the model for each entry, stacked. Most operators compute all entries
    at once. The others run in a Scan over the entries: control flow, operators without a batching
    rule, and custom operators. Outputs must have the same shape for all entries.

    A random operator draws for each entry independently if it reads a tensor that differs between
    entries, as Dropout does, and otherwise once for all entries.

    Args:
        model: See `gradient`. Gradient nodes are lowered to standard nodes.
        in_axes: The place of the new axis in the inputs: an int for all inputs without a default
            value, a tuple with an int or None for each of them, or a dict by name. Inputs with
            None, and those that a dict lacks, do not get the axis. A negative number counts from
            the end of the new shape. An input with a default value that a dict names loses it.
        out_axes: The place of the axis in the outputs, in the same form; 0 for those that a dict
            lacks. None is possible only for outputs that do not depend on mapped inputs; with a
            number, such an output is repeated.
        size: The length of the axis. By default, the axis is dynamic. Convolutions of which the
            weights are mapped then run in a Scan; with a fixed size, they are grouped convolutions.

    Returns:
        A new model of standard nodes, with the input and output names of the model. An output that
        was an input and is not anymore gets a numeric suffix.

    Raises:
        ArgumentError: If the axes or the size are invalid, or no input is mapped.
        ModelError: If the model is invalid or has training_info, or if a mapped input or an output
            is a sequence.

    Example:
        >>> from ortops.docs import examples
        >>> model = vmap(examples.mlp((4, 16, 2)), out_axes=1)
        >>> ends = model.graph.input[0], model.graph.output[0]
        >>> [onnx.helper.printable_value_info(value) for value in ends]
        ['%images[FLOAT, mappedxbatchx4]', '%logits[FLOAT, batchxmappedx2]']
    """
    proto, folder = loading.load(model)
    refuse_training(proto, "use vmap before build_training_model")
    work = convert.to_ir(proto, folder)
    work = lower_ir(work) if has_domain(proto) else normalize(work)
    infer_types(work)
    length = None if size is None else whole_number("size", size, 0)
    add_axis(work, in_axes, out_axes, length)
    return to_proto(work)


def _with_outputs(
    model: ModelLike,
    add: Callable[[Builder], object],
    lowered: bool,
    xs: str | Sequence[str] | None,
    y: str | Sequence[str] | None,
    seeds: int | bool | None = None,
) -> onnx.ModelProto:
    """Returns a model with the outputs that a formula adds."""
    proto, folder = loading.load(model)
    work = normalize(convert.to_ir(proto, folder))
    infer_computed_types(work)
    add(Builder(work, xs, y, seeds, algorithm_names(proto)))
    result = _finished(work, lowered)
    for info in proto.training_info:  # one by one: `extend` fails for messages of 2 GB
        result.training_info.add().CopyFrom(info)
    return result


def _finished(work: ir.Model, lowered: bool) -> onnx.ModelProto:
    """Returns a model with derivatives as a file."""
    work.graph.opset_imports.setdefault(GRADIENT_DOMAIN, 1)
    result = to_proto(lower_ir(work) if lowered else work)
    name_gradients(result)
    return result
