"""Models with a loss as an output, of which derivatives are taken."""

from __future__ import annotations

import logging
from typing import Literal

import onnx_ir as ir

from ortops import losses
from ortops.engine.lowering import infer_computed_types, normalize
from ortops.engine.trainable.metadata import entry_names
from ortops.engine.trainable.step_graph import inference_with_loss
from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.edit import values_of
from ortops.graph.files import loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.loading import ModelLike
from ortops.graph.tensor import Tape, Tensor
from ortops.losses import LossLike

logger = logging.getLogger("ortops")

_LOSS = "loss"


def emit_loss(tape: Tape, loss: LossLike, inputs: losses.Inputs | None) -> losses.Computed:
    """Emits a loss of the tensors of a graph; its automatic choices are logged.

    Args:
        tape: The tape of the graph.
        loss: See `ortops.build_training_model`.
        inputs: See `ortops.build_training_model`.
    """
    graph = tape.graph
    values = values_of(graph)

    def find(name: str) -> Tensor | None:
        return tape.tensor(values[name]) if name in values else None

    tape.scope = "loss/"
    computed = losses.compute(losses.resolve(loss), tape, find, list(values), graph.outputs, inputs)
    tape.scope = ""
    for message in computed.said:
        logger.warning("%s", message)
    return computed


def model_with_loss(
    model: ModelLike, loss: LossLike | Literal[True], inputs: losses.Inputs | None
) -> tuple[ir.Model, str, set[str]]:
    """Returns a model in inference mode with its loss as the last output.

    Args:
        model: An inference model or a trainable one; its training_info is left out.
        loss: See `ortops.derivatives.gradient`.
        inputs: See `ortops.derivatives.gradient`.

    Returns:
        The model, the name of the loss, and the names of the inputs that the loss added.
    """
    proto, folder = loading.load(model)
    own = {value.name for value in proto.graph.input}
    if loss is True:
        _refuse_several(entry_names(proto) if proto.training_info else [])
        work, value = inference_with_loss(LightModel(proto, {}), folder=folder)
        if value.name != _LOSS and _LOSS not in values_of(work.graph):
            value.name = _LOSS
    else:
        work = normalize(convert.to_ir(proto, folder))
        infer_computed_types(work)
        with Tape(work.graph) as tape:
            value = tape.output(emit_loss(tape, loss, inputs).value, _LOSS).value
    added = {value.name or "" for value in work.graph.inputs} - own
    return work, value.name or "", added


def _refuse_several(entries: list[str]) -> None:
    """Rejects files that do not have exactly one loss of their own."""
    if not entries:
        raise ModelError(
            "loss: the model has no training algorithm whose loss could be taken; pass a loss, "
            "such as loss='SoftmaxCrossEntropy'"
        )
    if len(entries) > 1:
        raise ModelError(
            f"loss: the model has {len(entries)} training algorithms, each with a loss; pass "
            "one of the losses instead of True"
        )
