"""Weights of rows and of classes, on files that were built without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_entries import rows as rows_of_heads
from test_entries import two_heads
from test_fit_weights import rows, same, weights
from test_sample_weight import FURTHER, REFUSING, WEIGHED, line, none
from training_models import assert_same_arrays
from violations import all_violations

import ortops
from models.layers import batch_norm, dropout, linear
from ortops import (
    ArgumentError,
    FeedError,
    Tape,
    TrainingSession,
    add_training,
    build_training_model,
    losses,
    op,
    schedules,
)
from ortops.docs.examples import mlp
from ortops.losses import LOSSES, MeanSquaredError, SoftmaxCrossEntropy
from ortops.optimizers import SGD, Adam, AdamW
from tests.loss_models import shifted

Array = np.ndarray[Any, Any]


def session(loss: Any = "SoftmaxCrossEntropy", optimizer: Any = None, **more: Any) -> Any:
    made = build_training_model(mlp((4, 8, 3)), loss=loss, optimizer=optimizer or SGD(0.1), **more)
    return TrainingSession(made)


def weighed(loss: Any = None, optimizer: Any = None, **more: Any) -> Any:
    return session(loss or SoftmaxCrossEntropy(sample_weight="w"), optimizer, **more)


# ---------------------------------------------------------------------------- against PyTorch


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # torch, of its KLDivLoss
@pytest.mark.parametrize("name", sorted(set(LOSSES) - REFUSING))
def test_each_loss_has_the_gradients_of_torch_with_repeated_rows(name: str) -> None:
    """A row of weight n is the row n times: torch computes that without any weights."""
    cases = [case for case in [*WEIGHED, *FURTHER] if case.loss.name == name]
    with all_violations() as check:
        for case in cases[:: max(1, len(cases) // 8)]:
            with check(case.name):
                is_the_gradient_of_repeated_rows(case)


def is_the_gradient_of_repeated_rows(case: Any) -> None:
    import torch

    rng = np.random.default_rng(3)
    outputs = {name: rng.normal(size=shape) for name, shape in case.outputs.items()}
    feeds = case.feeds(rng)
    count = len(next(iter(outputs.values())))
    times = np.array([3, 0, 1, 2, 5, 1, 0, 4])[:count]
    names = [f"p_{name}" for name in outputs]

    def fitted(loss: Any, **arguments: Any) -> tuple[float, dict[str, Array]]:
        model = shifted(outputs, case.squash)
        made = build_training_model(model, loss=loss, optimizer=SGD(1.0), trainable=names)
        run = TrainingSession(made)
        data = {**{f"x_{n}": y for n, y in outputs.items()}, **feeds, **arguments.pop("data", {})}
        found = run.fit(data, batch_size=count, shuffle=False, progress=False, **arguments)
        return found[-1]["loss"], {name: -run.state[f"p_{name}"] for name in outputs}

    value, found = fitted(case.loss, sample_weight=times)
    if case.reference is none:  # the same as built with weights, which other tests check
        loss = replace(case.loss, sample_weight="w")
        expected, wanted = fitted(loss, data={"w": times.astype(np.float64)})
    else:
        tensors = {name: torch.tensor(y, requires_grad=True) for name, y in outputs.items()}
        wide = [each[torch.tensor(np.repeat(np.arange(count), times))] for each in tensors.values()]
        given = [torch.tensor(np.repeat(array, times, axis=0)) for array in feeds.values()]
        computed = case.reference(torch, *wide, *given)
        computed.backward()
        expected = computed.item()
        wanted = {name: tensor.grad.numpy() for name, tensor in tensors.items()}
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, wanted[name], rtol=1e-8, atol=1e-11, err_msg=name)


@pytest.mark.slow
@pytest.mark.torch
def test_steps_of_adam_next_to_torch() -> None:
    """torch's losses of rows, weighted by hand: Σ w · loss / Σ w."""
    import torch

    made, data, w = session(optimizer=Adam(0.05, alpha=0.9, beta=0.999)), rows(), weights()
    own = {n: torch.tensor(a.copy(), requires_grad=True) for n, a in made.parameters.items()}
    optimizer = torch.optim.Adam(own.values(), lr=0.05, eps=1e-8)
    losses_of_torch = []
    for start in range(0, 20, 5):
        part = slice(start, start + 5)
        x = torch.tensor(data["images"][part])
        y = torch.relu(x @ own["fc1.weight"].T + own["fc1.bias"])
        y = y @ own["fc2.weight"].T + own["fc2.bias"]
        labels, each = torch.tensor(data["labels"][part]), torch.tensor(w[part])
        loss = torch.nn.functional.cross_entropy(y, labels, reduction="none")
        loss = (loss * each).sum() / each.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses_of_torch.append(loss.item() * each.sum().item())
    whole = {name: array[:20] for name, array in data.items()}
    found = made.fit(whole, sample_weight=w[:20], batch_size=5, shuffle=False, progress=False)
    assert found[-1]["loss"] == pytest.approx(sum(losses_of_torch) / w[:20].sum(), rel=1e-5)
    for name, tensor in own.items():
        np.testing.assert_allclose(
            made.parameters[name], tensor.detach().numpy(), rtol=2e-3, atol=2e-4
        )


def pixels(kind: str) -> tuple[Any, dict[str, Array], Any]:
    """Returns a model of pixels, tokens or questions, its data and torch's loss of each label."""
    import torch

    of = torch.nn.functional
    rng = np.random.default_rng(5)
    bits = np.float64 if kind == "double" else np.float32
    shape = {"tokens": [6, 5, 4], "questions": [6, 5], "time first": [5, 6, 4]}.get(kind, [6, 3, 4])
    with Tape(name="pixels") as tape:
        dims: list[Any] = [*shape]
        dims[shape.index(6)] = "batch"
        x = tape.input("x", bits, dims)
        tape.output(x * tape.initializer("w", np.ones(shape[-1:], bits)), "y")
    data = {"x": rng.standard_normal(shape).astype(bits)}
    if kind == "questions":
        data["targets"] = rng.integers(0, 2, shape).astype(np.float32)
        return (
            *((tape.model(), losses.BinaryCrossEntropyWithLogits()), data),
            lambda y, t: of.binary_cross_entropy_with_logits(y, t, reduction="none"),
        )
    axis = 1 if kind in ("pixels", "double") else 2
    data["labels"] = rng.integers(0, 3, [n for at, n in enumerate(shape) if at != axis])
    data["labels"][0, :2] = -100
    return (
        *((tape.model(), SoftmaxCrossEntropy(axis=axis, ignore_index=-100)), data),
        lambda y, t: of.cross_entropy(y.movedim(axis, 1), t, reduction="none"),
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "kind",
    [
        *("pixels", "tokens"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("questions", "time first", "double")),
    ],
)
def test_labels_of_several_axes_have_weights_of_classes_as_in_torch(kind: str) -> None:
    """Each label counts by its class; a weight of a row counts for all labels of the row."""
    import torch

    (model, loss), data, each = pixels(kind)
    file = build_training_model(model, loss=loss, optimizer=SGD(1.0), trainable=["w"])
    rows, target = int(kind == "time first"), data[next(name for name in data if name != "x")]
    by_class, of_rows = [0.5, 1.0, 3.0][: 2 if kind == "questions" else 3], np.arange(6) / 2
    weights_of = dict(enumerate(by_class))
    along = [6 if axis == rows else 1 for axis in range(target.ndim)]
    table = torch.tensor(by_class)
    for w, given in (
        (np.ones(along), {}),
        (of_rows.reshape(along), {"sample_weight": of_rows}),
    ):
        made = TrainingSession(file)
        known = torch.tensor(np.where(target < 0, 0, target)).long()
        weight = table[known] * torch.tensor(w) * torch.tensor(target >= 0)
        x = torch.tensor(data["x"])
        own = torch.ones(x.shape[-1], dtype=x.dtype, requires_grad=True)
        expected = each(x * own, torch.tensor(target)) * weight
        expected = expected.sum() / weight.sum()
        expected.backward()
        found = made.fit(
            data, class_weight=weights_of, **given, batch_size=6, shuffle=False, progress=False
        )
        exact = 1e-12 if kind == "double" else 1e-6
        assert found[-1]["loss"] == pytest.approx(expected.item(), rel=exact)
        np.testing.assert_allclose(1 - made.parameters["w"], own.grad, 20 * exact, exact / 10)
        again = TrainingSession(file)
        assert again.evaluate(data, class_weight=weights_of, **given)["loss"] == pytest.approx(
            expected.item(), rel=exact
        )


@pytest.mark.torch
def test_a_weight_for_each_label() -> None:
    """Of pixels, with nothing but the array; in the property tests, weights are of rows."""
    import torch

    (model, loss), data, each = pixels("pixels")
    made = TrainingSession(
        build_training_model(model, loss=loss, optimizer=SGD(1.0), trainable=["w"])
    )
    w = np.random.default_rng(0).random(data["labels"].shape)
    counted = torch.tensor(w * (data["labels"] >= 0))
    expected = each(torch.tensor(data["x"]), torch.tensor(data["labels"])) * counted
    found = made.evaluate(data, sample_weight=w, batch_size=4)
    assert found["loss"] == pytest.approx((expected.sum() / counted.sum()).item(), rel=1e-6)
    with pytest.raises(FeedError, match=r"'sample_weight' must have shape \[batch, 4\], got"):
        made.evaluate(data, sample_weight=w[:, :3])


def test_labels_that_a_loss_shifts_have_no_weights_of_classes() -> None:
    with Tape(name="tokens") as tape:
        x = tape.input("x", np.float32, ["batch", "time", 3])
        tape.output(x * tape.initializer("w", np.ones(3, np.float32)), "y")
    file = build_training_model(
        tape.model(), loss=losses.NextToken(), optimizer=SGD(1.0), trainable=["w"]
    )
    data = {"x": np.ones((2, 4, 3), np.float32), "labels": np.ones((2, 4), np.int64)}
    with pytest.raises(ArgumentError, match=r"class_weight: .*shifts its labels"):
        TrainingSession(file).fit(data, class_weight=[1, 2, 3], progress=False)


# ------------------------------------------------------------------- as if built with weights


@pytest.mark.slow
def test_a_file_without_weights_trains_as_one_with() -> None:
    """Bit for bit, also with a schedule, which the file does not describe, and by class."""
    data, w = rows(), weights()
    rate = schedules.cosine(0.1, steps=20)
    one, other = (make(optimizer=AdamW(rate), clip_norm=0.5, ema_decay=0.9) for make in MAKERS)
    given = {"sample_weight": w, "class_weight": {1: 3.0}, "epochs": 2, "batch_size": 5}
    given |= {"accumulate": 2, "metrics": ["accuracy"], "train_metrics": True, "progress": False}
    histories = [made.fit(data, validation_split=0.2, **given) for made in (one, other)]
    for mine, theirs in zip(*histories, strict=True):
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}
    assert_same_arrays(dict(one.state), dict(other.state))
    of = {"sample_weight": w, "metrics": ["accuracy", "f1"], "batch_size": 4}
    assert one.evaluate(data, **of) == other.evaluate(data, **of)
    assert one.evaluate(data, class_weight="balanced") == other.evaluate(
        data, class_weight="balanced"
    )


MAKERS = session, weighed


def test_batches_and_samples_contain_their_weights() -> None:
    data, w = rows(), weights()
    batches = [
        {n: a[at : at + 5] for n, a in {**data, "sample_weight": w}.items()} for at in (0, 5)
    ]
    samples = [{n: a[at] for n, a in {**data, "sample_weight": w}.items()} for at in range(10)]
    whole, one, other = session(), session(), session()
    first = {name: array[:10] for name, array in data.items()}
    call = {"shuffle": False, "batch_size": 5, "progress": False}
    whole.fit(first, sample_weight=w[:10], **call)
    one.fit(batches, sample_weight="sample_weight", progress=False)
    other.fit(samples, sample_weight="sample_weight", collate="pad", **call)
    same(whole, one)
    same(whole, other)
    found = one.evaluate(batches, sample_weight="sample_weight")
    assert found == whole.evaluate(first, sample_weight=w[:10], batch_size=5)
    with pytest.raises(FeedError, match="and give sample_weight='sample_weight'"):
        one.fit(batches, sample_weight=w, progress=False)


@pytest.mark.slow
def test_the_file_keeps_its_own_loss(tmp_path: Path) -> None:
    """Steps without weights are those of a session that never had some."""
    made, data = session(optimizer=Adam(0.01)), rows()
    before = made.model()
    made.fit(data, sample_weight=weights(), batch_size=11, progress=False)
    assert sorted(made.inputs) == ["images", "labels"]
    after = made.model()
    assert before.graph.node == after.graph.node
    assert before.training_info[0].algorithm.node == after.training_info[0].algorithm.node
    made.save(tmp_path / "a.onnx")
    opened = TrainingSession(tmp_path / "a.onnx")
    assert made.step(data)["loss"] == opened.step(data)["loss"]
    np.testing.assert_array_equal(made.run_steps([data] * 2), opened.run_steps([data] * 2))
    assert made.gradients(data).loss == opened.gradients(data).loss
    for each in (made, opened):
        each.constants  # noqa: B018
        each.fit(data, sample_weight=weights(), epochs=2, batch_size=11, progress=False)
    assert_same_arrays(dict(made.state), dict(opened.state))


@pytest.mark.slow
def test_a_step_in_a_callback_is_unweighted() -> None:
    class Steps(ortops.callbacks.Callback):
        def on_epoch(self, record: Any, session: Any) -> None:
            if record.epoch == 1:
                one.step(data)

    data, call = rows(), {"epochs": 2, "batch_size": 11, "progress": False}
    one, other = session(), session()
    one.fit(data, sample_weight=weights(), callbacks=[Steps()], shuffle=False, **call)
    with_weights = weighed()
    call["shuffle"] = False
    for epoch in (1, 2):
        with_weights.state = dict(other.state)
        with_weights.fit(data, sample_weight=weights(), **{**call, "epochs": 1})
        other.state = dict(with_weights.state)
        if epoch == 1:
            other.step(data)
    assert one.steps_done == 5
    same(one, with_weights)


@pytest.mark.slow
def test_resume(tmp_path: Path) -> None:
    data, w = rows(), weights()
    call = {"sample_weight": w, "epochs": 3, "batch_size": 6, "progress": False}
    whole = session(optimizer=Adam(0.01))
    whole.fit(data, **call)
    begun = session(optimizer=Adam(0.01))
    begun.fit(data, **{**call, "epochs": 1})
    begun.save(tmp_path / "a.onnx")
    opened = TrainingSession(tmp_path / "a.onnx")
    opened.fit(data, resume=True, **call)
    assert_same_arrays(dict(opened.state), dict(whole.state))


def stochastic() -> Any:
    rng = np.random.default_rng(0)
    with Tape(name="stochastic") as tape:
        x = tape.input("images", np.float32, ["batch", 4])
        y = dropout(batch_norm(linear(x, "a", 6, rng), "norm"), "dropped", 0.4)
        tape.output(linear(op.Tanh(y), "b", 3, rng), "y")
        tape.output(op.ReduceMean(y, [1], keepdims=1), "mean")
    return tape.model()


@pytest.mark.slow
def test_layers_in_training_mode_and_several_heads() -> None:
    """BatchNormalization and Dropout: the same statistics, and the same elements are dropped."""
    data = {**rows(), "targets": np.ones((22, 1), np.float32)}
    made = []
    for name in (None, "sample_weight"):
        loss = SoftmaxCrossEntropy("y", sample_weight=name)
        loss = 0.7 * loss + 0.3 * MeanSquaredError("mean", sample_weight=name)
        file = build_training_model(stochastic(), loss=loss, optimizer=Adam(0.01), seed=3)
        made.append(TrainingSession(file))
    own = made[0].model().training_info[0].algorithm
    found = [
        each.fit(data, sample_weight=weights(), epochs=2, batch_size=11, progress=False)[-1]
        for each in made
    ]
    assert {**found[0], "seconds": 0} == {**found[1], "seconds": 0}
    assert {"loss", "loss_y", "loss_mean"} <= found[0].keys()
    assert_same_arrays(dict(made[0].state), dict(made[1].state))
    ((with_weights),) = made[0]._of_weights.values()
    grafted = with_weights._loaded.proto.training_info[0].algorithm
    counts = [
        sum(node.op_type in ("BatchNormalization", "Gemm", "MatMul") for node in graph.node)
        for graph in (own, grafted)
    ]
    assert counts[0] == counts[1], "layers are computed twice"


@pytest.mark.slow
def test_entries() -> None:
    """Entries alone, in turn, and together; what another one trains does not change."""
    data, w = rows_of_heads(12), np.arange(12) % 3
    plain = two_heads()
    with_weights = build_training_model(
        *(),
        model=TrainingSession(plain).inference_model(),
        loss=SoftmaxCrossEntropy("logits", sample_weight="sample_weight"),
        optimizer=Adam(0.01),
        trainable=["trunk.*", "classes.*"],
    )
    loss = MeanSquaredError("y", sample_weight="sample_weight")
    with_weights = add_training(with_weights, name="second", loss=loss, optimizer=Adam(0.02))
    call = {"sample_weight": w, "batch_size": 4, "epochs": 2, "progress": False}
    for chosen in (
        {"entry": "second"},
        {"entry": "main"},
        {"entries": {"second": 1, "main": 2}},
        {},
    ):
        one, other = TrainingSession(plain), TrainingSession(with_weights)
        for made in (one, other):
            made.fit(data, **call, **chosen)
        assert_same_arrays(dict(one.state), dict(other.state))
    found = [made.evaluate(data, sample_weight=w, entry="second")["loss"] for made in (one, other)]
    assert found[0] == found[1]


def test_names_that_are_taken() -> None:
    with Tape(name="taken") as tape:
        x = tape.input("sample_weight", np.float32, ["N", 1])
        tape.output(x * tape.initializer("w", np.ones((1, 1), np.float32)), "y")
    file = build_training_model(
        tape.model(), loss="MeanSquaredError", optimizer=SGD(0.1), trainable=["w"]
    )
    made = TrainingSession(file)
    x = np.array([[1], [2]], np.float32)
    found = made.evaluate({"sample_weight": x, "targets": 0 * x}, sample_weight=[3.0, 1.0])
    assert found["loss"] == (3 * 1 + 1 * 4) / 4


@pytest.mark.slow
@pytest.mark.parametrize("bits", [np.float16, np.float64])
def test_other_types(bits: Any) -> None:
    data, w = rows_of_heads(12, dtype=bits), np.arange(12) % 3
    made = []
    for name in (None, "w"):
        with Tape(name="line") as tape:
            x = tape.input("x", bits, ["batch", 4])
            weight = np.random.default_rng(0).standard_normal((4, 3)).astype(bits)
            tape.output(x @ tape.initializer("w1", weight), "y")
        loss = SoftmaxCrossEntropy(sample_weight=name)
        made.append(
            TrainingSession(build_training_model(tape.model(), loss=loss, optimizer="Adam"))
        )
    chosen = {"x": data["x"], "labels": data["labels"]}
    for each in made:
        each.fit(chosen, sample_weight=w, batch_size=4, epochs=2, progress=False)
    assert_same_arrays(dict(made[0].state), dict(made[1].state))


# -------------------------------------------------------------------------------- what is refused


def own_loss(y: Any, labels: Any) -> Any:
    return losses.SoftmaxCrossEntropy()(y, labels)


class OwnLoss(losses.SoftmaxCrossEntropy):
    """A loss of a user's own."""


@pytest.mark.slow
def test_losses_without_a_known_weighted_form_are_refused_with_the_remedy() -> None:
    cases = {
        "does not describe its loss": (own_loss, OwnLoss(), OwnLoss() + SoftmaxCrossEntropy()),
        "needs a loss that is an average over rows": (
            *("Dice", SoftmaxCrossEntropy() + 0.5 * losses.Dice()),
        ),
    }
    for message, given in cases.items():
        for loss in given:
            made = session(loss)
            before = dict(made.state)
            for call in ({"sample_weight": weights()}, {"class_weight": {1: 2.0}}):
                (argument,) = call
                for method in (made.fit, made.evaluate):
                    more = {"progress": False} if method == made.fit else {}
                    with pytest.raises(ArgumentError, match=rf"{argument}: .*{message}") as raised:
                        method(rows(), **call, **more)
                    assert "build_training_model(model, loss=" in str(raised.value)
            assert_same_arrays(dict(made.state), before)


def test_the_remedy_for_a_loss_function() -> None:
    def loss(y: Any, labels: Any, v: Any) -> Any:
        each = op.Squeeze(y, [1]) - labels
        return op.ReduceSum(each * each * v, keepdims=0) / op.ReduceSum(v, keepdims=0)

    inputs = {name: (np.float32, ["N"]) for name in ("labels", "v")}
    file = build_training_model(
        line(), loss=loss, optimizer=SGD(0.0), inputs=inputs, trainable=["w"]
    )
    made = TrainingSession(file)
    with pytest.raises(ArgumentError, match="multiply by an input in your own loss function"):
        made.evaluate({"x": np.ones((2, 1))}, sample_weight=[1, 2])
