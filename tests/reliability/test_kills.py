"""A kill, or a full disk, at every operation on files: the old or the new, and work goes on."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from attacks import SOAK
from kills import Snapshot, contents, different, full_disk_at, litter, snapshots
from onnx import TensorProto, helper, numpy_helper
from test_files import marked

import ortops
from models import llama, mlp
from ortops import callbacks, lora
from ortops.cli import main
from ortops.derivatives import casadi
from ortops.docs import examples
from ortops.engine.training.callback import Record
from ortops.engine.training.export import export_step
from ortops.engine.training.history import History
from ortops.graph.files import external
from ortops.graph.files.saving import write_model
from ortops.llm import FineTuning, saving
from ortops.lora import peft

pytest.importorskip("fcntl", reason="no locks of Unix here")

ROWS = [[1, 2, 3], [4, 5, 6], [7, 8]]
PAIRS = [{"input_ids": row, "labels": row[1:]} for row in ROWS]


def chosen(found: list[Snapshot]) -> list[Snapshot]:
    """Returns the first, the middle and the last of what kills leave, or with `--soak` all."""
    kinds = different(found)
    return kinds if SOAK > 1 else [kinds[0], kinds[len(kinds) // 2], kinds[-1]]


def put(left: Path, folder: Path) -> None:
    """Makes a folder what a kill left."""
    shutil.rmtree(folder, ignore_errors=True)
    if left.exists():
        shutil.copytree(left, folder, symlinks=True)


# ------------------------------------------------------------------------------ language models


def encoder_decoder(folder: Path) -> Path:
    """Writes files of a model with an encoder, in which weights have other names in each file."""
    rng, h = np.random.default_rng(0), 8
    folder.mkdir()
    stored = {n: rng.standard_normal((9, h), np.float32) for n in ("words", "more")}
    stored |= {n: rng.standard_normal((h, h), np.float32) / 3 for n in ("c_proj", "o_proj")}
    stored["lm_head"] = rng.standard_normal((h, 9), np.float32)

    def write(name: str, nodes: list[Any], inputs: list[Any], output: Any, names: Any) -> None:
        given = [numpy_helper.from_array(stored[n], names.get(n, n)) for n in names]
        graph = helper.make_graph(nodes, "part", inputs, [output], given)
        opset = [helper.make_opsetid("", 21)]
        onnx.save(
            helper.make_model(graph, opset_imports=opset, ir_version=10), folder / f"{name}.onnx"
        )

    def value(name: str, kind: int, *shape: Any) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    states = value("last_hidden_state", TensorProto.FLOAT, "batch", "source", h)
    ids = value("input_ids", TensorProto.INT64, "batch", "source")
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["w"], "/embed"),
        helper.make_node("MatMul", ["w", "c_proj"], ["last_hidden_state"], "/layers/c_proj"),
    ]
    names: Mapping[str, str] = {"words": "words", "c_proj": "c_proj"}
    write("encoder_model", nodes, [ids], states, names)
    states = value("encoder_hidden_states", TensorProto.FLOAT, "batch", "source", h)
    ids = value("input_ids", TensorProto.INT64, "batch", "time")
    logits = value("logits", TensorProto.FLOAT, "batch", "time", 9)
    for name, suffix in (("decoder_model", ""), ("decoder_with_past_model", "_7")):
        names = {n: f"{n}{suffix}" for n in ("more", "o_proj", "lm_head")}
        nodes = [
            helper.make_node("Gather", [names["more"], "input_ids"], ["w"], "/embed"),
            helper.make_node("ReduceSum", ["encoder_hidden_states", "axis"], ["s"], "/sum"),
            helper.make_node("Add", ["w", "s"], ["x"], "/add"),
            helper.make_node("MatMul", ["x", names["o_proj"]], ["y"], "/layers/o_proj"),
            helper.make_node("MatMul", ["y", names["lm_head"]], ["logits"], "/lm_head"),
        ]
        stored["axis"] = np.array([1])
        write(name, nodes, [ids, states], logits, {**names, "axis": "axis"})
    config = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}" * 100)
    return folder


class Tune:
    """Commands that tune a language model.

    Args:
        folder: For what is needed.
        base: The folder of the model.
        rows: The data.
    """

    def __init__(self, folder: Path, base: Path, rows: list[Any]) -> None:
        data, self.saved = folder / "rows.jsonl", folder / "tuned"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self.start = [
            "tune",
            str(base),
            str(data),
            "--targets",
            "*_proj*" if rows is PAIRS else "*o_proj*",
        ]
        self.start += ["--quiet", "--batch-size", "2", "--save", str(self.saved)]

    def run(self, epochs: int, *more: str, rank: int = 1) -> int:
        return main([*self.start, "--epochs", str(epochs), "--rank", str(rank), *more])

    def run_or_raise(self) -> None:
        if self.run(1):
            raise RuntimeError("the command failed")

    def bits(self) -> dict[str, Any]:
        """Returns what a training has made: its state, its losses, and the files that are served.

        The state as a file has the seconds that epochs took.
        """
        session = FineTuning.load(self.saved).session
        state = {name: array.tobytes() for name, array in session.state.items()}
        files = {n: c for n, c in contents(self.saved).items() if n != "training.state"}
        return {**state, "losses": session.history.history["loss"], **files}

    def what_is_wrong_after(self, killed: list[Snapshot], *more: str) -> list[str]:
        """Runs the command after kills; returns where it ends with other bits than without one."""
        shutil.rmtree(self.saved)
        assert self.run(2) == 0
        expected, wrong = self.bits(), []
        for operation, left in killed:
            put(left, self.saved)
            found = self.bits() if self.run(2, *more) == 0 else {}
            others = [n for n in {**expected, **found} if expected.get(n) != found.get(n)]
            wrong += [f"{operation} ({left.name}): {others}"] if others else []
        return wrong


@pytest.fixture
def tune(tmp_path: Path) -> Tune:
    return Tune(tmp_path, llama.write(tmp_path / "base", layers=1), ROWS)


@pytest.mark.slow
def test_a_killed_tuning_goes_on(tune: Tune, tmp_path: Path) -> None:
    killed = snapshots(lambda: tune.run(1), tune.saved, tmp_path / "killed")
    names = [name for name, _ in killed]
    first_save = names.index(f"unlink {saving.UNFINISHED}") + 1
    assert len(names) - first_save > 20
    kinds = different(killed)[:: 6 if SOAK == 1 else 1]
    assert tune.what_is_wrong_after(kinds, "--resume") == []
    # Behind the first save, a new training has only to replace what it finds.
    kinds = chosen(killed[: first_save + 1])
    assert tune.what_is_wrong_after(kinds) == []


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["external data", "several files", "over an older one"])
def test_other_killed_tunings_go_on(
    kind: str, tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "several files":
        tune = Tune(tmp_path, encoder_decoder(tmp_path / "parts"), PAIRS)
    if kind == "external data":
        monkeypatch.setattr(saving, "_ONE_FILE", 1000)
    if kind == "over an older one":
        assert tune.run(1, rank=2) == 0
    killed = snapshots(lambda: tune.run(1), tune.saved, tmp_path / "killed")
    if kind == "over an older one":  # which goes on until the first save of the new one
        marked = next(
            n for n, each in enumerate(killed) if (each.folder / saving.UNFINISHED).exists()
        )
        killed = killed[marked:]
    assert tune.what_is_wrong_after(chosen(killed), "--resume") == []
    if SOAK > 1:
        assert tune.what_is_wrong_after(different(killed)) == []


@pytest.mark.slow
def test_several_files_of_two_saves_go_on(tmp_path: Path) -> None:
    """A kill between them leaves a decoder of one step beside one of another."""
    tune = Tune(tmp_path, encoder_decoder(tmp_path / "parts"), PAIRS)
    assert tune.run(1) == 0
    (old := tmp_path / "old").mkdir()
    name = "decoder_with_past_model.onnx"
    shutil.copy2(tune.saved / name, old / name)
    shutil.copytree(tune.saved, tmp_path / "first")
    assert tune.run(2, "--resume") == 0
    expected = tune.bits()
    state = tmp_path / "first" / "training.state"
    shutil.copy2(old / name, tune.saved / name)
    shutil.copy2(state, tune.saved / state.name)
    assert tune.run(2, "--resume") == 0
    assert tune.bits() == expected


@pytest.mark.slow
def test_a_killed_merge_can_be_repeated(tune: Tune, tmp_path: Path) -> None:
    killed = snapshots(lambda: tune.run(1, "--merge"), tune.saved, tmp_path / "killed")
    expected = contents(tune.saved)
    for operation, left in chosen(killed[:-1]):  # the last one takes the mark away
        put(left, tune.saved)
        assert tune.run(1, "--merge") == 0, operation
        assert contents(tune.saved) == expected, operation


@pytest.mark.slow
def test_only_the_first_save_can_be_unfinished(tune: Tune, tmp_path: Path) -> None:
    """Behind it, the state of the last save goes with all files that another one writes."""
    tuning = FineTuning(tmp_path / "base", 1, targets=["*o_proj*"])
    tuning.save(tune.saved)
    for function in (tuning, FineTuning.load(tune.saved)):
        killed = snapshots(lambda f=function: f.save(tune.saved), tune.saved, tmp_path / "killed")
        assert len(killed) > 20
        assert not [n for n, left in killed if (left / saving.UNFINISHED).exists()]
        shutil.rmtree(tmp_path / "killed")
    tuning.save(merged := tmp_path / "merged", merged=True)
    killed = snapshots(lambda: tuning.save(merged), merged, tmp_path / "killed")
    assert [n for n, left in killed if (left / saving.UNFINISHED).exists()][-1].endswith(
        "unfinished"
    )


def test_an_interrupted_first_save_is_no_base(tune: Tune, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "base", tune.saved)
    (tune.saved / saving.UNFINISHED).touch()
    for function in (FineTuning, FineTuning.load):
        with pytest.raises(ortops.ModelError, match=r"folder '.*tuned': its first save was int"):
            function(tune.saved)


@pytest.mark.slow
def test_a_tuning_on_a_full_disk_goes_on_later(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(snapshots(lambda: tune.run(1), tune.saved, tmp_path / "killed"))
    assert tune.run(2) == 0
    expected, numbers = tune.bits(), range(1, count, 1 if SOAK > 1 else 30)
    for number in numbers:
        shutil.rmtree(tune.saved)
        capsys.readouterr()
        failed = full_disk_at(number, tune.run_or_raise, tune.saved)
        said = capsys.readouterr().err
        names = f"{tune.saved}" in said and "No space left on device" in said
        assert names or not failed, (number, said)
        assert litter(tune.saved) == [], number
        assert tune.run(2, "--resume") == 0, number
        assert tune.bits() == expected, number


# ------------------------------------------------------------------------------------- training


class Fit:
    """A training that writes checkpoints and logs into a folder."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.folder = folder / "runs"
        self.data = {"images": rng.standard_normal((6, 16), np.float32)}
        self.data["labels"] = rng.integers(0, 3, 6)
        self.model = ortops.build_training_model(
            mlp.mlp((16, 32, 3)), loss="SoftmaxCrossEntropy", optimizer="Adam"
        )

    def run(self, epochs: int = 3, *, resume: bool = False) -> None:
        self.folder.mkdir(exist_ok=True)
        files = sorted(self.folder.glob("*.onnx")) if resume else []
        session = ortops.TrainingSession(files[-1] if files else self.model)
        given = [
            callbacks.CSVLog(self.folder / "log.csv"),
            callbacks.JSONLines(self.folder / "log.jsonl", every=1),
            callbacks.Checkpoint(self.folder / "{step:02d}.onnx", every=2, keep=2),
        ]
        session.fit(
            self.data,
            epochs=epochs,
            batch_size=2,
            callbacks=given,
            resume=bool(files),
            progress=False,
        )

    def bits(self) -> dict[str, Any]:
        """Returns the files without the seconds that epochs took, and the random marks of files."""
        found: dict[str, Any] = dict.fromkeys(contents(self.folder), "")
        last = max(self.folder.glob("*.onnx"))
        state = ortops.TrainingSession(last).state
        found |= {name: array.tobytes() for name, array in state.items()}
        rows = (self.folder / "log.csv").read_text().splitlines()
        found["log.csv"] = [row.rpartition(",")[0] for row in rows]
        lines = (self.folder / "log.jsonl").read_text().splitlines()
        found["log.jsonl"] = [{**json.loads(line), "seconds": 0} for line in lines]
        return found


@pytest.mark.slow
def test_a_killed_fit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "MESSAGE_LIMIT", 3000)  # so that there are external data
    fit = Fit(tmp_path)
    killed = snapshots(lambda: fit.run(2), fit.folder, tmp_path / "killed")
    shutil.rmtree(fit.folder)
    fit.run()
    expected, wrong = fit.bits(), []
    anew = [left for _, left in chosen(killed)]
    for operation, left in different(killed)[:: 3 if SOAK == 1 else 1]:
        for resume in (True, False) if left in anew else (True,):
            put(left, fit.folder)
            for file in fit.folder.glob("*.onnx"):
                onnx.load(file)  # complete, with its data
            fit.run(resume=resume)
            found = fit.bits()
            others = [n for n in {**expected, **found} if expected.get(n) != found.get(n)]
            wrong += [f"{operation} ({left.name}), {resume=}: {others}"] if others else []
    assert wrong == []


@pytest.mark.parametrize("kind", [callbacks.CSVLog, callbacks.JSONLines])
def test_a_log_on_a_full_disk(kind: Any, tmp_path: Path) -> None:
    file = tmp_path / "logs" / "log"
    file.parent.mkdir()
    session, log = examples.session(), kind(file)
    record = Record(1, 9, 0, 3, 0, {"loss": 0.5}, 0, 0.0, History())

    def write() -> None:
        log.on_epoch(record, session)

    log.on_begin(record, session)
    write()
    before = file.read_bytes()
    for number in (1, 2, 3):  # when it opens the file, and when it has written a part of the row
        error = full_disk_at(number, write, file.parent)
        assert f"No space left on device: '{file}'" in str(error)
        assert file.read_bytes() == before
    write()
    assert file.read_bytes() == before + before.splitlines(keepends=True)[-1]


# -------------------------------------------------------------------------------- other writers


def a_step(folder: Path, number: int) -> None:
    export_step(trainable(4 + number), folder)


def an_adapter(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    lora.save_adapter(adapted(number), folder / "small.onnx_adapter")


def an_adapter_of_peft(folder: Path, number: int) -> None:
    peft.refuse_others(folder)  # as the command does
    lora.to_peft(adapted(number), folder)


def weights_by_name(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    ortops.weights.save(examples.mlp((2, 3 + number, 2)), folder / "weights.safetensors")


def functions_of_casadi(folder: Path, number: int) -> None:
    casadi(examples.mlp((2, 3 + number, 2)), folder)


def a_model_with_data(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    light = external.detach(marked(number))
    write_model(folder / "model.onnx", light, limit=1000)


WRITERS = {
    f.__name__: f
    for f in (
        *(a_step, an_adapter, an_adapter_of_peft, weights_by_name, functions_of_casadi),
        a_model_with_data,
    )
}
SLOW = pytest.mark.slow
EACH = [  # whether at each operation, or at the first, the middle and the last one
    *(("an_adapter", False), ("weights_by_name", False), ("a_step", False)),
    *(("an_adapter_of_peft", True), ("a_model_with_data", True)),
    pytest.param("functions_of_casadi", False, marks=SLOW),
    pytest.param("a_step", True, marks=SLOW),
]


@functools.cache
def trainable(width: int) -> onnx.ModelProto:
    model = examples.mlp((2, width, 2))
    return ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="SGD")


@functools.cache
def adapted(number: int) -> onnx.ModelProto:
    return lora.add(examples.mlp((2, 8, 2)), rank=2 + number, targets=["fc1"])


def aged(folder: Path) -> None:
    """Makes files older: some clocks stand still for longer than it takes to write them."""
    for file in folder.rglob("*"):
        os.utime(file, (1e9, 1e9))


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("older", [False, True], ids=["the first", "over an older one"])
@pytest.mark.parametrize(("name", "every"), EACH)
def test_a_killed_writer_leaves_old_or_new_files(
    name: str, every: bool, older: bool, tmp_path: Path
) -> None:
    write, folder = WRITERS[name], tmp_path / "written"
    old: dict[str, str] = {}
    if older:
        write(folder, 0)
        write(folder, 0)
        aged(folder)
        old = contents(folder)
    killed = snapshots(lambda: write(folder, 1), folder, tmp_path / "killed")
    new, wrong = contents(folder), []
    for _ in range(2):  # an older generation of external data is kept for readers
        write(folder, 2)
    finally_there = contents(folder)
    for operation, left in different(killed) if every else chosen(killed):
        files = {n: c for n, c in contents(left).items() if c}
        others = [n for n in files if files[n] not in (old.get(n), new.get(n)) and ".data" not in n]
        others += [n for n in old if n not in files and ".data" not in n]
        put(left, folder)
        if name == "a_model_with_data" and "model.onnx" in files:
            onnx.load(folder / "model.onnx")
        for _ in range(2):
            write(folder, 2)
        others += ["afterwards"] if contents(folder) != finally_there else []
        wrong += [f"{operation} ({left.name}): {others}"] if others else []
    assert wrong == []


@pytest.mark.nightly
@pytest.mark.quick(5)
@pytest.mark.parametrize("older", [False, True], ids=["the first", "over an older one"])
@pytest.mark.parametrize(("name", "every"), EACH)
def test_a_full_disk_leaves_all_old_files(
    name: str, every: bool, older: bool, tmp_path: Path
) -> None:
    write, folder = WRITERS[name], tmp_path / "written"
    if older:
        write(folder, 0)
        aged(folder)
    old = contents(folder)
    killed = snapshots(lambda: write(folder, 1), folder, tmp_path / "killed")
    new, wrong = contents(folder), []
    last = len(killed) - 1
    for number in range(1, last + 1) if every or SOAK > 1 else (1, last // 2, last):
        put(killed[0].folder, folder)
        error = full_disk_at(number, lambda: write(folder, 1), folder)
        found = contents(folder)
        said = error is None or f"No space left on device: '{folder}" in str(error)
        whole = found == new if error is None else found == old
        if not whole or not said:
            wrong.append(f"{killed[number - 1].operation}: {error}, {sorted(found)}")
    assert wrong == []


# What writes files in another way than `ortops.graph.files.atomic`.
OTHERS = {
    "graph/files/atomic.py": "the way",
    "callbacks/logs.py": "appends rows",
    "cli/prediction.py": "an archive in memory",
    "cli/standard_streams.py": "/dev/null",
    "engine/trainable/limited.py": "/dev/null",
    "conformance/files.py": "does so too, as this package imports nothing else",
}


@pytest.mark.slow
def test_all_files_are_written_through_temporary_ones() -> None:
    direct = re.compile(
        r"shutil\.(copy|move)|\.write_(text|bytes)\(|\b(np|numpy)\.save\w*\(|\.tofile\("
        r"""|open\((?:[^()]|\([^()]*\))*["'][rbt]*[wax+][rbt+]*["']"""
    )
    package = Path(ortops.__file__).parent
    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if direct.search(line) and ">>>" not in line and "copyfileobj" not in line
    }
    assert found == OTHERS.keys()


# --------------------------------------------------------------------------------------- links

FOLDERS = ("a_step", "an_adapter_of_peft", "functions_of_casadi")
"""Who writes several files: what is in their folder, its maker chose, and not its writer."""


def move_out(folder: Path, outside: Path) -> dict[Path, bytes]:
    """Puts links to files outside in place of all files; returns the content of these."""
    outside.mkdir()
    for number, file in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        file.rename(outside / f"{number}")
        file.symlink_to(outside / f"{number}")
    return {file: file.read_bytes() for file in outside.iterdir()}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", WRITERS)
def test_links_in_folders_are_replaced_and_those_of_users_followed(
    name: str, tmp_path: Path
) -> None:
    write, folder = WRITERS[name], tmp_path / "written"
    write(folder, 0)
    for file in folder.glob("*.data"):  # whose names are new each time
        file.unlink()
    before = move_out(folder, tmp_path / "outside")
    write(folder, 1)
    after = {file: file.read_bytes() for file in before}
    assert (after == before) == (name in FOLDERS)
    links = [file for file in folder.iterdir() if file.is_symlink()]
    assert bool(links) != (name in FOLDERS)
    assert contents(tmp_path / "outside").keys() >= {file.name for file in before}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", ["one file", "below", "several files"])
def test_links_in_a_tuned_folder_are_replaced(kind: str, merged: bool, tmp_path: Path) -> None:
    if kind == "several files":
        base = encoder_decoder(tmp_path / "base")
    else:
        base = llama.write(tmp_path / "base", layers=1)
    if kind == "below":  # as of transformers.js
        (base / "onnx").mkdir()
        (base / "config.json").write_text("{}")
        for file in ("model.onnx", "model.onnx.data"):
            (base / file).rename(base / "onnx" / file)
        (base / "genai_config.json").unlink()
    saved = tmp_path / "tuned"
    tuning = FineTuning(base, 1, targets="*_proj*" if kind == "several files" else ["*o_proj*"])
    tuning.save(saved, merged=merged)
    names = contents(saved).keys()
    before = move_out(saved, tmp_path / "outside")
    (saved / saving.UNFINISHED).symlink_to(tmp_path / "outside" / "0")
    if kind == "below":
        (saved / "onnx").rename(tmp_path / "outside" / "onnx")
        (saved / "onnx").symlink_to(tmp_path / "outside" / "onnx", target_is_directory=True)
    (saved / "adapter.onnx_adapter").unlink(missing_ok=merged or kind == "several files")
    FineTuning(base, 1, targets="*_proj*" if kind == "several files" else ["*o_proj*"]).save(
        saved, merged=merged
    )
    assert {file: file.read_bytes() for file in before} == before
    assert len(list((tmp_path / "outside").iterdir())) == len(before) + (kind == "below")
    assert contents(saved).keys() == names
    assert not [file for file in saved.rglob("*") if file.is_symlink()]
