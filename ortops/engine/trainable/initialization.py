"""Runs the initialization graph of a training_info entry from an untrusted file."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import onnx
import onnx.utils
import onnx_ir as ir
import onnxruntime

from ortops._common.numbers import Array
from ortops.engine.execution.onnxruntime_sessions import run_session
from ortops.engine.execution.providers import CPU
from ortops.engine.inference import InferenceSession
from ortops.engine.lowering import lower
from ortops.engine.trainable.child_process import run_in_child
from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.edit import all_nodes, describe
from ortops.graph.files import external, loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.messages import ITEM_SIZES, has_domain
from ortops.graph.limits import LIMITS
from ortops.graph.operators import ELEMENTWISE, MOVES, having
from ortops.graph.shapes import infer_shapes, may_be_equal

_FAST = ELEMENTWISE | MOVES | having("linear")
"""Operators whose time is proportional to the size of their inputs and outputs."""

_CONSTANT = frozenset({"Constant", "ConstantOfShape", "Identity"})
"""Operators whose outputs are computed one at a time, when they are read."""


@loading.blame_model
def initial_values(
    model: LightModel,
    entry: int,
    variables: Mapping[str, Array],
    options: onnxruntime.SessionOptions | None,
) -> dict[str, Callable[[], Array]]:
    """Runs the initialization graph of a training_info entry.

    It runs on the CPU, so that training starts with the same bits on any device. Constants, such as
    the zeros that most optimizers start from, are computed one at a time, each time they are read,
    so that they are not all in memory at once.

    Args:
        model: A light trainable model; not changed.
        entry: The index of the entry.
        variables: The variables by name, whose shapes the values must have.
        options: The user's options for the session.

    Returns:
        For each bound variable, a function that returns its value.

    Raises:
        ModelError: If the graph is not valid, its values do not fit the variables, or it exceeds
            the limits of memory or time in `ortops.graph.limits`.
    """
    proto = model.proto
    info = proto.training_info[entry]
    if not info.initialization_binding:
        return {}
    started = onnx.helper.make_model(
        info.initialization,
        opset_imports=proto.opset_import,
        ir_version=proto.ir_version,
        functions=proto.functions,
    )
    names = {binding.key: binding.value for binding in info.initialization_binding}
    if started.graph.input:
        raise ModelError(
            f"training_info entry {entry}: its initialization has an input "
            f"'{started.graph.input[0].name}', which is never fed; make it an initializer"
        )
    what = f"training_info entry {entry}: its initialization"
    bare = LightModel(_without_shapes(started), model.data)
    is_fast = _check_sizes(bare, names, variables, entry)
    values = list(dict.fromkeys(names.values()))
    whole = LightModel(started, model.data).attach()
    if is_fast and _is_constant(started.graph, values):
        return _read_one_by_one(whole, names)
    if is_fast or math.isinf(LIMITS.initialization_seconds):
        outputs = _run_here(whole, values, what, options)
    else:
        standard = lower(whole) if has_domain(whole) else whole
        found = run_in_child(
            external.serialize(standard),
            values,
            what=what,
            seconds=LIMITS.initialization_seconds,
            memory=_memory(variables),
        )
        outputs = dict(zip(values, found, strict=True))
    return {name: functools.partial(outputs.__getitem__, value) for name, value in names.items()}


def _is_constant(graph: onnx.GraphProto, values: Sequence[str]) -> bool:
    """Whether values are outputs of nodes that compute constants."""
    made = {name for node in graph.node for name in node.output}
    is_plain = not graph.sparse_initializer and not graph.quantization_annotation
    return is_plain and made >= set(values) and all(n.op_type in _CONSTANT for n in graph.node)


def _read_one_by_one(
    model: onnx.ModelProto, names: Mapping[str, str]
) -> dict[str, Callable[[], Array]]:
    """Returns a function for each variable that runs only the nodes that compute its value."""
    extractor = onnx.utils.Extractor(model)

    def read(value: str) -> Array:
        part = extractor.extract_model([], [value])
        with _unoptimized(None) as chosen:
            session = InferenceSession(part, chosen, [CPU], kernels="onnx")
        return run_session(session, {}, [value])[value]

    return {name: functools.partial(read, value) for name, value in names.items()}


def _memory(variables: Mapping[str, Array]) -> int:
    """Returns the maximum memory of an initialization in bytes."""
    return max(LIMITS.initialization_memory, 8 * sum(array.nbytes for array in variables.values()))


def _run_here(
    model: onnx.ModelProto,
    values: Sequence[str],
    what: str,
    options: onnxruntime.SessionOptions | None,
) -> dict[str, Array]:
    """Returns values of a graph of fast operators, which can be stopped between two of them."""
    with _unoptimized(options) as chosen:
        session = InferenceSession(model, chosen, [CPU], kernels="onnx")
    run_options, ended = onnxruntime.RunOptions(), threading.Event()

    def stop() -> None:
        ended.set()
        run_options.terminate = True

    timer = threading.Timer(min(LIMITS.initialization_seconds, threading.TIMEOUT_MAX), stop)
    timer.daemon = True
    timer.start()
    try:
        return run_session(session, {}, values, run_options)
    except Exception as error:
        if not ended.is_set():
            raise
        raise ModelError(
            f"{what} did not end within {LIMITS.initialization_seconds:g} s; correct its graph, "
            "or allow more time (ortops.graph.limits.LIMITS.initialization_seconds)"
        ) from error
    finally:
        timer.cancel()


@contextlib.contextmanager
def _unoptimized(
    options: onnxruntime.SessionOptions | None,
) -> Iterator[onnxruntime.SessionOptions]:
    """Yields options without optimizations, which would evaluate the graph without a time limit.

    Memory is freed at once, instead of being kept for the next run.
    """
    chosen = onnxruntime.SessionOptions() if options is None else options
    level, arena = chosen.graph_optimization_level, chosen.enable_cpu_mem_arena
    chosen.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    chosen.enable_cpu_mem_arena = False
    try:
        yield chosen
    finally:
        chosen.graph_optimization_level, chosen.enable_cpu_mem_arena = level, arena


def _without_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of a light model without declared shapes, which may be wrong."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.value_info[:]
    for output in result.graph.output:
        output.type.tensor_type.ClearField("shape")
    for function in result.functions:
        del function.value_info[:]
    return result


def _check_sizes(
    light: LightModel,
    names: Mapping[str, str],
    variables: Mapping[str, Array],
    entry: int,
) -> bool:
    """Raises a ModelError if the shape of a value is wrong, or a tensor is too large.

    Returns:
        Whether all nodes are known to be fast, and to need little memory together.
    """
    model = convert.to_ir(light)
    named_alike = any(not function.domain for function in model.functions.values())
    is_fast = not named_alike and all(map(_is_fast, all_nodes(model.graph)))
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
                f"{list(variable.shape)} to '{output}' of shape {value.shape}; the shape of a "
                "variable cannot change"
            )
    limit = max([LIMITS.initialization_bytes, *(array.nbytes for array in variables.values())])
    total = 0
    for node in all_nodes(model.graph):
        for value in node.outputs:
            size, is_known = _size(value)
            if size > limit:
                raise ModelError(
                    f"{describe(node)}: in the initialization of training_info entry {entry}, its "
                    f"output must have at most {limit:,} bytes, got {size:,} "
                    "(ortops.graph.limits.LIMITS.initialization_bytes)"
                )
            total += size
            is_fast = is_fast and is_known
    return is_fast and total <= _memory(variables)


def _is_fast(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _FAST


def _size(value: ir.Value) -> tuple[int, bool]:
    """Returns the minimum size of a value in bytes, and whether the size is exact."""
    if value.shape is None or value.dtype is None:
        return 0, False
    known = [dim for dim in value.shape if isinstance(dim, int)]
    item = ITEM_SIZES.get(value.dtype.value)
    return math.ceil(math.prod(known) * (item or 1)), len(known) == len(value.shape) and bool(item)
