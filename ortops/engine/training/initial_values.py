"""The values of variables in a trainable model, before its first step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops.engine.execution.step import Step
from ortops.engine.execution.tables import said, tables_in_file
from ortops.engine.execution.values import Values
from ortops.engine.trainable.handed_graph import is_known
from ortops.engine.trainable.metadata import entry_number
from ortops.engine.training.state import check_master, is_rounded
from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.files import external
from ortops.graph.files.external import LightModel
from ortops.graph.files.held_file import InFile
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import initializers, location_of

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger("ortops")


def given_values(
    model: LightModel,
    steps: Sequence[Step],
    entries: Sequence[int],
    masters: Mapping[str, str],
) -> Values:
    """Returns the values that variables have in a model; each is read on access.

    Args:
        model: The model.
        steps: The steps that have the variables.
        entries: The training_info entries of the steps.
        masters: 16-bit parameters → the variables with their float32 values.

    Raises:
        ModelError: If entries have different values for a variable, or a float32 value does not fit
            its parameter.
    """
    wanted = {name for step in steps for name in (*step.variables, *step.updates)}
    found: dict[str, Callable[[], Array]] = {}
    stored: dict[str, InFile] = {}
    graphs = [model.proto.graph]
    graphs += [model.proto.training_info[number].algorithm for number in entries]
    for tensor in (tensor for graph in graphs for tensor in graph.initializer):
        if tensor.name in wanted:
            read = functools.partial(model.array_of, tensor)
            if tensor.name in found and not np.array_equal(found[tensor.name](), read()):
                raise ModelError(
                    f"training_info: '{tensor.name}' has different values in several entries; "
                    "name the variables of each entry differently"
                )
            found[tensor.name] = read
            if (content := model.stored(tensor)) is not None:
                stored[tensor.name] = content
    for name, master in masters.items():
        if not {name, master} <= found.keys():
            continue
        value, wide = found[name](), found[master]()
        check_master(name, value, master, wide)
        if not is_rounded(value, wide):
            logger.warning(
                "model: '%s' differs from '%s' rounded to %s, so it was probably changed; training "
                "continues from '%s'",
                *(name, master, value.dtype, name),
            )
            found[master] = functools.partial(value.astype, np.float32)
            stored.pop(master, None)
    return Values(found, stored)


def copy_to_memory(
    model: ModelLike | LightModel, entry: int | str | None, looked_up: float
) -> tuple[LightModel, list[int], dict[str, InFile]]:
    """Returns a light model and its data, which neither a file nor the caller can change.

    With it come the indices of the training_info entries: one, or all of them in order; and the
    tables that stay in a file, which have at least so many bytes.

    Variables that `reset` computes are only borrowed until they have their values. Others stay in
    the model's file, if it has one: `reset` reads them again.
    """
    light, data = convert.load_light(model, is_known)
    tables = tables_in_file(LightModel(light, data), looked_up)
    for table in tables.values():
        table.stay_open()
    for sentence in said({name: table.length for name, table in tables.items()}):
        logger.info("model: %s", sentence)
    staying = {location_of(t): tables[t.name] for t in light.graph.initializer if t.name in tables}
    # A missing entry 0 is an error later.
    every = list(range(max(1, len(light.training_info))))
    entries = every if entry is None else [entry_number(light, entry)]
    anew = computed(light, entries)
    tensors = list(initializers(light, initialization=False))
    lent = [tensor for tensor in tensors if tensor.name in anew]
    bound = {binding.key for info in light.training_info for binding in info.update_binding}
    bound -= anew
    given = [tensor for tensor in tensors if tensor.name in bound]
    rest = {location: tensor for location, tensor in data.items() if location not in staying}
    copied = external.copy_to_memory(rest, lent, given)
    return LightModel(light, {**copied, **staying}), entries, tables


def computed(proto: onnx.ModelProto, entries: Iterable[int]) -> set[str]:
    """Returns the variables that the initialization of some entries computes."""
    infos = [info for number, info in enumerate(proto.training_info) if number in list(entries)]
    return {binding.key for info in infos for binding in info.initialization_binding}
