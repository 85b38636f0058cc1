"""The gradient of each row's own loss by the parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from ortops import losses
from ortops._common.arguments import number
from ortops.derivatives.loss_graphs import emit_loss
from ortops.derivatives.vmap import add_axis
from ortops.engine.building.preparation import Prepared, prepare_for_training
from ortops.engine.building.reachability import reached
from ortops.engine.execution.sizes import bind_sizes
from ortops.engine.lowering import infer_types, lower_ir
from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.autodiff.grad import grad
from ortops.graph.constants import IR_VERSION, VARIABLE
from ortops.graph.edit import all_nodes, attribute_values, describe, is_float
from ortops.graph.files import external, loading
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.serialization import to_proto
from ortops.graph.names import Names
from ortops.graph.row_axes import RowAxes, row_axes_of_model
from ortops.graph.tensor import Tape, Tensor, op
from ortops.losses import LossLike

logger = logging.getLogger("ortops")

_EPSILON = 1e-6


@loading.blame_model
def per_sample_gradient(
    model: ModelLike,
    *,
    loss: LossLike,
    trainable: Sequence[str] | None = None,
    inputs: losses.Inputs | None = None,
    max_norm: float | None = None,
) -> onnx.ModelProto:
    """Returns a model that computes the gradient of each row's own loss by the parameters.

    A row's own loss is the loss of a batch with this row alone. One backward pass computes the
    gradients of all rows (see `vmap`). The model runs in inference mode: Dropout drops nothing, and
    BatchNormalization uses running statistics.

    Args:
        model: An inference model: a ModelProto, its bytes or its path; it is not modified. Rows are
            along the axes along which `ortops.TrainingSession.fit` cuts them; the batch size must
            be dynamic, or 1.
        loss: See `ortops.build_training_model`.
        trainable: See `ortops.build_training_model`.
        inputs: See `ortops.build_training_model`. Inputs that the loss adds have the rows where an
            output of their shape has them.
        max_norm: Clips the gradient of each row, over all parameters, to this norm (it is
            multiplied by ``min(1, max_norm / (norm + 1e-6))``), and sums the rows, as in
            differentially private training. Source: Abadi et al., "Deep learning with differential
            privacy", 2016, algorithm 1; its noise is not added.

    Returns:
        A new model of standard nodes with the inputs of the model and of the loss, and an output
        ``d_loss_d_<parameter>`` for each parameter: of shape ``[N, *shape]``, or ``shape`` with
        ``max_norm``.

    Raises:
        ArgumentError: See `ortops.build_training_model`; or if ``max_norm`` is not a number > 0.
        ModelError: See `ortops.build_training_model`; or if rows depend on each other, by a loss or
            by BatchNormalization in training mode; or if the batch size is fixed.
        UnsupportedError: If an operator that a gradient passes through has no gradient.

    Example:
        >>> from ortops.docs import examples
        >>> model = per_sample_gradient(examples.mlp((4, 16, 2)), loss="SoftmaxCrossEntropy")
        >>> onnx.helper.printable_value_info(model.graph.output[0])
        '%d_loss_d_fc1.weight[FLOAT, batchx16x4]'
    """
    if max_norm is not None:
        max_norm = number("max_norm", max_norm, above=0)
    prepared = prepare_for_training(model, trainable, "frozen")
    graph = prepared.graph
    _refuse_batch_statistics(graph)
    work = ir.Model(graph, ir_version=IR_VERSION, producer_name="ortops")
    found = row_axes_of_model(convert.load_light(model).proto)
    rows = _rows(graph, found)
    value, axis = next(iter(rows.items()))
    dim = None if value.shape is None else value.shape[axis]
    length = dim.value or "batch" if isinstance(dim, ir.SymbolicDim) else "batch"
    with Tape(graph, names=prepared.names) as tape:
        computed = _loss(prepared, tape, loss, inputs)
        for tensor in computed.inputs:
            place = found.of_target(tensor.shape)
            if place is None and found.fixed == 1:
                raise ModelError(
                    f"loss: input '{tensor.name}' must have the rows on an axis, got shape "
                    f"{list(tensor.shape or ())}; declare it with inputs="
                )
            if place is not None:
                rows[tensor.value] = place
        _bind_one_row(work, found, rows)
        parameters = [tape.tensor(value) for value in reached(prepared.choice, computed.value)]
        slopes = grad(computed.value, parameters)
        graph.outputs.clear()
        for parameter, slope in zip(parameters, slopes, strict=True):
            tape.output(slope, f"d_loss_d_{parameter.name}")
    work = lower_ir(work)
    axes = {value.name or "": axis for value, axis in rows.items()}
    _take_rows(work.graph, axes)
    infer_types(work)
    in_axes = {n: axes[n] for value in work.graph.inputs if (n := value.name or "") in axes}
    add_axis(work, in_axes, length=length)
    if max_norm is not None:
        _sum_clipped(work.graph, max_norm)
    result = to_proto(work)
    external.let_go(prepared.result)
    return result


def _refuse_batch_statistics(graph: ir.Graph) -> None:
    """Rejects BatchNormalization in training mode."""
    for node in all_nodes(graph):
        if node.op_type == "BatchNormalization" and attribute_values(node).get("training_mode"):
            raise ModelError(
                f"{describe(node)} normalizes by statistics of the batch, so a row has no gradient "
                "of its own; set training_mode=0, or use GroupNormalization"
            )


def _rows(graph: ir.Graph, found: RowAxes) -> dict[ir.Value, int]:
    """Returns the axes of the rows of the inputs that have them."""
    given = [value for value in graph.inputs if value.name not in graph.initializers]
    first = next((v for v in given if v.shape is None or len(v.shape)), None)
    if first is None or first.shape is None:
        raise ModelError("model: it needs an input of known rank whose axis 0 is the batch")
    if found.fixed not in (None, 1):
        raise ModelError(
            f"model: input '{first.name}' has a fixed batch size of {found.fixed}; make it dynamic "
            "with ortops.surgery.free_batch"
        )
    return {v: found.axes[v.name or ""] for v in given if v.name in found.axes}


def _loss(
    prepared: Prepared, tape: Tape, loss: LossLike, inputs: losses.Inputs | None
) -> losses.Computed:
    """Emits the loss."""
    computed = emit_loss(tape, loss, inputs)
    for part in computed.parts:
        if part.batch_coupled:
            raise ModelError(
                f"loss {part.label}: the loss of a row depends on other rows, so a row has no "
                "gradient of its own; use another loss"
            )
    for tensor in computed.inputs:
        if not tensor.shape:
            raise ModelError(
                f"loss: input '{tensor.name}' must have one entry per row on an axis, got shape "
                f"{'unknown' if tensor.shape is None else []}; declare it with inputs="
            )
    for message in prepared.choice.said:
        logger.warning("%s", message)
    return computed


def _bind_one_row(work: ir.Model, found: RowAxes, rows: Mapping[ir.Value, int]) -> None:
    """Sets the batch size to 1, and infers the shapes that follow from it."""
    for value, axis in rows.items():
        assert value.shape is not None
        dims = list(value.shape)
        dims[axis] = 1
        value.shape = ir.Shape(dims)
    for value in work.graph.initializers.values():
        if is_float(value):
            value.meta[VARIABLE] = True  # constants would be folded
    bind_sizes(work, {symbol: 1 for symbol in found.batch if isinstance(symbol, str)})


def _take_rows(graph: ir.Graph, axes: Mapping[str, int]) -> None:
    """Gives the inputs of a batch of one row the shape of the row."""
    tape = Tape(graph, before=graph[0], names=Names(graph))
    with tape:
        for value in [value for value in graph.inputs if value.name in axes]:
            assert value.shape is not None
            axis, dims = axes[value.name or ""], list(value.shape)
            row = ir.Value(type=value.type, shape=ir.Shape(dims[:axis] + dims[axis + 1 :]))
            users = list(value.uses())
            row.name, value.name = value.name, tape.names.unique(f"{value.name}_batch")
            graph.inputs[graph.inputs.index(value)] = row
            if users:
                value.replace_all_uses_with(op.Unsqueeze(tape.tensor(row), [axis]).value)


def _sum_clipped(graph: ir.Graph, max_norm: float) -> None:
    """Replaces the gradients of rows by the sum of the clipped ones."""
    tape = Tape(graph, names=Names(graph))
    outputs = list(graph.outputs)
    graph.outputs.clear()
    with tape:
        gradients = [tape.tensor(value) for value in outputs]
        norms = [_row_norms(gradient) for gradient in gradients]
        norm = op.Sqrt(op.Sum(*(each * each for each in norms)))
        factor = op.Unsqueeze(op.Min(max_norm / (norm + _EPSILON), np.float64(1)), [0])
        for gradient in gradients:
            flat = op.Reshape(gradient, [0, -1] if gradient.ndim != 1 else [-1, 1])
            total = op.MatMul(factor.astype(gradient.dtype), flat)
            shape = gradient.shape
            assert shape is not None
            name, gradient.value.name = gradient.name, tape.names.unique("rows")
            result = op.Reshape(total, [int(str(dim)) for dim in shape[1:]], allowzero=1)
            result.value.name = name
            graph.outputs.append(result.value)


def _row_norms(gradient: Tensor) -> Tensor:
    """Returns the norm of each row's gradient, in float64."""
    if gradient.dtype.itemsize < 4:
        gradient = gradient.astype(np.float32)
    if gradient.ndim == 1:
        return abs(gradient).astype(np.float64)
    return op.ReduceL2(gradient, list(range(1, gradient.ndim)), keepdims=0).astype(np.float64)
