"""Patterns of layers' names, against Python's own regular expressions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import onnx
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_models import ROWS, built, normal

from ortops import ModelError, lora
from ortops.graph.limits import LIMITS
from ortops.lora.patterns import Patterns

CHARACTERS = st.sampled_from(
    [*"ab1._-", ".", r"\.", r"\d", r"\W", r"\-", "[ab]", "[^a.]", "[]a-c]"]
)
REPEATS = st.sampled_from([*"*+?", "*?", "+?", "??", "{2}", "{,2}", "{1,}", "{0,3}", "{1,2}?"])
EXPRESSIONS = st.recursive(
    CHARACTERS | st.sampled_from(["", "^", "$", "{", "}", "a{", "{}", "]"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, REPEATS).map("(?:{0[0]}){0[1]}".format),
        st.tuples(CHARACTERS, REPEATS).map("".join),
    ),
    max_leaves=8,
)
NAMES = st.lists(st.text("ab1._-\n", max_size=8), min_size=1, max_size=4)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(EXPRESSIONS, NAMES)
def test_patterns_match_as_python_says(pattern: str, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = re.compile(rf"(.*\.)?({pattern})$")
        except re.error:
            with pytest.raises(ModelError, match=r"rank_pattern: invalid pattern .*: "):
                Patterns({pattern: 1}, "rank_pattern")
            return
    found = Patterns({pattern: 1}, "rank_pattern")
    for name in names:
        assert found.value_for(name, 0) == (expected.match(name) is not None), name


@pytest.mark.parametrize(
    ("pattern", "layer", "found"),
    [
        ("q_proj", "model.layers.0.q_proj", 1),
        ("proj", "model.layers.0.q_proj", 0),
        ("^q_proj", "model.layers.0.q_proj", 0),
        (r"^model\.layers\.0\.q_proj", "model.layers.0.q_proj", 1),
        ("(q|v)_proj", "model.layers.0.v_proj", 1),
        (r".*\.[0-3]\..*", "model.layers.3.v_proj", 1),
        (r"layers\.\d+\.mlp\.(gate|up)_proj", "model.layers.17.mlp.up_proj", 1),
        (r"layers\.\d+\.mlp\.(gate|up)_proj", "model.layers.17.mlp.down_proj", 0),
    ],
)
def test_patterns_that_people_write(pattern: str, layer: str, found: int) -> None:
    assert Patterns({pattern: 1}, "rank_pattern").value_for(layer, 0) == found


def test_the_first_pattern_that_fits_counts() -> None:
    patterns = Patterns({"fc[12]": 2, "fc1": 3, "fc.": 4}, "rank_pattern")
    assert [patterns.value_for(f"net.fc{number}", 8) for number in "123x"] == [2, 2, 4, 4]
    assert patterns.value_for("net.head", 8) == 8


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "(?!a)", "(?<=a)", r"(a)\1", "(?P<n>a)", "(?i)a", "a++", r"\bfc", r"\x41"),
        *("(", ")", "[", "a**", "*", "a{2,1}", "x)(y", "[b-a]", "a{99999999999999999999}"),
        *("(a{1000}){1000}", "(){9999}" * 3, "(" * 5000 + ")" * 5000),
    ],
)
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match=r"rank_pattern: invalid pattern .*: .*; use l"):
        Patterns({pattern: 1}, "rank_pattern")


def test_a_search_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"alpha_pattern: matching its .* patterns takes more than 1,000 steps; use fewer or"
    monkeypatch.setattr(LIMITS, "pattern_steps", 1000)
    for pattern, name in (("(a*)*b", "a" * 1000), ("a" * 500, "a" * 500)):
        patterns = Patterns({pattern: 1}, "alpha_pattern")
        with pytest.raises(ModelError, match=message):
            patterns.value_for(name, 0)
    with pytest.raises(ModelError, match=message):
        Patterns({f"fc{number}": 1 for number in range(20)}, "alpha_pattern")


LAYER = "a" * 60
RUN = "import sys; from ortops import lora; lora.from_peft(sys.argv[1], sys.argv[2])"


@pytest.mark.nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize("setting", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)*b", "(.*)*b", "a*" * 30 + "b"])
def test_patterns_of_exponential_time(pattern: str, setting: str, tmp_path: Path) -> None:
    """In a process that can be ended."""
    model = built(ROWS, lambda x, weight: x @ weight, weight=normal(6, 4))
    (tensor,) = model.graph.initializer
    layer = next(node for node in model.graph.node if node.op_type == "MatMul")
    tensor.name = layer.input[1] = f"{LAYER}.weight"
    onnx.save(model, tmp_path / "base.onnx")
    lora.to_peft(lora.add(model, rank=2), tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    names = ("target_modules", "exclude_modules", "layers_pattern")  # which say where PEFT adds it
    config |= {setting: {pattern: 3}} | dict.fromkeys(names, pattern)
    file.write_text(json.dumps(config))
    command = [sys.executable, "-c", RUN, str(tmp_path / "base.onnx"), str(tmp_path)]
    subprocess.run(command, timeout=100, check=True, stderr=subprocess.DEVNULL)


def test_layers_of_a_folder_by_patterns(tmp_path: Path) -> None:
    lora.to_peft(lora.add(built(ROWS, lambda x, w: x @ w, w=normal(6, 4)), rank=2), tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text()) | {"r": 8, "rank_pattern": {"f(c|d).(w|v)": 2}}
    file.write_text(json.dumps(config))
    (layer,) = {
        key.split(".lora_")[0].removeprefix("base_model.model.")
        for key in safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    }
    assert layer == "fc.w"
    lora.from_peft(built(ROWS, lambda x, w: x @ w, w=normal(6, 4)), tmp_path)
    file.write_text(json.dumps(config | {"rank_pattern": {"f(c|d)": 2}}))
    with pytest.raises(
        ModelError, match=r"layer 'fc.w': its rank must be 8 as in adapter_config.json, got 2"
    ):
        lora.from_peft(built(ROWS, lambda x, w: x @ w, w=normal(6, 4)), tmp_path)
