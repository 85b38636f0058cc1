"""JSON in files: how deep it may be nested, and how large its numbers may be."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import onnx
import pytest
from training_models import affine, classifier, labelled

import ortops
from ortops import ModelError, OrtopsError, TrainingSession, build_training_model
from ortops.cli import main
from ortops.graph.files.json_text import read_json, read_settings
from ortops.graph.safetensors import read_safetensors

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def depth(value: Any) -> int:
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    )
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@pytest.mark.slow
@hypothesis.given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_what_is_not_too_deep_is_read_as_it_was_written(
    value: Any, escaped: bool, indent: int | None
) -> None:
    text = json.dumps(value, ensure_ascii=escaped, indent=indent)
    assert read_json(text) == value
    assert read_json(text.encode(errors="surrogatepass")) == value


@pytest.mark.slow
@hypothesis.given(VALUES, st.integers(0, 6))
def test_the_limit_is_the_number_of_levels(value: Any, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ortops.graph.limits.LIMITS.nested_metadata", limit)
        if depth(value) <= limit:
            assert read_json(json.dumps(value)) == value
        else:
            with pytest.raises(
                ValueError, match=f"nested {depth(value)} levels deep, the limit is"
            ):
                read_json(json.dumps(value))


@pytest.mark.parametrize(
    "text", ["", "{", "]", '"', '"\\', '["\\"', "[" * 9 + "}" * 20, "nul", "01"]
)
def test_what_is_not_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"(Expecting|Unterminated|Extra)"):
        read_json(text)


@pytest.mark.slow
def test_a_high_recursion_limit_does_not_end_the_process() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        for text in ("[" * 10**6, '{"a":' * 10**6, "[" * 10**6 + "]" * 10**6):
            with pytest.raises(ValueError, match="nested 1,000,000 levels deep"):
                read_json(text)
    finally:
        sys.setrecursionlimit(before)


# ------------------------------------------------------------------------------ in each reader


def trainable(**settings: Any) -> onnx.ModelProto:
    return build_training_model(
        affine(), **{"loss": "MeanSquaredError", "optimizer": "SGD", **settings}
    )


def noted(model: onnx.ModelProto, key: str, text: str) -> onnx.ModelProto:
    entry = next((each for each in model.metadata_props if each.key == key), None)
    entry = entry or model.metadata_props.add(key=key)
    entry.value = text
    return model


NESTED = {
    "deeply": "[" * 100_000,
    "closed": "[" * 900 + "]" * 900,
    "in an object": '{"a":' * 900 + "1" + "}" * 900,
}


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("key", ["ortops.training", "ortops.fit", "ortops.lora"])
def test_notes_of_a_model(key: str, text: str) -> None:
    uses: list[Callable[[Any], Any]] = [TrainingSession]
    if key == "ortops.training":
        uses.append(ortops.step_graph)
    for use in uses if key != "ortops.lora" else [ortops.lora.merge]:
        with pytest.raises(ModelError, match=f"metadata_props '{key}': nested .* levels deep"):
            use(noted(trainable(), key, text))


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize(
    "name", ["loss", "losses", "prediction", "predictions", "training_copies", "groups", "unknown"]
)
def test_a_part_of_a_note(name: str, text: str) -> None:
    model = noted(trainable(), "ortops.training", f'{{"{name}": {text}}}')
    with pytest.raises(ModelError, match=r"metadata_props 'ortops.training': nested "):
        TrainingSession(model)


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_labels_of_an_input(text: str) -> None:
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    values = {value.name: value for value in model.training_info[0].algorithm.input}
    values["labels"].metadata_props[0].value = text
    with pytest.raises(ModelError, match=r"input 'labels': metadata 'ortops.labels' must be"):
        TrainingSession(model)


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_the_header_of_safetensors(text: str, tmp_path: Path) -> None:
    content = text.encode()
    (tmp_path / "a.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(ModelError, match=r"a.safetensors': not a safetensors file \(nested "):
        read_safetensors(tmp_path / "a.safetensors")


@pytest.mark.quick(1)
@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("key", ["ortops.train", "ortops.classes"])
def test_notes_of_the_command_line(
    key: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = tmp_path / "model.onnx", tmp_path / "data.npz"
    session = TrainingSession(
        build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    )
    rows = labelled((6,), rows=8)
    np.savez(data, **rows)
    session.fit(rows, batch_size=32, epochs=1, progress=False)
    onnx.save(noted(session.model(), key, text), model)
    arguments = ["train", str(model), "--data", str(data), "--epochs", "2", "--quiet"]
    status = main([*arguments, "--save", str(model), "--resume"])
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert ("metadata_props 'ortops.classes'" in told) == (key == "ortops.classes")
    assert status == (key == "ortops.classes")


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        *[('{"losses": [{"name": "loss", "weight": %s}]}', digits) for digits in (400, 5000)],
        *[('{"prediction": {"axis": %s}}', digits) for digits in (30, 400, 5000)],
        *[('{"prediction": {"ignored": -%s}}', digits) for digits in (30, 400, 5000)],
    ],
)
def test_numbers_that_are_too_large(text: str, digits: int) -> None:
    key, number = "ortops.training", "1" + "0" * digits
    model = noted(trainable(), key, text % number)
    with pytest.raises(ModelError, match=f"metadata_props '{key}': .*(must be a|limit)"):
        TrainingSession(model)


def test_a_weight_that_a_float_holds() -> None:
    losses = '{"losses": [{"name": "loss", "weight": %s}]}' % ("1" + "0" * 30)
    assert TrainingSession(noted(trainable(), "ortops.training", losses)).steps_done == 0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_weight_that_is_not_finite(number: str) -> None:
    model = noted(trainable(), "ortops.training", f'{{"losses": [{{"weight": {number}}}]}}')
    with pytest.raises(ModelError, match=r"'weight' must be a finite number, got .*"):
        TrainingSession(model)


@pytest.mark.parametrize("number", ["1" + "0" * 30, "1" + "0" * 5000])
def test_labels_that_are_too_large(number: str) -> None:
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    values = {value.name: value for value in model.training_info[0].algorithm.input}
    values["labels"].metadata_props[0].value = f'[{{"classes": {number}, "ignored": null}}]'
    with pytest.raises(OrtopsError, match=r"input 'labels': metadata 'ortops.labels' must be"):
        TrainingSession(model)


def test_settings_with_half_of_a_character_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"name": "\\ud83d\\ude42"}')  # both halves
    assert read_settings(file) == {"name": "\U0001f642"}
    file.write_text('{"name": "\\ud83d"}')
    with pytest.raises(ModelError, match="invalid JSON"):
        read_settings(file)
