"""Training and inference without onnxruntime-extensions, which has no wheels for some systems.

Each test blocks the packages in a process of its own, since they cannot be removed from one that
has imported them.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Everything that training needs besides the standard library and what these need themselves.
NEEDED = {"ml_dtypes", "numpy", "onnx", "onnx_ir", "onnxruntime", "ortops"}

BLOCKED = {
    "missing": 'sys.modules["onnxruntime_extensions"] = None',
    # A wheel whose shared library does not load, as on a system without its C++ runtime.
    "broken": """
        class Broken:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "onnxruntime_extensions":
                    raise OSError("libstdc++.so.6: version not found")
        sys.meta_path.insert(0, Broken())
    """,
}

COMMON = """
    import logging
    import numpy as np
    import onnx
    import onnxruntime
    import ortops

    lines = []
    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
    logging.getLogger("ortops").addHandler(Lines())

    model = onnx.parser.parse_model('''
        <ir_version: 10, opset_import: ["": 21]>
        m (float[batch, 2] x) => (float[batch, 1] y) <float[2, 1] w = {0, 0}> { y = MatMul (x, w) }
    ''')
    x = np.array([[1, 0], [0, 1]], np.float32)
    targets = np.array([[2], [-4]], np.float32)
"""


def run(script: str, blocked: str) -> None:
    lines = ["import sys", BLOCKED[blocked], COMMON, script]
    code = "\n".join(textwrap.dedent(each) for each in lines)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:ortops", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_models_train_as_with_the_extension() -> None:
    """One step of gradient descent on the mean of (w - target)²: w = rate · 2 · target / 2."""
    run(
        """
        trainable = ortops.build_training_model(
            model, loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.5)
        )
        session = ortops.TrainingSession(trainable)
        session.step({"x": x, "targets": targets})
        assert session.parameters["w"].tolist() == [[1.0], [-2.0]], session.parameters
        tuned = session.inference_model(original=model).SerializeToString()
        (y,) = onnxruntime.InferenceSession(tuned).run(None, {"x": x})
        assert y.tolist() == [[1.0], [-2.0]], y
        assert not [line for line in lines if "extensions" in line], lines
        """,
        "missing",
    )


@pytest.mark.slow
@pytest.mark.parametrize("blocked", BLOCKED)
def test_optimizer_nodes_run_as_standard_operators_and_the_log_says_so_once(blocked: str) -> None:
    """Momentum with alpha 0 is gradient descent: X - R · G = 1 - 0.5 · 4 = -1, 2 - 0.5 · 4 = 0."""
    run(
        """
        node = onnx.helper.make_node(
            "Momentum", ["r", "t", "x", "g", "v"], ["x_new", "v_new"], "update",
            domain="ai.onnx.preview.training",
            alpha=0.0, beta=1.0, mode="standard", norm_coefficient=0.0,
        )
        info = onnx.helper.make_tensor_value_info
        F, I = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
        graph = onnx.helper.make_graph(
            [node], "g",
            [info("r", F, []), info("t", I, []), *(info(n, F, [2]) for n in "xgv")],
            [info("x_new", F, [2]), info("v_new", F, [2])],
        )
        imports = [onnx.helper.make_opsetid("", 21)]
        imports.append(onnx.helper.make_opsetid("ai.onnx.preview.training", 1))
        updating = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
        feeds = {
            "r": np.array(0.5, np.float32), "t": np.array(1, np.int64),
            "x": np.array([1, 2], np.float32), "g": np.array([4, 4], np.float32),
            "v": np.zeros(2, np.float32),
        }
        for _ in range(2):
            session = ortops.InferenceSession(updating)
            assert session.run(["x_new"], feeds)[0].tolist() == [-1.0, 0.0]
        (line,) = lines
        assert "onnxruntime_extensions" in line or "libstdc++" in line, line
        assert "run as standard operators" in line, line

        lowered = ortops.lower(updating).SerializeToString()
        found = onnxruntime.InferenceSession(lowered).run(["x_new"], feeds)
        assert found[0].tolist() == [-1.0, 0.0]
        assert ortops.InferenceSession(updating, kernels="onnx").run(["x_new"], feeds)
        assert len(lines) == 1, lines
        """,
        blocked,
    )


@pytest.mark.slow
def test_asked_for_by_name_the_error_says_what_to_install() -> None:
    run(
        """
        trainable = ortops.build_training_model(
            model, loss="MeanSquaredError", optimizer=ortops.optimizers.Adam(0.5)
        )
        step = ortops.step_graph(trainable)
        for open_it in (
            lambda: ortops.InferenceSession(step, kernels="python"),
            lambda: ortops.TrainingSession(trainable, kernels="python"),
            lambda: ortops.register_custom_ops(onnxruntime.SessionOptions()),
        ):
            try:
                open_it()
            except ortops.KernelError as error:
                assert "pip install onnxruntime-extensions" in str(error), error
                assert 'kernels="onnx"' in str(error), error
            else:
                raise AssertionError("no error")
        """,
        "missing",
    )


@pytest.mark.slow
def test_training_imports_only_the_dependencies() -> None:
    """Blocks every installed package that is no dependency, and trains, saves, resumes, exports."""
    code = textwrap.dedent(f"""
        import importlib.metadata, sys
        needed = {NEEDED!r}
        requires = importlib.metadata.packages_distributions()
        dependencies = {{"flatbuffers", "google", "packaging", "protobuf", "typing_extensions",
                         "coloredlogs", "humanfriendly", "sympy", "mpmath"}}
        for name in requires:
            if name not in needed | dependencies:
                sys.modules[name] = None
    """)
    script = """
        import tempfile
        from pathlib import Path
        trainable = ortops.build_training_model(
            model, loss="MeanSquaredError", optimizer=ortops.optimizers.Adam(0.5)
        )
        data = {"x": np.tile(x, (4, 1)), "targets": np.tile(targets, (4, 1))}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trained.onnx")
            session = ortops.TrainingSession(trainable)
            history = session.fit(data, epochs=40, batch_size=4, progress=False)
            assert abs(session.predict(data)["y"] - data["targets"]).max() < 0.3
            session.save(path)
            again = ortops.TrainingSession(path)
            assert (again.parameters["w"] == session.parameters["w"]).all()
            ortops.export_step(session.model(), Path(folder, "step"))
            assert Path(folder, "step", "step.onnx").exists()
        """
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([code, textwrap.dedent(COMMON), textwrap.dedent(script)])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
