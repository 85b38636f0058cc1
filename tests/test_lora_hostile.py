"""Adapters that nobody means well with: each is refused by name, or means what it meant."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import logging
import math
import os
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from lora_models import ROWS, outputs, random_adapter, values, with_values

import ortops
from models import mlp
from ortops import ArgumentError, ModelError, OrtopsError, lora
from ortops.engine.check import check
from ortops.graph.limits import LIMITS
from ortops.lora.adapter_file import read_adapter_file

KEY = "ortops.lora"


def base() -> onnx.ModelProto:
    """Layers of one shape, whose adapters could stand for each other."""
    return mlp.mlp((6, 6, 6, 6))


@pytest.fixture(scope="module")
def adapted() -> onnx.ModelProto:
    model = lora.add(base(), rank=2, rank_pattern={"fc2": 3}, alpha_pattern={"fc3": 2})
    return with_values(model, random_adapter(model))


def described(model: onnx.ModelProto) -> Any:
    return json.loads(next(entry.value for entry in model.metadata_props if entry.key == KEY))


def with_text(model: onnx.ModelProto, text: str) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    next(entry for entry in result.metadata_props if entry.key == KEY).value = text
    return result


# --------------------------------------------------------------------------------------- metadata

NONSENSE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 8, 2**31, 2**63, 10**400, 0.5, 2.0, -2.5, 1e308, 5e-324),
    *(math.nan, math.inf, "", "2", "*", "fc1", "fc2", "fc1.weight", "fc1.lora_A.weight", "images"),
    *("embedding", "convolution", "linear", "x" * 100, "a" * 32, "2:" + "a" * 32, "\ud800", "\0"),
    *([], [[]], [["fc1.lora/base", "fc1.lora/base"]], [1], {}, {"fc1": {}}, {"(a+)+": 2}),
)


def places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the way to each value in a JSON object."""
    if path:
        yield path
    if isinstance(found, dict | list):
        for key, value in found.items() if isinstance(found, dict) else enumerate(found):
            yield from places(value, (*path, key))


def changed(found: Any, path: tuple[Any, ...], change: Callable[[Any, Any], object]) -> str:
    result = copy.deepcopy(found)
    holder = result
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return json.dumps(result)


def rename(holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder["other"] = holder.pop(key)
    else:
        holder.reverse()


def double(holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder["other"] = copy.deepcopy(holder[key])
    else:
        holder.append(copy.deepcopy(holder[key]))


def mutations(found: Any) -> dict[str, str]:
    """Returns texts for the metadata, none of which is the given one, by what was done."""
    result = {}
    every = list(places(found))
    for path in every:
        for value in NONSENSE:
            text = changed(found, path, lambda holder, key, v=value: holder.__setitem__(key, v))
            result[f"{path} = {value!r:.40}"] = text
        result[f"del {path}"] = changed(found, path, lambda holder, key: holder.__delitem__(key))
        result[f"rename {path}"] = changed(found, path, rename)
        result[f"double {path}"] = changed(found, path, double)
    modules = found["modules"]
    for one, other in (("fc1", "fc3"), ("fc1", "fc2")):
        for part in (None, *modules[one]):
            swapped = copy.deepcopy(found)
            first, second = swapped["modules"][one], swapped["modules"][other]
            if part is None:
                swapped["modules"] |= {one: second, other: first}
            else:
                first[part], second[part] = second[part], first[part]
            result[f"swap {part} of {one} and {other}"] = json.dumps(swapped)
    return {what: text for what, text in result.items() if json.loads(text) != found}


NOT_JSON = {
    "empty": "",
    "cut": '{"rank": 2',
    "nested": "[" * 100_000,
    "nested objects": '{"a":' * 100_000,
    "array": "[]",
    "digits": '{"rank": ' + "9" * 5000 + "}",
    "number": "1",
    "null": "null",
}


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_metadata_that_are_no_object(text: str, adapted: onnx.ModelProto) -> None:
    with pytest.raises(ModelError, match=r"metadata_props 'ortops.lora'.*; remove the entry to u"):
        lora.merge(with_text(adapted, text))


def product_of(folder: Path) -> dict[str, np.ndarray]:
    """Returns what PEFT adds to the weight of each layer."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    result = {}
    for key, a in tensors.items():
        layer, part, _ = key.partition(".lora_A.")
        if not part:
            continue
        peft = layer.removeprefix("base_model.model.")
        alpha = config["alpha_pattern"].get(f"^{peft}", config["lora_alpha"])
        rank = config["rank_pattern"].get(f"^{peft}", config["r"])
        assert rank == a.shape[0]
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        result[peft] = scale * (tensors[f"{layer}.lora_B.weight"] @ a).astype(np.float64)
    return result


def meaning(model: onnx.ModelProto, use: str, folder: Path) -> Any:
    """Returns what a model with an adapter comes to in a use."""
    if use == "merge":
        return outputs(lora.merge(model), {"images": ROWS})[0]
    if use == "save_adapter":
        lora.save_adapter(model, folder / "a")
        file = onnxruntime.AdapterFormat.read_adapter(str(folder / "a"))
        arrays = {name: value.numpy().copy() for name, value in file.get_parameters().items()}
        return arrays | {"version": np.array(file.get_model_version())}
    if use == "to_peft":
        lora.to_peft(model, folder)
        return product_of(folder)
    plan = check(model, loss="MeanSquaredError")
    for problem in plan.problems:  # an alpha that can be merged, but not trained with
        assert "is out of the range of float32; add the adapter with an alpha close" in problem
        raise ModelError(problem)
    return np.array([*plan.parameters])


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[n], expected[n]) for n in found)
    if expected.dtype.kind == "f":
        return bool(np.allclose(found, expected, rtol=1e-4, atol=1e-5))
    return bool(np.array_equal(found, expected))


@pytest.mark.nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("use", ["merge", "save_adapter", "to_peft", "check"])
def test_changed_metadata_are_refused_or_mean_the_same(
    use: str, part: int, adapted: onnx.ModelProto, tmp_path: Path
) -> None:
    """A layer that is left out is frozen: no more is said of the adapter, and no files of it."""
    expected = meaning(adapted, use, tmp_path)
    every = mutations(described(adapted))
    assert len(every) > 1500
    refusals: dict[str, str] = {}
    taken = []
    for what, text in itertools.islice(every.items(), part, None, 3):
        try:
            found = meaning(with_text(adapted, text), use, tmp_path)
        except ModelError as error:
            refusals[what] = str(error)
            continue
        if use == "check" and re.fullmatch(r"del \('modules', 'fc.'\)", what):
            assert set(found) < set(expected), what
            continue
        assert same(found, expected), what
        taken.append(what)
    for what, message in refusals.items():
        assert re.match(r"metadata_props 'ortops.lora': |model: |layer '", message), what
    assert len(taken) < 250  # other numbers for alpha, rank and rslora, which are consistent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, r"'rank' must be an integer >= 1, got 0; remove"),
        ({"rank": True}, r"'rank' must be an integer >= 1, got True; remove"),
        ({"alpha": "16"}, r"'alpha' must be a finite number other than 0, got '16'; remove"),
        ({"rslora": 1}, r"'rslora' must be true or false, got 1; remove"),
        ({"modules": {}}, r"'modules' must be an object of at least one layer, got {}; remove"),
        ({"modules": {"fc1": 3}}, r"modules 'fc1' must be an object, got 3; remove"),
        ({"fingerprint": "x"}, r"'fingerprint' must be a fingerprint: a .*, got 'x'; remove"),
        ({"other": 1}, r"'other' must not be present; known names are alpha, .*; remove"),
        ({"rank_pattern": {"a": 0}}, r"'rank_pattern' must be an object of integers >= 1, got {'a"),
    ],
)
def test_messages_name_key_and_value(
    change: dict[str, Any], message: str, adapted: onnx.ModelProto
) -> None:
    text = json.dumps(described(adapted) | change)
    with pytest.raises(ModelError, match=r"^metadata_props 'ortops.lora': " + message):
        lora.merge(with_text(adapted, text))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kind": "dense"},
            r"'kind' must be one of linear, convolution, embedding, got 'dense'; r",
        ),
        ({"kind": None}, r"'kind' must be one of linear, convolution, embedding, got None; remove"),
        ({"a": "fc2.lora_A.weight"}, r"'a' must be 'fc1.lora_A.weight', got 'fc2.lora_A.weight'; "),
        ({"tensors": []}, r"'tensors' must be an array of pairs of names, got \[\]; remove"),
        (
            {"tensors": [["a"]]},
            r"'tensors' must be an array of pairs of names, got \[\['a'\]\]; re",
        ),
        (
            {"tensors": [["a", "a"]]},
            r"'tensors' must start with unique names, got 'a'; re",
        ),
        (
            {"peft": "fc2"},
            r"'peft' must be a name that ends like the layer's name, got 'fc2'; remove",
        ),
        ({"rank": -2}, r"'rank' must be an integer >= 1, got -2; remove"),
    ],
)
def test_messages_name_the_layer(
    change: dict[str, Any], message: str, adapted: onnx.ModelProto
) -> None:
    found = described(adapted)
    found["modules"]["fc1"] |= change
    with pytest.raises(
        ModelError, match=r"^metadata_props 'ortops.lora': modules 'fc1': " + message
    ):
        lora.merge(with_text(adapted, json.dumps(found)))


# ---------------------------------------------------------------------------- .onnx_adapter files


@pytest.mark.slow
def test_changed_adapter_files_are_refused_or_taken(
    adapted: onnx.ModelProto, tmp_path: Path
) -> None:
    path = tmp_path / "a.onnx_adapter"
    lora.save_adapter(adapted, path)
    original, rng = path.read_bytes(), random.Random(0)
    refusals = []
    cuts = [original[:size] for size in (0, 1, 4, 8, 100, len(original) - 1)]
    for content in [*cuts, *(mutated(original, rng) for _ in range(400))]:
        path.write_bytes(content)
        try:
            found = values(lora.load_adapter(adapted, path))
        except ModelError as error:
            refusals.append(str(error))
            continue
        for name, array in values(adapted).items():  # else it has other numbers, which are taken
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert np.isfinite(found[name]).all()
    assert all(str(path) in message for message in refusals)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((7, 2), r"its 'fc1.lora_A.weight' has 48 bytes, which do not fit shape \[7, 2\]"),
        (
            (2**40, 2),
            r"its 'fc1.lora_A.weight' has 48 bytes, which do not fit shape \[1099511627776, 2",
        ),
        (
            (2**62, 2**62),
            r"its 'fc1.lora_A.weight' has 48 bytes, which do not fit shape \[46116860184",
        ),
        ((-6, -2), r"its 'fc1.lora_A.weight' has 48 bytes, which do not fit shape \[-6, -2\]"),
        (
            (2, 6),
            r"'fc1.lora_A.weight' must be float32\[6, 2\] as in the model, got float32\[2, 6\]",
        ),
    ],
)
def test_dimensions_that_a_file_claims(
    dims: tuple[int, int], message: str, adapted: onnx.ModelProto, tmp_path: Path
) -> None:
    """Which older versions of onnxruntime believe."""
    path = tmp_path / "a.onnx_adapter"
    model = lora.add(base(), rank=2, targets=["fc1"])
    lora.save_adapter(model, path)
    content = path.read_bytes()
    assert content.count(struct.pack("<qq", 6, 2)) == 1
    path.write_bytes(content.replace(struct.pack("<qq", 6, 2), struct.pack("<qq", *dims)))
    with pytest.raises(ModelError, match=message):
        lora.load_adapter(model, path)


def test_a_parameter_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx_adapter"
    model = lora.add(base(), rank=6, targets=["fc1"])
    lora.save_adapter(model, path)
    path.write_bytes(path.read_bytes().replace(b"fc1.lora_B.weight", b"fc1.lora_A.weight"))
    with pytest.raises(
        ModelError, match=r"\(it has 'fc1.lora_A.weight' twice\); give a file written by "
    ):
        lora.load_adapter(model, path)


def test_adapter_files_are_read_as_onnxruntime_reads_them(
    adapted: onnx.ModelProto, tmp_path: Path
) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(3, 2),
        "b": np.arange(4, dtype=np.float16).reshape(1, 2, 2),
        "ü": np.array(2.5),
        "none": np.zeros((0, 3), np.float32),
    }
    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(7)
    form.set_model_version(2**31 - 1)
    form.set_parameters({n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in arrays.items()})
    form.export_adapter(str(tmp_path / "a"))
    found, version, _ = read_adapter_file(tmp_path / "a")
    assert version == 2**31 - 1
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def mutated(original: bytes, rng: random.Random) -> bytes:
    result = bytearray(original)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(result))
        match rng.randrange(4):
            case 0:
                result[place] ^= 1 << rng.randrange(8)
            case 1:
                result[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                result[place : place + 4] = struct.pack("<i", rng.choice((-1, 0, 1, 2**31 - 1)))
            case _:
                del result[place : place + rng.choice((1, 4, 64))]
    return bytes(result)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(
    number: float, adapted: onnx.ModelProto, tmp_path: Path
) -> None:
    name = "fc2.lora_B.weight"
    array = values(adapted)[name].copy()
    array[1, 2] = number
    broken = with_values(adapted, {name: array})
    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(1)
    given = {n: a for n, a in values(broken).items() if ".lora_" in n}
    form.set_parameters({n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in given.items()})
    form.export_adapter(str(tmp_path / "a.onnx_adapter"))
    message = r"'fc2.lora_B.weight' has NaN or infinite values; give an adapter whose training"
    with pytest.raises(ModelError, match=r"file '.*a.onnx_adapter': " + message):
        lora.load_adapter(adapted, tmp_path / "a.onnx_adapter")
    for use in (lora.merge, *((lambda m, w=w: w(m, tmp_path / "b")) for w in WRITERS)):
        with pytest.raises(ModelError, match="model: " + message):
            use(broken)
    assert not (tmp_path / "b").exists()
    lora.to_peft(adapted, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    key = "base_model.model.fc2.lora_A.weight"
    tensors[key] = tensors[key].copy()
    tensors[key][0, 0] = number
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(ModelError, match=r"layer 'fc2': 'A' has NaN or infinite values; give"):
        lora.from_peft(base(), tmp_path)


WRITERS = (lora.save_adapter, lora.to_peft)


# ------------------------------------------------------------------------------------ PEFT folders


@pytest.fixture
def folder(adapted: onnx.ModelProto, tmp_path: Path) -> Path:
    lora.to_peft(adapted, tmp_path)
    return tmp_path


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_changed_settings_are_refused_or_taken(part: int, folder: Path) -> None:
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    expected = {n: array.shape for n, array in values(lora.from_peft(base(), folder)).items()}
    taken, refusals = 0, {}
    paths = [*places(config), ("use_dora",), ("layers_pattern",), ("exclude_modules",)]
    for number, path in enumerate(paths):
        for value in NONSENSE[(part + number) % 2 :: 2]:
            text = changed(config, path, lambda holder, key, v=value: holder.__setitem__(key, v))
            file.write_text(text)
            try:
                found = values(lora.from_peft(base(), folder))
            except OrtopsError as error:
                refusals[str(path), repr(value)] = str(error)
                continue
            taken += 1
            assert {name: array.shape for name, array in found.items()} == expected, (path, value)
            assert all(np.isfinite(array).all() for array in found.values()), (path, value)
    assert not [case for case, message in refusals.items() if not message.isprintable()]
    assert taken  # what says only which layers PEFT adapts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0}, r"adapter_config.json': 'r' must be an integer >= 1, got 0; give"),
        ({"r": -2}, r"adapter_config.json': 'r' must be an integer >= 1, got -2; give"),
        ({"r": 2.0}, r"adapter_config.json': 'r' must be an integer >= 1, got 2.0; give"),
        ({"r": 10**400}, r"adapter_config.json': 'r' must be an integer >= 1, got 1000"),
        (
            {"lora_alpha": "16"},
            r"'lora_alpha' must be a finite number other than 0, got '16'; give",
        ),
        ({"lora_alpha": 10**400}, r"'lora_alpha' must be a finite number other than 0, got 1000"),
        ({"lora_alpha": math.inf}, r"'lora_alpha' must be a finite number other than 0, got inf; "),
        ({"use_rslora": "false"}, r"'use_rslora' must be true or false or null, got 'false'; give"),
        (
            {"rank_pattern": {"fc1": 2.0}},
            r"'rank_pattern' must be an object of integers >= 1 or null, got {'fc1': 2.0}; give",
        ),
        (
            {"lora_alpha": 1e308, "use_rslora": True},
            r"layer 'fc.': A, or B times .*e\+307, overflows float32",
        ),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str, folder: Path) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        lora.from_peft(base(), folder)


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_settings_that_are_no_object(text: str, folder: Path) -> None:
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(
        OrtopsError, match=r"adapter_config.json': (invalid JSON: |it must be a JSON object)"
    ):
        lora.from_peft(base(), folder)


@pytest.mark.slow
def test_changed_weights_are_refused_or_taken(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    original, rng = file.read_bytes(), random.Random(0)
    shapes = {name: array.shape for name, array in values(lora.from_peft(base(), folder)).items()}
    header = 8 + int.from_bytes(original[:8], "little")
    for _ in range(400):
        size = rng.choice((header, header, len(original)))
        file.write_bytes(mutated(original[:size], rng) + original[size:])
        try:
            found = values(lora.from_peft(base(), folder))
        except OrtopsError:
            continue
        assert {name: array.shape for name, array in found.items()} == shapes
        assert all(np.isfinite(array).all() for array in found.values())


def safetensors_of(header: dict[str, Any], content: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def entry(shape: list[int], begin: int = 0, kind: str = "F32") -> dict[str, Any]:
    end = begin + (0 if 0 in shape else math.prod(shape) * 4)
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


A, B = (f"base_model.model.fc1.lora_{which}.weight" for which in "AB")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            {A: entry([]), B: entry([], 4)},
            r"layer 'fc1': its rank must be 2 as in adapter_config.json, got 0",
        ),
        (
            {A: entry([0, 6]), B: entry([6, 0])},
            r"layer 'fc1': its rank must be 2 as in adapter_config.json, got 0",
        ),
        (
            {A: entry([0, 2**63]), B: entry([6, 0])},
            r"'.*fc1.lora_A.weight' has an invalid shape \[0, 92",
        ),
        (
            {A: entry([2]), B: entry([6, 2], 8)},
            r"layer 'fc1': A and B must have shapes .*, got \[2\] and \[6, 2\]",
        ),
        (
            {A: entry([2, 3, 2]), B: entry([6, 2], 48)},
            r"layer 'fc1': A and B must have shapes .*, got \[2, 3, 2\] and \[6, 2\]",
        ),
        (
            {A: entry([2, 6]), A.removesuffix(".weight"): entry([2, 6], 48), B: entry([6, 2], 96)},
            r"layer 'fc1' has a second A, '.*'; write the adapter again",
        ),
    ],
)
def test_weights_that_are_refused(header: dict[str, Any], message: str, folder: Path) -> None:
    size = max(each["data_offsets"][1] for each in header.values())
    content = safetensors_of(header, np.ones(size // 4, np.float32).tobytes())
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        lora.from_peft(base(), folder)


FILES = ["adapter_config.json", "adapter_model.safetensors", "a.onnx_adapter"]


@pytest.mark.parametrize("name", FILES)
def test_files_without_an_end(name: str, adapted: onnx.ModelProto, folder: Path) -> None:
    file = folder / name
    lora.save_adapter(adapted, folder / "a.onnx_adapter")
    read = functools.partial(lora.from_peft, base(), folder)
    if name.endswith("_adapter"):
        read = functools.partial(lora.load_adapter, adapted, file)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        file.unlink()
        make(file)
        message = rf"{name}'(: Is a directory| is not a regular file); (give|save|pass) "
        if file.is_symlink() and "_adapter" not in name:
            message = rf"'{name}' is a link that leads out of "
        with pytest.raises(ModelError, match=message):
            read()
        if file.is_dir():
            file.rmdir()


def test_links_to_files_are_followed(folder: Path) -> None:
    """As the folders of Hugging Face's cache have them."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).rename(folder / f"blob of {name}")
        (folder / name).symlink_to(folder / f"blob of {name}")
    lora.from_peft(base(), folder)


def test_settings_of_any_length(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "metadata_bytes", 100)
    with pytest.raises(
        ModelError, match=r"json' must have at most 100 bytes, got \d+; raise ortops.graph.limits"
    ):
        lora.from_peft(base(), folder)


# --------------------------------------------------------------------------------------- adding


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 10**400}, r"alpha must be a finite number > 0, got 1000"),
        ({"alpha": 1 + 2j}, r"alpha must be a finite number > 0, got \(1\+2j\)"),
        ({"rslora": "no"}, r"rslora must be True or False, got 'no'"),
        ({"rank_pattern": {1: 2}}, r"rank_pattern: patterns must be strings, got 1"),
    ],
)
def test_settings_of_add(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        lora.add(base(), **settings)


def test_a_product_that_is_rewired_is_not_merged(adapted: onnx.ModelProto) -> None:
    """A layer that adds the product of another's A and B would be merged with its own."""
    broken = onnx.ModelProto()
    broken.CopyFrom(adapted)
    products = [node for node in broken.graph.node if ".lora/MatMul" in node.name]
    for node in products:
        for index, name in enumerate(node.input):
            other = {"fc1.lora": "fc3.lora", "fc3.lora": "fc1.lora"}.get(name[:8])
            if other is not None and name.endswith(".weight"):
                node.input[index] = other + name[8:]
    with pytest.raises(
        ModelError,
        match=r"layer 'fc3' was changed: .* is not added to the linear product of its A and B",
    ):
        lora.merge(broken)


def test_a_name_in_metadata_is_not_a_pattern(
    adapted: onnx.ModelProto, caplog: pytest.LogCaptureFixture
) -> None:
    """As ``trainable=`` takes them: the base would be trained."""
    found = described(adapted)
    found["modules"] = {
        "*": found["modules"]["fc1"] | {"a": "*.lora_A.weight", "b": "*.lora_B.weight"}
    }
    with (
        caplog.at_level(logging.WARNING, "ortops"),
        pytest.raises(
            ModelError,
            match=r"'\*.lora_A.weight' of its adapter must be both an input and an initializer",
        ),
    ):
        ortops.build_training_model(
            with_text(adapted, json.dumps(found)), loss="MeanSquaredError", optimizer="SGD"
        )
    assert "is trained" not in caplog.text


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.bool_, object])
def test_parameters_of_other_types(kind: type, adapted: onnx.ModelProto, tmp_path: Path) -> None:
    name = "fc1.lora_A.weight"
    broken = onnx.ModelProto()
    broken.CopyFrom(adapted)
    (tensor,) = (tensor for tensor in broken.graph.initializer if tensor.name == name)
    array = np.full((6, 2), "a", object) if kind is object else np.ones((6, 2), kind)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    for use in (lora.merge, *((lambda m, w=w: w(m, tmp_path / "b")) for w in WRITERS)):
        with pytest.raises(
            ModelError, match=rf"'{name}' of its adapter must be of type FLOAT, FLO"
        ):
            use(broken)


@pytest.mark.parametrize("size", [1, 5])
def test_a_product_that_does_not_fit_is_not_merged(size: int, adapted: onnx.ModelProto) -> None:
    """One row could be broadcast to all of the weight."""
    broken = with_values(adapted, {"fc1.lora_A.weight": np.ones((size, 2), np.float32)})
    message = rf"product of A and B of layer 'fc1' has shape \[6, {size}\], .* weight has \[6, 6\]"
    with pytest.raises(ModelError, match=message):
        lora.merge(broken)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["[" + "-" * 100_000 + "1]", "[" + "1+" * 100_000 + "1]", "[0x" + "f" * 5000 + ", 1]", "[1"],
    ids=["deep", "deeper", "digits", "cut"],
)
def test_names_of_scopes_that_are_none(text: str) -> None:
    """Which exporters write into the metadata of nodes, as Python writes lists."""
    model = base()
    for node in model.graph.node:
        for key in ("pkg.torch.onnx.name_scopes", "namespace"):
            node.metadata_props.add(key=key, value=text)
    names = {name for name in values(lora.add(model, rank=2)) if name.endswith(".lora_A.weight")}
    assert names == {f"fc{number}.lora_A.weight" for number in (1, 2, 3)}
    ortops.build_training_model(
        model, loss="MeanSquaredError", optimizer="SGD", trainable=["fc1.*"]
    )


def test_an_alpha_by_which_nothing_can_be_divided(adapted: onnx.ModelProto, tmp_path: Path) -> None:
    found = described(adapted)
    for alpha in (1e300, 1e-300):
        found["modules"]["fc1"]["alpha"] = alpha
        with pytest.raises(
            ModelError, match=r"layer 'fc1': dividing B by its scaling .* loses precision"
        ):
            lora.to_peft(with_text(adapted, json.dumps(found)), tmp_path / "a")
