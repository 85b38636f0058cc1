"""Weights that are trained themselves beside an adapter: modules_to_save and bias of PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortops._common.arguments import choice
from ortops._common.notes import say_note
from ortops.engine.building.parameters import why_not
from ortops.engine.building.readers import readers
from ortops.errors import ArgumentError, ModelError, UnsupportedError, did_you_mean
from ortops.graph.layer_names import plain, standard
from ortops.lora.targets import Target, bias_of, layer_of, parts, steps_to_weight, targets

BIASES = ("none", "all", "lora_only")
"""The options of ``bias``, as in PEFT."""

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


@dataclass(frozen=True, eq=False)
class Parameter:
    """A weight or a bias of a model.

    Attributes:
        value: The initializer.
        module: The name of its layer.
        attribute: ``"weight"``, ``"bias"``, or another name of a parameter of PyTorch.
        target: The layer, if it multiplies by a matrix.
        is_turned: Whether PyTorch has the matrix transposed.
    """

    value: ir.Value
    module: str
    attribute: str
    target: Target | None = None
    is_turned: bool = False

    @property
    def name(self) -> str:
        """The name in transformers."""
        return f"{standard(self.module)}.{self.attribute}"

    def is_in(self, modules: Iterable[str]) -> bool:
        """Whether it belongs to one of some modules, which are named by the end of their names."""
        return is_in(self.module, modules)


def is_in(layer: str, modules: Iterable[str]) -> bool:
    """Whether a layer is one of some modules, or inside; the end of a module's name is enough."""
    names = {f"{name}." for name in (layer, standard(layer))}
    return any(f"{module}." in name for module in modules for name in names)


def parameters_of(work: ir.Model) -> list[Parameter]:
    """Returns the weights and biases of a model: of matrices, and those that have a name."""
    found: dict[tuple[ir.Value, object], Parameter] = {}
    for target in targets(work):
        weight, bias, module = target.weight, _bias(target), target.module
        found[weight, target.key] = Parameter(weight, module, "weight", target, _is_turned(target))
        if bias is not None:
            found[bias, target.key] = Parameter(bias, module, "bias", target)
    known = {value for value, _ in found}
    for name, value in work.graph.initializers.items():
        module, _, attribute = name.rpartition(".")
        is_named = attribute in ("weight", "bias") and bool(module)  # and be it of ones or zeros
        is_float = value.dtype is not None and value.dtype.is_floating_point()
        if value not in known and is_float and value.uses() and (is_named or not why_not(value)):
            if not module or not attribute.isidentifier():
                module, attribute = layer_of(next(readers(value)).node, value), ""
            found[value, name] = Parameter(value, plain(module.removesuffix(".Add")), attribute)
    return list(found.values())


def _bias(target: Target) -> ir.Value | None:
    """Returns the bias of a layer, an initializer that its node or the next one adds.

    It is the quantized one if the bias is dequantized.
    """
    value, given = bias_of(target.node), [use.node for use in target.y.uses()]
    if value is None and len(given) == 1 and given[0].op_type == "Add":
        value = next((each for each in given[0].inputs if each is not target.y), None)
    source = None if value is None else value.producer()
    if source is not None and source.op_type == "DequantizeLinear":
        value = source.inputs[0]
    is_bias = value is not None and value.is_initializer() and len(value.shape or ()) == 1
    return value if is_bias else None


def _is_turned(target: Target) -> bool:
    """Whether a linear layer's weight is stored as [in, out], which PyTorch has as [out, in]."""
    found = steps_to_weight(target.node.inputs[target.index])
    steps = () if found is None else found[1]
    turns = sum(step.op_type == "Transpose" for step in steps)
    turns += target.node.op_type == "Gemm" and target.node.attributes.get_int("transB", 0) == 1
    return bool(turns % 2) != (target.kind == "linear")


def saved_modules(modules: object) -> list[str]:
    """Returns the argument ``modules_to_save`` as a list.

    Raises:
        ArgumentError: If it is not names.
    """
    found = [] if modules is None else [modules] if isinstance(modules, str) else modules
    if not isinstance(found, Iterable) or not all(isinstance(m, str) and m for m in (*found,)):
        raise ArgumentError(f"modules_to_save must be names of modules, got {modules!r:.80}")
    return [*found]


def full_weights(
    work: ir.Model, modules: Sequence[str], bias: str, adapted: Sequence[Target]
) -> dict[str, str]:
    """Returns the weights that are trained beside an adapter, with their names in transformers.

    Args:
        work: The model, without an adapter.
        modules: The modules to train whole.
        bias: See `ortops.lora.add`.
        adapted: The layers that get an adapter.

    Raises:
        ModelError: If a module has no parameter.
        UnsupportedError: If a parameter cannot be trained, or is not one of that module alone.
    """
    choice("bias", bias, BIASES)
    everything = parameters_of(work) if modules or bias != "none" else []
    for module in modules:
        if not any(each.is_in([module]) for each in everything):
            hint = did_you_mean(module, dict.fromkeys(each.module for each in everything))
            raise ModelError(f"modules_to_save: '{module}' matches no module with weights; {hint}")
    nodes = {target.node for target in adapted}
    result, found = dict[str, str](), 0
    for each in everything:
        is_bias = each.attribute == "bias" and (
            bias == "all" or (bias == "lora_only" and each.target and each.target.node in nodes)
        )
        if each.is_in(modules) or is_bias:
            _refuse(each, everything, work.graph)
            result[each.value.name or ""] = each.name
            found += each.attribute == "bias"
    if bias != "none" and not found:
        say_note("bias='%s' trains none: the file has no biases of these layers", bias)
    return result


def _refuse(each: Parameter, everything: Sequence[Parameter], graph: ir.Graph) -> None:
    """Rejects a parameter that cannot be trained, or that other layers read, too."""
    dtype, own = each.value.dtype, (each.module, each.attribute)
    others = [o for o in everything if o.value is each.value or (o.module, o.attribute) == own]
    layers = {layer_of(reader.node, each.value) for reader in readers(each.value)}
    is_called = each.target is not None and each.target.first is not None
    why = ""
    if dtype is None or not dtype.is_floating_point():
        why = "is quantized, so it cannot be trained as a whole"
    elif dtype not in _FLOATS or not each.value.is_initializer() or not each.attribute:
        why = f"must be a named initializer of FLOAT, FLOAT16 or DOUBLE, got {dtype}"
    elif each.target is not None and parts(each.target):
        why = "belongs to several layers of PEFT, which the exporter fused"
    elif len(others) > 1 or (len(layers) > 1 and not is_called):
        owners = ", ".join(sorted(layers | {other.module for other in others}))
        why = f"is shared by {owners}, of which PEFT would train copies"
    elif any(reader.node.graph is not graph for reader in readers(each.value)):
        why = "is read inside a branch or a loop"
    if why:
        remedy = "leave the layer out, or give a float model, untied by ortops.surgery.untie"
        start = f"modules_to_save, bias: '{each.value.name}' of layer '{each.module}'"
        raise UnsupportedError(f"{start} {why}; {remedy}")
