"""`fit(detect_anomaly=True)` names the node that made the first value that is not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from test_distributed import fit_joined
from test_precision import half
from training_models import Arrays, assert_same_arrays, classifier, labelled, normalizing

import ortops
from ortops import ArgumentError, DivergedError, TrainingSession, build_training_model
from ortops.callbacks import Callback
from ortops.losses import MeanSquaredError
from ortops.optimizers import SGD, Adam

ROWS = 8


def parsed(nodes: str, weights: str = "{1, 1}") -> onnx.ModelProto:
    """y = f(x · w), of x [batch, 2]."""
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[batch, 2] x) => (float[batch, 1] y) <float[2, 1] w = {weights}>
    {{ [product] a = MatMul(x, w) {nodes} }}""")


def rows(**at: tuple[float, float]) -> Arrays:
    """Ones, but for some rows, whose numbers follow "row"."""
    x = np.ones((ROWS, 2), np.float32)
    for name, values in at.items():
        x[int(name.removeprefix("row"))] = values
    return {"x": x, "targets": np.zeros((ROWS, 1), np.float32)}


def session(model: onnx.ModelProto, optimizer: Any = None) -> TrainingSession:
    trainable = build_training_model(
        model, loss="MeanSquaredError", optimizer=optimizer or SGD(0.0)
    )
    return TrainingSession(trainable)


def arguments(**more: Any) -> dict[str, Any]:
    settings = {"batch_size": 2, "shuffle": False, "progress": False, "detect_anomaly": True}
    return {**settings, **more}


CASES: dict[str, tuple[onnx.ModelProto, Arrays, list[str]]] = {
    "a logarithm": (
        parsed("[logarithm] y = Log(a)"),
        rows(row5=(-1, 0)),
        ["'y' is nan at [1, 0]", "Log node 'logarithm' ('a' is from -1 to 2)", "forward pass"],
    ),
    "an overflow behind a NaN": (
        parsed("[power] b = Exp(a) [quotient] y = Div(b, b)"),
        rows(row4=(500, 500)),
        ["'b' is inf at [0, 0]", "Exp node 'power' ('a' is from 2 to 1000)", "forward pass"],
    ),
    "a root, whose slope is infinite": (
        parsed("[root] y = Sqrt(a)"),
        rows(row4=(0, 0)),
        ["Div node 'Gradient/root/Div'", "backward pass"],
    ),
    "a loss that overflows": (
        parsed("y = Identity(a)"),
        rows(row5=(3e25, 0)),
        ["is inf", "loss", "forward pass"],
    ),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "value"), [("x", np.nan), ("x", np.inf), ("targets", np.nan)])
def test_data_that_are_not_finite(name: str, value: float) -> None:
    data = rows()
    data[name][5, 0] = value
    with pytest.raises(DivergedError) as caught:
        session(parsed("y = Identity(a)")).fit(data, **arguments())
    size = 2 * data[name].shape[1]
    expected = f"'{name}' is {value} at [1, 0], and 1 of its {size} values are not finite"
    assert str(caught.value).endswith(f"at step 3: {expected}, in the data")


@pytest.mark.quick(3)
@pytest.mark.parametrize("stop_on_nan", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_node(case: str, accumulate: int, stop_on_nan: bool) -> None:
    model, data, said = CASES[case]
    made = session(model)
    with pytest.raises(DivergedError) as caught:
        made.fit(data, **arguments(accumulate=accumulate, stop_on_nan=stop_on_nan))
    for part in said:
        assert part in str(caught.value)
    step = {1: 3, 2: 2, 3: 1}[accumulate]
    assert f"at step {step}:" in str(caught.value)
    ended = {1: "", 2: " of part 1 of 2", 3: " of part 3 of 3"}[accumulate]
    if accumulate == 2 and "forward pass" in said:  # found before the other part is read
        ended = ""
    assert str(caught.value).endswith(f"pass{ended}")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update(accumulate: int) -> None:
    made = session(parsed("y = Identity(a)"), SGD(3e38))
    data = rows()
    with pytest.raises(DivergedError, match="variable 'w' is -inf at step 1:") as caught:
        made.fit(data, **arguments(accumulate=accumulate))
    assert str(caught.value).endswith("in the update")


class Spoiling(Callback):
    """Makes a parameter large after a step, so that the logits of the next one overflow."""

    def on_step(self, record: Any, session: Any) -> None:
        if record.step == 3:
            session.parameters = {"w2": np.copysign(3e38, session.parameters["w2"])}


def test_a_step_within_a_training() -> None:
    """With Dropout and the state of Adam, as they were before that step."""
    model = build_training_model(
        classifier(dropout=0.5), loss="SoftmaxCrossEntropy", optimizer=Adam(0.05)
    )
    data = labelled((6,), rows=20)
    made = TrainingSession(model)
    with pytest.raises(DivergedError, match=r"MatMul node .*in the forward pass") as caught:
        made.fit(data, **arguments(batch_size=4, epochs=3, callbacks=[Spoiling()]))
    assert "at step 4:" in str(caught.value)
    assert "'w2' is from -3e+38 to 3e+38" in str(caught.value)


def test_masks_of_infinity_are_no_anomaly() -> None:
    model = parsed("""[mask] m = Where(b, a, f) [probabilities] p = Softmax<axis=0>(m)
    y = Identity(p)""")
    for name, array in (("b", [[True], [False]]), ("f", -np.inf)):
        kind = bool if name == "b" else np.float32
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(array, kind), name))
    made = session(model, SGD(0.1))
    made.fit(rows(), **arguments())
    assert made.steps_done == ROWS // 2


@pytest.mark.quick(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_else_changes(accumulate: int) -> None:
    def make() -> TrainingSession:
        net = classifier(dropout=0.25)
        model = build_training_model(net, loss="SoftmaxCrossEntropy", optimizer=Adam(0.05))
        return TrainingSession(model)

    data = labelled((6,), rows=20)
    plain, checked = make(), make()
    given = arguments(epochs=2, accumulate=accumulate)
    wanted = plain.fit(data, **{**given, "detect_anomaly": False})
    assert checked.fit(data, **given) == wanted
    assert_same_arrays(dict(checked.state), dict(plain.state))


def test_skipped_steps_of_float16_are_no_anomaly() -> None:
    model = build_training_model(
        half(normalizing()), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1)
    )
    made = TrainingSession(model)
    made.state["loss_scale"] = 2.0**24  # gradients overflow, and the scale falls
    data = labelled((1, 4, 4), rows=20)
    data["x"] = data["x"].astype(np.float16)
    made.fit(data, **arguments())
    assert 0 < made.steps_done < 10


def test_an_entry() -> None:
    """Of several algorithms in a file, the one that makes the steps is repeated."""
    first = parsed("[other] b0 = MatMul(x, v) [logarithm] b = Log(b0) y = Identity(a)")
    first.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 1), np.float32), "v"))
    first.graph.output.append(
        onnx.helper.make_tensor_value_info("b", onnx.TensorProto.FLOAT, ["batch", 1])
    )
    model = build_training_model(first, loss=MeanSquaredError("y"), optimizer=SGD(0.0))
    model = ortops.add_training(
        model, loss=MeanSquaredError("b"), optimizer=SGD(0.0), name="second"
    )
    data = rows(row5=(-1, 0))
    made = TrainingSession(model)
    with pytest.raises(ArgumentError, match="several training_info entries make steps"):
        made.fit(data, **arguments())
    history = made.fit(data, entry="main", **arguments())
    assert np.isfinite(history[-1]["loss"])
    with pytest.raises(DivergedError, match="Log node 'logarithm'"):
        TrainingSession(model).fit(data, entry="second", **arguments())


def test_what_is_refused() -> None:
    data = labelled((6,), rows=8)
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    with pytest.raises(ArgumentError, match="detect_anomaly must be True or False, got 1"):
        TrainingSession(model).fit(data, detect_anomaly=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a joined session divides each batch"):
        fit_joined(model, data, detect_anomaly=True)
