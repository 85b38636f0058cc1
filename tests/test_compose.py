"""Models composed into one for training, and split again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper as nh
import onnxruntime
import pytest

import ortops
from ortops.losses import MeanSquaredError

ENCODER = """
<ir_version: 9, opset_import: ["" : {opset}]>
encoder (int64[batch, time] ids, int64[batch, time] mask) => (float[batch, time, 3] hidden) {{
    x = Gather (shared, ids)
    projected = MatMul (x, weight)
    hidden = Tanh (projected)
}}"""
DECODER = """
<ir_version: 10, opset_import: ["" : {opset}]>
decoder (int64[n, time] ids, float[n, source, 3] states) => (float[n, 1, 2] hidden) {{
    x = Gather (shared, ids)
    pooled = ReduceMean <keepdims = 1> (states, axes)
    own = ReduceMean <keepdims = 1> (x, axes)
    sum = Add (pooled, own)
    hidden = MatMul (sum, weight)
}}"""
CONNECT = {"decoder.states": "encoder.hidden"}
IDS, MORE = np.array([[0, 1, 2], [3, 4, 0]]), np.array([[1, 4], [2, 2]])
FEEDS = {
    "encoder.ids": IDS,
    "mask": np.ones_like(IDS),
    "decoder.ids": MORE,
    "targets": np.float32([[[1, 0]], [[-1, 2]]]),
}


def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {"shared": (5, 3), "first": (3, 3), "second": (3, 2)}
    return {name: generator.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def pair(opsets: tuple[int, int] = (21, 21)) -> dict[str, onnx.ModelProto]:
    values = arrays()
    result = {}
    for (name, text), opset, weight in zip(
        {"encoder": ENCODER, "decoder": DECODER}.items(), opsets, ("first", "second"), strict=True
    ):
        model = onnx.parser.parse_model(text.format(opset=opset))
        own = {"shared": values["shared"], "weight": values[weight]}
        if name == "decoder":
            own["axes"] = np.array([1])
        model.graph.initializer.extend(nh.from_array(a, n) for n, a in own.items())
        result[name] = model
    return result


def run(model: onnx.ModelProto, **feeds: Any) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, feeds)


def names_of(values: Any) -> list[str]:
    return [value.name for value in values]


def trained(
    models: dict[str, Any], optimizer: Any = "SGD", steps: int = 3
) -> ortops.TrainingSession:
    model = ortops.compose(models, CONNECT)
    loss = MeanSquaredError("decoder.hidden")
    session = ortops.TrainingSession(
        ortops.build_training_model(model, loss=loss, optimizer=optimizer)
    )
    for _ in range(steps):
        session.step(FEEDS)
    return session


def test_names_and_values(caplog: pytest.LogCaptureFixture) -> None:
    models = pair()
    with caplog.at_level(logging.WARNING, "ortops"):
        model = ortops.compose(models, CONNECT)
    onnx.checker.check_model(model, full_check=True)
    assert names_of(model.graph.input) == ["encoder.ids", "mask", "decoder.ids"]
    assert names_of(model.graph.output) == ["encoder.hidden", "decoder.hidden"]
    assert names_of(model.graph.initializer) == [
        "shared",
        "encoder.weight",
        "decoder.weight",
        "axes",
    ]
    assert [r.getMessage() for r in caplog.records] == [
        "compose: weights with equal values became one weight that the models share: shared"
    ]
    assert model.ir_version == 10
    dims = [[d.dim_param for d in v.type.tensor_type.shape.dim] for v in model.graph.input]
    assert dims == [["batch", "time"], ["batch", "time"], ["batch", "decoder_time"]]
    (hidden,) = run(models["encoder"], ids=IDS, mask=IDS)
    (expected,) = run(models["decoder"], ids=MORE, states=hidden)
    feeds = {name: array for name, array in FEEDS.items() if name != "targets"}
    found = run(model, **feeds)
    np.testing.assert_array_equal(found[0], hidden)
    np.testing.assert_array_equal(found[1], expected)
    assert names_of(models["encoder"].graph.initializer) == ["shared", "weight"]  # not changed


@pytest.mark.torch
def test_trains_as_torch_does() -> None:
    import torch

    weights = {n: torch.tensor(a, requires_grad=True) for n, a in arrays().items()}
    optimizer = torch.optim.Adam(weights.values(), 0.05)
    for _ in range(5):
        optimizer.zero_grad()
        states = torch.tanh(weights["shared"][torch.tensor(IDS)] @ weights["first"])
        own = weights["shared"][torch.tensor(MORE)].mean(1, keepdim=True)
        y = (states.mean(1, keepdim=True) + own) @ weights["second"]
        torch.nn.functional.mse_loss(y, torch.tensor(FEEDS["targets"])).backward()
        optimizer.step()
    adam = ortops.optimizers.Adam(0.05, beta=0.999, epsilon_after_correction=True)
    session = trained(pair(), adam, 5)
    names = {"shared": "shared", "encoder.weight": "first", "decoder.weight": "second"}
    for own, name in names.items():
        expected = weights[name].detach().numpy()
        np.testing.assert_allclose(session.state[own], expected, atol=2e-6)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("with_originals", [True, False])
@pytest.mark.parametrize("opsets", [(21, 21), (18, 23), (18, 18), (19, 20)])
def test_split(opsets: tuple[int, int], with_originals: bool) -> None:
    models = pair(opsets)
    session = trained(models)
    found = ortops.split(session.inference_model(), models if with_originals else None)
    assert list(found) == ["encoder", "decoder"]
    for (name, model), opset in zip(found.items(), opsets, strict=True):
        onnx.checker.check_model(model, full_check=True)
        for field in ("input", "output"):
            assert list(getattr(model.graph, field)) == list(getattr(models[name].graph, field))
        given = {t.name: nh.to_array(t) for t in model.graph.initializer}
        assert given.keys() == {t.name for t in models[name].graph.initializer}
        np.testing.assert_array_equal(given["shared"], session.state["shared"])
        np.testing.assert_array_equal(given["weight"], session.state[f"{name}.weight"])
        assert not with_originals or model.opset_import[0].version == opset
        assert not model.metadata_props
    (hidden,) = run(found["encoder"], ids=IDS, mask=IDS)
    (y,) = run(found["decoder"], ids=MORE, states=hidden)
    feeds = {name: array for name, array in FEEDS.items() if name != "targets"}
    np.testing.assert_allclose(y, session.predict(feeds)["decoder.hidden"], atol=1e-6)


def test_files_with_external_data_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {}
    for name, model in pair().items():
        (tmp_path / name).mkdir()
        paths[name] = tmp_path / name / "model.onnx"
        onnx.save(
            *(model, paths[name]), save_as_external_data=True, location="data", size_threshold=0
        )
    monkeypatch.chdir(tmp_path)
    session, expected = trained(paths), trained(pair())
    np.testing.assert_array_equal(session.state["shared"], expected.state["shared"])
    found = ortops.split(session.inference_model(), paths)
    values = {t.name: nh.to_array(t) for t in found["decoder"].graph.initializer}
    np.testing.assert_array_equal(values["weight"], expected.state["decoder.weight"])


def test_zeros_and_ones_and_weights_of_one_model_stay_separate() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]> f (float[n, 2] x) => (float[n, 2] y)
    <float[2] scale = {1, 1}, float[2] a = {3, 4}, float[2] b = {3, 4}> {
        s = Mul (x, scale)
        t = Add (s, a)
        y = Mul (t, b)
    }"""
    other = onnx.parser.parse_model(text)
    single = onnx.parser.parse_model(text)
    del single.graph.initializer[2]
    single.graph.node[2].input[1] = "a"
    model = ortops.compose({"one": single, "two": other})
    names = ["one.scale", "a", "two.scale", "b"]
    assert names_of(model.graph.initializer) == names


def test_a_tensor_that_is_read_twice_and_an_input_that_is_passed_on() -> None:
    first = (
        "<ir_version: 10, opset_import: ['' : 21]> a (float[n] x) => (float[n] y) { y = Neg (x) }"
    )
    second = """<ir_version: 10, opset_import: ['' : 21]>
    b (float[n] p, float[n] q, float[n] r) => (float[n] y) { s = Sub (p, q)  y = Mul (s, r) }"""
    models = {
        "a.b": onnx.parser.parse_model(first.replace("'", '"')),
        "c": onnx.parser.parse_model(second.replace("'", '"')),
    }
    connect = {"c.p": "a.b.y", "c.q": "a.b.y", "c.r": "a.b.x"}
    model = ortops.compose(models, connect)
    assert names_of(model.graph.input) == ["x"]
    x = np.float32([1, 2])
    for value, expected in zip(run(model, x=x), [-x, 0 * x], strict=True):
        np.testing.assert_array_equal(value, expected)
    again = ortops.split(model)["c"]
    assert run(again, p=x, q=2 * x, r=x)[0].tolist() == [-1, -4]


def test_functions_of_one_name() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
    g (float[n] x) => (float[n] y) {{ y = local.f (x) }}
    <domain: "local", opset_import: ["" : 21]> f (x) => (y) {{ y = {} (x) }}"""
    models = {name: onnx.parser.parse_model(text.format(name)) for name in ("Neg", "Abs", "Exp")}
    model = ortops.compose(models, {"Abs.x": "Neg.y"})
    onnx.checker.check_model(model, full_check=True)
    x = np.float32([1, -2])
    found = run(model, **{"Neg.x": x, "Exp.x": x})
    for value, expected in zip(found, [-x, np.abs(x), np.exp(x)], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert run(ortops.split(model)["Abs"], x=x)[0].tolist() == [1, 2]


def test_weights_in_branches() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[n, 2] x, bool c) => (float[n, 2] y) {
        y = If (c) <
            then_branch = t () => (float[n, 2] z) {
                w = Constant <value = float[2] {1, 2}> ()
                z = Mul (x, w)
            },
            else_branch = e () => (float[n, 2] z) { z = Neg (x) }
        >
    }"""
    models = {name: onnx.parser.parse_model(text) for name in ("a", "b")}
    for each in models.values():
        body = each.graph.node[0].attribute[0].g
        body.quantization_annotation.add(tensor_name="z")
    model = ortops.compose(models, {"b.x": "a.y"})
    onnx.checker.check_model(model, full_check=True)
    bodies = [n.attribute[0].g for n in (*model.graph.node, *ortops.split(model)["b"].graph.node)]
    for body in bodies:  # descriptions of values follow their names, both ways
        (annotation,) = body.quantization_annotation
        assert annotation.tensor_name == body.output[0].name
    x, yes = np.float32([[1, 1]]), np.array(True)
    assert run(model, **{"x": x, "a.c": yes, "b.c": yes})[1].tolist() == [[1, 4]]
    part = ortops.split(model, models)["b"]
    assert run(part, x=x, c=yes)[0].tolist() == [[1, 2]]


def test_adapter_is_merged_before_splitting() -> None:
    models = pair()
    adapted = ortops.lora.add(ortops.compose(models, CONNECT), rank=2, targets=["*weight"])
    with pytest.raises(ortops.ModelError, match=r"has an adapter; merge it with ortops.lora.merge"):
        ortops.split(adapted)
    for tensor in adapted.graph.initializer:
        if "lora_B" in tensor.name:
            tensor.CopyFrom(nh.from_array(np.full(tensor.dims, 0.5, np.float32), tensor.name))
    merged = ortops.lora.merge(adapted)
    feeds = {name: array for name, array in FEEDS.items() if name != "targets"}
    for found in (ortops.split(merged), ortops.split(merged, models)):
        (hidden,) = run(found["encoder"], ids=IDS, mask=IDS)
        (y,) = run(found["decoder"], ids=MORE, states=hidden)
        np.testing.assert_allclose(y, run(adapted, **feeds)[1], atol=1e-5)


def test_a_weight_that_merging_separates_does_not_fit_the_originals() -> None:
    models = pair()
    model = ortops.compose(models, CONNECT)
    model.graph.initializer.append(nh.from_array(np.float32([[1, 2], [3, 4], [5, 6]]), "fresh"))
    model.graph.node[-1].input[1] = "fresh"
    with pytest.raises(ortops.ModelError, match=r"weight 'fresh' was added since"):
        ortops.split(model, models)
    assert names_of(ortops.split(model)["decoder"].graph.initializer)[-1] == "fresh"


def changed(part: str, **fields: Any) -> dict[str, onnx.ModelProto]:
    models = pair()
    value = models[part].graph.input[1] if part == "decoder" else models[part].graph.output[0]
    kind = {"elem_type": 1, "shape": ["n", "source", 3]} | fields
    value.type.CopyFrom(onnx.helper.make_tensor_type_proto(**kind))
    return models


@pytest.mark.parametrize(
    ("models", "connect", "error", "message"),
    [
        ([], None, ortops.ArgumentError, r"models must be a dict of models by name, got \[\]"),
        ({1: None}, None, ortops.ArgumentError, "names must be non-empty strings, got 1"),
        (pair(), ["x"], ortops.ArgumentError, r"connect must be a dict such as .*got \['x'\]"),
        (pair(), {"states": "encoder.hidden"}, ortops.ArgumentError,
         "'states' must be '<model>.<name>'; the models are 'encoder', 'decoder'"),
        (pair(), {"decoder.state": "encoder.hidden"}, ortops.ArgumentError,
         "model 'decoder' has no input 'state'; did you mean 'states'"),
        (pair(), {"decoder.states": "encoder.hiden"}, ortops.ArgumentError,
         "model 'encoder' has no output or input 'hiden'; did you mean 'hidden'"),
        (pair(), {"decoder.states": 1}, ortops.ArgumentError, "names must be strings, got 1"),
        (pair(), {"decoder.states": "decoder.hidden"}, ortops.ModelError, "the same model"),
        (pair(), {**CONNECT, "encoder.mask": "decoder.ids"}, ortops.ModelError,
         "the models 'encoder', 'decoder' form a cycle"),
        (pair(), {"decoder.ids": "encoder.ids", "encoder.ids": "decoder.ids"}, ortops.ModelError,
         "form a cycle"),
        (changed("decoder", elem_type=11), CONNECT, ortops.ModelError,
         "'decoder.states' has type double, but 'encoder.hidden' has type float;"),
        (changed("decoder", shape=["n", "source", 4]), CONNECT, ortops.ModelError,
         r"'decoder.states' has shape \['n', 'source', 4\], but .* the same shape"),
        (changed("decoder", shape=["n", 3]), CONNECT, ortops.ModelError, "of the same rank"),
        ({"a": b"x"}, None, ortops.ModelError, "model 'a': "),
    ],
)  # fmt: skip
def test_errors(models: Any, connect: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ortops.compose(models, connect)


def test_errors_of_models_and_of_split() -> None:
    models = pair()
    session = trained(models)
    with pytest.raises(ortops.ModelError, match="model 'a': it has training_info; give the model"):
        ortops.compose({"a": session.model()})
    with pytest.raises(ortops.ModelError, match="model 'a': it has an adapter; merge it"):
        ortops.compose({"a": ortops.lora.add(models["encoder"], targets=["weight"])})
    with pytest.raises(ortops.ModelError, match=r"not written by ortops\.compose"):
        ortops.split(models["encoder"])
    with pytest.raises(ortops.ModelError, match="it has training_info; give the trained model"):
        ortops.split(session.model())
    with pytest.raises(ortops.ArgumentError, match=r"dict of the models \['decoder', 'encoder'\]"):
        ortops.split(session.inference_model(), {"encoder": models["encoder"]})
    broken = ortops.compose(models)
    broken.metadata_props[-1].value = '{"encoder": {"inputs": 3}}'
    with pytest.raises(ortops.ModelError, match=r"metadata_props 'ortops\.composition': 'encoder'"):
        ortops.split(broken)


def test_operators_of_other_domains() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    g (float[n, 2] x) => (float[n, 2] y) { y = com.microsoft.Gelu (x) }"""
    models = {name: onnx.parser.parse_model(text) for name in ("a", "b")}
    ortops.compose(models, {"b.x": "a.y"})
    models["a"].opset_import[1].version = 2
    with pytest.raises(ortops.UnsupportedError, match=r"model 'b': Gelu node 'y': .* 1 and 2 of"):
        ortops.compose(models, {"b.x": "a.y"})
