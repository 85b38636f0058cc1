"""Low-rank matrices beside the weights of a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError, did_you_mean
from ortops.graph import convert, external
from ortops.graph.adapters import METADATA_KEY, Adapter, Module, adapter_of, scaling, value_for
from ortops.graph.convert import ModelLike
from ortops.graph.edit import take_place
from ortops.graph.serialization import to_proto
from ortops.graph.tensor import Names
from ortops.lora.model import Array, fingerprint, refuse_training
from ortops.lora.targets import Target, chosen

__all__ = ["Base", "Layer", "add", "attach", "read_base"]

_INITIALIZERS_MAY_BE_INPUTS_OR_NOT = 4  # the IR version since which they need not be

logger = logging.getLogger("ortops")


@convert.blame_model
def add(
    model: ModelLike,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] | None = None,
    *,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    seed: int = 0,
) -> onnx.ModelProto:
    """Returns a model with a low-rank adapter, LoRA, which computes the same until it is trained.

    A layer y = W x becomes y = W x + scaling · B A x, by nodes beside the one that computes W x,
    which stays as it is: quantized weights (MatMulNBits, DequantizeLinear) stay quantized. A and B
    are inputs that have a default: initializers of the same name, so that the model runs with and
    without onnxruntime's adapter files. They are called ``<layer>.lora_A.weight``, of shape
    [in, rank], and ``<layer>.lora_B.weight``, [rank, out]: PEFT's, transposed, with the scaling in
    B. Those of convolutions are [in, rank, *kernel] and [rank, out, 1, …]; those of embeddings
    [words, rank] and [rank, size]. `ortops.build_training_model` trains them alone by default.

    A layer is called as torch's exporters tell, by the scope of the node, or by the name of the
    weight. Each layer that reads a weight has an adapter of its own, also where weights are tied;
    nodes of one layer that read the same weight share one.

    Where QuantizeLinear and DequantizeLinear round what the node computes, the adapter's part is
    added behind them.

    Args:
        model: An inference model: a ModelProto, its bytes, or its path; not changed.
        rank: The rank, 1 or more.
        alpha: Times 1 / rank it is the scaling.
        targets: What gets an adapter: names of weights, patterns of names, or (patterns of) the
            layers and scopes of the nodes that read them, as ``trainable=`` of
            `ortops.build_training_model`. By default every matrix that is the second operand of
            MatMul, Gemm, Conv or MatMulNBits; Gather's, embeddings, only where they are named.
        rslora: Whether the scaling is alpha / √rank.
        rank_pattern: Other ranks, by regular expressions of layers, as in PEFT: one matches a name
            or what stands in it behind a dot, and each has to mean a layer.
        alpha_pattern: Other alphas likewise.
        seed: Of the first A: the same seed, the same numbers.

    Returns:
        A new model, of the same opset. External data stay external, relative to the folder of the
        given file. A starts uniform in ±1/√(numbers that go in) and B from zeros; A of embeddings
        starts from zeros and B from normal numbers, as in PEFT.

    Raises:
        ModelError: If the model has an adapter or training_info already, or a target means
            or a pattern means nothing, or a number is not legal.
        UnsupportedError: If a target means what takes no adapter: convolutions with groups,
            operators of integers, recurrent layers, bfloat16.

    Source: arXiv:2106.09685 (LoRA); arXiv:2312.03732 (rsLoRA).

    Example:
        >>> from models import mlp
        >>> adapted = add(mlp.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> {tensor.name: list(tensor.dims) for tensor in adapted.graph.initializer[-2:]}
        {'fc1.lora_A.weight': [4, 2], 'fc1.lora_B.weight': [2, 16]}
    """
    patterns = {"rank_pattern": rank_pattern or {}, "alpha_pattern": alpha_pattern or {}}
    for name, pattern in patterns.items():
        if not isinstance(pattern, Mapping):
            raise ModelError(
                f"{name}: it is {pattern!r}; numbers by patterns of layers are accepted"
            )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ModelError(f"seed: it is {seed!r}; a whole number from 0 on is accepted")
    ranks, alphas = dict(rank_pattern or {}), dict(alpha_pattern or {})
    for name, number in (("rank", rank), *((f"rank_pattern '{p}'", r) for p, r in ranks.items())):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
            raise ModelError(f"{name}: it is {number!r}; a whole number from 1 on is accepted")
    given = (("alpha", alpha), *((f"alpha_pattern '{p}'", each) for p, each in alphas.items()))
    for name, each in given:
        is_number = isinstance(each, int | float | np.number) and not isinstance(each, bool)
        if not is_number or not math.isfinite(each) or each <= 0:
            raise ModelError(f"{name}: it is {each!r}; a number greater than 0 is accepted")
    base = read_base(model)
    found = chosen(base.work, targets)
    layers_found = dict.fromkeys(target.module for target in found)
    for name, pattern in patterns.items():
        for expression in pattern:
            if not any(value_for({expression: 1}, module, 0) for module in layers_found):
                raise ModelError(
                    f"{name}: '{expression}' means no layer that gets an adapter; "
                    f"{did_you_mean(str(expression), layers_found)}"
                )
    generator = np.random.default_rng(seed)
    layers: dict[object, Layer] = {}
    for target in found:
        key = (target.module, target.weight, target.kind, target.sizes)
        layer = layers.get(key)
        if layer is None:
            r = int(value_for(ranks, target.module, rank))
            own = float(value_for(alphas, target.module, alpha))
            a, b = _first(target, r, scaling(r, own, rslora=rslora), generator)
            layer = layers[key] = Layer(target.module, r, own, a, b)
        layer.targets.append(target)
    ranks, alphas = {p: int(r) for p, r in ranks.items()}, {p: float(a) for p, a in alphas.items()}
    described = Adapter(int(rank), float(alpha), rslora, "", {}, ranks, alphas)
    return attach(base, list(layers.values()), described)


@dataclass(frozen=True)
class Base:
    """A model that gets an adapter.

    Attributes:
        work: The model, to be changed.
        fingerprint: What tells it from others.
    """

    work: ir.Model
    fingerprint: str


@dataclass(frozen=True)
class Layer:
    """A layer that gets an adapter.

    Attributes:
        module: Its name.
        rank: The rank.
        alpha: The alpha.
        a: The numbers of A, as `add` tells their shape.
        b: The numbers of B, with the scaling.
        targets: The nodes that compute it.
        peft: What PEFT calls the layer.
    """

    module: str
    rank: int
    alpha: float
    a: Array
    b: Array
    targets: list[Target] = field(default_factory=list)
    peft: str = ""


def read_base(model: ModelLike) -> Base:
    """Reads a model that is to get an adapter; the model is not changed.

    Raises:
        ModelError: If it has one already, or training_info.
    """
    proto, folder = convert.load(model)
    if adapter_of(proto.metadata_props) is not None:
        raise ModelError(
            "model: it has an adapter already; fold it into the weights with ortops.lora.merge, or "
            "give the model without it"
        )
    refuse_training(proto)
    return Base(convert.to_ir(proto, folder), fingerprint(*external.detach(proto, folder)))


def attach(base: Base, layers: Sequence[Layer], adapter: Adapter) -> onnx.ModelProto:
    """Returns a model with adapters of given numbers.

    Args:
        base: The model; not to be used afterwards.
        layers: The layers.
        adapter: What is said of all of them.
    """
    work = base.work
    names = Names(work.graph)
    modules = {}
    for layer in layers:
        module = _unique(layer.module, names)
        a = _parameter(work.graph, f"{module}.lora_A.weight", layer.a)
        b = _parameter(work.graph, f"{module}.lora_B.weight", layer.b)
        modules[module] = Module(
            layer.targets[0].kind,
            a.name or "",
            b.name or "",
            layer.rank,
            layer.alpha,
            [_place(target, a, b, module, names) for target in layer.targets],
            layer.peft,
        )
    described = replace(adapter, fingerprint=base.fingerprint, modules=modules)
    work.metadata_props[METADATA_KEY] = described.dumps()
    work.ir_version = max(work.ir_version, _INITIALIZERS_MAY_BE_INPUTS_OR_NOT)
    count = sum(layer.a.size + layer.b.size for layer in layers)
    logger.warning("an adapter of %s was added: %s numbers to train", described, f"{count:,}")
    return to_proto(work)


def _unique(module: str, names: Names) -> str:
    """Returns the name of a layer, with a number behind it if its A or B would not be unique."""
    candidate, number = module, 1
    while any(not names.is_free(f"{candidate}.lora_{which}.weight") for which in "AB"):
        candidate, number = f"{module}_{number}", number + 1
    for which in "AB":
        names.take(f"{candidate}.lora_{which}.weight")
    return candidate


def _parameter(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """Adds an input that has a default value."""
    tensor = ir.tensor(array, name=name)
    kind, shape = ir.TensorType(tensor.dtype), ir.Shape(array.shape)
    value = ir.Value(name=name, type=kind, shape=shape, const_value=tensor)
    graph.inputs.append(value)
    graph.register_initializer(value)
    return value


def _first(
    target: Target, rank: int, scale: float, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Returns the first A and B, as PEFT initializes them."""
    (into, out), kernel = target.sizes, target.kernel
    dtype = target.dtype.numpy()
    if target.kind == "embedding":
        b = scale * generator.standard_normal((rank, out))
        return np.zeros((into, rank), dtype), b.astype(dtype)
    bound = 1 / math.sqrt(into * math.prod(kernel))
    a = generator.uniform(-bound, bound, (into, rank, *kernel))
    return a.astype(dtype), np.zeros((rank, out, *(1 for _ in kernel)), dtype)


def _place(target: Target, a: ir.Value, b: ir.Value, module: str, names: Names) -> list[str]:
    """Adds what an adapter computes to what a node computes.

    Returns:
        The names of what is computed without the adapter, and with it.
    """
    node, nodes = target.node, list[ir.Node]()

    def emit(
        op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr] = ()
    ) -> ir.Value:
        name = names.unique(f"{module}.lora/{op_type}")
        made = ir.Node("", op_type, inputs, attributes, name=name)
        made.outputs[0].name = names.unique(f"{name}_output")
        nodes.append(made)
        return made.outputs[0]

    x = node.inputs[1 if target.kind == "embedding" else 0]
    if target.kind == "embedding":
        delta = emit("MatMul", [emit("Gather", [a, x]), b])
    elif target.kind == "convolution":
        swapped = [ir.AttrInt64s("perm", [1, 0, *range(2, 2 + len(target.kernel))])]
        kept = [attribute for attribute in node.attributes.values() if attribute.name != "group"]
        down = emit("Conv", [x, emit("Transpose", [a], swapped)], kept)
        delta = emit("Conv", [down, emit("Transpose", [b], swapped)])
    else:
        if node.op_type == "Gemm" and node.attributes.get_int("transA", 0) == 1:
            x = emit("Transpose", [x], [ir.AttrInt64s("perm", [1, 0])])
        delta = emit("MatMul", [emit("MatMul", [x, a]), b])
    y = _rounded(node.outputs[0])
    total = emit("Add", [delta, delta])
    total.type, total.shape = y.type, y.shape
    take_place(y, total)
    y.name = names.unique(f"{module}.lora/base")
    nodes[-1].replace_input_with(0, y)
    last = y.producer()
    assert last is not None
    assert isinstance(last.graph, ir.Graph)
    last.graph.insert_after(last, nodes)
    return [y.name, total.name or ""]


def _rounded(value: ir.Value) -> ir.Value:
    """Returns what becomes of a value that is only quantized and dequantized, else itself."""
    rounded = value
    for op_type in ("QuantizeLinear", "DequantizeLinear"):
        uses = rounded.uses()
        if len(uses) != 1 or rounded.is_graph_output():
            return value
        (use,) = uses
        if use.node.op_type != op_type or use.idx != 0 or use.node.graph is not _graph(value):
            return value
        rounded = use.node.outputs[0]
    return rounded


def _graph(value: ir.Value) -> object:
    node = value.producer()
    return None if node is None else node.graph
