"""Adds further training algorithms to a trainable model, as several ``training_info`` entries."""

from __future__ import annotations

import re
from typing import Unpack

import onnx

from ortops._common.garbage_collection import pause_collection
from ortops._common.other_names import ARGUMENTS_OF_BUILD, explains_arguments, has_arguments_of
from ortops.engine.building.builder import BuildSettings, build_light, build_training_model
from ortops.engine.building.preparation import Place
from ortops.engine.trainable.metadata import entry_names
from ortops.errors import ArgumentError, ModelError
from ortops.graph import convert
from ortops.graph.convert import MINIMUM_OPSET
from ortops.graph.files import loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.loading import ModelLike

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@explains_arguments(**ARGUMENTS_OF_BUILD)
@has_arguments_of(build_training_model)
@loading.blame_model
@pause_collection()
def add_training(
    model: ModelLike,
    *,
    name: str,
    **settings: Unpack[BuildSettings],
) -> onnx.ModelProto:
    """Adds one more training algorithm to a trainable model, as an entry of ``training_info``.

    A model can be trained by several algorithms in turn, each with its own loss, optimizer and
    weights, as a GAN is: ``session.step(feeds, entry=name)`` makes a step of one of them, and
    ``session.step(feeds)`` one of each, in order. The name of an entry is that of its algorithm
    graph; the first is called ``main``.

    The variables of the entry are named ``<name>.learning_rate``, ``<name>.step``,
    ``<name>.<parameter>.V`` and so on. An input of its loss that has the name, type and shape of
    another entry's input is the same input. Weights can be read by all entries, but the ONNX
    standard (``TrainingInfoProto.update_binding``) lets only one of them update an initializer.
    This applies to running statistics of BatchNormalization as well: only the first entry that
    normalizes by batch statistics updates them.

    Args:
        model: A trainable model, as `ortops.build_training_model` returns it or
            `ortops.TrainingSession.save` writes it, whose state is kept: a ModelProto, its bytes or
            its path.
        name: The name of the entry: letters, digits, ``_`` and ``-``.
        loss: See `ortops.build_training_model`, as for all other arguments.
        optimizer: The optimizer of the entry.
        trainable: The parameters that the entry trains. The default is every weight that the loss
            depends on and no other entry trains.
        inputs: Additional inputs that the loss reads.
        batch_normalization: Which BatchNormalization layers normalize by batch statistics in the
            steps of this entry. ``"auto"`` stands for those whose scale or bias the entry trains.
        clip_norm: The maximum norm of all gradients together.
        clip_value: The maximum absolute value of each gradient element.
        ema_decay: The decay of an exponential moving average of the entry's parameters.
        groups: Optimizer settings for some of the parameters.
        seed: The initial value of the state ``<name>.seed``, for Dropout.

    Returns:
        A new model; the argument is not changed.

    Raises:
        ArgumentError: If an argument is not valid for any model.
        ModelError: If the model is not trainable or has an entry of this name, the entry would
            train a weight that another one trains or none at all, or an input has another type or
            shape than that of another entry.

    Example:
        >>> import numpy as np
        >>> import ortops
        >>> from ortops import Tape
        >>> with Tape(name="two_lines") as tape:
        ...     x = tape.input("x", np.float32, ["batch", 1])
        ...     for name in ("a", "b"):
        ...         weight = tape.initializer(f"w_{name}", np.zeros((1, 1), np.float32))
        ...         _ = tape.output(x @ weight, name)
        >>> sgd = ortops.optimizers.SGD(0.25)
        >>> first, second = (ortops.losses.MeanSquaredError(output) for output in "ab")
        >>> model = ortops.build_training_model(tape.model(), loss=first, optimizer=sgd)
        >>> model = add_training(model, name="second", loss=second, optimizer=sgd)
        >>> session = ortops.TrainingSession(model)
        >>> batch = {"x": np.ones((1, 1), np.float32), "targets": np.ones((1, 1), np.float32)}
        >>> session.step(batch, entry="second", outputs=["loss"])
        {'loss': array(1., dtype=float32)}
        >>> {name: array.item() for name, array in session.parameters.items()}
        {'w_a': 0.0, 'w_b': 0.5}
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            "name must start with a letter and have only letters, digits, '_' and '-', got "
            f"{name!r:.80}"
        )
    light = convert.load_light(model)
    place = place_of(light.proto, name)
    bare = LightModel(onnx.ModelProto(), light.data)
    bare.proto.CopyFrom(light.proto)
    del bare.proto.training_info[:]
    made = build_light(bare, place=place, **settings)
    (added,) = made.proto.training_info
    for value in added.algorithm.input:
        _check_shared(value, place)
    result = onnx.ModelProto()
    result.CopyFrom(made.proto)
    del result.training_info[:]
    for info in light.proto.training_info:
        result.training_info.add().CopyFrom(info)
    result.training_info.add().CopyFrom(added)
    return LightModel(result, {**light.data, **made.data}).attach()


def place_of(proto: onnx.ModelProto, name: str) -> Place:
    """Returns the place of a new entry in a model.

    Raises:
        ModelError: If the model is not trainable, is older than training needs, or has an entry of
            this name.
    """
    names = entry_names(proto)
    if not proto.training_info:
        raise ModelError(
            "model: it has no training_info; make it trainable with ortops.build_training_model, "
            f"and add '{name}' to the result"
        )
    if name in names:
        raise ModelError(
            f"name: the model has an entry '{name}' already (entries: {', '.join(names)}); give "
            "the new one another name"
        )
    opset = max((e.version for e in proto.opset_import if e.domain in ("", "ai.onnx")), default=0)
    if 0 < opset < MINIMUM_OPSET:
        raise ModelError(
            f"model: it has opset {opset}, and its training_info would not fit the model of opset "
            f"{MINIMUM_OPSET} that training needs; convert the inference model, and make it "
            "trainable with ortops.build_training_model"
        )
    updated: dict[str, str] = {}
    inputs: dict[str, tuple[onnx.ValueInfoProto, str]] = {}
    taken = set[str]()
    for own, info in zip(names, proto.training_info, strict=True):
        updated |= {binding.key: own for binding in info.update_binding}
        taken.update(tensor.name for tensor in info.algorithm.initializer)
        for value in info.algorithm.input:
            inputs.setdefault(value.name, (value, own))
    return Place(name, updated, taken, inputs)


def _check_shared(value: onnx.ValueInfoProto, place: Place) -> None:
    """Raises a ModelError if an input has another type or shape than that of another entry."""
    if value.name not in place.inputs:
        return
    other, entry = place.inputs[value.name]
    if other.type != value.type:
        raise ModelError(
            f"loss: its input '{value.name}' is {_shown(value)}, but {_shown(other)} in the entry "
            f"'{entry}'; name it differently with target= of the loss, or with inputs="
        )


def _shown(value: onnx.ValueInfoProto) -> str:
    kind = value.type.tensor_type
    dims = [str(dim.dim_param or dim.dim_value or "?") for dim in kind.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    return f"{dtype}[{', '.join(dims)}]" if kind.HasField("shape") else f"{dtype} of any shape"
