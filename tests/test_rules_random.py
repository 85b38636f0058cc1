"""The rule of Dropout: the mask of the forward pass, at build time and at run time."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from checked import Checked
from dot_test import DOMAIN, normal
from onnx import helper, numpy_helper
from running import run, run_by_name

import ortops

CHECKED = [Checked("Dropout", 2, [0])]


def dropped(
    x: np.ndarray,
    *,
    ratio: np.ndarray | None = None,
    training: bool | None = None,
    at_run_time: bool = False,
    order: int = 1,
    mask: bool = True,
) -> dict[str, np.ndarray]:
    """Runs y = Dropout(x), f = Σ w·y and d = ∂f/∂x, or f = Σ w·y² and its second derivative.

    Returns:
        y, mask (if asked for), w and d by name.
    """
    feeds = {"x": x, "w": normal(*x.shape, seed=5).astype(x.dtype)}
    given = {"ratio": ratio, "training_mode": None if training is None else np.array(training)}
    given = {name: array for name, array in given.items() if array is not None}
    names = [
        "x",
        "ratio" if "ratio" in given else "",
        *(["training_mode"] * (training is not None)),
    ]
    while not names[-1]:
        names.pop()
    nodes = [
        helper.make_node("Dropout", names, ["y", "mask"] if mask else ["y"]),
        helper.make_node("Mul", ["y", "y"], ["square"]),
        helper.make_node("Mul", ["y" if order == 1 else "square", "w"], ["f"]),
        helper.make_node("Gradient", ["x"], ["d1"], name="first", domain=DOMAIN, xs=["x"], y="f"),
        helper.make_node("Gradient", ["x"], ["d2"], name="second", domain=DOMAIN, xs=["x"], y="d1"),
    ][: 3 + order]
    shown = {**feeds, **(given if at_run_time else {})}
    initializers = [] if at_run_time else [numpy_helper.from_array(a, n) for n, a in given.items()]
    results = ["y", *(["mask"] * mask), f"d{order}"]
    graph = helper.make_graph(
        nodes,
        "case",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in shown.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in results],
        initializers,
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))
    return {**run_by_name(model, shown), "w": feeds["w"]}


@pytest.mark.parametrize("at_run_time", [False, True], ids=["constant", "run-time"])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.25, 0.9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_cotangent_passes_where_the_value_did(
    dtype: type, ratio: float | None, at_run_time: bool
) -> None:
    x = normal(40, 50).astype(dtype)
    given = None if ratio is None else np.array(ratio, np.float32)
    found = dropped(x, ratio=given, training=True, at_run_time=at_run_time)
    scale = 1 / (1 - np.float64(0.5 if given is None else given))
    mask = found["mask"]
    assert abs(mask.mean() - 1 / scale) < 0.06  # five standard deviations of 2000 draws
    np.testing.assert_allclose(found["y"], np.where(mask, x * scale, 0), rtol=1e-5)
    np.testing.assert_allclose(found["d1"], np.where(mask, found["w"] * scale, 0), rtol=1e-5)


@pytest.mark.parametrize("ratio_dtype", [np.float16, np.float64])
@pytest.mark.parametrize("at_run_time", [False, True], ids=["constant", "run-time"])
def test_ratio_of_another_type(ratio_dtype: type, at_run_time: bool) -> None:
    x = normal(10, 20).astype(np.float32)
    found = dropped(x, ratio=np.array(0.5, ratio_dtype), training=True, at_run_time=at_run_time)
    np.testing.assert_allclose(found["d1"], np.where(found["mask"], 2 * found["w"], 0), rtol=1e-6)


def test_the_mask_is_kept_where_the_model_does_not_ask_for_it() -> None:
    x = 1 + abs(normal(20, 20))
    found = dropped(x, training=True, mask=False)
    assert 0 < np.count_nonzero(found["y"]) < x.size
    np.testing.assert_allclose(found["d1"], np.where(found["y"] != 0, 2 * found["w"], 0))


@pytest.mark.parametrize("at_run_time", [False, True], ids=["constant", "run-time"])
@pytest.mark.parametrize("training", [None, False])
@pytest.mark.parametrize("mask", [False, True])
def test_inference_passes_everything(training: bool | None, at_run_time: bool, mask: bool) -> None:
    x = normal(4, 5)
    found = dropped(
        x, ratio=np.array(0.7, np.float32), training=training, at_run_time=at_run_time, mask=mask
    )
    np.testing.assert_array_equal(found["y"], x)
    np.testing.assert_array_equal(found["d1"], found["w"])


def test_the_second_derivative_has_the_same_mask() -> None:
    found = dropped(normal(20, 20), ratio=np.array(0.2, np.float32), training=True, order=2)
    scale = 1 / (1 - np.float64(np.float32(0.2)))
    expected = np.where(found["mask"], 2 * found["w"] * scale**2, 0)  # f = Σ w·(scale·x)²
    np.testing.assert_allclose(found["d2"], expected, rtol=1e-6)


def test_an_infinite_cotangent_does_not_reach_a_dropped_element() -> None:
    # zero times infinity would be NaN
    x = np.zeros((30, 30), np.float32)
    nodes = [
        helper.make_node("Dropout", ["x", "ratio", "training_mode"], ["y", "mask"]),
        helper.make_node("Sqrt", ["y"], ["f"]),
        helper.make_node("Gradient", ["x"], ["d"], domain=DOMAIN, xs=["x"], y="f"),
    ]
    graph = helper.make_graph(
        nodes,
        "case",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [helper.make_empty_tensor_value_info(name) for name in ("mask", "d")],
        [
            numpy_helper.from_array(np.array(0.5, np.float32), "ratio"),
            numpy_helper.from_array(np.array(True), "training_mode"),
        ],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))
    mask, d = run(model, {"x": x})
    np.testing.assert_array_equal(d, np.where(mask, np.inf, 0))
