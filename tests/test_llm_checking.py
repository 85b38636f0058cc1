"""``ortops check`` of the folder of a language model."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from test_llm_pruning import pruned
from violations import all_violations

from models import llama
from ortops import ArgumentError, Tape, UnsupportedError, op
from ortops.cli import main
from ortops.graph.convert import to_ir
from ortops.llm import FineTuning
from ortops.llm.checking import Serving, check_folder
from ortops.llm.estimates import Forecast, attention_of, forecast
from ortops.llm.generation import Sampling

_LINES = """language model model.onnx
inputs: input_ids, attention_mask
caches, empty in training: 4 (past_key_values.0.key … past_key_values.1.value)
loss: NextToken of output 'logits'
layers that get an adapter: qkv_proj × 2, o_proj × 2, gate_proj × 2, up_proj × 2, down_proj × 2
adapter of rank 8: 7,168 values
"""


@pytest.mark.slow
def test_a_float_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama.write(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert found.startswith(_LINES)
    assert "normalizations are computed again in the backward pass; --recompute none keeps" in found
    assert found.endswith("no problems: ready for ortops tune\n")


@pytest.mark.slow
def test_a_quantized_folder_that_prunes_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pruned(tmp_path, 4)
    assert main(["check", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["quantized"] == 11
    assert found["adapter_size"] == 7168
    assert found["said"] == ["the file computes the logits of the last token only; tuning, of all"]


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["check", str(tmp_path)]) == 2
    assert "cannot choose the model among 0 .onnx files" in capsys.readouterr().err


@pytest.mark.slow
def test_generation_that_onnxruntime_refuses(tmp_path: Path) -> None:
    folder = llama.write(tmp_path, layers=1)
    with pytest.raises(ArgumentError, match=f"integer >= 0 and < {llama.WORDS}, got 999"):
        FineTuning(folder, rank=1).generate([999])
    model = onnx.load(folder / "model.onnx")
    node = next(each for each in model.graph.node if each.op_type == "GroupQueryAttention")
    ones = onnx.numpy_helper.from_array(np.ones(llama.SIZE, np.float32), "norm")
    model.graph.initializer.append(ones)
    node.input.extend([""] * (14 - len(node.input)) + ["norm", "norm"])
    onnx.save(model, folder / "model.onnx")
    name, what = re.escape(node.name), "does not support the input q_norm_weight"
    expected = f"GroupQueryAttention node '{name}': .* {what}"
    with pytest.raises(UnsupportedError, match=expected):
        FineTuning(folder, rank=1).generate([65])
    assert any("q_norm_weight" in each for each in check_folder(folder).said)


@pytest.mark.slow
def test_normalizations_alone(tmp_path: Path) -> None:
    folder = llama.write(tmp_path, bits=4, layers=1)
    assert not check_folder(folder).said  # the embedding is a float matrix
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        if tensor.name == "model.embed_tokens.weight":
            values = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array((9 * values).astype(np.int8), "int8"))
    table = onnx.helper.make_node("Cast", ["int8"], ["model.embed_tokens.weight"], to=1)
    model.graph.node.insert(0, table)
    onnx.save(model, folder / "model.onnx")
    (said,) = check_folder(folder).said
    assert said.startswith("without an adapter, only normalizations would be trained")


@pytest.mark.slow
def test_memory_and_time_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama.write(tmp_path, bits=4, layers=1)
    assert main(["check", str(tmp_path), "--measure", "2x16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]["measured"]
    assert (found["rows"], found["tokens"], found["steps"]) == (2, 16, 3)
    assert found["seconds"] > 0
    assert found["tokens_per_second"] == pytest.approx(32 / found["seconds"])
    assert found["peak_memory"] is None or found["peak_memory"] > 10e6
    assert main(["check", str(tmp_path), "--measure", "999"]) == 0  # the context has 128
    expected = (
        r"measured, 3 steps of rank 8 with 1 × 128 tokens: [\d,]+ tokens per second, .* s per"
    )
    assert re.search(expected, capsys.readouterr().out)
    assert main(["check", str(tmp_path / "model.onnx"), "--measure", "16"]) == 2
    assert "--measure needs the folder of a language model" in capsys.readouterr().err


def test_a_model_with_problems_is_not_measured(tmp_path: Path) -> None:
    llama.write(tmp_path, layers=1)
    model = onnx.load(tmp_path / "model.onnx")
    model.graph.output[0].name = "scores"
    next(n for n in model.graph.node if "logits" in n.output).output[0] = "scores"
    onnx.save(model, tmp_path / "model.onnx")
    report = check_folder(tmp_path, (1, 16))
    assert report.problems
    assert report.measured is None


@pytest.mark.slow
def test_both_forms_of_a_tuned_model_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = FineTuning(llama.write(tmp_path / "base", layers=1), rank=2, learning_rate=0.03)
    assert tuning.generate([65], 3) != [66, 67, 68]
    tuning.fit([[65, 66, 67, 68]], epochs=20, progress=False)
    assert tuning.generate([65], 3) == [66, 67, 68]  # with the present adapter
    tuning.save(tmp_path / "tuned")
    tuning.save(tmp_path / "merged", merged=True)
    forms = FineTuning.load(tmp_path / "tuned")._server.forms()
    found = {name: form.continued([65], 3, (), Sampling()) for name, form in forms.items()}
    assert found == {"merged": [66, 67, 68], "adapter": [66, 67, 68]}  # as it was trained
    weights = [weight for value in forms["adapter"].fixed.values() for weight in value.flat]
    assert any(weights)
    assert main(["check", str(tmp_path / "tuned"), "--measure", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    served = report["served"]
    assert (served["prompt"], served["tokens"]) == (64, 32)
    assert min(served[name] for name in ("merged", "adapter", "ratio")) > 0
    assert not served["rounds_again"]
    assert report["measured"] is None
    assert main(["check", str(tmp_path / "tuned"), "--measure", "999"]) == 0
    text = capsys.readouterr().out
    assert "measured, 32 tokens behind a prompt of 96, medians of 5 rounds: merged " in text
    assert text.splitlines()[-1].startswith("serve the m")
    assert main(["check", str(tmp_path / "tuned")]) == 1  # as it has an adapter
    assert check_folder(tmp_path / "merged", (1, 8)).served is None


@pytest.mark.parametrize(
    ("ratio", "again", "expected"),
    [
        (1.3, False, "serve the merged model: save(folder, merged=True), or ortops tune --merge"),
        (1.3, True, "merging rounds the quantized weights again"),
        (1.02, True, "serve the model with its adapter: it is as fast"),
        (0.8, False, "serve the model with its adapter: it is as fast"),
    ],
)
def test_which_form_to_serve(ratio: float, again: bool, expected: str) -> None:
    found = str(Serving(64, 32, 100 * ratio, 100, ratio, again))
    assert f"merged {100 * ratio:.1f} tokens per second, with the adapter 100.0" in found
    assert expected in found
    assert ("rounds" in found.splitlines()[1]) is (again and ratio > 1.05)


@pytest.mark.slow
def test_an_estimate_counts_what_a_step_has(tmp_path: Path) -> None:
    folder = llama.write(tmp_path)
    report = check_folder(folder)
    found = report.estimated
    assert found is not None
    assert "estimated for rank 8 with 4 × 128 tokens: " in str(report)  # the context's length
    session = FineTuning(folder).session
    variables = {n: a for n, a in session.state.items() if "lora" in n}
    assert found.per_rank * 8 == 5 * sum(a.nbytes for n, a in variables.items()) / _roles(variables)
    model = onnx.load(folder / "model.onnx")
    kept = [n for node in model.graph.node for n in node.output if n and "present" not in n]
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in kept)
    stock = onnxruntime.InferenceSession(model.SerializeToString())
    ones = np.ones((1, 100), np.int64)
    past = np.zeros((1, llama.PAIRS, 0, llama.SIZE), np.float32)
    feeds = {v.name: past if v.name.startswith("past") else ones for v in stock.get_inputs()}
    arrays = dict(zip(kept, stock.run(kept, feeds), strict=True))
    assert arrays.pop("logits").shape[-1] == found.words
    counted = sum(a.nbytes for a in arrays.values() if a.dtype == np.float32) / 100
    assert found.per_token + found.kept == pytest.approx(counted, rel=0.25)
    assert found.per_token < 0.75 * counted


def _roles(variables: dict[str, np.ndarray]) -> int:
    """Returns how many variables each matrix of an adapter of two layers has."""
    return len(variables) // 20


def test_what_fits_into_memory() -> None:
    made = Forecast(4, 512, 1e9, 1e6, 1000, 1e6, 2048, (0.5, 5.0), 4 * 10**9)
    batch = 1e9 + 2048 * 1e6 + 13 * 2048 * 1000
    assert made.memory(4, 512) == batch  # 3.25 arrays of 4 bytes for each logit
    assert made.memory(1, 10**6) == 1e9 + 1e12 + 13 * 2**22  # in chunks
    wide = replace(made, words=2**17)
    assert wide.memory(1, 10**6) == 1e9 + 1e12 + 13 * 2**23  # of 64 rows
    tokens = 2048 + int((4e9 - batch) / 1e6)
    assert f"up to {tokens // 512} × 512 tokens or one row of 2,048; 4 × 512" in str(made)
    assert str(made).endswith("fit up to rank 256")
    less = Forecast(4, 512, 1e9, 1e6, 0, 1e6, 2048, (0.5, 5.0), 2 * 10**9)
    assert str(less).endswith("rank 8 fits with at most 1,000 tokens per step")
    unknown = Forecast(4, 512, 1e9, 1e6, 0, 1e6, 2048, (0.5, 5.0), None)
    expected = "estimated for rank 8 with 4 × 512 tokens: 3,048 MB of memory"
    assert str(unknown) == f"{expected} (3,048 MB with --recompute none), 0.5 to 5 s per step"
    more = str(replace(unknown, kept=1e6))
    assert more == f"{expected} (5,096 MB with --recompute none), 0.5 to 5 s per step"


GROUPED = attention_of(to_ir(llama.llama(layers=1)).graph, None)
MEASURED: list[tuple[str, *tuple[int, ...], int | None]] = [
    ("GroupQueryAttention", 4, 2, 64, 2, 192, 2000, 1, 64, 139, 139),
    ("GroupQueryAttention", 4, 2, 64, 2, 192, 2000, 4, 512, 205, None),
    ("GroupQueryAttention", 32, 4, 128, 2, 384, 8000, 4, 128, 260, 266),
    ("GroupQueryAttention", 4, 4, 256, 4, 704, 32000, 4, 256, 428, 450),
    ("GroupQueryAttention", 32, 4, 512, 8, 1536, 32000, 2, 512, 867, None),
    ("GroupQueryAttention", 4, 6, 256, 4, 768, 128000, 1, 512, 714, None),
    ("GroupQueryAttention", 4, 6, 512, 8, 1408, 8000, 4, 256, 494, 596),
    ("GroupQueryAttention", 4, 6, 512, 8, 1408, 8000, 4, 512, 679, 855),
    ("GroupQueryAttention", 4, 6, 512, 8, 1408, 8000, 4, 1024, 1066, 1354),
    ("GroupQueryAttention", 4, 6, 512, 8, 1408, 8000, 4, 2048, 1939, 2458),
    ("GroupQueryAttention", 32, 6, 512, 8, 1408, 8000, 4, 256, 689, None),
    ("GroupQueryAttention", 32, 6, 512, 8, 1408, 8000, 4, 512, 869, None),
    ("GroupQueryAttention", 32, 6, 512, 8, 1408, 8000, 4, 1024, 1242, None),
    ("GroupQueryAttention", 32, 6, 512, 8, 1408, 8000, 4, 2048, 2120, None),
    ("GroupQueryAttention", 4, 6, 512, 8, 1408, 140000, 2, 256, 440, None),
    ("GroupQueryAttention", 4, 8, 512, 8, 1408, 16000, 4, 512, 827, 1087),
    ("MultiHeadAttention", 32, 4, 256, 4, 704, 8000, 4, 256, 382, None),
    ("MultiHeadAttention", 32, 4, 256, 4, 704, 8000, 4, 512, 481, 544),
    ("MultiHeadAttention", 32, 6, 768, 12, 2048, 32000, 2, 512, 1067, 1209),
    ("MultiHeadAttention", 32, 8, 256, 8, 704, 8000, 1, 1024, 566, None),
    ("Attention", 32, 4, 256, 4, 704, 8000, 1, 1024, 382, None),
    ("Attention", 32, 6, 512, 8, 1408, 8000, 4, 512, 991, 1198),
    ("Softmax", 32, 4, 256, 4, 704, 8000, 1, 1024, 435, None),
    ("Softmax", 32, 4, 256, 4, 704, 8000, 2, 512, 394, None),
    ("Softmax", 32, 4, 256, 4, 704, 8000, 4, 256, 393, None),
    ("Softmax", 32, 4, 256, 4, 704, 8000, 4, 512, 479, 560),
    ("Softmax", 32, 6, 512, 8, 1408, 8000, 4, 512, 1184, None),
    ("Softmax", 32, 6, 768, 12, 2048, 32000, 2, 512, 1706, None),
    ("Softmax", 32, 8, 256, 8, 704, 8000, 4, 512, 802, None),
]
"""The form, bits of weights, layers, width, heads, inner width and words of models, rows and
tokens, and the measured peak of a process in MB by default and with recompute=None: of
onnxruntime's operators, of ONNX's, and of PyTorch's exporter."""


def attention(kind: str, cap: bool = False, dtype: Any = np.float32) -> ir.Graph:
    """Returns the graph of one layer of attention."""
    if kind != "Softmax":
        domain = "com.microsoft" if kind == "MultiHeadAttention" else ""
        return ir.Graph([], [], nodes=[ir.Node(domain, kind, [])])
    with Tape(name="attention") as tape:
        x = tape.input("x", dtype, ["batch", "time", 8])
        x = x @ tape.initializer("w", np.ones((8, 8), dtype))
        scores = x @ op.Transpose(x, perm=[0, 2, 1])
        y = op.Softmax(op.Tanh(scores) if cap else scores) @ x
        tape.output(y, "logits")
    return to_ir(tape.model()).graph


def test_estimates_are_near_to_what_was_measured() -> None:
    with all_violations() as check:
        for kind, bits, layers, width, heads, inner, words, rows, tokens, *measured in MEASURED:
            made = estimated(kind, bits, layers, width, heads, inner, words, rows, tokens)
            with check((kind, width, rows, tokens)):
                found = [made.memory(rows, tokens), made.memory(rows, tokens)]
                found[1] += rows * tokens * made.kept
                for expected, each in zip(measured, found, strict=True):
                    assert expected is None or each / 1e6 == pytest.approx(expected, rel=0.12)


def estimated(
    kind: str, bits: int, layers: int, width: int, heads: int, inner: int, words: int, *shape: int
) -> Forecast:
    grouped = kind == "GroupQueryAttention"
    pairs = {"GroupQueryAttention": 2 * width // heads, "MultiHeadAttention": width}
    cached = pairs.get(kind, width // 2)
    qkv = [(width, width + 2 * cached)] if grouped else [(width, width), *[(width, cached)] * 2]
    sizes = layers * [*qkv, (width, width), *[(width, inner)] * 2, (inner, width)]
    table = words * width
    count = sum(math.prod(each) for each in sizes) + table
    weights = int(count * (4 if bits == 32 else 0.5 + 4 / 32)) + 4 * table
    in_file = 4 * table if 4 * table >= 2**27 else 0
    found = GROUPED if grouped else attention_of(attention(kind), heads)
    assert not isinstance(found, str)
    found = found._replace(layers=layers)
    inside = weights if kind in ("Attention", "Softmax") else 0
    return forecast(sizes, found, (weights, in_file, inside), words, (*shape, 2048))


def test_what_is_not_estimated_is_said(tmp_path: Path) -> None:
    cases = [
        (attention("Softmax", cap=True), 2, "soft cap"),
        (attention("Softmax"), None, "number of heads"),
        (attention("Softmax", dtype=np.float16), 2, "float16"),
        (ir.Graph([], [], nodes=[]), 2, "none of the forms"),
    ]
    with all_violations() as check:
        for graph, heads, reason in cases:
            with check(reason):
                assert reason in str(attention_of(graph, heads))


def test_memory_of_scores_grows_with_the_square_of_the_length() -> None:
    made = Forecast(2, 100, 1e6, 10, 0, 1e3, 4096, (0.5, 5.0), 3 * 10**6, per_pair=1)
    assert made.memory(2, 100) == 1e6 + 2 * (100 * 10 + 100**2)
    rows, row = 2e6 // (100 * 110), (-10 + math.sqrt(100 + 8e6)) // 2
    assert f"up to {rows:.0f} × 100 tokens or one row of {row:,.0f};" in str(made)


@pytest.mark.slow
def test_weights_are_copied_up_to_a_size() -> None:
    small, large = (
        forecast([(8, 8)], GROUPED, (size, 0, 0), 10, (1, 8, 8)).fixed
        for size in (2**28, 2**28 + 1)
    )
    assert small - large == pytest.approx(1.5 * 2**28)
    inside = forecast([(8, 8)], GROUPED, (2**28 + 1, 0, 2**28), 10, (1, 8, 8)).fixed
    assert inside - large == 2**28  # of one file, which onnxruntime does not read in place
