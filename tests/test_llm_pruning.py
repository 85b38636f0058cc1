"""Language models whose files compute the logits of the last token only (prune_lm_head)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from models import llama
from ortops.cli import main
from ortops.llm import FineTuning

ROWS = [[65, 66, 67, 68, 256], [70, 71, 72, 256]]


def pruned(folder: Path, bits: int, layers: int = llama.LAYERS) -> Path:
    """Writes a folder as onnxruntime-genai's builder does with prune_lm_head=true."""
    llama.write(folder, bits=bits, layers=layers)
    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    head = next(node for node in graph.node if "logits" in node.output)
    source = head.input[0]
    for name, array in (("last", np.array(-1)), ("axes", np.array([1]))):
        graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    gather = onnx.helper.make_node(
        "Gather", [source, "last"], ["gathered"], "/lm_head/prune/Gather", axis=1
    )
    unsqueeze = onnx.helper.make_node(
        "Unsqueeze", ["gathered", "axes"], ["pruned"], "/lm_head/prune/Unsqueeze"
    )
    place = list(graph.node).index(head)
    graph.node.insert(place, unsqueeze)
    graph.node.insert(place, gather)
    head.input[0] = "pruned"
    (logits,) = (value for value in graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(model, folder / "model.onnx")
    return folder


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "targets", [["lm_head", "o_proj"], pytest.param(None, marks=pytest.mark.slow)]
)
def test_pruned_files_train_like_whole_ones(
    bits: int, targets: list[str] | None, tmp_path: Path
) -> None:
    whole = llama.write(tmp_path / "whole", bits=bits, layers=1)
    base = pruned(tmp_path / "pruned", bits, layers=1)
    found = []
    for folder in (whole, base):
        tuning = FineTuning(folder, rank=2, targets=targets, learning_rate=0.01)
        history = tuning.fit(ROWS, epochs=3, progress=False)
        found.append((history.history["loss"], tuning.generate([65], max_new_tokens=4)))
    assert found[0] == found[1]

    tuning.save(tmp_path / "tuned")
    tuned = onnx.load(tmp_path / "tuned" / "model.onnx")
    assert {"/lm_head/prune/Gather", "/lm_head/prune/Unsqueeze"} <= {
        n.name for n in tuned.graph.node
    }
    logits = [served(folder, [65, 66, 67]) for folder in (base, tmp_path / "tuned", whole)]
    np.testing.assert_array_equal(logits[0], logits[1])
    assert logits[0].shape == (1, 1, llama.WORDS)
    np.testing.assert_allclose(logits[0], logits[2][:, -1:], atol=1e-5)
    if bits == 32:
        tuning.save(tmp_path / "merged", merged=True)
        assert served(tmp_path / "merged", [65, 66, 67]).shape == (1, 1, llama.WORDS)
    again = FineTuning.load(tmp_path / "tuned")
    assert again.evaluate(ROWS) == tuning.evaluate(ROWS)
    (tmp_path / "tuned" / "training.state").unlink()
    assert FineTuning.load(tmp_path / "tuned").evaluate(ROWS) == tuning.evaluate(ROWS)


def served(folder: Path, tokens: list[int]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    shape = (1, llama.PAIRS, 0, llama.SIZE)
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros(shape, np.float32)
    result: np.ndarray = session.run(["logits"], feeds)[0]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["NextToken", ortops.losses.DPO()])
def test_a_pruned_file_without_its_folder_is_refused(
    loss: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = pruned(tmp_path, 32, layers=1) / "model.onnx"
    expected = r"output 'logits' has one position only, .* tune its folder with ortops.llm.FineTun"
    with pytest.raises(ortops.ModelError, match=expected):
        ortops.build_training_model(file, loss=loss, optimizer="SGD")  # type: ignore[arg-type]
    assert main(["check", str(file), "--loss", "NextToken"]) == 1
    assert "prune_lm_head" in capsys.readouterr().out
    assert main(["check", str(tmp_path)]) == 0


def test_errors_of_a_loss_are_not_blamed_on_operators_of_onnxruntime() -> None:
    def loss(logits: ortops.Tensor) -> ortops.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ortops.build_training_model(llama.llama(layers=1), loss=loss, optimizer="SGD")
    with pytest.raises(TypeError, match="optimizer"):
        ortops.build_training_model(llama.llama(layers=1), loss="NextToken")  # type: ignore[call-arg]
