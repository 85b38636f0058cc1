"""Attributions of models with token ids, compared with captum on the same networks in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from torch_exports import exported
from violations import all_violations

import ortops
from ortops import attribution

RNG = np.random.default_rng(8)
TABLE, HEAD = RNG.normal(size=(7, 3)), RNG.normal(size=(3, 3))
IDS = np.array([[1, 5, 0, 0], [2, 3, 6, 4]])
MASK = (IDS > 0).astype(np.float32)


def quadratic(ids: str = "int64", *, tied: bool = False) -> onnx.ModelProto:
    """Scores (Σ over tokens of mask · e²) · head of embeddings e; tied, with the table as head."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        g ({ids}[n,t] ids, float[n,t] mask, {ids}[n,t] kinds) => (float[n,c] y) {{
            e = Gather (table, ids)
            axes = Constant <value_ints = [2]> ()
            m = Unsqueeze (mask, axes)
            s = Mul (e, e)
            p = Mul (s, m)
            time = Constant <value_ints = [1]> ()
            h = ReduceSum <keepdims = 0> (p, time)
            y = {"Gemm <transB = 1> (h, table)" if tied else "MatMul (h, head)"}
        }}"""
    )
    arrays = {"table": TABLE} if tied else {"table": TABLE, "head": HEAD}
    for name, array in arrays.items():
        tensor = numpy_helper.from_array(array.astype(np.float32), name)
        model.graph.initializer.append(tensor)
    return model


def explain(model: onnx.ModelProto, **feeds: Any) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    given = {"ids": IDS, "mask": MASK, "kinds": IDS} | feeds
    types = {"tensor(int32)": np.int32, "tensor(int64)": np.int64, "tensor(float)": np.float32}
    fed = {v.name: np.asarray(given[v.name]).astype(types[v.type]) for v in session.get_inputs()}
    (found,) = session.run(["attribution"], fed)
    return np.asarray(found)


@pytest.mark.nightly
@pytest.mark.parametrize("ids", ["int64", "int32"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_token_has_its_part_of_the_score(ids: str, tied: bool) -> None:
    """By hand: e² is its own integral from zeros, and its gradient is 2 e."""
    model, weights = quadratic(ids, tied=tied), (TABLE.T if tied else HEAD)[:, 2]
    of, e, m = attribution.integrated_gradients, TABLE[IDS], MASK[..., None]
    whole = (e**2 * m) @ weights
    # From e0 to e in each element: (e - e0) · (e + e0) = e² - e0².
    other = np.array([[3, 3, 3, 3], [0, 1, 2, 6]])
    expected: dict[str, tuple[onnx.ModelProto, np.ndarray, dict[str, Any]]] = {
        "zeros": (of(model, target=2, input="ids"), whole, {}),
        "named": (of(model, target=2, input="ids", baseline=0.0), whole, {}),
        "an id": (
            of(model, target=2, input="ids", baseline=4),
            whole - (TABLE[4] ** 2 * m) @ weights,
            {},
        ),
        "an id for each position": (
            of(model, target=2, input=["ids"], baseline=[6, 5, 0, 1]),
            whole - (TABLE[[6, 5, 0, 1]] ** 2 * m) @ weights,
            {},
        ),
        "other ids": (
            of(model, target=2, input="ids", baseline="input"),
            whole - (TABLE[other] ** 2 * m) @ weights,
            {"baseline": other},
        ),
        "saliency": (
            attribution.saliency(model, target=2, input="ids"),
            np.abs(2 * e * m * weights).sum(-1),
            {},
        ),
        "with signs": (
            attribution.saliency(model, target=2, input="ids", absolute=False),
            (2 * e * m) @ weights,
            {},
        ),
        "without noise": (
            attribution.smooth_grad(model, target=2, input="ids", noise=0.0, samples=2),
            np.abs(2 * e * m * weights).sum(-1),
            {},
        ),
    }
    with all_violations() as check:
        for case, (explained, wanted, feeds) in expected.items():
            with check(case):
                np.testing.assert_allclose(
                    explain(explained, **feeds), wanted, rtol=1e-5, atol=1e-6
                )
                assert {"kinds", "mask"} <= {v.name for v in explained.graph.input}


def test_tokens_are_the_default_where_no_input_is_a_float() -> None:
    model = quadratic()
    model.graph.input.remove(model.graph.input[1])
    model.graph.initializer.append(numpy_helper.from_array(MASK, "mask"))
    found = explain(attribution.saliency(model, target=2, absolute=False))
    np.testing.assert_allclose(
        found, (2 * TABLE[IDS] * MASK[..., None]) @ HEAD[:, 2], rtol=1e-5, atol=1e-6
    )


def test_tokens_and_masks_on_one_path() -> None:
    explained = attribution.integrated_gradients(
        quadratic(), target=2, input=["ids", "mask"], baseline={"ids": 0.0, "mask": 0.0}
    )
    names = [value.name for value in explained.graph.output[1:]]
    assert names == ["attribution_ids", "attribution_mask"]
    session = onnxruntime.InferenceSession(explained.SerializeToString())
    found = session.run(names, {"ids": IDS, "mask": MASK, "kinds": IDS})
    whole = (TABLE[IDS] ** 2 * MASK[..., None]) @ HEAD[:, 2]
    np.testing.assert_allclose(found[0], 2 / 3 * whole, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[1], whole / 3, rtol=1e-4, atol=1e-6)


def test_inputs_that_are_no_tokens() -> None:
    with all_violations() as check:
        for settings, message in (
            ({"input": "kinds"}, "input: 'kinds' is of type .* the ids of one embedding, got 0"),
            ({"baseline": "zeros"}, "baseline must be a number, an array or 'input', got 'zeros'"),
            ({"baseline": [[1], [1, 2]]}, "baseline must be a number, an array or 'input'"),
            ({"baseline": {"kinds": 1}}, "baseline: 'kinds' is no input to explain"),
        ):
            with check(settings), pytest.raises(ortops.OrtopsError, match=message):
                attribution.integrated_gradients(quadratic(), **{"input": "ids"} | settings)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("captum", "export")
@pytest.mark.filterwarnings("ignore")  # captum and the exporters warn about themselves
@pytest.mark.parametrize("dynamo", [False, True])
def test_tokens_are_explained_as_by_captum(dynamo: bool) -> None:
    import torch
    from captum import attr
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 6, padding_idx=0)
            self.rnn = nn.GRU(6, 6, batch_first=True)
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.rnn(self.embed(ids))[0] * mask[..., None]
            return self.head(torch.tanh(hidden.sum(1)))

    torch.manual_seed(0)
    net = Net().eval()
    ids, mask = torch.tensor(IDS), torch.tensor(MASK)
    model = exported(net, {"ids": ids, "mask": mask}, dynamo=dynamo)
    net.eval()
    layer = attr.LayerIntegratedGradients(net, net.embed)
    for baseline in (0, 4):
        settings = {"additional_forward_args": (mask,), "n_steps": 50, "target": 3}
        expected = layer.attribute(ids, torch.full_like(ids, baseline), **settings).sum(-1)
        explained = attribution.integrated_gradients(
            model, input="ids", target=3, baseline=baseline, steps=50
        )
        found = explain(explained)
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-3, atol=1e-5)

    def after(embedded: torch.Tensor) -> torch.Tensor:
        hidden = net.rnn(embedded)[0] * mask[..., None]
        return net.head(torch.tanh(hidden.sum(1)))

    embedded = net.embed(ids).detach().requires_grad_()
    slopes = attr.Saliency(after).attribute(embedded, target=3).sum(-1)
    found = explain(attribution.saliency(model, input="ids", target=3))
    np.testing.assert_allclose(found, slopes.numpy(), rtol=1e-3, atol=1e-5)
