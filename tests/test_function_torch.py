"""Function.torch: an ONNX model as a torch.nn.Module, next to PyTorch's autograd."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from test_function import BRANCH, LOOKUP, MASKED, POWER, network
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import ortops
from models import lenet, mlp, resnet, transformer
from models.torch_twins import twin
from ortops import Function, Tape, op
from ortops.derivatives import programs
from ortops.derivatives.bridges import torch as torch_module
from ortops.engine.execution import memory

pytestmark = [
    pytest.mark.torch,
    # Of PyTorch's own code.
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

Tensor = torch.Tensor


@pytest.fixture(scope="module")
def module() -> Any:
    return Function(network()).torch()


def reference(x: Tensor, weights: Any) -> Tensor:
    return torch.tanh(x @ weights["w1"] + weights["b1"]) @ weights["w2"]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in module.named_parameters()}


def of_weights(module: nn.Module, x: Tensor, *values: Tensor) -> Any:
    names = [name for name, _ in module.named_parameters()]
    return functional_call(module, dict(zip(names, values, strict=True)), (x,))


@pytest.fixture
def x() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 3, dtype=torch.double, generator=generator)


# --------------------------------------------------------------------------------- derivatives


@pytest.mark.slow
def test_gradcheck(module: nn.Module, x: Tensor) -> None:
    weights = [each.clone().requires_grad_() for each in weights_of(module).values()]
    inputs = (x.requires_grad_(), *weights)

    def f(x: Tensor, *values: Tensor) -> Any:
        return of_weights(module, x, *values)

    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs, check_fwd_over_rev=True)
    assert torch.autograd.gradcheck(module, (x,))
    assert torch.autograd.gradgradcheck(module, (x,))


@pytest.mark.slow
def test_transformations_of_torch_func(module: nn.Module, x: Tensor) -> None:
    weights = weights_of(module)
    batch = torch.stack([x, 2 * x, -x])

    def energy(x: Tensor) -> Tensor:
        return (module(x) ** 2).sum()

    def expected(x: Tensor) -> Tensor:
        return (reference(x, weights) ** 2).sum()

    def loss(values: Any, x: Tensor) -> Tensor:
        return (functional_call(module, values, (x,)) ** 2).sum()

    def expected_loss(values: Any, x: Tensor) -> Tensor:
        return (reference(x, values) ** 2).sum()

    def third(f: Any) -> Any:
        return grad(lambda a: (grad(lambda b: (grad(f)(b) ** 2).sum())(a) ** 2).sum())

    def network(x: Tensor) -> Tensor:
        return reference(x, weights)

    for ours, theirs, given in (
        (grad(energy), grad(expected), x),
        (jacrev(module), jacrev(network), x),
        (jacfwd(module), jacfwd(network), x),
        (hessian(energy), hessian(expected), x),
        (jacrev(jacrev(energy)), hessian(expected), x),
        (third(energy), third(expected), x),
        (vmap(module), vmap(network), batch),
        (vmap(grad(energy)), vmap(grad(expected)), batch),
        (grad(lambda b: vmap(energy)(b).sum()), grad(lambda b: vmap(expected)(b).sum()), batch),
        (vmap(jacrev(module)), vmap(jacrev(network)), batch),
        (vmap(hessian(energy)), vmap(hessian(expected)), batch),
        (vmap(vmap(module)), vmap(vmap(network)), batch[None].repeat(2, 1, 1, 1)),
        (vmap(module, in_dims=1, out_dims=1), vmap(network, in_dims=1, out_dims=1), batch),
    ):
        assert torch.allclose(ours(given), theirs(given), rtol=1e-9)
    assert torch.allclose(jvp(module, (x,), (x,))[1], jvp(network, (x,), (x,))[1])
    per_sample = vmap(grad(loss), in_dims=(None, 0))(weights, batch)
    wanted = vmap(grad(expected_loss), in_dims=(None, 0))(weights, batch)
    assert all(torch.allclose(per_sample[name], wanted[name]) for name in weights)


def test_what_torch_cannot_transform_is_said(module: nn.Module, x: Tensor) -> None:
    with pytest.raises(ortops.UnsupportedError, match=r"cannot be read.*use .*torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(module, x, vectorize=True)
    assert vmap(module)(torch.zeros(0, 4, 3, dtype=torch.double)).shape == (0, 4, 2)
    assert torch.allclose(
        torch.autograd.functional.jacobian(module, x), jacrev(module)(x), rtol=1e-12
    )


def test_a_gradient_penalty_trains(module: nn.Module, x: Tensor) -> None:
    def penalties(f: Any, weights: Any) -> list[Tensor]:
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(f(given).sum(), given, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        return list(torch.autograd.grad(penalty, weights))

    ours = penalties(module, list(module.parameters())[:2])
    weights = {name: each.clone().requires_grad_() for name, each in weights_of(module).items()}
    theirs = penalties(lambda x: reference(x, weights), list(weights.values())[:2])
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


# ------------------------------------------------------------------------------------- training


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (mlp.mlp((5, 7, 3)), (6, 5)),
        (lenet.lenet(), (6, 1, 8, 8)),
        (transformer.transformer(depth=1, width=16, hidden=32), (6, 8, 8)),
    ],
    ids=["mlp", "lenet", "transformer"],
)
def test_training_follows_torch(model: onnx.ModelProto, shape: tuple[int, ...]) -> None:
    """Between two torch layers, with the same steps as a torch module."""
    torch.manual_seed(0)
    x, labels = torch.randn(shape), torch.randint(0, 2, shape[:1])
    losses, slopes = [], []
    for middle in (Function(model).torch(), twin(model)):
        torch.manual_seed(1)
        width = model.graph.output[0].type.tensor_type.shape.dim[-1].dim_value
        net = nn.Sequential(nn.Linear(shape[-1], shape[-1]), middle, nn.Linear(width, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        found = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), labels)
            loss.backward()
            if not found:
                slopes.append({n: p.grad.clone() for n, p in net.named_parameters()})
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    ours, theirs = losses
    assert ours[-1] < ours[0] / 2
    assert np.allclose(ours, theirs, rtol=1e-3)
    assert slopes[0].keys() == slopes[1].keys()
    for name, slope in slopes[1].items():
        assert torch.allclose(slopes[0][name], slope, rtol=1e-3, atol=1e-5), name


def test_statistics_stay_constants() -> None:
    model = resnet.resnet((1, 1), image=(3, 8, 8))
    module, other = Function(model).torch(), twin(model)
    assert {n for n, _ in module.named_parameters()} == {n for n, _ in other.named_parameters()}
    before = {name: each.clone() for name, each in module.state_dict().items()}
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    for each in (module.train(), other):
        each(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        theirs = other.get_parameter(name).grad
        assert torch.allclose(parameter.grad, theirs, rtol=1e-2, atol=1e-3 * theirs.abs().max())
    assert all(torch.equal(before[name], each) for name, each in module.state_dict().items())


@pytest.mark.slow
@pytest.mark.optional("onnxscript", "export")
@pytest.mark.parametrize("dynamo", [False, True], ids=["TorchScript", "dynamo"])
def test_gradients_of_an_export_equal_those_of_the_exported_net(dynamo: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 3)
    )
    x = torch.randn(2, 1, 8, 8)
    file = io.BytesIO()
    settings: dict[str, Any] = {"dynamic_axes": {"x": {0: "n"}}}
    if dynamo:
        settings = {"dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},), "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        made = torch.onnx.export(net, (x,), file, input_names=["x"], dynamo=dynamo, **settings)
    data = made.model_proto if made is not None else onnx.load_from_string(file.getvalue())
    module = Function(data).torch()
    names = {name for name, _ in net.named_parameters()}
    assert names == {name for name, _ in module.named_parameters()}
    module.load_state_dict(net.state_dict())
    net.load_state_dict(module.state_dict())
    for rows in (2, 5):
        x = torch.randn(rows, 1, 8, 8, requires_grad=True)
        results = []
        for each in (module, net):
            each.zero_grad()
            (slope,) = torch.autograd.grad(each(x).tanh().sum(), x, retain_graph=True)
            each(x).tanh().sum().backward()
            results.append([slope, *(each.get_parameter(n).grad for n in sorted(names))])
        for ours, theirs in zip(*results, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_only_what_is_needed_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Function(mlp.mlp((4, 16, 2))).torch()
    asked: list[Any] = []
    program = programs.Source.program

    def spied(self: Any, request: Any) -> Any:
        asked.append((request.kind, request.wrt))
        return program(self, request)

    monkeypatch.setattr(programs.Source, "program", spied)
    x = torch.randn(3, 4)
    module.get_parameter("fc1.weight").requires_grad_(False)
    module(x).sum().backward()
    assert asked == [("vjp", ("fc1.bias", "fc2.weight", "fc2.bias"))]
    assert module.get_parameter("fc1.weight").grad is None
    asked.clear()
    with torch.no_grad():
        assert not module(x).requires_grad
    assert asked == [("outputs", ())]


def test_constant_weights(x: Tensor) -> None:
    f = Function(network())
    module = f.torch(trainable=False)
    assert not list(module.parameters())
    assert not module.state_dict()
    assert torch.autograd.gradcheck(module, (x.requires_grad_(),))
    assert not module(x.detach()).requires_grad
    with pytest.raises(ortops.ArgumentError, match="trainable must be True or False, got 1"):
        f.torch(trainable=1)  # type: ignore[arg-type]


def test_replaced_weights_are_initial_values(x: Tensor) -> None:
    f = Function(network())
    other = f.with_parameters({"w1": 2 * f.parameters["w1"]})
    module = other.torch()
    assert np.array_equal(module.w1.detach(), other.parameters["w1"])
    assert np.array_equal(module(x).detach(), other(x))
    with torch.no_grad():
        module.w1.zero_()
    assert np.array_equal(other.parameters["w1"], 2 * f.parameters["w1"])
    assert np.array_equal(other.torch(trainable=False)(x), other(x))


# ---------------------------------------------------------------------------------------- memory


def test_tensors_are_not_copied(module: nn.Module, x: Tensor, monkeypatch: Any) -> None:
    read: list[int] = []
    written: list[int] = []
    convert, compute = memory.ort_value, programs._Part.compute

    def spied_convert(array: Any) -> Any:
        read.append(array.ctypes.data)
        return convert(array)

    def spied_compute(self: Any, feeds: Any) -> Any:
        found = compute(self, feeds)
        written.extend(value.data_ptr() for value in found.values())
        return found

    monkeypatch.setattr(programs, "ort_value", spied_convert)
    monkeypatch.setattr(programs._Part, "compute", spied_compute)
    y = module(x.requires_grad_())
    pointers = {x.data_ptr(), *(each.data_ptr() for each in module.parameters())}
    assert set(read) == pointers
    assert y.data_ptr() in written
    residuals = set(written)
    read.clear()
    written.clear()
    cotangent = torch.ones_like(y)
    slopes = torch.autograd.grad(y, [x, *module.parameters()], cotangent)
    assert cotangent.data_ptr() in read
    assert set(read) <= pointers | residuals | {cotangent.data_ptr()}
    assert [each.data_ptr() for each in slopes] == written


def test_torch_finds_changed_and_freed_tensors(module: nn.Module, x: Tensor) -> None:
    y = module(x.requires_grad_()).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()
    given = x.detach().clone().requires_grad_()
    moved = given * 1
    y = module(moved).sum()
    moved.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_residuals_are_freed_by_the_backward_pass(x: Tensor, monkeypatch: Any) -> None:
    """They pass through torch's hooks for saved tensors, which other tools use to move them."""
    module = Function(network()).torch()
    packed: list[Tensor] = []
    arrays: list[Any] = []
    convert = torch_module._tensor

    def spied(array: Any) -> Tensor:
        arrays.append(weakref.ref(array))
        return convert(array)

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    monkeypatch.setattr(torch_module, "_tensor", spied)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    _, *residuals = arrays
    assert residuals
    shapes = {each().shape for each in residuals}
    assert {tuple(each.shape) for each in packed} >= shapes
    packed.clear()
    total = y.sum()
    assert all(each() is not None for each in residuals)
    total.backward()
    assert all(each() is None for each in residuals)
    assert y.shape == (4, 2)


def test_other_layouts_of_memory(module: nn.Module) -> None:
    x = torch.randn(3, 4, dtype=torch.double).T
    assert not x.is_contiguous()
    assert torch.equal(module(x), module(x.contiguous()))
    wide = torch.randn(8, 6, dtype=torch.double)[::2, ::2].requires_grad_()
    cotangent = torch.ones((), dtype=torch.double).expand(4, 2)
    (slope,) = torch.autograd.grad(module(wide), wide, cotangent)
    given = wide.detach().contiguous().requires_grad_()
    assert torch.equal(slope, torch.autograd.grad(module(given).sum(), given)[0])


# ---------------------------------------------------------------------------------- kinds of models


def test_integer_inputs_and_outputs() -> None:
    module = Function(onnx.parser.parse_model(LOOKUP)).torch()
    ids, x = torch.tensor([2, 0]), torch.tensor([[1.0, 1], [2, 2]], requires_grad=True)
    y, following = module(ids, x=x)
    assert following.tolist() == [3, 1]
    assert not following.requires_grad
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[5, 6], [1, 2]]
    assert module.table.grad.tolist() == [[2, 2], [0, 0], [1, 1]]
    assert [name for name, _ in module.named_parameters()] == ["table"]
    assert module([2, 0], x)[0].tolist() == y.tolist()
    assert module(np.array([2, 0]), x)[0].tolist() == y.tolist()


def test_a_classifier_without_floating_point_outputs() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> f (float[n, 2] x) => (int64[n, 1] label)
    <float[2, 2] w = {0, 1, 1, 0}> {
        y = MatMul (x, w)
        label = ArgMax <axis = 1> (y)
    }"""
    module = Function(onnx.parser.parse_model(text)).torch()
    label = module(torch.tensor([[1.0, 2], [2, 1]], requires_grad=True))
    assert label.tolist() == [[0], [1]]
    assert not label.requires_grad


def test_unused_outputs_and_inputs() -> None:
    with Tape(name="two") as tape:
        x, z = (tape.input(name, np.float32, ["n"]) for name in ("x", "z"))
        tape.output(x * x, "square")
        tape.output(op.Exp(z), "power")
    module = Function(tape.model()).torch()
    x, z = (torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    square, _ = module(x, z)
    square.sum().backward()
    assert x.grad.tolist() == [2, 4]
    assert z.grad is None or z.grad.tolist() == [0, 0]


def test_control_flow() -> None:
    x = torch.tensor([1.0, 2, 3], requires_grad=True)
    module = Function(onnx.parser.parse_model(BRANCH)).torch()
    for square, slope in ((True, [2, 4, 6]), (False, [-1, -1, -1])):
        (found,) = torch.autograd.grad(module(torch.tensor(square), x).sum(), x)
        assert found.tolist() == slope
    loop = Function(onnx.parser.parse_model(POWER)).torch()
    y = loop(torch.tensor(3), x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    assert slope.tolist() == [3, 12, 27]
    assert torch.autograd.grad(slope.sum(), x)[0].tolist() == [6, 12, 18]


@pytest.mark.slow
def test_dropout_in_training_mode() -> None:
    module = Function(onnx.parser.parse_model(MASKED)).torch()
    x = torch.ones(1000, requires_grad=True)
    for settings in ({}, {"create_graph": True}):
        y = module(x)
        assert 300 < (y == 0).sum() < 700
        (slope,) = torch.autograd.grad(y.sum(), x, **settings)
        assert torch.equal(slope, y)
    with pytest.raises(ortops.UnsupportedError, match=r"Dropout node 'y' draws .* would draw"):
        torch.autograd.grad((slope**2).sum(), x)
    with pytest.raises(ortops.UnsupportedError, match="a forward-mode derivative"):
        jvp(module, (x,), (x,))
    with pytest.raises(ortops.UnsupportedError, match="randomness='different'"):
        vmap(module)(torch.ones(2, 9))
    with pytest.raises(ortops.UnsupportedError, match="vmap over an axis of size 0"):
        vmap(module, randomness="different")(torch.ones(0, 9))
    both = vmap(module, randomness="different")(torch.ones(2, 1000))
    assert not torch.equal(*both)


def test_inactive_dropout_is_differentiated_twice() -> None:
    text = MASKED.replace("bool {1}", "bool {0}").replace("Dropout (x,", "Dropout (z,")
    module = Function(
        onnx.parser.parse_model(text.replace("y = Dropout", "z = Mul (x, x)\n y = Dropout"))
    ).torch()
    x = torch.tensor([1.0, 3], requires_grad=True)
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(slope.sum(), x)[0].tolist() == [2, 2]


def test_a_quantized_model_is_differentiated_straight_through() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> f (float[n, 2] x) => (float[n, 2] y)
    <float[2, 2] w = {1, 2, 3, 4}, float s = {0.5}, uint8 z = {128}> {
        q = QuantizeLinear (x, s, z)
        d = DequantizeLinear (q, s, z)
        y = MatMul (d, w)
    }"""
    module = Function(onnx.parser.parse_model(text)).torch()
    x = torch.tensor([[0.6, 1.1]], requires_grad=True)
    y = module(x)
    assert y.tolist() == [[3.5, 5]]
    y.sum().backward()
    assert x.grad.tolist() == [[3, 7]]
    assert module.w.grad.tolist() == [[0.5, 0.5], [1, 1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float_types(dtype: torch.dtype) -> None:
    kind = {torch.float16: np.float16, torch.float32: np.float32}.get(dtype, ml_dtypes.bfloat16)
    with Tape(name="scaled") as tape:
        x = tape.input("x", kind, ["n"])
        w = tape.initializer("w", np.array([2, 4]).astype(kind))
        tape.output((x.astype(np.float32) * w.astype(np.float32) * 3).astype(kind), "y")
    module = Function(tape.model()).torch()
    x = torch.tensor([1, 3], dtype=dtype, requires_grad=True)
    y = module(x)
    assert y.dtype is module.w.dtype is dtype
    y.sum().backward()
    assert x.grad.dtype is module.w.grad.dtype is dtype
    assert x.grad.tolist() == [6, 12]
    assert module.w.grad.tolist() == [3, 9]


def test_weights_that_are_inputs_with_default_values() -> None:
    model = network()
    model.graph.input.insert(0, helper.make_tensor_value_info("w1", TensorProto.DOUBLE, [3, 5]))
    model.graph.input.append(helper.make_tensor_value_info("b1", TensorProto.DOUBLE, [5]))
    x = torch.randn(2, 3, dtype=torch.double)
    expected = Function(network()).torch()
    module = Function(model).torch()
    assert torch.equal(module(x), expected(x))
    module(x).sum().backward()
    expected(x).sum().backward()
    for name, each in expected.named_parameters():
        assert torch.allclose(module.get_parameter(name).grad, each.grad)
    with pytest.raises(ortops.ArgumentError, match="input 'w1' has a default value in the model"):
        module(x, w1=x)


# ---------------------------------------------------------------------------- names and states


ODD = [
    "fc.weight",
    "fc.bias",
    "fc",
    "/enc/MatMul_1",
    "type.weight",
    "forward",
    "a..b",
    "onnx::Add_3",
]


def test_odd_names_of_weights(tmp_path: Path) -> None:
    with Tape(name="odd") as tape:
        y = tape.input("x", np.float32, [2])
        for number, name in enumerate(ODD, 1):
            y = y + tape.initializer(name, np.full(2, number, np.float32))
        tape.output(y, "y")
    module = Function(tape.model()).torch()
    state = module.state_dict()
    assert sorted(state) == sorted(ODD)
    assert [name for name in ODD if state[name][0] != 1 + ODD.index(name)] == []
    doubled = {name: 2 * value for name, value in state.items()}
    torch.save(doubled, tmp_path / "state.pt")
    assert not any(module.load_state_dict(torch.load(tmp_path / "state.pt")))
    assert module(torch.zeros(2)).tolist() == [72, 72]
    module(torch.zeros(2)).sum().backward()
    assert all(each.grad.tolist() == [1, 1] for each in module.parameters())
    assert len(list(module.parameters())) == len(ODD)
    with pytest.raises(RuntimeError, match="Missing key"):
        module.load_state_dict({"fc": torch.zeros(2)})


def test_copies_and_pickles(module: Any, x: Tensor, tmp_path: Path) -> None:
    trained = copy.deepcopy(module)
    with torch.no_grad():
        trained.w1.mul_(2)
    assert not torch.equal(trained(x), module(x))
    torch.save(trained, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    for other in (loaded, pickle.loads(pickle.dumps(trained)), copy.deepcopy(trained)):
        assert torch.equal(other(x), trained(x))
        assert torch.autograd.gradcheck(other, (x.clone().requires_grad_(),))
    f = Function(network()).with_parameters({"w1": np.zeros((3, 5))})
    assert np.array_equal(pickle.loads(pickle.dumps(f))(x), f(x))
    assert copy.deepcopy(f) is f
    chosen = Function(
        network(), sess_options=ortops.derivatives.programs.onnxruntime.SessionOptions()
    )
    with pytest.raises(TypeError, match="a Function with sess_options cannot be pickled"):
        pickle.dumps(chosen)


def test_trained_values_return_to_the_function(x: Tensor) -> None:
    f = Function(network())
    module = f.torch()
    with torch.no_grad():
        module.w1.mul_(3)
    trained = f.with_parameters(module.state_dict())
    assert np.array_equal(trained.parameters["w1"], 3 * f.parameters["w1"])
    assert np.array_equal(trained(x), module(x).detach())
    with torch.no_grad():
        module.w1.zero_()
    assert np.array_equal(trained.parameters["w1"], 3 * f.parameters["w1"])


def test_repr() -> None:
    shown = repr(nn.Sequential(Function(mlp.mlp((4, 16, 2))).torch()))
    assert "OnnxModule(" in shown
    assert "Function(images: float32[batch, 4]) -> logits: float32[batch, 2], 4 weights" in shown


def test_a_parametrized_weight(x: Tensor) -> None:
    module = Function(network()).torch()
    wanted = module.w1.detach().clone()
    nn.utils.parametrizations.weight_norm(module, "w1")
    assert torch.allclose(module.w1, wanted)
    module(x).sum().backward()
    assert module.parametrizations.w1.original0.grad.abs().sum() > 0


# ------------------------------------------------------------------------- what does not work


def test_wrong_tensors_are_named() -> None:
    module = Function(mlp.mlp((4, 16, 2))).torch()
    x = torch.zeros(3, 4)
    for call, message in (
        (lambda: module(x.double()), r"input 'images' must be torch.float32, got torch.float64"),
        (lambda: module(x.to("meta")), r"input 'images' must be .* on the CPU, .* on meta"),
        (lambda: module(x.to_sparse()), r"input 'images' must be a dense tensor"),
        (lambda: module(x[:, 1:]), r"'images' must have shape \[batch, 4\], got \[3, 3\]"),
        (lambda: module(), "missing: images"),
        (lambda: module(x, x), "has 1 input "),
        (lambda: module(other=x), "no input is named 'other'"),
        (lambda: module(np.zeros((3, 4)) + 0.1), "'images' must be float32, got float64"),
        (lambda: module.double()(x), "weight 'fc1.weight' must be torch.float32"),
        (lambda: module.to("meta")(x), "weight 'fc1.weight' must be .* on meta"),
    ):
        with pytest.raises((ortops.ArgumentError, ortops.FeedError), match=message):
            call()


def test_outputs_that_are_no_tensors() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> f (float[n] x) => (string[n] y) {
        y = Cast <to = 8> (x)
    }"""
    with pytest.raises(ortops.UnsupportedError, match=r"output 'y' of type .* cannot be a torch"):
        Function(onnx.parser.parse_model(text)).torch()


@pytest.mark.slow
def test_torch_compile_breaks_the_graph_around_it(x: Tensor) -> None:
    module = Function(network()).torch()
    net = nn.Sequential(nn.Linear(3, 3), module, nn.Linear(2, 1)).double()
    compiled = torch.compile(net, backend="eager")
    results = []
    for each in (net, compiled):
        net.zero_grad()
        each(x).sum().backward()
        results.append([p.grad.clone() for p in net.parameters()])
    assert all(torch.allclose(a, b) for a, b in zip(*results, strict=True))
    torch.compiler.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"onnxruntime computes an ortops\.Function"
    ):
        torch.compile(net, backend="eager", fullgraph=True)(x)


def test_threads_may_share_a_module(x: Tensor) -> None:
    module = Function(network()).torch()
    results: dict[int, Tensor] = {}

    def work(number: int) -> None:
        given = (number * x).requires_grad_()
        (slope,) = torch.autograd.grad(module(given).square().sum(), given, create_graph=True)
        (results[number],) = torch.autograd.grad(slope.sum(), given)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    weights = weights_of(module)
    for number, found in results.items():
        given = (number * x).requires_grad_()
        y = reference(given, weights).square().sum()
        (slope,) = torch.autograd.grad(y, given, create_graph=True)
        assert torch.allclose(found, torch.autograd.grad(slope.sum(), given)[0])
    assert len(results) == 4


def test_torch_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "ortops.derivatives.bridges.torch", raising=False)
    with pytest.raises(ortops.OrtopsError, match=r"needs torch; pip install ortops\[torch"):
        Function(network()).torch()
