"""Faults of onnxruntime, and how ortops writes and runs models so that they do not matter.

`FAULTS` has for each a model that onnxruntime computes wrongly, or does not load, at one of its
optimization levels; the functions are the remedies. What rules and passes emit is compared at two
levels in the tests, which is how most of the faults were found.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.graph.edit import (
    all_nodes,
    node_after,
    permutation_of,
    producer_of,
    rank_of,
    tape_before,
)
from ortops.graph.files.messages import MICROSOFT, node_graphs, nodes_within
from ortops.graph.names import Names
from ortops.graph.tensor import Tensor, op

logger = logging.getLogger("ortops")


@dataclass(frozen=True)
class Fault:
    """A fault of onnxruntime.

    Attributes:
        what: What goes wrong.
        versions: The first and the last version of onnxruntime in which it was seen.
        remedy: What ortops does, and the function that does it.
        model: A model with it, in the syntax of `onnx.parser`: its outputs, at two optimization
            levels, are not all equal, or it does not run at one of them.
    """

    what: str
    versions: tuple[str, str]
    remedy: str
    model: str

    def is_present(self) -> bool:
        """Whether the installed onnxruntime has the fault, by running the model."""
        return _is_present(self.model)


FAULTS = {
    "matrix times vector": Fault(
        "MatMul(Transpose(A), v) is fused into a wrong product if v has one axis, in float32 and "
        "float64, also through a Cast or an Identity. MatMul(v, Transpose(A)) is fused rightly.",
        ("1.21", "1.32"),
        "`avoid` swaps the factors; `write_vector_first` does so in files that are written",
        """(float[3, 4] a, float[3] v) => (float[4] y) {
            t = Transpose <perm = [1, 0]> (a)
            y = MatMul (t, v)
        }""",
    ),
    "padded weight": Fault(
        "A Pad of zeros in front of a convolution is merged into its padding even if it pads the "
        "weight or the bias, also through two Transposes; the model does not load.",
        ("1.27", "1.32"),
        "`avoid` puts a Reshape between them",
        """(float[1, 1, 5] x, float[1, 1, 2] w) => (float[1, 1, 3] y)
        <int64[6] pads = {0, 0, 0, 0, 0, 1}> {
            padded = Pad (w, pads)
            y = Conv (x, padded)
        }""",
    ),
    "pad of axes": Fault(
        "A Transpose is moved past a Pad as if its pads were for all axes.",
        ("1.21", "1.32"),
        "`pad_axes` writes pads for all axes",
        """(float[2, 3] x) => (float[3, 3] y) <int64[2] pads = {0, 1}, int64[1] axes = {1}> {
            t = Transpose <perm = [1, 0]> (x)
            padded = Pad (t, pads, , axes)
            y = Transpose <perm = [1, 0]> (padded)
        }""",
    ),
    "cubic Resize": Fault(
        "The optimizer for Transposes removes those around a cubic Resize, whose kernel cannot "
        "compute with the channels last. Not if the Resize reads a constant, as it does in a "
        "vision transformer before training.",
        ("1.21", "1.21"),
        "`disabled_optimizers`: sessions run without that optimizer",
        """(float[1, 2, 2, 3] x) => (float[1, 3, 3, 3] y) <int64[4] sizes = {1, 3, 3, 3}> {
            first = Transpose <perm = [0, 3, 1, 2]> (x)
            resized = Resize <mode = "cubic"> (first, , , sizes)
            y = Transpose <perm = [0, 2, 3, 1]> (resized)
        }""",
    ),
    "products of 8 bits": Fault(
        "With accuracy_level=4, MatMulNBits rounds activations to 8 bits. It computes zeros if the "
        "weights are constant and the scales are not: if these are trained, or if a Cast of "
        "float16 scales is inserted and not folded, inside a Scan and below the level ALL. "
        "DequantizeLinear and MatMul are fused into that node, too.",
        ("1.21", "1.32"),
        "`use_exact_products` and `without_integers` leave the rounding out",
        """(float[1, 32] x, float[1] scales) => (float[1, 1] y, float[1, 1] z)
        <uint8[1, 1, 16] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> {
            y = com.microsoft.MatMulNBits
                <K = 32, N = 1, bits = 4, block_size = 32, accuracy_level = 4> (x, w, scales)
            z = com.microsoft.MatMulNBits <K = 32, N = 1, bits = 4, block_size = 32> (x, w, scales)
        }""",
    ),
}
"""The known faults, by name."""


@functools.cache
def _is_present(text: str) -> bool:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "{MICROSOFT}": 1]> probe {text}"""
    )
    plain, optimized = outputs_of(proto, optimize=False), outputs_of(proto)
    if plain is None or optimized is None:
        return True
    found = [*plain, *optimized]
    # Far above rounding, and below what each of these models is wrong by.
    return not all(np.allclose(found[0], each, rtol=0.1) for each in found)


def outputs_of(
    model: onnx.ModelProto, *, optimize: bool = True, written: str = ""
) -> list[Array] | None:
    """Runs a small float32 model on the CPU, to see what the installed onnxruntime can do.

    Args:
        model: The model; its inputs of known shapes are fed with numbers between ½ and 1.
        optimize: Whether onnxruntime optimizes it.
        written: A file for the optimized model.

    Returns:
        The outputs; None if onnxruntime does not load or run it, for example for want of a kernel.
    """
    import onnxruntime  # only here: this module belongs to a part that runs nothing

    rng = np.random.default_rng(0)
    feeds = {
        value.name: rng.uniform(
            0.5, 1, [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for value in model.graph.input
    }
    options, run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    options.log_severity_level = run_options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = written
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        found: list[Array] = session.run(None, feeds, run_options)
    except Exception:  # onnxruntime's classes have no common base class
        return None
    return found


# ---------------------------------------------------------------------------- forms of nodes

_SWAPPED = "ortops.vector_first"

_REMOVABLE = ("Identity", "Transpose")  # two Transposes may cancel each other


def avoid(graph: ir.Graph, names: Names | None = None) -> None:
    """Writes nodes that onnxruntime would compute wrongly in another way.

    Args:
        graph: A graph with inferred types, changed in place, with its subgraphs.
        names: The names used in it.
    """
    nodes = list(all_nodes(graph))
    products, convolutions = list(_products_with_vectors(nodes)), list(_padded_weights(nodes))
    if not products and not convolutions:
        return
    names = names or Names(graph)
    for node, matrix, perm in products:
        _put_vector_first(node, matrix, perm, names)
    for node, index, value in convolutions:
        tape = tape_before(node, names)
        same = op.Reshape(tape.tensor(value), [0] * (rank_of(value) or 0) if index == 1 else [-1])
        node.replace_input_with(index, same.with_shape_of(tape.tensor(value)).value)


def is_affected(graph: ir.Graph) -> bool:
    """Whether `avoid` would change a graph."""
    nodes = list(all_nodes(graph))
    return any(True for each in (_products_with_vectors, _padded_weights) for _ in each(nodes))


def _padded_weights(nodes: Sequence[ir.Node]) -> Iterator[tuple[ir.Node, int, ir.Value]]:
    """Yields convolutions with each weight or bias that a Pad computes."""
    for node in nodes:
        if node.op_type != "Conv" or node.domain:
            continue
        for index, value in enumerate(node.inputs):
            before = producer_of(value, *_REMOVABLE, "Pad")
            while before is not None and before.op_type in _REMOVABLE:
                before = producer_of(before.inputs[0], *_REMOVABLE, "Pad")
            if index and value is not None and before is not None:
                yield node, index, value


def _products_with_vectors(
    nodes: Sequence[ir.Node],
) -> Iterator[tuple[ir.Node, ir.Value, list[int]]]:
    """Yields products of computed matrices with vectors, and the order that transposes those."""
    for node in nodes:
        if node.op_type != "MatMul" or node.domain:
            continue
        matrix, vector = node.inputs
        rank = rank_of(matrix) or 0
        if matrix is None or rank < 2 or rank_of(vector) != 1 or producer_of(matrix) is None:
            continue
        if producer_of(matrix, "Constant") is None:
            yield node, matrix, [*range(rank - 2), rank - 1, rank - 2]


def _put_vector_first(node: ir.Node, matrix: ir.Value, perm: list[int], names: Names) -> None:
    before = producer_of(matrix, "Transpose")
    if before is not None and permutation_of(before) == tuple(perm):
        factor, perm = before.inputs[0], []
    else:
        tape = tape_before(node, names)
        factor = op.Transpose(tape.tensor(matrix), perm=perm).value
    vector = node.inputs[1]
    node.replace_input_with(0, vector)
    node.replace_input_with(1, factor)
    node.meta[_SWAPPED] = perm


def write_vector_first(proto: onnx.ModelProto, graph: ir.Graph) -> list[str]:
    """Changes a model like its graph, of which `avoid` was called.

    Args:
        proto: The model, with the same names; changed in place. Where a function has such products,
            which may be right in other calls, a Max of one tensor keeps them from being fused.
        graph: The changed graph, with its functions inlined.

    Returns:
        The names of new tensors.
    """
    changed = {node.outputs[0].name: node for node in all_nodes(graph) if _SWAPPED in node.meta}
    added = _write(proto.graph, changed) if changed else []
    for function in proto.functions if changed else ():  # what is left is in functions
        for node in [each for each in function.node if each.op_type == "MatMul"]:
            same = onnx.helper.make_node("Max", node.input[:1], [f"{node.output[0]}_matrix"])
            function.node.insert(list(function.node).index(node), same)
            node.input[0] = same.output[0]
    return added


def _write(proto: onnx.GraphProto, changed: dict[str | None, ir.Node]) -> list[str]:
    added: list[str] = []
    for node in list(proto.node):
        for inner in node_graphs(node):
            added += _write(inner, changed)
        product = changed.pop(node.output[0], None) if node.op_type == "MatMul" else None
        if product is None:
            continue
        perm, factor = product.meta[_SWAPPED], product.inputs[1]
        assert factor is not None
        assert factor.name is not None
        if perm:
            transpose = onnx.helper.make_node("Transpose", node.input[:1], [factor.name], perm=perm)
            proto.node.insert(list(proto.node).index(node), transpose)
            added.append(factor.name)
        node.input[:] = [node.input[1], factor.name]
    return added


def pad_axes(
    x: Tensor,
    pads: Sequence[object] | Array | Tensor,
    value: object = None,
    axes: Sequence[int] | Array | Tensor | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    """Emits a Pad node without the input ``axes`` if the axes are known.

    See `FAULTS`: onnxruntime moves Transposes past it as if its pads were for all axes.

    Args:
        x: A tensor.
        pads: The padding before each of the axes, then after each.
        value: The padding value; 0 by default.
        axes: The axes; all by default.
        mode: The operator's mode.
    """
    known = axes.constant if isinstance(axes, Tensor) else axes
    if known is None or x.shape is None:
        return op.Pad(x, pads, value, axes, mode=mode)
    places = [int(axis) % x.ndim for axis in known]
    places += [x.ndim + axis for axis in places]
    given = pads.constant if isinstance(pads, Tensor) else pads
    if given is not None:
        full: list[object] = [0] * (2 * x.ndim)
        for place, amount in zip(places, given, strict=True):
            full[place] = amount if isinstance(amount, Tensor) else int(cast(int, amount))
        return op.Pad(x, full, value, mode=mode)
    order = [0] * (2 * x.ndim)
    for number, place in enumerate(places, 1):
        order[place] = number
    amounts = op.Gather(op.Concat(np.zeros(1, np.int64), pads, axis=0), order)
    return op.Pad(x, amounts, value, mode=mode)


# ------------------------------------------------------------------- quantized products

_EIGHT_BITS = 4


def use_exact_products(graph: ir.Graph) -> None:
    """Removes ``accuracy_level=4`` where onnxruntime is wrong with it, also in subgraphs.

    Weights with float16 scales are dequantized to float32 and then rounded, which gives the same
    numbers, and which onnxruntime does not fuse.

    Args:
        graph: A graph, changed in place.
    """
    names = Names(graph)
    for node in list(all_nodes(graph)):
        if not node.domain and node.op_type == "DequantizeLinear":
            _dequantize_to_float32(node, names)
    without_integers(graph)


def without_integers(graph: ir.Graph) -> set[str]:
    """Removes ``accuracy_level=4`` where onnxruntime is wrong with it, and nothing else.

    Next to an adapter, whose nodes have no float16 kernels on the CPU, onnxruntime puts Casts
    around products with float16 scales.

    Returns:
        The outputs of the products.
    """
    found = set()
    for node in all_nodes(graph):
        is_product = (node.domain, node.op_type) == (MICROSOFT, "MatMulNBits")
        if is_product and node.attributes.get_int("accuracy_level", 0) == _EIGHT_BITS:
            scales = node.inputs[2]
            if scales is None or scales.dtype != ir.DataType.FLOAT or not _is_constant(scales):
                del node.attributes["accuracy_level"]
                found.add(node.outputs[0].name or "")
    return found


def _dequantize_to_float32(node: ir.Node, names: Names) -> None:
    """Dequantizes a constant weight to float32, and casts the result to float16."""
    weight, scales = node.inputs[:2]
    old = node.outputs[0]
    if weight is None or scales is None or not _is_constant(weight) or old.is_graph_output():
        return
    if scales.dtype != ir.DataType.FLOAT16 or "output_dtype" in node.attributes:
        return
    tape, readers = tape_before(node, names), list(old.uses())
    wide = op.Cast(tape.tensor(scales), to=ir.DataType.FLOAT)
    node.replace_input_with(1, wide.value)
    old.type = wide.value.type
    tape.before = node_after(node)
    narrow = op.Cast(tape.tensor(old), to=ir.DataType.FLOAT16)
    for reader, index in readers:
        reader.replace_input_with(index, narrow.value)


def _is_constant(value: ir.Value) -> bool:
    return not value.is_graph_input() and ir.convenience.get_const_tensor(value) is not None


# ------------------------------------------------------------------- optimizers of sessions

_OPTIMIZER = "TransposeOptimizer_CPUExecutionProvider"


def disabled_optimizers(model: onnx.ModelProto) -> list[str]:
    """Returns the optimizers of onnxruntime that must not run on a model, and logs them once."""
    sentences = said(model)
    for sentence in sentences:
        _say(sentence)
    return [_OPTIMIZER] if sentences else []


def said(model: onnx.ModelProto) -> list[str]:
    """Returns what is said about a model: a sentence for each optimizer that is left out."""
    cubic = any(
        node.op_type == "Resize" and any(each.s == b"cubic" for each in node.attribute)
        for node in nodes_within(model)
    )
    if not cubic or not FAULTS["cubic Resize"].is_present():
        return []
    import onnxruntime

    version = onnxruntime.__version__
    why = f"because the one of version {version} breaks a cubic Resize"
    return [f"sessions run without onnxruntime's optimizer for Transposes, {why}"]


@functools.cache
def _say(sentence: str) -> None:
    logger.warning(sentence)
