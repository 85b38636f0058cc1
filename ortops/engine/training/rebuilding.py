"""Builds the training algorithm of a trainable model again, for other weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx

from ortops.engine.building.builder import build_training_model
from ortops.engine.building.recipe import MISSING_ARGUMENTS, arguments_of
from ortops.engine.trainable.metadata import METADATA_KEY
from ortops.engine.training.position import POSITION_KEY
from ortops.errors import OrtopsError, UnsupportedError
from ortops.graph.files.json_metadata import read_metadata, remove_metadata
from ortops.losses import LossLike
from ortops.optimizers import Optimizer, UpdateRule


def rebuilt(
    model: onnx.ModelProto,
    trainable: Sequence[str] | None,
    loss: LossLike | None,
    optimizer: str | Optimizer | type[Optimizer] | UpdateRule | None,
) -> onnx.ModelProto:
    """Returns a trainable model with a new training algorithm, at the start of training.

    Args:
        model: A trainable model; changed.
        trainable: The parameters to train.
        loss: The loss; None for the one that the file describes.
        optimizer: The optimizer; None for the one that the file describes.

    Raises:
        ModelError: If ``trainable`` does not fit the model.
        OrtopsError: If the file does not describe loss or optimizer, and they are not given.
        UnsupportedError: If the model has several training_info entries.
    """
    if len(model.training_info) > 1:
        raise UnsupportedError(
            f"with_trainable: the model has {len(model.training_info)} training algorithms; build "
            "it again with ortops.build_training_model and ortops.add_training"
        )
    found = read_metadata(model.metadata_props, METADATA_KEY, "remove it") or {}
    recipe = found.get("recipe")
    if not isinstance(recipe, dict) or recipe.get(MISSING_ARGUMENTS):
        raise OrtopsError(
            "with_trainable: the file does not say how it was built, as ortops wrote it before it "
            "had with_trainable, or another tool; build session.inference_model() again with "
            "ortops.build_training_model"
        )
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    arguments = arguments_of({name: v for name, v in recipe.items() if given.get(name) is None})
    arguments |= {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in arguments:
            raise OrtopsError(
                f"with_trainable: the file does not describe its {name}, which is not one of "
                f"ortops with numbers and names as arguments; give it with {name}="
            )
    del model.training_info[:]
    for key in (METADATA_KEY, POSITION_KEY):
        remove_metadata(model, key)
    return build_training_model(model, trainable=trainable, **arguments)
