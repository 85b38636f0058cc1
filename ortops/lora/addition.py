"""Adds a low-rank adapter to a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortops._common.arguments import boolean, number, whole_number
from ortops._common.notes import say_note
from ortops.errors import ArgumentError, ModelError, UnsupportedError, did_you_mean
from ortops.graph import convert
from ortops.graph.adapters import METADATA_KEY, Adapter, Module, adapter_of, scaling
from ortops.graph.edit import describe, take_place
from ortops.graph.faults import without_integers
from ortops.graph.files import external, loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.serialization import to_proto
from ortops.graph.layer_names import standard, whole_of
from ortops.graph.names import Names
from ortops.lora.evaluation import norms_of, product, squares_of
from ortops.lora.fingerprints import fingerprint
from ortops.lora.full_weights import full_weights, is_in, saved_modules
from ortops.lora.model import WITHOUT_TRAINING, Array
from ortops.lora.patterns import Patterns
from ortops.lora.peft_layers import is_fusing, model_type_beside
from ortops.lora.targets import Target, bias_of, chosen
from ortops.surgery.reading import refuse_training

_PADS_ARE_INPUTS = 11  # the first opset of Pad whose pads are not an attribute
_RATIO_IS_INPUT = 12  # the first opset of Dropout whose ratio is not an attribute
_INITIALIZERS_MAY_BE_INPUTS_OR_NOT = 4  # the first IR version with initializers beside inputs

logger = logging.getLogger("ortops")


@loading.blame_model
def add(
    model: ModelLike,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] | None = None,
    *,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    dropout: float = 0.0,
    dora: bool = False,
    modules_to_save: str | Sequence[str] | None = None,
    bias: str = "none",
    seed: int = 0,
) -> onnx.ModelProto:
    """Returns a model with a low-rank adapter (LoRA). Its outputs are the same until it is trained.

    A layer y = W x becomes y = W x + scaling · B A x. The node that computes W x does not change,
    so quantized weights (MatMulNBits, DequantizeLinear) stay quantized. A and B are inputs with
    default values (initializers of the same name), so that the model runs with and without
    onnxruntime's adapter files. They are named ``<layer>.lora_A.weight``, of shape [in, rank], and
    ``<layer>.lora_B.weight``, of shape [rank, out]. These are PEFT's matrices, transposed, with the
    scaling multiplied into B. For convolutions the shapes are [in, rank, *kernel] and
    [rank, out, 1, …], for embeddings [words, rank] and [rank, size]. By default,
    `ortops.build_training_model` trains only A and B. The optimizer updates B / scaling, so that
    training takes the same steps as PEFT's.

    A layer is named after the scope of its node, as written by PyTorch's exporters, or else after
    its weight. Each layer gets its own adapter, also where weights are tied. A layer that is called
    several times (ALBERT, the shared keys of DeBERTa) has one adapter for all calls, as in PEFT.
    Where config.json or genai_config.json beside the model's file says that it is Phi-3, whose
    gate_proj and up_proj are one layer in transformers, these share A.

    As in PEFT, A and B are float32 if the model computes in float16 or bfloat16; their product is
    rounded before it is added.

    If the output of a node is quantized by QuantizeLinear and DequantizeLinear, the adapter's
    output is added after them.

    Args:
        model: An inference model: a ModelProto, its bytes, or its path; not changed.
        rank: The rank, at least 1.
        alpha: The numerator of the scaling, alpha / rank.
        targets: The layers to adapt: names or patterns of weights, or of the layers and scopes of
            the nodes that read them, like ``trainable=`` of `ortops.build_training_model`, or the
            ends of names of layers, as in PEFT. Parts of a fused layer are named as in
            transformers: ``["q_proj", "v_proj"]`` adapts these columns of qkv_proj. Patterns that
            begin with ``!`` exclude: ``["all-linear", "!layers.0.*"]``; if there are no others,
            they exclude from ``*``, which is every layer, embeddings included. By default
            every weight that is the second operand of MatMul, Gemm, Conv or MatMulNBits. Embeddings
            (Gather) are adapted only if they are named. As in PEFT, ``"all-linear"`` is every
            linear layer except the output layer: ``lm_head``, or whichever layer computes the
            model's first floating-point output.
        rslora: Whether to use the scaling alpha / √rank (rsLoRA).
        rank_pattern: Ranks of particular layers, by regular expressions as in PEFT. An expression
            matches a layer's full name or the part after one of its dots, and must match at least
            one layer.
        alpha_pattern: Alphas of particular layers, likewise.
        dropout: The ratio of elements of a layer's input that training drops before A, at least 0
            and below 1; the others are multiplied by 1 / (1 - dropout). The layers draw masks of
            their own. As in PEFT, inference drops nothing, and adapters of embeddings have no
            dropout.
        dora: Whether each output of a layer is scaled by m / ‖W + scaling · B A‖ (DoRA), where m,
            the magnitude, is trained too, and the norm is that of the output's weights and has no
            gradient, as in PEFT. The scale is an input, ``<layer>.lora_scale``, which
            `save_adapter` computes. Dropout drops only what A reads.
        modules_to_save: Modules whose own weights and biases are trained, such as a new head:
            ``["lm_head", "score"]``, which also name the modules inside. They get no adapter, and
            become inputs with default values, under the names that they have. As in PEFT, the
            files of adapters hold them.
        bias: Which other biases are trained, as in PEFT: ``"none"``, ``"all"`` of the model, or
            ``"lora_only"``, those of the layers with an adapter.
        seed: The seed of the random initial values.

    Returns:
        A new model of the same opset. External data stay external, relative to the folder of the
        given file. As in PEFT, A is initialized uniformly in ±1/√(number of inputs) and B to zeros;
        for embeddings, A is initialized to zeros and B from a normal distribution.

    Raises:
        ArgumentError: If a number, flag or type of an argument is invalid.
        ModelError: If the model already has an adapter or training_info, or a target or pattern
            matches nothing.
        UnsupportedError: If a target cannot have an adapter: grouped convolutions, integer
            operators, recurrent layers, g_idx of MatMulNBits; or dropout is given and a target is
            inside a branch or a loop. If a weight of ``modules_to_save`` or ``bias`` is quantized,
            shared with another layer (PEFT trains a copy), or inside a branch or a loop.

    Source: arXiv:2106.09685 (LoRA); arXiv:2312.03732 (rsLoRA); arXiv:2402.09353 (DoRA).

    Example:
        >>> from ortops.docs import examples
        >>> adapted = add(examples.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> {tensor.name: list(tensor.dims) for tensor in adapted.graph.initializer[-2:]}
        {'fc1.lora_A.weight': [4, 2], 'fc1.lora_B.weight': [2, 16]}
    """
    pairs = rank_pattern, alpha_pattern
    kind = model_type_beside(Path(model).absolute()) if isinstance(model, (str, Path)) else None
    settings = (rank, alpha, targets, rslora, *pairs, dropout, seed, dora, modules_to_save, bias)
    return to_proto(adapted(read_base(model), *settings, model_type=kind))


def adapted(
    base: Base,
    rank: int,
    alpha: float,
    targets: str | Sequence[str] | None,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    dora: bool = False,
    modules_to_save: str | Sequence[str] | None = None,
    bias: str = "none",
    model_type: str | None = None,
) -> ir.Model:
    """Adds an adapter to a model; see `add`.

    Args:
        base: The model; not to be used afterwards.
        rank: See `add`, as for all other arguments.
        alpha: The numerator of the scaling.
        targets: The layers to adapt.
        rslora: Whether to use rsLoRA.
        rank_pattern: Ranks of particular layers.
        alpha_pattern: Alphas of particular layers.
        dropout: The ratio of elements that training drops before A.
        seed: The seed of the random initial values.
        dora: Whether to train magnitudes, too.
        modules_to_save: Modules whose own weights are trained.
        bias: Which biases are trained.
        model_type: The model's type in transformers, if it is known.
    """
    dora = boolean("dora", dora)
    rslora, seed = boolean("rslora", rslora), whole_number("seed", seed, 0)
    rank, alpha = whole_number("rank", rank, 1), number("alpha", alpha, above=0)
    dropout = number("dropout", dropout, minimum=0, below=1)
    ranks = {
        p: whole_number(f"rank_pattern {p!r:.80}", each, 1)
        for p, each in _pattern("rank_pattern", rank_pattern).items()
    }
    alphas = {
        p: number(f"alpha_pattern {p!r:.80}", each, above=0)
        for p, each in _pattern("alpha_pattern", alpha_pattern).items()
    }
    modules = saved_modules(modules_to_save)
    found = [t for t in chosen(base.work, targets) if not is_in(t.module, modules)]
    weights = full_weights(base.work, modules, bias, found)
    if not found:
        raise ModelError("targets: no layer is left for the adapter, because of modules_to_save")
    _refuse_overlap(found)
    largest = max(min(t.sizes[0] * math.prod(t.kernel), t.sizes[1]) for t in found)
    if rank > largest:
        say_note("rank=%d: no layer is larger than %d, a rank that learns as much", rank, largest)
    layers_found = dict.fromkeys(
        name for target in found for name in (target.module, standard(target.module))
    )
    by_rank, by_alpha = Patterns(ranks, "rank_pattern"), Patterns(alphas, "alpha_pattern")
    for name, each_by in (("rank_pattern", by_rank), ("alpha_pattern", by_alpha)):
        if (unused := each_by.without_layer(layers_found)) is not None:
            hint = did_you_mean(unused, layers_found)
            raise ModelError(f"{name}: '{unused}' matches no layer that gets an adapter; {hint}")
    generator = np.random.default_rng(seed)
    layers: dict[object, Layer] = {}
    firsts: dict[object, Layer] = {}  # of layers that PEFT has as one
    for target in found:
        layer = layers.get(target.key)
        if layer is None:
            r = int(_value_for(by_rank, target.module, rank))
            own = float(_value_for(by_alpha, target.module, alpha))
            a, b = _first(target, r, scaling(r, own, rslora=rslora), generator)
            whole = whole_of(standard(target.module)) if is_fusing(model_type) else ""
            first = firsts.get((whole, r, own, target.x))
            a = first.a if first else a
            layer = layers[target.key] = Layer(target.module, r, own, a, b, dora=dora, first=first)
            if whole:
                firsts.setdefault((whole, r, own, target.x), layer)
        layer.targets.append(target)
    described = Adapter(rank, alpha, rslora, "", {}, ranks, alphas, dropout, weights)
    described = replace(described, bias=bias if bias != "none" else "")
    return attach(base, list(layers.values()), described)


def _pattern(name: str, value: object) -> Mapping[str, Any]:
    """Returns an argument that maps patterns of layers to numbers."""
    if not isinstance(value or {}, Mapping):
        raise ArgumentError(f"{name} must map patterns of layers to numbers, got {value!r:.80}")
    found: Mapping[Any, Any] = value or {}  # type: ignore[assignment]
    for text in found:
        if not isinstance(text, str):
            raise ArgumentError(f"{name}: patterns must be strings, got {text!r:.80}")
    return found


def _refuse_overlap(found: Sequence[Target]) -> None:
    """Rejects a fused layer and one of its parts."""
    whole = {target.node: target for target in found if not target.columns}
    for target in found:
        if target.columns and target.node in whole:
            raise ArgumentError(
                f"targets: '{target.module}' is a part of '{whole[target.node].module}', which "
                "gets an adapter too; name either the fused layer or its parts"
            )


def _value_for(patterns: Patterns, module: str, default: float) -> float:
    """Returns the number of a layer, by its name in the model or in transformers."""
    return patterns.value_for(module, patterns.value_for(standard(module), default))


@dataclass(frozen=True)
class Base:
    """A model that gets an adapter.

    Attributes:
        work: The model, to be changed.
        light: The same, as it was.
        fingerprint: Its fingerprint (see `ortops.lora.fingerprints`).
    """

    work: ir.Model
    light: LightModel
    fingerprint: str


@dataclass(frozen=True)
class Layer:
    """A layer that gets an adapter.

    Attributes:
        module: Its name.
        rank: The rank.
        alpha: The alpha.
        a: The values of A, in the shape that `add` documents.
        b: The values of B, multiplied by the scaling.
        targets: The nodes of the layer.
        peft: The layer's name in PEFT.
        dora: Whether it has magnitudes.
        magnitude: Their values; None for the norms of the weight.
        first: The layer whose A it shares, as they are one layer in PEFT.
    """

    module: str
    rank: int
    alpha: float
    a: Array
    b: Array
    targets: list[Target] = field(default_factory=list)
    peft: str = ""
    dora: bool = False
    magnitude: Array | None = None
    first: Layer | None = None


def read_base(model: ModelLike | LightModel) -> Base:
    """Reads a model that is to get an adapter, without changing it.

    Args:
        model: The model. The data of a light model stay where they are.

    Raises:
        ModelError: If it already has an adapter or training_info.
    """
    proto, folder = (model.proto, None) if isinstance(model, LightModel) else loading.load(model)
    if adapter_of(proto.metadata_props) is not None:
        raise ModelError(
            "model: it already has an adapter; merge it with ortops.lora.merge, or give the model "
            "without it"
        )
    refuse_training(proto, WITHOUT_TRAINING)
    light = model if isinstance(model, LightModel) else external.detach(proto, folder)
    whole = model if isinstance(model, LightModel) else proto
    work = convert.to_ir(whole, folder)
    if changed := without_integers(work.graph):
        logger.warning(
            "%d MatMulNBits nodes with float16 scales lose accuracy_level=4, as stock onnxruntime "
            "computes them wrongly next to an adapter below its highest optimization level",
            len(changed),
        )
        light = light.copy()
        for node in light.proto.graph.node:
            if node.output[0] in changed:
                kept = [each for each in node.attribute if each.name != "accuracy_level"]
                del node.attribute[:]
                node.attribute.extend(kept)
    return Base(work, light, fingerprint(light))


def attach(base: Base, layers: Sequence[Layer], adapter: Adapter) -> ir.Model:
    """Adds an adapter of given values to a model, and returns it.

    Args:
        base: The model; not to be used afterwards.
        layers: The layers.
        adapter: The settings that all layers share.
    """
    work = base.work
    free = adapter.weights
    digest = fingerprint(base.light, free=free) if free else base.fingerprint
    whole = [work.graph.initializers[name] for name in adapter.weights]
    work.graph.inputs.extend(value for value in whole if value not in work.graph.inputs)
    names, opset = Names(work.graph), work.graph.opset_imports.get("", 1)
    modules, matrices = {}, dict[int, ir.Value]()
    for layer in layers:
        if (adapter.dropout and layer.targets[0].kind != "embedding") or layer.dora:
            _refuse_inner(layer, work.graph)
        module = _unique(layer.module, names)
        root = id(layer.first or layer)
        if root not in matrices:
            matrices[root] = _parameter(work.graph, f"{module}.lora_A.weight", layer.a)
        a = matrices[root]
        b = _parameter(work.graph, f"{module}.lora_B.weight", layer.b)
        kind, columns = layer.targets[0].kind, list(layer.targets[0].columns)
        described = (kind, a.name or "", b.name or "", layer.rank, layer.alpha)
        new = Module(*described, [], layer.peft, columns, layer.dora)
        scale = _scale(work, layer, new) if layer.dora else None
        for target in layer.targets:
            placed = _place(target, (a, b, scale), module, names, opset, adapter.dropout)
            new.tensors.append(placed)
        modules[module] = new
    result = replace(adapter, fingerprint=digest, modules=modules)
    work.metadata_props[METADATA_KEY] = result.dumps()
    work.ir_version = max(work.ir_version, _INITIALIZERS_MAY_BE_INPUTS_OR_NOT)
    count = sum(value.const_value.size for value in whole if value.const_value)
    count += sum(layer.b.size + layer.a.size * (layer.first is None) for layer in layers)
    say_note("added an adapter of %s: %s trainable parameters", result, f"{count:,}")
    return work


def _unique(module: str, names: Names) -> str:
    """Returns the name of a layer, with a number appended if its A or B would not be unique."""
    candidate, number = module, 1
    while any(not names.is_free(f"{candidate}.lora_{which}.weight") for which in "AB"):
        candidate, number = f"{module}_{number}", number + 1
    for which in "AB":
        names.take(f"{candidate}.lora_{which}.weight")
    return candidate


def _parameter(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """Adds an input with a default value."""
    tensor = ir.tensor(array, name=name)
    kind, shape = ir.TensorType(tensor.dtype), ir.Shape(array.shape)
    value = ir.Value(name=name, type=kind, shape=shape, const_value=tensor)
    graph.inputs.append(value)
    graph.register_initializer(value)
    return value


def _scale(work: ir.Model, layer: Layer, module: Module) -> ir.Value:
    """Adds the magnitudes of a layer and the norms of its weight; returns the scale, an input."""
    target = layer.targets[0]
    squares = squares_of(work, target.node, target.kind)
    first, last, _ = target.columns or (0, len(squares), 0)
    shape = (last - first, *(1 for _ in target.kernel))
    own = squares[first:last].reshape(shape)
    norms = np.sqrt(own).astype(layer.a.dtype)
    scale = np.ones_like(norms)
    if layer.magnitude is not None:
        update = product(module, layer.a, layer.b)
        found = norms_of(module, norms, squares_of(work, target.node, target.kind, update))
        norms = layer.magnitude.reshape(shape).astype(norms.dtype)
        scale = norms / found
    for name, array in ((module.magnitude, norms), (module.square, own.astype(norms.dtype))):
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        work.graph.register_initializer(value)
    return _parameter(work.graph, module.scale, scale)


def _first(
    target: Target, rank: int, scale: float, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Returns the initial A and B, as in PEFT."""
    (into, out), kernel = target.sizes, target.kernel
    dtype = target.adapter_dtype.numpy()
    if target.kind == "embedding":
        b = scale * generator.standard_normal((rank, out))
        return np.zeros((into, rank), dtype), b.astype(dtype)
    bound = 1 / math.sqrt(into * math.prod(kernel))
    a = generator.uniform(-bound, bound, (into, rank, *kernel))
    return a.astype(dtype), np.zeros((rank, out, *(1 for _ in kernel)), dtype)


def _constant(value: Any, dtype: Any, emit: Callable[..., ir.Value]) -> ir.Value:
    return emit("Constant", [], [ir.AttrTensor("value", ir.tensor(np.array(value, dtype)))])


def _padded(
    b: ir.Value, columns: Sequence[int], opset: int, emit: Callable[..., ir.Value]
) -> ir.Value:
    """Returns B of a part of a fused layer, with zeros for the columns of the other parts.

    The scales of DoRA, which have one axis, get ones.
    """
    first, last, count = columns
    is_scale = b.shape is not None and len(b.shape) == 1
    pads = [first, count - last] if is_scale else [0, first, 0, count - last]
    if opset < _PADS_ARE_INPUTS:
        value = ir.AttrFloat32("value", float(is_scale))
        return emit("Pad", [b], [ir.AttrInt64s("pads", pads), *[value] * is_scale])
    ones = [_constant(1, b.dtype.numpy(), emit)] if is_scale and b.dtype else []
    return emit("Pad", [b, _constant(pads, np.int64, emit), *ones])


def _refuse_inner(layer: Layer, graph: ir.Graph) -> None:
    """Rejects a layer in a sub-graph, where masks could not be drawn again, nor norms computed."""
    for target in layer.targets:
        if target.node.graph is not graph:
            raise UnsupportedError(
                f"{describe(target.node)}: layer '{layer.module}' is inside a branch or a loop, "
                "where adapters cannot have dropout and DoRA; use dropout=0 (lora_dropout in PEFT) "
                "and dora=False"
            )


def _dropped(x: ir.Value, ratio: float, opset: int, emit: Callable[..., ir.Value]) -> ir.Value:
    """Returns the input of A: in training, some elements of x are dropped."""
    if opset < _RATIO_IS_INPUT:
        return emit("Dropout", [x], [ir.AttrFloat32("ratio", ratio)])
    return emit("Dropout", [x, _constant(ratio, np.float32, emit)])


def _place(
    target: Target,
    parameters: tuple[ir.Value, ir.Value, ir.Value | None],
    module: str,
    names: Names,
    opset: int,
    dropout: float,
) -> list[str]:
    """Adds the output of an adapter to the output of a node.

    Returns:
        The names of the output without the adapter, and with it.
    """
    node, nodes = target.node, list[ir.Node]()
    a, b, scale = parameters

    def emit(
        op_type: str, inputs: Sequence[ir.Value | None], attributes: Sequence[ir.Attr] = ()
    ) -> ir.Value:
        name = names.unique(f"{module}.lora/{op_type}")
        made = ir.Node("", op_type, inputs, attributes, name=name)
        made.outputs[0].name = names.unique(f"{name}_output")
        nodes.append(made)
        return made.outputs[0]

    x = target.x
    if target.adapter_dtype != target.dtype and target.kind != "embedding":
        x = emit("Cast", [x], [ir.AttrInt64("to", target.adapter_dtype.value)])
    if dropout and x is not None and target.kind != "embedding":
        x = _dropped(x, dropout, opset, emit)
    factor: ir.Value = b
    if target.columns:
        factor = _padded(b, target.columns, opset, emit)
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
        delta = emit("MatMul", [emit("MatMul", [x, a]), factor])
    y = _rounded(target.y)
    total = emit("Add", [delta, delta])
    last_node = nodes.pop()
    total.type, total.shape = y.type, y.shape
    take_place(y, total)
    y.name = names.unique(f"{module}.lora/base")
    if scale is not None:
        if target.columns:
            scale = _padded(scale, target.columns, opset, emit)
        delta = _scaled(target, y, delta, scale, emit)
    if target.adapter_dtype != target.dtype:
        delta = emit("Cast", [delta], [ir.AttrInt64("to", target.dtype.value)])
    nodes.append(last_node)
    last_node.replace_input_with(0, y)
    last_node.replace_input_with(1, delta)
    last = y.producer()
    assert last is not None
    assert isinstance(last.graph, ir.Graph)
    last.graph.insert_after(last, nodes)
    return [y.name, total.name or ""]


def _scaled(
    target: Target, y: ir.Value, delta: ir.Value, scale: ir.Value, emit: Callable[..., ir.Value]
) -> ir.Value:
    """Returns g · (W x + B A x) − W x, what DoRA adds to a layer's output, given W x + b."""
    node, bias = target.node, bias_of(target.node)
    beta = node.attributes.get_float("beta", 1.0) if node.op_type == "Gemm" else 1.0
    if target.adapter_dtype != target.dtype:
        wide = [ir.AttrInt64("to", target.adapter_dtype.value)]
        y, bias = emit("Cast", [y], wide), None if bias is None else emit("Cast", [bias], wide)
    if bias is not None and target.kernel:
        shape = [-1, *(1 for _ in target.kernel)]
        bias = emit("Reshape", [bias, _constant(shape, np.int64, emit)])
    if bias is not None and beta != 1:
        bias = emit("Mul", [bias, _constant(beta, target.adapter_dtype.numpy(), emit)])
    if bias is not None:
        y = emit("Sub", [y, bias])
    return emit("Sub", [emit("Mul", [scale, emit("Add", [y, delta])]), y])


def _rounded(value: ir.Value) -> ir.Value:
    """Returns a value after QuantizeLinear and DequantizeLinear, if nothing else reads it."""
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
