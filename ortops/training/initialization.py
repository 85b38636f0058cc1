"""Running the initialization graph of a training_info entry, which comes from a file."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime

from ortops.errors import ModelError
from ortops.execution.onnxruntime_sessions import errors_as_ours
from ortops.graph import convert, external
from ortops.graph.edit import all_nodes, describe
from ortops.graph.external import ITEM_SIZES, Data
from ortops.graph.limits import LIMITS
from ortops.graph.shapes import infer_shapes, may_be_equal
from ortops.inference import InferenceSession

__all__ = ["initial_values"]

Array: TypeAlias = npt.NDArray[Any]


@convert.blame_model
def initial_values(
    proto: onnx.ModelProto,
    data: Data,
    entry: int,
    variables: Mapping[str, Array],
    options: onnxruntime.SessionOptions | None,
    providers: Sequence[Any],
) -> dict[str, Array]:
    """Returns what the initialization graph of a training_info entry computes.

    Args:
        proto: A light trainable model; not changed.
        data: Its data (see `ortops.graph.external`).
        entry: The number of the entry.
        variables: The variables by name, which tell what the values have to be like.
        options: The user's options for the session.
        providers: Its execution providers.

    Returns:
        The value of each variable that is bound.

    Raises:
        ModelError: If the graph is not legal, computes something else than the variables, or takes
            more memory or time than `ortops.graph.limits` accept.
    """
    info = proto.training_info[entry]
    if not info.initialization_binding:
        return {}
    model = onnx.helper.make_model(
        info.initialization,
        opset_imports=proto.opset_import,
        ir_version=proto.ir_version,
        functions=proto.functions,
    )
    names = {binding.key: binding.value for binding in info.initialization_binding}
    if model.graph.input:
        raise ModelError(
            f"training_info entry {entry}: its initialization has an input "
            f"'{model.graph.input[0].name}'; nothing is fed to it, so make it an initializer"
        )
    _check_sizes(convert.to_ir(model, None, data), names, variables, entry)
    values = list(dict.fromkeys(names.values()))
    with _unoptimized(options) as chosen:
        session = InferenceSession(external.attach(model, data), chosen, providers, kernels="onnx")
    run_options, ended = onnxruntime.RunOptions(), threading.Event()

    def stop() -> None:
        ended.set()
        run_options.terminate = True

    timer = threading.Timer(LIMITS.initialization_seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        with errors_as_ours():
            computed = session.run_with_ort_values(values, {}, run_options)
    except Exception as error:
        if not ended.is_set():
            raise
        raise ModelError(
            f"training_info entry {entry}: its initialization has not ended after "
            f"{LIMITS.initialization_seconds:g} s; correct its loops, or allow more time "
            "(ortops.graph.limits.LIMITS.initialization_seconds)"
        ) from error
    finally:
        timer.cancel()
    outputs = dict(zip(values, computed, strict=True))
    return {name: outputs[value].numpy() for name, value in names.items()}  # not copied


@contextlib.contextmanager
def _unoptimized(
    options: onnxruntime.SessionOptions | None,
) -> Iterator[onnxruntime.SessionOptions]:
    """Gives options without optimizations, which would run the graph where nothing can stop it."""
    chosen = onnxruntime.SessionOptions() if options is None else options
    level = chosen.graph_optimization_level
    chosen.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        yield chosen
    finally:
        chosen.graph_optimization_level = level


def _check_sizes(
    model: ir.Model, names: Mapping[str, str], variables: Mapping[str, Array], entry: int
) -> None:
    """Refuses values of other shapes than the variables', and tensors that do not fit in memory."""
    convert.inline(model)
    infer_shapes(model)
    outputs = {value.name: value for value in model.graph.outputs}
    for name, output in names.items():
        value, variable = outputs[output], variables.get(name)
        if variable is None:
            continue
        if not may_be_equal(value.shape, ir.Shape(variable.shape)):
            raise ModelError(
                f"training_info entry {entry}: its initialization sets '{name}' of shape "
                f"{list(variable.shape)} to '{output}' of shape {value.shape}; a variable keeps "
                "its shape"
            )
    most = max([LIMITS.initialization_bytes, *(array.nbytes for array in variables.values())])
    for node in all_nodes(model.graph):
        for value in node.outputs:
            size = _size(value)
            if size > most:
                raise ModelError(
                    f"{describe(node)}: in the initialization of training_info entry {entry}, its "
                    f"output takes {size:,} bytes; {most:,} are accepted "
                    "(ortops.graph.limits.LIMITS.initialization_bytes)"
                )


def _size(value: ir.Value) -> int:
    """Returns how many bytes a value takes, as far as is known; 0 where nothing is."""
    if value.shape is None or value.dtype is None:
        return 0
    known = [dim for dim in value.shape if isinstance(dim, int)]
    return math.ceil(math.prod(known) * ITEM_SIZES.get(value.dtype.value, 1))
