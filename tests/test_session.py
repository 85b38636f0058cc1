"""InferenceSession: any legal form of the domain's nodes, and onnxruntime's own interface."""

from __future__ import annotations

import threading

import numpy as np
import onnx
import onnxruntime
import pytest
from domain_models import model, node, value
from onnx import TensorProto, helper

import ortops

F = np.float32
KERNELS = ["python", "onnx"]


def adam_model(
    *,
    count=1,
    kind=TensorProto.FLOAT,
    r_kind=TensorProto.FLOAT,
    shape=("n",),
    outputs=None,
    **attributes,
):
    letters = ["X", "G", "V", "H"]
    names = [f"{letter}{index}" for letter in letters for index in range(count)]
    inputs = [value("R", (), r_kind), value("T", (), TensorProto.INT64)]
    inputs += [value(name, list(shape), kind) for name in names]
    if outputs is None:
        outputs = [f"{letter}{index}_new" for letter in "XVH" for index in range(count)]
    update = node("Adam", ["R", "T", *names], outputs, name="update", **attributes)
    return model([update], inputs, [name for name in outputs if name])


def adam_feeds(count=1, dtype=F, r_dtype=F, shape=(5,), t=3, seed=0):
    rng = np.random.default_rng(seed)
    feeds = {"R": np.array(0.01, r_dtype), "T": np.array(t)}
    for index in range(count):
        for letter in "XGVH":
            array = rng.standard_normal(shape)
            feeds[f"{letter}{index}"] = np.asarray(
                np.square(array) if letter == "H" else array, dtype
            )
    return feeds


def adam(feeds, index=0, *, alpha=0.9, beta=0.999, epsilon=1e-6):
    """The specification's pseudo-code in float64, element by element, with float32 attributes."""
    alpha, beta, epsilon = (float(F(number)) for number in (alpha, beta, epsilon))
    r, t = float(feeds["R"]), int(feeds["T"])
    if t > 0:
        r = r * (1 - beta**t) ** 0.5 / (1 - alpha**t)
    results = []
    for x, g, v, h in zip(
        *(feeds[f"{letter}{index}"].ravel().astype(np.float64) for letter in "XGVH"), strict=True
    ):
        v_new = alpha * v + (1 - alpha) * g
        h_new = beta * h + (1 - beta) * g * g
        results.append((x - r * v_new / (h_new**0.5 + epsilon), v_new, h_new))
    return [np.array(column) for column in zip(*results, strict=True)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", ["path", "bytes", "proto"])
def test_forms_of_a_model(tmp_path, kernels, form):
    proto = adam_model()
    path = tmp_path / "adam.onnx"
    onnx.save(proto, path)
    given = {"path": path, "bytes": proto.SerializeToString(), "proto": proto}[form]
    session = ortops.InferenceSession(given, kernels=kernels)
    assert isinstance(session, onnxruntime.InferenceSession)
    assert [i.name for i in session.get_inputs()] == ["R", "T", "X0", "G0", "V0", "H0"]
    feeds = adam_feeds()
    for found, expected in zip(session.run(None, feeds), adam(feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.nightly
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["float", "double"])
@pytest.mark.parametrize("r_kind", ["float", "double"])
@pytest.mark.parametrize("t", [0, 1, 1000])
def test_types(kernels, kind, r_kind, t):
    types = {"float": (TensorProto.FLOAT, F), "double": (TensorProto.DOUBLE, np.float64)}
    proto = adam_model(kind=types[kind][0], r_kind=types[r_kind][0])
    feeds = adam_feeds(dtype=types[kind][1], r_dtype=types[r_kind][1], t=t)
    rtol = 2e-6 if kind == "float" else 1e-13
    found = ortops.InferenceSession(proto, kernels=kernels).run(None, feeds)
    for array, expected in zip(found, adam(feeds), strict=True):
        assert array.dtype == types[kind][1]
        np.testing.assert_allclose(array, expected, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3, 4, 1)], ids=str)
def test_shapes(kernels, shape):
    feeds = adam_feeds(shape=shape)
    proto = adam_model(shape=[f"n{axis}" for axis in range(len(shape))])
    found = ortops.InferenceSession(proto, kernels=kernels).run(None, feeds)
    for array, expected in zip(found, adam(feeds) if feeds["X0"].size else found, strict=True):
        assert array.shape == shape
        np.testing.assert_allclose(array.ravel(), expected.ravel(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kernels", KERNELS)
def test_many_tensors_and_skipped_outputs(kernels):
    outputs = ["X0_new", "", "X2_new", "V0_new", "V1_new", "", "", "H1_new"]
    proto = adam_model(count=3, outputs=outputs)
    feeds = adam_feeds(count=3)
    session = ortops.InferenceSession(proto, kernels=kernels)
    results = dict(
        zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True)
    )
    assert sorted(results) == sorted(name for name in outputs if name)
    for name, found in results.items():
        expected = adam(feeds, int(name[1]))["XVH".index(name[0])]
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kernels", KERNELS)
def test_attributes_with_nine_digits(kernels):
    numbers = {"alpha": 0.123456789, "beta": 0.9999999, "epsilon": 1.23456789e-3}
    feeds = adam_feeds()
    session = ortops.InferenceSession(adam_model(**numbers), kernels=kernels)
    for found, expected in zip(session.run(None, feeds), adam(feeds, **numbers), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kernels", KERNELS)
def test_gradient_and_update_in_one_graph(kernels):
    nodes = [
        helper.make_node("Mul", ["X0", "X0"], ["y"]),
        node("Gradient", ["X0"], ["G0"], xs=["X0"], y="y"),
        node("Adam", ["R", "T", "X0", "G0", "V0", "H0"], ["X_new", "V_new", "H_new"]),
    ]
    inputs = [value("R"), value("T", (), TensorProto.INT64)]
    inputs += [value(name, ["n"]) for name in ("X0", "V0", "H0")]
    session = ortops.InferenceSession(model(nodes, inputs, ["X_new"]), kernels=kernels)
    feeds = adam_feeds()
    feeds["G0"] = 2 * feeds["X0"]
    expected = adam(feeds)[0]
    del feeds["G0"]
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=2e-6, atol=1e-7)


def test_a_model_without_the_domain():
    proto = model([helper.make_node("Neg", ["a"], ["b"])], [value("a")], ["b"])
    assert ortops.InferenceSession(proto).run(None, {"a": np.asarray(F(2))}) == [-2]


def test_a_trainable_file_runs_as_inference():
    proto = model([helper.make_node("Neg", ["a"], ["b"])], [value("a")], ["b"])
    info = proto.training_info.add()
    info.algorithm.node.append(node("Gradient", ["a"], ["da"], xs=["a"], y="b"))
    assert ortops.InferenceSession(proto).run(None, {"a": np.asarray(F(2))}) == [-2]


def test_unknown_kernels():
    with pytest.raises(
        ortops.ArgumentError, match="kernels must be 'auto', 'python' or 'onnx', got 'c'"
    ):
        ortops.InferenceSession(adam_model(), kernels="c")


def with_external_data(path):
    """A model with a Gradient node, and a weight in a file; the gradient is 3."""
    nodes = [
        helper.make_node("Mul", ["a", "w"], ["y"]),
        node("Gradient", ["a"], ["da"], xs=["a"], y="y"),
    ]
    proto = model(nodes, [value("a")], ["da"], initializers={"w": np.asarray(F(3))})
    path.parent.mkdir()
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


FOLDER_KEY = "session.model_external_initializers_file_folder_path"


def test_options_of_the_caller_say_of_no_folder_afterwards(tmp_path):
    options, feeds = onnxruntime.SessionOptions(), {"a": np.asarray(F(1))}
    path = with_external_data(tmp_path / "one" / "model.onnx")
    session = ortops.InferenceSession(path, options)
    assert session.run(None, feeds) == [3]
    assert options.get_session_config_entry(FOLDER_KEY) == ""
    plain = tmp_path / "one" / "plain.onnx"
    proto = onnx.load(path, load_external_data=False)
    proto.graph.output[0].name = "y"
    proto.graph.node.pop()
    onnx.save(proto, plain)
    assert onnxruntime.InferenceSession(plain, options).run(None, feeds) == [3]
    session.set_providers(["CPUExecutionProvider"])
    assert session.run(None, feeds) == [3]


def test_options_of_the_caller_keep_their_folder(tmp_path):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(FOLDER_KEY, str(tmp_path))
    path = with_external_data(tmp_path / "one" / "model.onnx")
    assert ortops.InferenceSession(path, options).run(None, {"a": np.asarray(F(1))}) == [3]
    assert options.get_session_config_entry(FOLDER_KEY) == str(tmp_path)
    path.unlink()
    with pytest.raises(ortops.ModelError):
        ortops.InferenceSession(path, options)
    assert options.get_session_config_entry(FOLDER_KEY) == str(tmp_path)


def test_arguments_have_the_names_that_onnxruntime_gives_them():
    session = ortops.InferenceSession(
        path_or_bytes=adam_model().SerializeToString(),
        sess_options=onnxruntime.SessionOptions(),
        providers=["CPUExecutionProvider"],
        provider_options=[{}],
    )
    feeds = adam_feeds()
    np.testing.assert_allclose(session.run(None, feeds)[0], adam(feeds)[0], rtol=2e-6, atol=1e-7)


def wrong_feeds():
    feeds = adam_feeds()
    feeds["G0"] = np.zeros(7, F)
    return feeds


def unshaped_model():
    """A model whose shapes only a run can tell to be wrong."""
    return adam_model(shape=(None,))


def test_a_kernel_that_fails_raises_and_the_session_lives():
    session = ortops.InferenceSession(unshaped_model())
    with pytest.raises(ortops.KernelError) as raised:
        session.run(None, wrong_feeds())
    assert "Adam node 'update'" in str(raised.value)
    assert "(7,)" in str(raised.value)
    feeds = adam_feeds()
    np.testing.assert_allclose(session.run(None, feeds)[0], adam(feeds)[0], rtol=2e-6, atol=1e-7)


def test_a_kernel_that_fails_in_every_way_to_run():
    session = ortops.InferenceSession(unshaped_model())
    feeds = wrong_feeds()
    names = [output.name for output in session.get_outputs()]
    held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    with pytest.raises(ortops.KernelError, match="Adam node"):
        session.run_with_ort_values(names, held)
    binding = session.io_binding()
    for name, array in held.items():
        binding.bind_ortvalue_input(name, array)
    for name in names:
        binding.bind_output(name)
    with pytest.raises(ortops.KernelError, match="Adam node"):
        session.run_with_iobinding(binding)
    done = threading.Event()
    seen = []

    def callback(results, data, message):
        seen.append((results, data, message))
        done.set()

    session.run_async(names, feeds, callback, "mine")
    assert done.wait(30)
    assert seen[0][:2] == (None, "mine")
    assert "Adam node" in seen[0][2]


def test_two_threads_in_one_session_get_their_own_errors():
    session = ortops.InferenceSession(unshaped_model())
    good, bad = adam_feeds(), wrong_feeds()
    outcomes = {"good": [], "bad": []}

    def work(kind, feeds):
        for _ in range(50):
            try:
                outcomes[kind].append(bool(np.isfinite(session.run(None, feeds)[0]).all()))
            except ortops.KernelError:
                outcomes[kind].append(None)

    threads = [
        threading.Thread(target=work, args=("good", good)),
        threading.Thread(target=work, args=("bad", bad)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"good": [True] * 50, "bad": [None] * 50}


def test_an_opset_that_onnxruntime_does_not_know():
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "graph", [x], [y])
    newer = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 99)], ir_version=10)
    said = (
        r"model: .* Opset 99 is .* It needs a newer version than onnxruntime "
        rf"{onnxruntime.__version__}; upgrade onnxruntime, or convert the model to an older opset"
    )
    with pytest.raises(ortops.UnsupportedError, match=said):
        ortops.InferenceSession(newer.SerializeToString())
