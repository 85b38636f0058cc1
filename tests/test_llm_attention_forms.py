"""Language models with each form of attention and position: first loss and gradients of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortops.llm import FineTuning
from ortops.llm.checking import check_folder

WIDTH, HEADS, WORDS, LONGEST = 16, 2, 24, 16
SIZE = WIDTH // HEADS
ROWS = [[7, 8, 9, 10, 11, 3], [9, 10, 11], [20, 21, 22, 23]]


class Graph:
    """The nodes and weights of a model."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: dict[str, Any] = {}
        self._rng = np.random.default_rng(0)

    def node(self, kind: str, inputs: list[str], domain: str = "", **more: Any) -> str:
        name = f"/{kind}_{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(kind, inputs, [f"{name}_y"], name, domain=domain, **more)
        )
        return f"{name}_y"

    def fused(self, kind: str, inputs: list[str], **more: Any) -> str:
        return self.node(kind, inputs, "com.microsoft", **more)

    def weight(self, name: str, *shape: int) -> str:
        values = self._rng.normal(0, 1.5 * shape[0] ** -0.5, shape)
        return self.constant(name, values.astype(np.float32))

    def constant(self, name: str, array: Any) -> str:
        self.stored[name] = array
        return name

    def linear(self, x: str, name: str, out: int = WIDTH) -> str:
        weight = self.weight(f"{name}.weight", WIDTH, out)
        self.nodes.append(helper.make_node("MatMul", [x, weight], [f"{name}_y"], f"/{name}/MatMul"))
        return f"{name}_y"

    def mask(self) -> str:
        return self.node("Cast", ["attention_mask"], to=TensorProto.INT32)

    def projections(self, x: str) -> list[str]:
        return [self.linear(x, name) for name in ("q_proj", "k_proj", "v_proj")]

    def tables(self) -> list[str]:
        angles = np.outer(np.arange(LONGEST), 100.0 ** (-np.arange(0, SIZE, 2) / SIZE))
        return [
            self.constant(name, part(angles).astype(np.float32))
            for name, part in (("cos", np.cos), ("sin", np.sin))
        ]

    def distances(self) -> str:
        """The bias of ALiBi, [batch, heads, queries, keys], without the causal mask."""
        positions = self.node("Cast", ["position_ids"], to=TensorProto.FLOAT)
        axes = [self.constant(f"axes{n}", np.array(n)) for n in ([1, 3], [1, 2])]
        queries, keys = (self.node("Unsqueeze", [positions, each]) for each in axes)
        slopes = self.constant("slopes", np.array([0.5, 0.25], np.float32).reshape(1, HEADS, 1, 1))
        return self.node("Mul", [self.node("Sub", [keys, queries]), slopes])


def multi_head(graph: Graph, x: str) -> str:
    inputs = [*graph.projections(x), "", graph.mask()]
    return graph.fused("MultiHeadAttention", inputs, num_heads=HEADS, unidirectional=1)


def multi_head_alibi(graph: Graph, x: str) -> str:
    inputs = [*graph.projections(x), "", graph.mask(), graph.distances()]
    return graph.fused("MultiHeadAttention", inputs, num_heads=HEADS, unidirectional=1)


def multi_head_rotary(graph: Graph, x: str) -> str:
    q, k, v = graph.projections(x)
    tables = graph.tables()
    q, k = (graph.fused("RotaryEmbedding", [each, "position_ids", *tables]) for each in (q, k))
    inputs = [q, k, v, "", graph.mask()]
    return graph.fused("MultiHeadAttention", inputs, num_heads=HEADS, unidirectional=1)


def packed(graph: Graph, x: str) -> str:
    inputs = [x, graph.weight("qkv.weight", WIDTH, 3 * WIDTH), graph.weight("qkv.bias", 3 * WIDTH)]
    return graph.fused("Attention", [*inputs, graph.mask()], num_heads=HEADS, unidirectional=1)


def packed_alibi(graph: Graph, x: str) -> str:
    inputs = [x, graph.weight("qkv.weight", WIDTH, 3 * WIDTH), graph.weight("qkv.bias", 3 * WIDTH)]
    inputs += [graph.mask(), "", graph.distances()]
    return graph.fused("Attention", inputs, num_heads=HEADS, unidirectional=1)


def grouped_alibi(graph: Graph, x: str) -> str:
    one = graph.constant("one", np.array([1]))
    count = graph.node("ReduceSum", ["attention_mask", one], keepdims=1)
    lengths = graph.node("Cast", [graph.node("Sub", [count, one])], to=TensorProto.INT32)
    total = graph.node("Gather", [graph.node("Shape", ["attention_mask"]), "second"], axis=0)
    graph.constant("second", np.array(1))
    total = graph.node("Cast", [total], to=TensorProto.INT32)
    inputs = [*graph.projections(x), "", "", lengths, total, "", "", "", graph.distances()]
    y = graph.fused("GroupQueryAttention", inputs, num_heads=HEADS, kv_num_heads=HEADS)
    graph.nodes[-1].output.extend(["present_key", "present_value"])
    return y


def standard(graph: Graph, x: str) -> str:
    return _standard(graph, graph.projections(x), [])


def standard_alibi(graph: Graph, x: str) -> str:
    return _standard(graph, graph.projections(x), [graph.distances()])


def standard_rotary(graph: Graph, x: str) -> str:
    q, k, v = graph.projections(x)
    inputs = [*graph.tables(), "position_ids"]
    q, k = (graph.node("RotaryEmbedding", [each, *inputs], num_heads=HEADS) for each in (q, k))
    return _standard(graph, [q, k, v], [])


def _standard(graph: Graph, inputs: list[str], bias: list[str]) -> str:
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS}
    return graph.node("Attention", [*inputs, *bias], **heads, is_causal=1)


KERNELS = {21: "onnxruntime>=1.22", 23: "onnxruntime>=1.23", 24: "onnxruntime>=1.24"}
FORMS = [
    pytest.param(
        form, opset, marks=pytest.mark.needs(KERNELS[opset]), id=f"{form.__name__}-{opset}"
    )
    for form, opset in [
        *((form, 21) for form in (multi_head, multi_head_alibi, multi_head_rotary)),
        *((form, 21) for form in (packed, packed_alibi, grouped_alibi)),
        *((form, n) for form in (standard, standard_alibi, standard_rotary) for n in (23, 24)),
    ]
]


def write(folder: Path, form: Callable[[Graph, str], str], opset: int) -> Graph:
    graph = Graph()
    x = graph.node("Gather", [graph.weight("embedding", WORDS, WIDTH), "input_ids"])
    x = graph.node("Mul", [x, graph.constant("four", np.array(4, np.float32))])
    y = graph.linear(form(graph, x), "o_proj")
    graph.linear(graph.node("Add", [x, y]), "lm_head", WORDS)
    graph.nodes[-1].output[0] = "logits"
    read = {name for node in graph.nodes for name in node.input}
    names = ["input_ids", "attention_mask", "position_ids"]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "form",
            [
                helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "time"])
                for name in names
                if name in read
            ],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "time", WORDS])],
            [numpy_helper.from_array(array, name) for name, array in graph.stored.items()],
        ),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    onnx.save(model, folder / "model.onnx")
    return graph


def oracle(torch: Any, graph: Graph, lora: dict[str, Any], form: str, batch: Any) -> Any:
    """Returns the loss that PyTorch computes in float64."""
    weights = {n: torch.from_numpy(np.asarray(a)) for n, a in graph.stored.items()}
    ids = torch.from_numpy(batch["input_ids"])
    length = ids.shape[1]
    positions = torch.arange(length)

    def linear(x: Any, name: str) -> Any:
        y = x @ weights[f"{name}.weight"].double()
        a, b = (lora.get(f"{name}.lora_{part}.weight") for part in "AB")
        return y if a is None else y + x @ a @ b

    def rotated(x: Any) -> Any:
        cos, sin = (weights[name][:length].double() for name in ("cos", "sin"))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = 4 * weights["embedding"].double()[ids]
    if "qkv.weight" in weights:
        together = x @ weights["qkv.weight"].double() + weights["qkv.bias"].double()
        parts = together.chunk(3, -1)
    else:
        parts = [linear(x, name) for name in ("q_proj", "k_proj", "v_proj")]
    q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in parts)
    if "rotary" in form:
        q, k = rotated(q), rotated(k)
    bias = torch.full((length, length), -torch.inf).triu(1).double()[None]
    if "alibi" in form:
        slopes = weights["slopes"].double().reshape(HEADS, 1, 1)
        bias = bias + slopes * (positions[None] - positions[:, None])
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
    logits = linear(x + linear(y.transpose(1, 2).flatten(2), "o_proj"), "lm_head")
    labels = torch.from_numpy(batch["labels"])[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(("form", "opset"), FORMS)
def test_the_first_loss_and_gradients_are_those_of_torch(
    form: Callable[[Graph, str], str], opset: int, tmp_path: Path
) -> None:
    import torch

    graph = write(tmp_path, form, opset)
    assert not check_folder(tmp_path).problems
    tuning = FineTuning(tmp_path, rank=2, alpha=4)
    rng = np.random.default_rng(1)
    given = {
        name: rng.normal(0, 0.3, array.shape).astype(np.float32)
        for name, array in tuning.session.parameters.items()
    }
    tuning.session.parameters = given
    (batch,) = tuning._batches.of(tuning._batches.read(ROWS, 10, "all"), 9)
    found = tuning.session.gradients(batch)
    lora = {n: torch.from_numpy(a).double().requires_grad_() for n, a in given.items()}
    loss = oracle(torch, graph, lora, form.__name__, batch)
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    assert len(lora) == (2 if form in (packed, packed_alibi) else 8)
    for name, tensor in lora.items():
        np.testing.assert_allclose(found[name], tensor.grad, rtol=2e-4, atol=1e-5, err_msg=name)
