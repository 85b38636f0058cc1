"""Fine-tuning of language models in folders."""

from __future__ import annotations

import doctest
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from chats import read_examples
from violations import all_violations

import ortops
from models import llama
from ortops import ArgumentError, FeedError, Tape, op, schedules
from ortops.cli import main
from ortops.engine.training.row_data import grouped
from ortops.llm import FineTuning
from ortops.llm.checking import check_folder
from ortops.llm.examples import batch_of, example_of
from ortops.llm.folder import open_folder
from ortops.llm.tokenization import Tokenizer

ROWS = [
    {"input_ids": [104, 105, 33, 97, 98, 99, 256], "labels": [-100, -100, -100, 97, 98, 99, 256]},
    [104, 111, 33, 100, 256],
    {"input_ids": [120, 121, 122]},
]
CHAT = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A pirate."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Arr!"},
]
SHARE_GPT = [
    {"from": "human", "value": "Who are you?"},
    {"from": "gpt", "value": "A pirate."},
    {"from": "human", "value": "Why?"},
    {"from": "gpt", "value": "Arr!"},
]


BITS = [32, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=BITS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama.write(tmp_path_factory.mktemp("base"), bits=request.param)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what does not depend on the model: with one layer, building takes half."""
    return llama.write(tmp_path_factory.mktemp("base"), layers=1)


@pytest.fixture(scope="module")
def plain(base: Path) -> FineTuning:
    """What tests share that change nothing of it."""
    return FineTuning(base, rank=1)


@pytest.fixture(scope="module", params=BITS)
def shallow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `base`, of both precisions."""
    return llama.write(tmp_path_factory.mktemp("base"), bits=request.param, layers=1)


@pytest.fixture(scope="module")
def untrained(shallow: Path) -> FineTuning:
    """What tests share that change nothing of it, of both precisions."""
    return FineTuning(shallow)


def start_of(base: Path, folder: Path) -> list[str]:
    """Writes `ROWS` to a file and returns a command that tunes with them."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return ["tune", str(base), str(rows), "--rank", "2", "--batch-size", "2", "--quiet"]


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> ortops.TrainingSession:
    """The session after three epochs of a command that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    saved = str(folder / "tuned")
    assert main([*start_of(base, folder), "--epochs", "3", "--save", saved]) == 0
    return FineTuning.load(saved).session


def served(folder: Path, tokens: list[int], *, active: bool) -> np.ndarray:
    """Returns the logits that stock onnxruntime computes."""
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", providers=["CPUExecutionProvider"]
    )
    options, adapter = onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
    if active:
        adapter.Load(str(folder / "adapter.onnx_adapter"))
        options.add_active_adapter(adapter)
    feeds: dict[str, Any] = {name: np.array([tokens]) for name in ("input_ids",)}
    feeds["attention_mask"] = np.ones_like(feeds["input_ids"])
    for value in session.get_inputs():
        if value.name.startswith("past"):
            shape = (1, llama.PAIRS, 0, llama.HIDDEN // llama.HEADS)
            feeds[value.name] = np.zeros(shape, np.float32)
    return session.run(["logits"], feeds, options)[0]


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_train_save_serve_and_continue(folder: Path, tmp_path: Path) -> None:
    rate = schedules.warmup_linear(0.02, steps=40, warmup=2)
    tuning = FineTuning(folder, rank=4, alpha=4, learning_rate=rate)
    before = tuning.evaluate(ROWS, batch_size=2)
    np.testing.assert_allclose(before["perplexity"], np.exp(before["loss"]), rtol=1e-6)
    history = tuning.fit(ROWS, epochs=10, batch_size=2, progress=False)
    assert history.history["steps"] == list(range(2, 22, 2))
    losses = history.history["loss"]
    assert losses[-1] < losses[0] / 2

    tuned = tmp_path / "tuned"
    tuning.save(tuned)
    names = {file.name for file in tuned.iterdir()}
    assert {file.name for file in tuned.glob("*.onnx_adapter")} == {"adapter.onnx_adapter"}
    added = {"adapter.onnx_adapter", "training.state"}
    assert names == {file.name for file in folder.iterdir()} - {"model.onnx.data"} | added
    stored = {t.name: t.ByteSize() for t in onnx.load(tuned / "training.state").graph.initializer}
    assert stored["model.embed_tokens.weight"] < 50  # it is in the model's file
    assert (tuned / "genai_config.json").read_bytes() == (folder / "genai_config.json").read_bytes()

    prompt = [104, 105, 33]
    logits = served(tuned, prompt, active=False)
    np.testing.assert_allclose(logits, served(folder, prompt, active=False), atol=1e-6)
    following = []
    for _ in range(8):
        token = int(served(tuned, prompt + following, active=True)[0, -1].argmax())
        if token == 256:
            break
        following.append(token)
    assert tuning.generate(prompt, max_new_tokens=8) == following

    again = FineTuning.load(tuned)
    assert again.generate(prompt, max_new_tokens=8) == following
    for each in (tuning, again):
        each.fit(ROWS, epochs=3, batch_size=2, seed=1, progress=False)
    assert again.session.history == tuning.session.history
    for name, array in tuning.session.state.items():
        np.testing.assert_array_equal(again.session.state[name], array)
    again.save(tuned)  # in place
    once_more = FineTuning.load(tuned)
    assert once_more.session.steps_done == tuning.session.steps_done
    np.testing.assert_allclose(served(tuned, prompt, active=False), logits, atol=1e-6)


@pytest.mark.slow
def test_whole_modules_are_trained_saved_and_served(base: Path, tmp_path: Path) -> None:
    settings = {"modules_to_save": ["lm_head"], "bias": "all"}
    tuning = FineTuning(base, rank=2, learning_rate=0.02, **settings)
    tuning.fit(ROWS, epochs=2, batch_size=2, progress=False)
    tuning.save(tmp_path / "tuned")
    prompt = [104, 105, 33]
    plain, tuned = (served(tmp_path / "tuned", prompt, active=each) for each in (False, True))
    np.testing.assert_allclose(plain, served(base, prompt, active=False), atol=1e-6)
    assert abs(tuned - plain).max() > 1e-2
    assert tuning.generate(prompt, max_new_tokens=1) in ([int(tuned[0, -1].argmax())], [])
    again = FineTuning.load(tmp_path / "tuned")
    for each in (tuning, again):
        each.fit(ROWS, epochs=3, batch_size=2, seed=1, progress=False)
    for name, array in tuning.session.state.items():
        np.testing.assert_array_equal(again.session.state[name], array)
    tuning.save(tmp_path / "merged", merged=True)
    again.save(tmp_path / "tuned")
    merged = served(tmp_path / "merged", prompt, active=False)
    np.testing.assert_allclose(merged, served(tmp_path / "tuned", prompt, active=True), atol=1e-4)
    ortops.lora.to_peft(tuning.session.inference_model(), tmp_path / "peft")
    third = FineTuning(base, adapter=tmp_path / "peft")
    assert third.evaluate(ROWS)["loss"] == pytest.approx(tuning.evaluate(ROWS)["loss"], rel=1e-5)
    third.save(tmp_path / "third")
    plain = served(tmp_path / "third", prompt, active=False)
    np.testing.assert_allclose(plain, served(base, prompt, active=False), atol=1e-6)
    with pytest.raises(ortops.ModelError, match="whole weights are trained, such as"):
        FineTuning(base, rank=2, loss="DPO", **settings)
    with pytest.raises(ArgumentError, match="bias must be left out if rank=None"):
        FineTuning(base, rank=None, bias="all")


@pytest.mark.slow
def test_magnitudes_are_trained_saved_and_served(shallow: Path, tmp_path: Path) -> None:
    tuning = FineTuning(shallow, rank=2, learning_rate=0.02, dora=True)
    tuning.fit(ROWS, epochs=2, batch_size=2, progress=False)
    tuning.save(tmp_path / "tuned")
    held = onnxruntime.AdapterFormat.read_adapter(str(tmp_path / "tuned" / "adapter.onnx_adapter"))
    kinds = {name.rpartition("lora_")[2] for name in held.get_parameters()}
    assert kinds == {"A.weight", "B.weight", "scale"}
    prompt = [104, 105, 33]
    plain, tuned = (served(tmp_path / "tuned", prompt, active=each) for each in (False, True))
    np.testing.assert_allclose(plain, served(shallow, prompt, active=False), atol=1e-6)
    assert abs(tuned - plain).max() > 1e-2
    assert tuning.generate(prompt, max_new_tokens=1) in ([int(tuned[0, -1].argmax())], [])
    merged = ortops.lora.merge(tuning.session.inference_model(), dequantize=True)
    onnx.save(merged, tmp_path / "model.onnx")
    np.testing.assert_allclose(served(tmp_path, prompt, active=False), tuned, atol=1e-4)

    again = FineTuning.load(tmp_path / "tuned")
    for each in (tuning, again):
        each.fit(ROWS, epochs=3, batch_size=2, seed=1, progress=False)
    for name, array in tuning.session.state.items():
        np.testing.assert_array_equal(again.session.state[name], array)

    ortops.lora.to_peft(tuning.session.inference_model(), tmp_path / "peft")
    third = FineTuning(shallow, adapter=tmp_path / "peft")
    assert third.evaluate(ROWS)["loss"] == pytest.approx(tuning.evaluate(ROWS)["loss"], rel=1e-5)
    third.save(tmp_path / "third")
    plain = served(tmp_path / "third", prompt, active=False)
    np.testing.assert_allclose(plain, served(shallow, prompt, active=False), atol=1e-6)
    (tmp_path / "third" / "training.state").unlink()
    loaded = FineTuning.load(tmp_path / "third").evaluate(ROWS)["loss"]
    assert loaded == pytest.approx(third.evaluate(ROWS)["loss"], rel=1e-5)


@pytest.mark.slow
def test_resume_in_the_middle_of_an_epoch(base: Path, tmp_path: Path) -> None:
    class Stop(ortops.callbacks.Callback):
        def on_step(self, record: Any, session: Any) -> None:
            if record.step == 3:
                record.stop("for this test")

    whole = FineTuning(base, rank=2)
    expected = whole.fit(ROWS, epochs=3, batch_size=2, progress=False)
    tuning = FineTuning(base, rank=2)
    tuning.fit(ROWS, epochs=3, batch_size=2, progress=False, callbacks=[Stop()])
    assert tuning.session.steps_done == 3
    tuning.save(tmp_path)
    again = FineTuning.load(tmp_path)
    found = again.fit(ROWS, epochs=3, batch_size=2, progress=False, resume=True)
    assert found == expected
    for name, array in whole.session.state.items():
        np.testing.assert_array_equal(again.session.state[name], array)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("every", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_command_resumes_bit_for_bit(
    base: Path,
    whole: ortops.TrainingSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int | None,
) -> None:
    start = start_of(base, tmp_path)
    start += [] if every is None else ["--checkpoint-steps", str(every)]
    part = str(tmp_path / "part")

    class Interrupted(ortops.callbacks.Callback):
        def on_step(self, record: Any, session: Any) -> None:
            if record.step == 3:
                signal.raise_signal(signal.SIGINT)

    fit = FineTuning.fit

    def interrupted(self: FineTuning, *args: Any, **settings: Any) -> Any:
        return fit(self, *args, **settings, callbacks=[Interrupted()])

    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "fit", interrupted)
        assert main([*start, "--epochs", "3", "--save", part]) == 130
    assert FineTuning.load(part).session.steps_done == 3
    assert main([*start, "--epochs", "3", "--save", part, "--resume"]) == 0
    found = FineTuning.load(part).session
    assert found.steps_done == whole.steps_done
    for name, array in whole.state.items():
        np.testing.assert_array_equal(found.state[name], array)


@pytest.mark.slow
def test_load_without_the_state_of_the_training(base: Path, tmp_path: Path) -> None:
    tuning = FineTuning(base, rank=2, learning_rate=0.02)
    tuning.fit(ROWS, epochs=2, progress=False)
    tuning.save(tmp_path)
    (tmp_path / "training.state").unlink()
    again = FineTuning.load(tmp_path)
    assert again.evaluate(ROWS) == tuning.evaluate(ROWS)
    assert again.session.steps_done == 0


@pytest.mark.slow
@pytest.mark.torch
def test_the_loss_is_that_of_torch(tmp_path: Path) -> None:
    import torch

    base = llama.write(tmp_path)
    tuning = FineTuning(base, rank=4)
    weights = {
        tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        for tensor in onnx.load(base / "model.onnx").graph.initializer
    }
    batch = batch_of(read_examples(ROWS, _no_tokenizer, train_on="all", max_length=9))
    loss = torch.nn.functional.cross_entropy(
        _torch_llama(torch, weights, torch.from_numpy(batch["input_ids"]))[:, :-1].flatten(0, 1),
        torch.from_numpy(batch["labels"])[:, 1:].flatten(),
    )
    assert abs(tuning.evaluate(ROWS)["loss"] - loss.item()) < 1e-5


def _torch_llama(torch: Any, weights: dict[str, Any], ids: Any) -> Any:
    heads, pairs, size = llama.HEADS, llama.PAIRS, llama.HIDDEN // llama.HEADS

    def norm(x: Any, name: str) -> Any:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[f"{name}.weight"]

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.MatMul.weight"]

    def rotated(x: Any) -> Any:  # [batch, heads, time, size]
        cos, sin = (weights[f"{name}_cache"][: x.shape[2]] for name in ("cos", "sin"))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(llama.LAYERS):
        scope = f"model.layers.{layer}"
        y = linear(norm(x, f"{scope}.input_layernorm"), f"{scope}.attn.qkv_proj")
        y = y.unflatten(-1, (heads + 2 * pairs, size)).transpose(1, 2)
        q, k, v = y.split([heads, pairs, pairs], 1)
        k, v = (each.repeat_interleave(heads // pairs, 1) for each in (rotated(k), v))
        y = torch.nn.functional.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), f"{scope}.attn.o_proj")
        y = norm(x, f"{scope}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(y, f"{scope}.mlp.gate_proj"))
        x = x + linear(gate * linear(y, f"{scope}.mlp.up_proj"), f"{scope}.mlp.down_proj")
    x = norm(x, f"model.layers.{llama.LAYERS}.final_norm_layernorm")
    return linear(x, "lm_head")


def _no_tokenizer() -> Tokenizer:
    raise AssertionError


# ------------------------------------------------------------------------------------------ data


def test_a_batch_is_padded() -> None:
    batch = batch_of(read_examples(ROWS[:2], _no_tokenizer, train_on="all", max_length=9))
    assert batch["labels"].tolist() == [
        [-100, -100, -100, 97, 98, 99, 256],
        [104, 111, 33, 100, 256, -100, -100],
    ]
    assert batch["attention_mask"].sum(1).tolist() == [7, 5]
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 3, 4, 4, 4]


@pytest.mark.optional("tokenizers", "llm")
@pytest.mark.optional("jinja2", "llm")
@pytest.mark.parametrize(
    ("row", "train_on", "expected"),
    [
        ({"text": "héllo"}, "assistant", "héllo"),
        ({"prompt": "a", "completion": "bc"}, "assistant", "bc"),
        ({"prompt": "a", "completion": "bc"}, "completion", "bc"),
        ({"prompt": "a", "completion": "bc"}, "all", "abc"),
        ({"messages": CHAT}, "assistant", "A pirate.Arr!"),
        ({"messages": CHAT}, "completion", "Arr!"),
        ({"conversations": SHARE_GPT}, "assistant", "A pirate.Arr!"),
        ({"conversations": SHARE_GPT}, "all", "Who are you?A pirate.Why?Arr!"),
        ({"messages": CHAT}, "all", "Who are you?A pirate.Why?Arr!"),
    ],
)
def test_what_is_trained(base: Path, row: Any, train_on: str, expected: str) -> None:
    tokenizer = Tokenizer(open_folder(base))
    (example,) = read_examples([row], lambda: tokenizer, train_on=train_on, max_length=99)
    trained = example.tokens[example.trained]
    assert tokenizer.text(trained) == expected
    assert trained[-1] == 256  # the end of the text


@pytest.mark.slow
@pytest.mark.optional("tokenizers", "llm")
@pytest.mark.optional("jinja2", "llm")
def test_chats_from_a_file(base: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Arr"}]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": chat}) + "\n\n", encoding="utf-8")
    tuning = FineTuning(base, rank=8, alpha=8, learning_rate=0.01)
    tuning.fit(file, epochs=30, progress=False)
    assert tuning.generate(chat[:1], max_new_tokens=9) == "Arr"
    assert tuning.generate("<|user|>Hi<|end|><|assistant|>", max_new_tokens=9) == "Arr"


@pytest.mark.optional("tokenizers", "llm")
@pytest.mark.optional("jinja2", "llm")
def test_rows_in_the_forms_of_data_sets(base: Path) -> None:
    tokenizer = Tokenizer(open_folder(base))
    columns = {key: [turn[key] for turn in SHARE_GPT] for key in SHARE_GPT[0]}
    rows = [
        {"conversations": columns, "text": None},  # a Sequence of dicts
        {"conversations": None, "text": "abc"},
        {"conversations": np.array(SHARE_GPT)},
        {"input_ids": np.array([1, 2, 3]), "labels": np.array([-100, 2, 3])},
    ]
    found = read_examples(iter(rows), lambda: tokenizer, train_on="assistant", max_length=99)
    shown = [tokenizer.text(each.tokens[each.trained]) for each in found[:3]]
    assert shown == ["A pirate.Arr!", "abc", "A pirate.Arr!"]
    assert found[3].trained.tolist() == [False, True, True]


def test_data_sets_of_hugging_face(base: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [65 + n, 66 + n, 67 + n]} for n in range(6)]
    whole = datasets.Dataset.from_list(rows)
    losses = [
        FineTuning(base, rank=1).fit(data, progress=False, validation=0.5)[-1]["loss"]
        for data in (rows, whole, whole.with_format("numpy"))
    ]
    assert len(set(losses)) == 1
    tuning = FineTuning(base, rank=1)
    for parts in (datasets.DatasetDict(train=whole), datasets.DatasetDict({"train": whole})):
        with pytest.raises(FeedError, match=r"Dict; give one of its parts: data\['train'\]"):
            tuning.fit(parts, progress=False)


@pytest.mark.slow
@pytest.mark.optional("tokenizers", "llm")
@pytest.mark.optional("jinja2", "llm")
def test_an_unknown_speaker_of_a_conversation(plain: FineTuning) -> None:
    rows = [{"conversations": [*SHARE_GPT, {"from": "bing", "value": "no"}]}]
    expected = "'from' must be one of human, gpt, system, user, assistant, tool, got 'bing'"
    with pytest.raises(FeedError, match=expected):
        plain.fit(rows, progress=False)


@pytest.mark.slow
def test_a_fraction_of_the_rows_is_held_out(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [[65 + n, 66 + n, 67 + n] for n in range(10)]
    whole = FineTuning(base, rank=1)
    whole.fit(rows, epochs=2, batch_size=2, validation=0.25, seed=3, progress=False)
    assert whole.session.steps_done == 2 * 4  # 7 rows
    aside = sorted(np.random.default_rng(3).permutation(10)[:3])
    held_out = whole.evaluate([rows[place] for place in aside], batch_size=2)
    assert whole.session.history[-1]["validation_loss"] == held_out["loss"]

    file, saved = tmp_path / "rows.jsonl", str(tmp_path / "tuned")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    start = ["tune", str(base), str(file), "--rank", "1", "--batch-size", "2", "--quiet"]
    start += ["--validation", "0.25", "--seed", "3", "--save", saved]
    assert main([*start, "--epochs", "1"]) == 0
    assert main([*start, "--epochs", "2", "--resume"]) == 0
    again = FineTuning.load(saved)
    assert again.session.history == whole.session.history
    without = [each for each in start if each not in ("--validation", "0.25")]
    assert main([*without, "--epochs", "3", "--resume"]) == 1
    expected = "the data must have 4 batches, as in the training to resume, got 5"
    assert expected in capsys.readouterr().err
    for share in (0, 1, -0.5, float("nan")):
        with pytest.raises(ArgumentError, match=f"a fraction between 0 and 1, got {share}$"):
            whole.fit(rows, validation=share, progress=False)
    with pytest.raises(ArgumentError, match=r"must leave rows .*, got 0\.95 of 10 rows: 0 would"):
        whole.fit(rows, validation=0.95, progress=False)


def test_rows_are_truncated_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rows = [[1, 2, 3, 4], [1, 2], {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]
    assert len(read_examples(rows, _no_tokenizer, train_on="all", max_length=2)) == 2
    assert [record.message for record in caplog.records] == [
        "2 rows were truncated to max_length=2 tokens",
        "1 rows were left out, as they have no token to train",
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"words": 1}], r"data: row 1 must have messages, conversations, prompt and comp"),
        ([[1, 2], [1, "a"]], "data: row 2 must have"),
        ([{"input_ids": [1, 2], "labels": [1]}], "data: row 1 must have"),
        ([[1]], r"no row has a token to train with train_on='all' and max_length=9"),
        (
            {"train": [[1, 2]], "test": [[1, 2]]},
            r"got dict; give one of its parts: data\['train'\], data\['test'\]",
        ),
        (
            {"input_ids": [1]},
            "path of a file of JSON lines, JSON, CSV or Parquet, or rows, got dict",
        ),
    ],
)
def test_rows_of_another_form(rows: Any, message: str) -> None:
    with pytest.raises(ortops.FeedError, match=message):
        read_examples(rows, _no_tokenizer, train_on="all", max_length=9)


def test_a_line_that_is_not_json(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n{"text"\n', encoding="utf-8")
    with pytest.raises(ortops.FeedError, match=r"rows.jsonl', line 2: invalid JSON"):
        read_examples(file, _no_tokenizer, train_on="all", max_length=9)
    file.rename(tmp_path / "rows.tsv")
    with pytest.raises(ortops.FeedError, match=r"JSON: .*; give a file of JSON lines, JSON, CSV"):
        read_examples(tmp_path / "rows.tsv", _no_tokenizer, train_on="all", max_length=9)


# ------------------------------------------------------------------------------------- arguments


@pytest.mark.slow
def test_wrong_arguments(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ortops.ArgumentError, match="folder_or_file must be the path of a folder"):
        FineTuning(tmp_path / "absent")
    with pytest.raises(ortops.ModelError, match=r"among 0 \.onnx files; give the path of the file"):
        FineTuning(tmp_path)
    with pytest.raises(ortops.ModelError, match=r"its model has no adapter; begin with"):
        FineTuning.load(base)
    tuning = FineTuning(base / "model.onnx", rank=1, targets=["*o_proj*"])
    assert len(tuning.session.parameters) == 2
    with pytest.raises(ortops.ArgumentError, match="train_on must be"):
        tuning.fit(ROWS, train_on="user")
    with pytest.raises(ortops.ArgumentError, match="batch_size must be an integer >= 1, got 0"):
        tuning.fit(ROWS, batch_size=0)
    with pytest.raises(ortops.ArgumentError, match="at least 1 and fewer than 128 tokens, got 0"):
        tuning.generate([])
    with pytest.raises(ortops.ArgumentError, match="at least 1 and fewer than 128 tokens, got 128"):
        tuning.generate([1] * 128)
    with pytest.raises(ortops.ArgumentError, match="must not be that of the original model"):
        tuning.save(base)
    tuning.save(tmp_path)
    with pytest.raises(ortops.ModelError, match=r"already has an adapter; continue with"):
        FineTuning(tmp_path)
    (tmp_path / "training.state").write_bytes(b"no model")
    with pytest.raises(ortops.ModelError, match=r"delete it to begin the training again"):
        FineTuning.load(tmp_path)


def test_folders_that_lack_something(base: Path, tmp_path: Path) -> None:
    for file in base.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    config = json.loads((base / "genai_config.json").read_text())
    config["model"]["decoder"]["filename"] = "other.onnx"
    (tmp_path / "genai_config.json").write_text(json.dumps(config))
    with pytest.raises(ortops.ModelError, match=r"names 'other.onnx', which is missing"):
        open_folder(tmp_path)
    (tmp_path / "genai_config.json").write_text("{")
    with pytest.raises(ortops.ModelError, match=r"genai_config.json': invalid JSON"):
        open_folder(tmp_path)
    (tmp_path / "genai_config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ortops.ModelError, match=r"tokenizer.json is missing; add it, or give"):
        Tokenizer(open_folder(tmp_path))


# ---------------------------------------------------------------------------------- command line


@pytest.mark.slow
def test_the_command(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(
        "".join(f"{json.dumps({'input_ids': [1, 2, n]})}\n" for n in (3, 4))
    )
    start = ["tune", str(base), "rows.jsonl", "--rank", "2", "--quiet"]
    assert main([*start, "--alpha", "4", "--epochs", "2", "--learning-rate", "0.01"]) == 0
    assert capsys.readouterr().err.endswith(f"wrote {base.name}-tuned\n")
    tuning = FineTuning.load(f"{base.name}-tuned")
    assert tuning.session.steps_done == 2
    assert tuning.session.learning_rate == np.float32(0.01)
    shapes = {array.shape for array in tuning.session.parameters.values()}
    assert (llama.HIDDEN, 2) in shapes

    again = ["tune", f"{base.name}-tuned", "rows.jsonl", "--quiet", "--save", "further"]
    assert main([*again, "--learning-rate", "1e-3", "--validation", "rows.jsonl"]) == 0
    further = FineTuning.load("further").session
    assert (further.steps_done, further.learning_rate) == (3, np.float32(1e-3))
    assert "validation_loss" in further.history[-1]
    capsys.readouterr()
    for command, message in (
        (
            [*again, "--rank", "2"],
            "--rank: 'base0-tuned' continues a training with its own",
        ),
        ([*again, "--learning-rate", "cosine(1e-3)"], "--learning-rate must be a number"),
        ([*start, "--save", "rows.jsonl"], "--save must be a folder, got the file 'rows.jsonl'"),
        ([*start, "--save", str(base)], "has files that ortops did not write; give a new folder"),
    ):
        assert main(command) == 1
        assert message.replace("base0", base.name) in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_with_a_schedule(base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [1, 2, 3]}\n' * 5)
    rate, saved = "cosine(0.01)", tmp_path / "tuned"
    command = ["tune", str(base), str(rows), "--rank", "1", "--targets", "*o_proj*", "--quiet"]
    command += ["--batch-size", "2", "--epochs", "2"]
    assert main([*command, "--learning-rate", rate, "--save", str(saved)]) == 0
    assert FineTuning.load(saved).session.history.history["steps"] == [3, 6]


# --------------------------------------------------------------------------- onnxruntime-genai


@pytest.mark.slow
def test_settings_of_onnxruntime_genai_are_written(base: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    shutil.copytree(base, given)
    expected = json.loads((given / "genai_config.json").read_text())["model"]
    (given / "genai_config.json").unlink()
    config = {
        "model_type": "llama",
        "num_attention_heads": llama.HEADS,
        "num_key_value_heads": llama.PAIRS,
        "num_hidden_layers": 1,
        "hidden_size": llama.HIDDEN,
        "vocab_size": llama.WORDS,
        "max_position_embeddings": llama.CONTEXT,
        "eos_token_id": 256,
    }
    (given / "config.json").write_text(json.dumps(config))
    tuning = FineTuning(given, rank=1, targets=["*o_proj*"])
    tuning.save(tmp_path / "tuned")
    found = json.loads((tmp_path / "tuned" / "genai_config.json").read_text())["model"]
    del expected["decoder"]["session_options"], found["decoder"]["session_options"]
    assert found == expected | {"eos_token_id": [256]}
    assert open_folder(tmp_path / "tuned").end == (256,)

    del config["hidden_size"]
    (given / "config.json").write_text(json.dumps(config))
    FineTuning(given, rank=1, targets=["*o_proj*"]).save(tmp_path / "without")
    assert not (tmp_path / "without" / "genai_config.json").exists()


@pytest.mark.optional("onnxruntime_genai", "genai")
def test_onnxruntime_genai_serves_the_folder(folder: Path, tmp_path: Path) -> None:
    import onnxruntime_genai

    def generated(path: Path, adapter: str = "") -> list[int]:
        model = onnxruntime_genai.Model(str(path))
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=16, do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        if adapter:
            adapters = onnxruntime_genai.Adapters(model)
            adapters.load(str(path / adapter), "tuned")
            generator.set_active_adapter(adapters, "tuned")
        generator.append_tokens(np.array(prompt, np.int32))
        found = []
        while not generator.is_done():
            generator.generate_next_token()
            found.append(int(generator.get_next_tokens()[0]))
        return found

    prompt = [104, 105, 33]
    tuning = FineTuning(folder, rank=8, alpha=8, learning_rate=0.01)
    tuning.fit(ROWS, epochs=30, progress=False)
    tuning.save(tmp_path)
    assert generated(tmp_path) == generated(folder)
    tuned = generated(tmp_path, "adapter.onnx_adapter")
    assert tuned == [97, 98, 99, 256]
    assert tuning.generate(prompt) == tuned[:-1]


@pytest.mark.slow
def test_begin_with_an_adapter_of_another_precision(tmp_path: Path) -> None:
    one, other = (llama.write(tmp_path / str(bits), bits=bits, layers=1) for bits in (32, 4))
    tuning = FineTuning(one, rank=2, targets=["q_proj", "v_proj"], learning_rate=0.01)
    tuning.fit(ROWS, epochs=2, progress=False)
    tuning.save(tmp_path / "tuned")
    file = tmp_path / "tuned" / "adapter.onnx_adapter"
    again = FineTuning(other, rank=2, targets=["q_proj", "v_proj"], adapter=file)
    for name, array in again.session.parameters.items():
        np.testing.assert_array_equal(array, tuning.session.parameters[name])
    again.save(tmp_path / "again")
    plain, tuned = (served(tmp_path / "again", [65, 66], active=active) for active in (False, True))
    np.testing.assert_array_equal(plain, served(other, [65, 66], active=False))
    assert abs(tuned - plain).max() > 1e-4

    ortops.lora.to_peft(tuning.session.inference_model(), tmp_path / "peft")
    third = FineTuning(other, adapter=tmp_path / "peft")
    for name, array in third.session.parameters.items():
        np.testing.assert_allclose(array, tuning.session.parameters[name], rtol=1e-6)


# --------------------------------------------------------------------------- data


@pytest.mark.optional("pyarrow", "tables")
def test_rows_of_parquet_and_of_json_lines_are_the_same(plain: FineTuning, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"prompt": "a", "completion": "b"},
    ]
    columns = {n: [row.get(n) for row in rows] for n in ("messages", "prompt", "completion")}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    expected = plain.evaluate(rows)
    assert plain.evaluate(tmp_path / "rows.parquet") == expected
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(FeedError, match=r"bad.parquet': .*; write it again, as Parquet"):
        plain.evaluate(tmp_path / "bad.parquet")


@pytest.mark.slow
def test_the_first_batch_is_shown(
    base: Path, plain: FineTuning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"prompt": "a", "completion": "b"},
        {"text": "c"},
    ]
    expected = (
        "row 1: 8 tokens, 3 trained\n<|user|>hi<|end|><|assistant|>«ho<|end|>»\n"
        "row 2: 3 tokens, 2 trained\na«b<|end|>»"
    )
    assert plain.show(rows, batch_size=2) == expected
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["tune", str(base), str(file), "--show", "--batch-size", "2"]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.slow
def test_token_ids_are_shown_without_a_tokenizer(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").unlink()
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    shown = FineTuning(tmp_path / "base", rank=1).show([row])
    assert shown == "row 1: 3 tokens, 2 trained\n5 «6 7 »"


def test_batches_of_similar_length() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 500, 1003)
    order = generator.permutation(1003)
    found = grouped(order, lengths, 4)
    assert sorted(found) == list(range(1003))
    now, before = (lengths[each[:1000].reshape(-1, 4)] for each in (found, order))
    padded = [4 * batches.max(1).sum() - batches.sum() for batches in (now, before)]
    assert padded[0] < 0.1 * padded[1]
    means = now.mean(1)
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.2  # the batches are in random order


@pytest.mark.slow
def test_training_by_length_resumes(base: Path, tmp_path: Path) -> None:
    rows = [[65 + n % 7] * (2 + n) for n in range(9)]
    settings = {"epochs": 2, "batch_size": 2, "group_by_length": True, "progress": False}
    whole = FineTuning(base, rank=1)
    whole.fit(rows, **settings)

    class Stop(ortops.callbacks.Callback):
        def on_step(self, record: Any, session: Any) -> None:
            if record.step == 7:
                record.stop("for this test")

    FineTuning(base, rank=1).fit(rows, **settings, callbacks=[Stop()], save=tmp_path / "part")
    again = FineTuning.load(tmp_path / "part")
    again.fit(rows, **settings, resume=True, save=tmp_path / "part")
    for name, array in whole.session.state.items():
        np.testing.assert_array_equal(again.session.state[name], array)


def test_padding_on_the_left(plain: FineTuning, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="padding must be 'right', as GroupQueryAttention node"):
        plain.fit([[1, 2]], padding="left", progress=False)
    with Tape(name="bigrams") as tape:
        ids = tape.input("input_ids", np.int64, ["batch", "time"])
        table = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
        x = op.Gather(tape.initializer("embedding", table), ids)
        weight = np.random.default_rng(1).standard_normal((4, 9)).astype(np.float32)
        tape.output(x @ tape.initializer("dense.weight", weight), "logits")
    (tmp_path / "bigrams").mkdir()
    onnx.save(tape.model(), tmp_path / "bigrams" / "model.onnx")
    found = []
    for side in ("right", "left"):
        tuning = FineTuning(tmp_path / "bigrams", rank=1, targets=["dense"], learning_rate=0.1)
        found += [
            tuning.fit(
                [[1, 2, 3], [4, 5], [6, 7, 8, 1]], epochs=2, padding=side, progress=False
            ).history["loss"]
        ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    rows = [example_of([1, 2], [True, True]), example_of([3], [True])]
    batch = batch_of(rows, "left")
    np.testing.assert_array_equal(batch["input_ids"], [[1, 2], [0, 3]])
    np.testing.assert_array_equal(batch["attention_mask"], [[1, 1], [0, 1]])
    np.testing.assert_array_equal(batch["position_ids"], [[0, 1], [0, 0]])
    np.testing.assert_array_equal(batch["labels"], [[-100, 2], [-100, -100]])


# --------------------------------------------------------------------------- templates

THINKING = (
    "{% set last = namespace(n=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.n = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < last.n and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}"
    "{{ '<|' + m.role + '|>' + text + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>so</think>ho"},
    {"role": "user", "content": "ho?"},
    {"role": "assistant", "content": "<think>no</think>hi"},
]


LAST = "<|assistant|>«<think>no</think>hi<|end|>»"


def templated(base: Path, folder: Path, template: str) -> FineTuning:
    shutil.copytree(base, folder)
    (folder / "chat_template.jinja").write_text(template)
    return FineTuning(folder, rank=1)


@pytest.mark.slow
def test_replies_whose_reasoning_is_removed_are_found(base: Path, tmp_path: Path) -> None:
    tuning = templated(base, tmp_path / "base", THINKING)
    shown = tuning.show([{"messages": CHAT}]).splitlines()
    assert shown[1::2] == [
        f"<|user|>hi<|end|><|assistant|>«ho<|end|>»<|user|>ho?<|end|>{LAST}",
        "<|user|>hi<|end|><|assistant|>«<think>so</think>ho<|end|>»",
    ]
    last = tuning.show([{"messages": CHAT}], train_on="completion").splitlines()[1]
    assert last.count("«") == 1
    assert last.endswith("«<think>no</think>hi<|end|>»")


@pytest.mark.slow
@pytest.mark.optional("transformers", "export")
def test_marked_replies_are_those_of_transformers(base: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tuning = templated(base, tmp_path / "base", MARKED)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "base")
    expected = theirs.apply_chat_template(
        CHAT,
        chat_template=MARKED,
        return_assistant_tokens_mask=True,
        return_dict=True,
        tokenize=True,
    )
    (example,) = read_examples(
        [{"messages": CHAT}], lambda: tuning.tokenizer, train_on="assistant", max_length=99
    )
    assert example.tokens.tolist() == expected["input_ids"]
    assert example.trained.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.slow
def test_replies_that_cannot_be_found_are_said(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = THINKING.replace(".lstrip()", ".upper()")
    tuning = templated(base, tmp_path / "base", template)
    assert tuning.show([{"messages": CHAT}]).splitlines()[1::2] == [
        f"<|user|>hi<|end|><|assistant|>HO<|end|><|user|>ho?<|end|>{LAST}",
        "<|user|>hi<|end|><|assistant|>«<think>so</think>ho<|end|>»",
    ]
    text = "1 replies that the chat template changes in longer chats are rows of their own"
    assert text in caplog.text
    counting = "{% if messages | length < 3 %}{{ messages | length }}{% endif %}"
    counting += THINKING.replace("text.split('</think>')[-1].lstrip()", "text | length | string")
    tuning = templated(base, tmp_path / "other", counting)
    assert tuning.show([{"messages": CHAT}]).count("«") == 1
    text = "1 rows have replies that the chat template changes: 1 replies are not trained"
    assert text in caplog.text


# --------------------------------------------------------------------------- preferences


PAIRS = [
    {"prompt": "hi", "chosen": " there", "rejected": " you"},
    {"prompt": "how", "chosen": " nice", "rejected": " bad"},
]


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_preferences_are_trained(shallow: Path, untrained: FineTuning, tmp_path: Path) -> None:
    tuning = FineTuning(shallow, learning_rate=0.01, loss=ortops.losses.DPO(beta=0.5))
    before = tuning.evaluate(PAIRS)
    assert before == {
        "loss": pytest.approx(np.log(2), abs=5e-6),  # half of what the margin may be off
        "reward_margin": pytest.approx(0, abs=1e-5),
        "reward_accuracy": before["reward_accuracy"],
    }
    tuning.fit(PAIRS, epochs=8, batch_size=2, progress=False)
    after = tuning.evaluate(PAIRS)
    assert after["reward_accuracy"] == 1
    assert after["reward_margin"] > 0.5
    tuning.save(tmp_path / "tuned")
    again = FineTuning.load(tmp_path / "tuned")
    assert again.evaluate(PAIRS) == after
    with pytest.raises(FeedError, match="data: for DPO, each row must have chosen and rejected"):
        again.fit([{"text": "hi"}], progress=False)
    with pytest.raises(FeedError, match=r"need loss='DPO' \(--loss DPO\)"):
        untrained.fit(PAIRS, progress=False)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.4])
def test_margins_are_those_of_the_loss_function(shallow: Path, smoothing: float) -> None:
    """Also with smoothing, with margins so large that the loss is 0, and in batches."""
    for beta in (0.5, 80.0):
        loss = ortops.losses.DPO(beta=beta, label_smoothing=smoothing)
        tuning = FineTuning(shallow, learning_rate=0.02, loss=loss)
        tuning.fit(PAIRS, epochs=12, batch_size=2, progress=False)
        each = [tuning.evaluate([pair]) for pair in PAIRS]
        for found in each:
            margin = found["reward_margin"]
            expected = np.logaddexp(0, -margin) + smoothing * margin
            assert found["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert found["reward_accuracy"] == (margin > 0)
        mean = {name: np.mean([found[name] for found in each]) for name in each[0]}
        assert tuning.evaluate(PAIRS, batch_size=2) == pytest.approx(mean, rel=1e-3, abs=1e-6)
    assert mean["reward_margin"] > 20
    assert np.isfinite(mean["reward_margin"])


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_forms_of_preferences_are_the_same(shallow: Path) -> None:
    tuning = FineTuning(shallow, loss="DPO")
    tuning.session.learning_rate = 0.0
    tokens = tuning.tokenizer.tokens
    end = tuning.tokenizer.end
    ids = [
        {
            "prompt": tokens(row["prompt"]),
            **{n: tokens(row[n], special=False) + end for n in ("chosen", "rejected")},
        }
        for row in PAIRS
    ]
    nudge(tuning)
    assert tuning.evaluate(ids) == tuning.evaluate(PAIRS)
    user = [{"role": "user", "content": "hi"}]
    replies = [[{"role": "assistant", "content": text}] for text in ("yes", "no")]
    apart = {"prompt": user, "chosen": replies[0], "rejected": replies[1]}
    whole = {"chosen": user + replies[0], "rejected": user + replies[1]}
    assert tuning.evaluate([apart]) == tuning.evaluate([whole])


def nudge(tuning: FineTuning) -> None:
    """Makes the adapter differ from nothing."""
    generator = np.random.default_rng(0)
    for name, array in tuning.session.parameters.items():
        if "lora_B" in name:
            noise = generator.standard_normal(array.shape).astype(array.dtype)
            tuning.session.state[name] = 0.1 * noise


@pytest.fixture(scope="module")
def preferring(base: Path) -> FineTuning:
    """What tests share that change nothing of it."""
    return FineTuning(base, rank=1, loss="DPO")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "hi", "chosen": "a" * 200, "rejected": "b"}, "row 1 has 20[0-9] tokens, but"),
        ({"prompt": "hi", "chosen": 3, "rejected": "b"}, "row 1 must have prompt, chosen and rej"),
        ({"prompt": [1], "chosen": [], "rejected": [2]}, "row 1 has an empty answer"),
    ],
)
def test_wrong_preferences(preferring: FineTuning, row: dict[str, Any], text: str) -> None:
    with pytest.raises(FeedError, match=text):
        preferring.fit([row], progress=False)
    assert preferring.session.steps_done == 0


# --------------------------------------------------------------------------- metrics and sampling


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_accuracy_and_exact_match(shallow: Path) -> None:
    tuning = FineTuning(shallow, learning_rate=0.02)
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "ef", "completion": "gh"}]
    tuning.fit(rows, epochs=60, progress=False)
    found = tuning.evaluate(rows, exact_match=True)
    assert found["accuracy"] == 1
    assert found["exact_match"] == 1
    other = tuning.evaluate([*rows, {"prompt": "ab", "completion": "xy"}], exact_match=True)
    assert other["exact_match"] == pytest.approx(2 / 3)
    assert 0 < other["accuracy"] < 1


@pytest.mark.slow
def test_sampling(untrained: FineTuning) -> None:
    tuning = untrained
    greedy = tuning.generate([65, 66], max_new_tokens=8)
    draws = {
        tuple(tuning.generate([65, 66], max_new_tokens=8, temperature=2.0, seed=seed))
        for seed in range(5)
    }
    assert len(draws) > 1
    for settings in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-9}):
        settings = {"temperature": 1.0, **settings}
        assert tuning.generate([65, 66], max_new_tokens=8, **settings) == greedy
    same = [tuning.generate([65], max_new_tokens=8, temperature=1.0, seed=3) for _ in range(2)]
    assert same[0] == same[1]
    for settings, text in (
        ({"temperature": -1}, "temperature must be a finite number >= 0, got -1"),
        ({"top_p": 0}, "top_p must be"),
        ({"top_k": 0}, "top_k must be an integer >= 1, got 0"),
    ):
        with pytest.raises(ArgumentError, match=text):
            tuning.generate([65], **settings)


@pytest.mark.slow
def test_probabilities_of_draws() -> None:
    """The frequencies of 4000 draws are within 4 standard deviations of the probabilities."""
    from ortops.llm.generation import Sampling

    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    cases = (
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.9}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"temperature": 0.5}, np.array([0.25, 0.09, 0.0225, 0.0025]) / 0.365),
    )
    for settings, expected in cases:
        sampling = Sampling(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
        drawn = np.bincount([sampling.token(logits, step) for step in range(4000)], minlength=4)
        shares = np.array(expected)
        assert (abs(drawn / 4000 - shares) <= 4 * np.sqrt(shares * (1 - shares) / 4000)).all()


@pytest.mark.slow
def test_nothing_below_the_first_adapter_is_differentiated(tmp_path: Path) -> None:
    """An adapter on the last layer needs no backward pass through the layers before it."""
    tuning = FineTuning(llama.write(tmp_path / "base"), 4, 4, targets=["*layers.1*"])
    lowered = ortops.lower(ortops.step_graph(tuning.session.model()))
    names = [node.name for node in lowered.graph.node if "Gradient" in node.name]
    assert any("layers.1" in name for name in names)
    assert not [name for name in names if "layers.0" in name]


@pytest.mark.slow
def test_the_examples_of_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are skipped as doctests, since they need a model, which an installation lacks."""
    monkeypatch.chdir(tmp_path)
    llama.write("model")
    members = [vars(FineTuning)[name] for name in ("fit", "evaluate", "show", "generate", "save")]
    members += [FineTuning.tokenizer, FineTuning.load, FineTuning, ortops.losses.DPO, check_folder]
    with all_violations() as check:
        for member in members:
            names = {
                "FineTuning": FineTuning,
                "DPO": ortops.losses.DPO,
                "check_folder": check_folder,
            }
            test = doctest.DocTestParser().get_doctest(member.__doc__, names, str(member), None, 0)
            for example in test.examples:
                example.options.pop(doctest.SKIP, None)
            printed: list[str] = []
            with check(member):
                assert len(test.examples) >= 2
                doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
                assert printed == []
