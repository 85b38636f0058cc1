"""The arguments of `FineTuning`: one table for Python and the command line, and what they do."""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from violations import all_violations

import ortops
from models import llama
from ortops import ArgumentError, Tape, op, schedules
from ortops.cli import main
from ortops.cli.parser import make_parser
from ortops.llm import FineTuning
from ortops.llm.options import FOREIGN, OF_LOSS, SHARED_FIT, TUNING, TUNING_FIT
from ortops.losses import DPO, NextToken
from ortops.optimizers import Adam, AdamW, Lion

PAGE = Path(ortops.__file__).parent / "docs" / "recipes.md"
WORDS, SIZE = 7, 6
ROWS = [
    {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, 4, 5]},
    {"input_ids": [2, 4, 6], "labels": [-100, 4, 6]},
    {"input_ids": [6, 5, 4, 3]},
    {"input_ids": [3, 3], "labels": [-100, 3]},
]


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    shapes = {"embedding": (WORDS, SIZE), "hidden.weight": (SIZE, SIZE)}
    shapes["lm_head.weight"] = (SIZE, WORDS)
    return {name: draw(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folder(weights: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one hidden layer, which predicts a token by the one before."""
    with Tape(name="bigrams") as tape:
        ids = tape.input("input_ids", np.int64, ["batch", "time"])
        kept = {name: tape.initializer(name, array) for name, array in weights.items()}
        x = op.Gather(kept["embedding"], ids)
        x = op.Tanh(x @ kept["hidden.weight"])
        tape.output(x @ kept["lm_head.weight"], "logits")
    path = tmp_path_factory.mktemp("bigrams")
    onnx.save(tape.model(), path / "model.onnx")
    return path


# ---------------------------------------------------------------------------------- the table


def test_the_tables_are_the_signatures() -> None:
    constructor = inspect.signature(FineTuning).parameters
    assert [*constructor] == ["folder_or_file", *TUNING]
    fit = inspect.signature(FineTuning.fit).parameters
    assert [*fit] == ["self", "data", *TUNING_FIT, "settings"]
    with all_violations() as check:
        for table, shown in ((TUNING, constructor), (TUNING_FIT, fit)):
            for name, option in table.items():
                with check(name):
                    assert shown[name].default == option.default
        for name, option in OF_LOSS.items():
            with check(name):
                assert inspect.signature(DPO).parameters[name].default == option.default


def test_each_argument_is_explained_in_its_order() -> None:
    for documented, names in (
        (FineTuning, ["folder_or_file", *TUNING]),
        (FineTuning.fit, ["data", *TUNING_FIT, r"\*\*settings"]),
    ):
        text = inspect.getdoc(documented) or ""
        arguments = text.split("Args:\n")[1].split("\n\nAttributes:")[0].split("\n\nReturns:")[0]
        found = re.findall(r"^    (\*{0,2}\w+):", arguments, re.M)
        assert sorted(found) == sorted(name.replace("\\", "") for name in names)


def test_the_command_line_has_each_argument_or_says_where_else() -> None:
    subparsers = make_parser("")._subparsers
    assert subparsers is not None
    tune = subparsers._group_actions[0].choices["tune"]
    known = {name for action in tune._actions for name in action.option_strings}
    with all_violations() as check:
        for name, option in {**TUNING, **OF_LOSS, **TUNING_FIT}.items():
            with check(name):
                said = re.findall(r"--[\w-]+", option.help)
                wanted = said if option.metavar is None else [f"--{name.replace('_', '-')}"]
                assert wanted or option.help.startswith("nothing: "), option.help
                assert known.issuperset(wanted)


@pytest.mark.slow
def test_foreign_names_lead_to_ours(capsys: pytest.CaptureFixture[str]) -> None:
    known = {*TUNING, *OF_LOSS, *TUNING_FIT, *SHARED_FIT}
    with all_violations() as check:
        for foreign, ours in FOREIGN.items():
            with check(foreign):
                assert ours in known
                assert foreign not in known
                for call in (FineTuning, FineTuning.fit):
                    with pytest.raises(TypeError, match=f"has no argument '{foreign}'; use ") as e:
                        call("none", **{foreign: 1})  # type: ignore[arg-type]
                    assert f"{ours}=" in str(e.value) or f"({ours}=…)" in str(e.value)
                if any(name.startswith(foreign) for name in known):  # an abbreviation
                    continue
                with pytest.raises(SystemExit):
                    main(["tune", "a", "b", f"--{foreign}=1"])
                flag = "checkpoint-steps" if ours == "save_steps" else ours.replace("_", "-")
                assert f"--{foreign}=1 is not an option; use --{flag}" in capsys.readouterr().err
    with pytest.raises(TypeError, match="FineTuning has no argument 'epochs'; use epochs= of fit"):
        FineTuning("none", epochs=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="fit has no argument 'clip_norm'; use clip_norm= of Fine"):
        FineTuning.fit("none", clip_norm=3)  # type: ignore[arg-type]


def test_the_page_of_other_libraries_has_each_name_and_names_of_ours() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| (.+) \|$", page, re.M)
    signatures: dict[str, Any] = {
        "FineTuning": inspect.signature(FineTuning).parameters,
        "fit": {**inspect.signature(FineTuning.fit).parameters, **dict.fromkeys(SHARED_FIT)},
    }
    known, listed = {**vars(ortops.schedules), **vars(ortops.losses)}, set[str]()
    with all_violations() as check:
        for theirs, _, ours in rows:
            with check(theirs):
                names = re.findall(r"`(\w+)`", theirs)
                listed |= {*names}
                call, argument = re.findall(r"`(FineTuning|fit)\((\w+)=", ours)[0]
                assert argument in signatures[call]
                inner = re.findall(r"ortops\.\w+\.(\w+)\((?:[\w.-]+, )?(?:(\w+)=)?", ours)
                for each, keyword in inner:
                    assert not keyword or keyword in inspect.signature(known[each]).parameters
                wanted = {keyword for _, keyword in inner} & {*OF_LOSS} or {argument}
                assert {FOREIGN[name] for name in names} == wanted
        with check("all"):
            assert listed == {*FOREIGN}
        with check("the same names"):
            same = {*re.findall(r"`(\w+)`", page.partition("\n## Limits")[0].split("|\n\n")[-1])}
            assert same <= {*TUNING, *OF_LOSS, *TUNING_FIT, *SHARED_FIT}


@pytest.mark.slow
def test_configurations_are_read_and_written(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    words = "--rank 2 --optimizer Lion --clip-norm 1 --accumulate 2 --batch-size 1 --max-steps 3"
    words += " --learning-rate warmup_cosine(1e-2,warmup=0.3) --label-smoothing 0.1 --no-rslora"
    words += " --epochs 2 --targets hidden --padding right --weight-decay 0.1 --quiet"
    given = ["tune", str(folder), "rows.jsonl", *words.split()]
    assert main([*given, "--save", "first", "--write-config", "tune.toml"]) == 0
    assert main(["tune", "--config", "tune.toml", "--save", "second"]) == 0
    first, second = (FineTuning.load(name).session for name in ("first", "second"))
    assert first.steps_done == second.steps_done == 3
    for name, array in first.parameters.items():
        np.testing.assert_array_equal(array, second.parameters[name])
    assert main(["tune", str(folder), "--config", "tune.toml", "--rank", "1", "--save", "3"]) == 0
    assert {min(a.shape) for a in FineTuning.load("3").session.parameters.values()} == {1}
    capsys.readouterr()
    for text, message in (
        ("max_grad_norm = 1", "there is no option 'max_grad_norm'; use --clip-norm"),
        ("data = 3", "'data' must be a string, a path"),
        ('data = ""', "must not be empty"),
        ('loss = "MSE"', "invalid choice: 'MSE'"),
        ("rank = 2", "folder is missing; see ortops tune --help"),
    ):
        Path("bad.toml").write_text(text)
        assert main(["tune", "--config", "bad.toml"]) == 1
        assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------ the algorithm


def optimizer_of(folder: Path, **arguments: Any) -> Any:
    """Returns the optimizer that a training is built with."""
    return ortops.llm.tuning.optimizer_of(arguments)


def test_optimizers(folder: Path) -> None:
    torchs = {"epsilon_after_correction": True}
    cosine = schedules.cosine(1e-3)
    with all_violations() as check:
        for given, expected in (
            ({}, Adam(2e-4, **torchs)),
            ({"weight_decay": 0.1}, AdamW(2e-4, weight_decay=0.1, **torchs)),
            ({"optimizer": "adamw"}, AdamW(2e-4, **torchs)),
            ({"optimizer": "Lion", "learning_rate": cosine}, Lion(cosine)),
            ({"optimizer": "Lion", "weight_decay": 0.2}, Lion(2e-4, weight_decay=0.2)),
            ({"optimizer": "Prodigy"}, ortops.optimizers.Prodigy(1.0)),
            ({"optimizer": "Prodigy", "learning_rate": 0.5}, ortops.optimizers.Prodigy(0.5)),
            ({"optimizer": Lion(3e-4)}, Lion(3e-4)),
        ):
            with check(given):
                assert optimizer_of(folder, **given) == expected
    for given, message in (
        ({"optimizer": Lion(), "learning_rate": 0.1}, "learning_rate must be left out, as the opt"),
        ({"optimizer": Lion(), "weight_decay": 0.1}, "use optimizer=Lion(weight_decay=…)"),
        ({"optimizer": "SGD", "weight_decay": 0.1}, "weight_decay: optimizer SGD has none; use"),
        ({"optimizer": "Lio"}, "unknown optimizer 'Lio'; did you mean 'Lion'?"),
        ({"weight_decay": -1}, "weight_decay must be a finite number >= 0, got -1"),
        ({"clip_norm": 0}, "clip_norm must be a finite number > 0, got 0"),
        ({"rslora": 1}, "rslora must be True or False, got 1"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            FineTuning(folder, **given)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_recipe_is_torchs(folder: Path, weights: dict[str, np.ndarray], smoothing: float) -> None:
    """AdamW, clipping, warm-up, smoothing and accumulation, beside the same in PyTorch."""
    import torch

    tuning = FineTuning(
        *(folder, 2, 4, ["hidden"], schedules.warmup_cosine(0.05, warmup=0.3)),
        loss=NextToken(label_smoothing=smoothing),
        weight_decay=0.1,
        clip_norm=0.05,
    )
    first = {name.split(".lora_")[1][0]: array for name, array in tuning.session.parameters.items()}
    a, b = (torch.tensor(first[w], dtype=torch.float64, requires_grad=True) for w in "AB")
    embedding, hidden, head = (torch.tensor(w).double() for w in weights.values())
    optimizer = torch.optim.AdamW([a, b], lr=0.05, weight_decay=0.1)
    batches = [ROWS[:2], ROWS[2:]]
    epochs, losses = 5, list[float]()
    warmup = math.ceil(epochs * 0.3)
    for step in range(epochs):  # of one update each
        rest = (step - warmup) / (epochs - warmup)
        factor = step / warmup if step < warmup else (1 + math.cos(math.pi * rest)) / 2
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in (row for batch in batches for row in batch):
            ids = torch.tensor(row["input_ids"])
            x = embedding[ids]
            logits = torch.tanh(x @ hidden + 2 * x @ a @ b) @ head
            labels = torch.tensor(row.get("labels", row["input_ids"]))[1:]
            settings: dict[str, Any] = {"reduction": "sum", "label_smoothing": smoothing}
            total = total + torch.nn.functional.cross_entropy(logits[:-1], labels, **settings)
            count += int((labels != -100).sum())
        loss = total / count
        losses.append(loss.item())
        optimizer.param_groups[0]["lr"] = 0.05 * factor
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([a, b], 0.05)
        optimizer.step()
    history = tuning.fit(ROWS, epochs, batch_size=2, shuffle=False, accumulate=2, progress=False)
    np.testing.assert_allclose(history.history["loss"], losses, rtol=2e-5)
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_preferences_follow_trls_formula(folder: Path, smoothing: float) -> None:
    """−(1 − s) log σ(beta · margin) − s log σ(−beta · margin), of sums of log p, in NumPy."""
    row = {"prompt": [1, 2], "chosen": [3, 4], "rejected": [5, 6, 6]}
    tuning = FineTuning(
        *(folder, 2, 4, ["hidden"], 0.02), loss=DPO(beta=0.5, label_smoothing=smoothing)
    )
    tuning.fit([row], epochs=3, progress=False)
    model = ortops.lora.merge(tuning.session.inference_model())
    sums = []
    for session in (ortops.InferenceSession(model), ortops.InferenceSession(folder / "model.onnx")):
        for answer in (row["chosen"], row["rejected"]):
            ids = np.array([row["prompt"] + answer])
            logits = session.run(["logits"], {"input_ids": ids})[0][0].astype(np.float64)
            log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            places = np.arange(1, ids.shape[1] - 1)
            sums.append(log_p[places, ids[0, 2:]].sum())
    margin = 0.5 * ((sums[0] - sums[2]) - (sums[1] - sums[3]))
    expected = (1 - smoothing) * np.log1p(np.exp(-margin)) + smoothing * np.log1p(np.exp(margin))
    found = tuning.evaluate([row])
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["reward_margin"], margin, rtol=1e-4)


@pytest.mark.slow
def test_an_interrupted_recipe_resumes_bit_for_bit(tmp_path: Path) -> None:
    base = llama.write(tmp_path / "base", layers=1)
    recipe: dict[str, Any] = {"optimizer": "AdamW", "weight_decay": 0.1, "clip_norm": 0.1}
    recipe |= {"learning_rate": schedules.warmup_linear(1e-2, warmup=0.4), "dropout": 0.1}
    settings: dict[str, Any] = {"batch_size": 1, "accumulate": 2, "progress": False}
    rows = [[1, 2, 3], [4, 5, 6, 7], [8, 9], [3, 2, 1]]
    whole = FineTuning(base, 2, **recipe)
    whole.fit(rows, 3, **settings)

    def stop(record: Any, session: Any) -> None:
        if session.steps_done == 3:
            raise KeyboardInterrupt

    class Stop(ortops.callbacks.Callback):
        def on_step(self, record: Any, session: Any) -> None:
            stop(record, session)

    part, saved = FineTuning(base, 2, **recipe), tmp_path / "tuned"
    with pytest.raises(KeyboardInterrupt):
        part.fit(rows, 3, save=saved, callbacks=[Stop()], **settings)
    again = FineTuning.load(saved)
    again.fit(rows, 3, save=saved, resume=True, **settings)
    assert again.session.steps_done == whole.session.steps_done == 6
    for name, array in whole.session.parameters.items():
        np.testing.assert_array_equal(array, again.session.parameters[name])


# ---------------------------------------------------------------------------------- all weights


@pytest.mark.slow
def test_all_weights_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    base = llama.write(tmp_path / "base", layers=1)
    rows = [[65, 66, 67, 68, 256], [70, 71, 72, 256]]
    settings: dict[str, Any] = {"batch_size": 1, "progress": False}
    whole = FineTuning(base, None, learning_rate=1e-2)
    history = whole.fit(rows, 10, **settings)
    assert history[-1]["loss"] < 0.1 < history[0]["loss"]
    weights = {each.name for each in onnx.load(base / "model.onnx").graph.initializer}
    assert {"lm_head.MatMul.weight", "model.embed_tokens.weight"} <= {*whole.session.parameters}
    assert {*whole.session.parameters} <= weights
    part, saved = FineTuning(base, None, learning_rate=1e-2), tmp_path / "tuned"
    assert part.generate([65], max_new_tokens=4) != [66, 67, 68]
    part.fit(rows, 5, save=saved, **settings)
    assert not (saved / "adapter.onnx_adapter").exists()
    again = FineTuning.load(saved)
    again.fit(rows, 10, save=saved, resume=True, **settings)
    for name, array in whole.session.parameters.items():
        np.testing.assert_array_equal(array, again.session.parameters[name])
    assert again.generate([65], max_new_tokens=4) == [66, 67, 68]
    again.save(tmp_path / "merged", merged=True)
    feeds = {"input_ids": np.array([rows[0]]), "attention_mask": np.ones((1, 5), np.int64)}
    logits = []
    for folder in (saved, tmp_path / "merged"):
        session = ortops.InferenceSession(folder / "model.onnx")
        for value in session.get_inputs():
            if value.name.startswith("past"):
                shape = (1, llama.PAIRS, 0, llama.SIZE)
                feeds[value.name] = np.zeros(shape, np.float32)
        logits.append(session.run(["logits"], feeds)[0])
        assert logits[-1][0, :4].argmax(-1).tolist() == rows[0][1:]
    np.testing.assert_array_equal(*logits)
    assert not (tmp_path / "merged" / "training.state").exists()
    adapter = FineTuning(base, 1)
    adapter.save(tmp_path / "adapter")
    with pytest.raises(ArgumentError, match="folder must not have an adapter if rank=None"):
        again.save(tmp_path / "adapter")


@pytest.mark.slow
def test_all_weights_are_refused_with_what_needs_an_adapter(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, message in (
        ({"targets": ["hidden"]}, "targets must be left out if rank=None trains all weights, got"),
        ({"dropout": 0.5}, "dropout must be left out if rank=None trains all weights, got 0.5"),
        ({"loss": "DPO"}, "loss must be NextToken if rank=None, as the reference of DPO is"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            FineTuning(folder, None, **given)
    for loss in ("InfoNCE", "Triplet", "nothing", ortops.losses.SoftmaxCrossEntropy()):
        message = r"loss must be NextToken or DPO of .*Triplet need task='retrieval'\), got "
        with pytest.raises(ArgumentError, match=message + re.escape(f"{loss!r:.80}")):
            FineTuning(folder, 1, loss=loss)
    base = llama.write(tmp_path / "int4", bits=4, layers=1)
    with pytest.raises(ortops.UnsupportedError, match=r"but '.*' is UINT8, read by MatMulNBits"):
        FineTuning(base, None)
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    words = ["tune", str(folder), str(tmp_path / "rows.jsonl"), "--quiet", "--rank", "none"]
    assert main([*words, "--save", str(tmp_path / "tuned"), "--max-steps", "1"]) == 0
    tuned = FineTuning.load(tmp_path / "tuned").session
    assert {*tuned.parameters} == {"embedding", "hidden.weight", "lm_head.weight"}
