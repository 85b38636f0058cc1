"""Fine-tuning of encoder-decoder folders and merged decoders, beside transformers and PEFT."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from ortops.llm import FineTuning

pytestmark = [
    pytest.mark.torch,
    pytest.mark.optional("transformers", "llm"),
    pytest.mark.filterwarnings("ignore"),
]

RANK, ALPHA, RATE = 2, 4, 0.02
FRAMES = 40
LETTERS = "abcdefghijklmnopqrstuvwxyz .!?"
END = 1


def t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=2, num_heads=2,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=END,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8,
        max_source_positions=FRAMES // 2, max_target_positions=12, decoder_start_token_id=3,
        pad_token_id=0, bos_token_id=END, eos_token_id=END, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=END,
        eos_token_id=END, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


MODELS = {"t5": t5, "whisper": whisper, "gpt2": gpt2}


def torch_model(kind: str) -> Any:
    import torch

    torch.manual_seed(0)
    return MODELS[kind]().eval()


def wrapped(model: Any, kind: str) -> tuple[Any, Any]:
    """Returns modules that take and return what Optimum's files do."""
    import torch
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model.get_encoder()

        def forward(self, *inputs: Any) -> Any:
            return self.encoder(*inputs).last_hidden_state

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, mask: Any, ids: Any, *more: Any) -> Any:
            own, cross = DynamicCache(), DynamicCache()
            if kind == "gpt2":
                for layer in range(len(more) // 2):
                    own.update(*more[2 * layer : 2 * layer + 2], layer)
                found = model(ids, attention_mask=mask, past_key_values=own, use_cache=True)
                layers = found.past_key_values.layers
                return found.logits, *(x for each in layers for x in (each.keys, each.values))
            cache, (hidden, *past) = EncoderDecoderCache(own, cross), more
            for layer in range(len(past) // 4):
                own.update(*past[4 * layer : 4 * layer + 2], layer)
                cross.update(*past[4 * layer + 2 : 4 * layer + 4], layer)
                cache.is_updated[layer] = True
            masks = {} if kind == "whisper" else {"attention_mask": mask}
            found = model(
                decoder_input_ids=ids, encoder_outputs=(hidden,), past_key_values=cache, **masks
            )
            both = found.past_key_values
            result = [found.logits]
            for layer in range(2):
                result += _keys(both.self_attention_cache.layers[layer])
                result += [] if past else _keys(both.cross_attention_cache.layers[layer])
            return tuple(result)

    return Encoder(), Decoder()


def _keys(layer: Any) -> list[Any]:
    return [layer.keys, layer.values]


def export(module: Any, file: Path, inputs: dict[str, Any], outputs: list[str]) -> None:
    import torch

    axes = {}
    for name, value in inputs.items():
        if value is None:
            continue
        if name.startswith("past"):
            axes[name] = {0: "batch", 2: "source" if "encoder" in name else "past"}
        elif name == "encoder_hidden_states":
            axes[name] = {0: "batch", 1: "source"}
        elif name == "input_features":
            axes[name] = {0: "batch"}
        else:
            axes[name] = {0: "batch", 1: f"{file.stem[:3]}_time"}
            if name == "encoder_attention_mask":
                axes[name] = {0: "batch", 1: "source"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            *(module, tuple(inputs.values()), str(file)),
            input_names=[name for name, value in inputs.items() if value is not None],
            output_names=outputs,
            dynamic_axes=axes,
            opset_version=18,
            dynamo=False,
        )


def cache_names(kind: str, prefix: str, parts: tuple[str, ...]) -> list[str]:
    middle = [""] if kind == "gpt2" else [f".{part}" for part in parts]
    return [f"{prefix}.{n}{m}.{w}" for n in range(2) for m in middle for w in ("key", "value")]


def merged(first: Path, following: Path, file: Path) -> None:
    """Merges two decoders as Optimum does, but with copies of the weights in both branches."""
    without, with_past = onnx.load(first), onnx.load(following)
    outputs = list(without.graph.output)
    made = {value.name for value in with_past.graph.output}
    for value in outputs:
        if value.name not in made:  # the cache of the encoder stays
            past = value.name.replace("present", "past_key_values")
            with_past.graph.node.add(op_type="Identity", input=[past], output=[value.name])
    inputs = {v.name: v for v in (*with_past.graph.input, *without.graph.input)}
    choice = onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    branches = {}
    for name, model in (("then_branch", with_past), ("else_branch", without)):
        branches[name] = model.graph
        del model.graph.input[:], model.graph.output[:]
        for value in outputs:
            model.graph.output.add(
                name=value.name, type=onnx.TypeProto(tensor_type=onnx.TypeProto.Tensor(elem_type=1))
            )
    names = [value.name for value in outputs]
    node = onnx.helper.make_node("If", ["use_cache_branch"], names, "optimum::if", **branches)
    graph = onnx.helper.make_graph([node], "merged", [*inputs.values(), choice], outputs)
    imports = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=imports, ir_version=9), file)


def write(folder: Path, kind: str) -> Path:
    import torch

    model = torch_model(kind)
    encoder, decoder = wrapped(model, kind)
    ids = torch.randint(2, 40, (2, 5))
    mask = torch.ones_like(ids)
    folder.mkdir(exist_ok=True)
    names = cache_names(kind, "present", ("decoder", "encoder"))
    pasts = cache_names(kind, "past_key_values", ("decoder", "encoder"))
    if kind == "gpt2":
        inputs: dict[str, Any] = {"attention_mask": mask, "input_ids": ids}
        following = {"attention_mask": torch.ones(2, 6, dtype=torch.int64), "input_ids": ids[:, :1]}
        later = names
    else:
        source = {"input_ids": torch.randint(2, 40, (2, 7))}
        source["attention_mask"] = torch.ones_like(source["input_ids"])
        if kind == "whisper":
            source = {"input_features": torch.randn(2, 8, FRAMES)}
        export(encoder, folder / "encoder_model.onnx", source, ["last_hidden_state"])
        hidden = encoder(*source.values())
        known = source.get("attention_mask")
        inputs = {
            "encoder_attention_mask": known,
            "input_ids": ids,
            "encoder_hidden_states": hidden,
        }
        following = {**inputs, "input_ids": ids[:, :1]}
        later = cache_names(kind, "present", ("decoder",))
    export(decoder, folder / "decoder_model.onnx", inputs, ["logits", *names])
    with torch.no_grad():
        caches = decoder(*inputs.values())[1:]
    following |= dict(zip(pasts, caches, strict=True))
    export(decoder, folder / "decoder_with_past_model.onnx", following, ["logits", *later])
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    return folder


@pytest.fixture(scope="module", params=["t5", "whisper"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a kind of model, which PyTorch exports once; tests do not change it."""
    return functools.cache(lambda kind: write(tmp_path_factory.mktemp("split") / kind, kind))


@pytest.fixture(scope="module")
def split_folder(kind: str, exported: Callable[[str], Path]) -> Path:
    return exported(kind)


def as_merged(split: Path, folder: Path) -> Path:
    """Writes the same models as transformers.js has them."""
    (folder / "onnx").mkdir(parents=True)
    shutil.copy(split / "config.json", folder)
    if (split / "encoder_model.onnx").exists():
        shutil.copy(split / "encoder_model.onnx", folder / "onnx")
    target = folder / "onnx" / "decoder_model_merged.onnx"
    merged(split / "decoder_model.onnx", split / "decoder_with_past_model.onnx", target)
    return folder


@pytest.fixture(scope="module")
def opened(exported: Callable[[str], Path]) -> Callable[[str], FineTuning]:
    """Returns the tuning of a kind of model, which is made once; tests do not train it."""
    return functools.cache(lambda kind: FineTuning(exported(kind), RANK))


@pytest.fixture(scope="module")
def untrained(kind: str, opened: Callable[[str], FineTuning]) -> FineTuning:
    return opened(kind)


@pytest.fixture(scope="module", params=["split", "merged"])
def folder(
    request: pytest.FixtureRequest, split_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if request.param == "split":
        return split_folder
    return as_merged(split_folder, tmp_path_factory.mktemp("merged") / "folder")


def rows_of(kind: str) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    rows = []
    for source, target in ((4, 3), (6, 5)):
        row: dict[str, Any] = {"labels": [*generator.integers(4, 40, target).tolist(), END]}
        if kind == "whisper":
            row["input_features"] = generator.normal(size=(8, FRAMES)).astype(np.float32)
        else:
            row["input_ids"] = [*generator.integers(4, 40, source).tolist(), END]
        rows.append(row)
    return rows


def torch_batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    def padded(name: str, value: int) -> Any:
        values = [torch.tensor(row[name]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(values, True, value)

    labels = padded("labels", -100)
    if "input_features" in rows[0]:
        features = torch.tensor(np.stack([row["input_features"] for row in rows]))
        return {"labels": labels, "input_features": features}
    ids = padded("input_ids", 0)
    return {"labels": labels, "input_ids": ids, "attention_mask": (ids > 0).long()}


def torch_greedy(model: Any, row: dict[str, Any], count: int) -> list[int]:
    import torch

    batch = torch_batch([row])
    del batch["labels"]
    tokens = [model.config.decoder_start_token_id]
    with torch.no_grad():
        while len(tokens) <= count:
            scores = model(**batch, decoder_input_ids=torch.tensor([tokens])).logits
            if (token := int(scores[0, -1].argmax())) == END:
                break
            tokens.append(token)
    return tokens[1:]


def in_peft(model: Any, session: ortops.TrainingSession) -> Any:
    """Returns PEFT's model, with the adapter of a session."""
    import peft
    import torch

    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear"
    )
    adapted = peft.get_peft_model(model, settings)
    own = {
        name.replace(".default", "").removeprefix("base_model.model."): parameter
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad
    }
    assert len(own) == len(session.parameters)
    for name, array in session.parameters.items():
        plain = name.removeprefix("model.")
        (match,) = (each for each in own if each in (plain, f"model.{plain}"))
        with torch.no_grad():
            own[match].copy_(torch.tensor(array.T))
    return adapted


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.optional("peft", "llm")
def test_trains_as_peft_does_and_is_served(folder: Path, kind: str, tmp_path: Path) -> None:
    import torch

    rows = rows_of(kind)
    tuning = FineTuning(folder, RANK, ALPHA, learning_rate=RATE)
    model = in_peft(torch_model(kind), tuning.session)
    first = model(**torch_batch(rows)).loss.item()
    np.testing.assert_allclose(tuning.evaluate(rows)["loss"], first, atol=1e-5)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], RATE)
    expected = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(**torch_batch(rows)).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    history = tuning.fit(rows, epochs=6, shuffle=False, progress=False)
    np.testing.assert_allclose(history.history["loss"], expected, atol=1e-5)

    tuned = tmp_path / "tuned"
    tuning.save(tuned)
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    written = {str(file.relative_to(tuned)) for file in tuned.rglob("*") if file.is_file()}
    assert written == names | {"training.state"}
    trained = model.merge_and_unload().eval()
    again = FineTuning.load(tuned)
    for row in rows:
        source = row.get("input_features", row.get("input_ids"))
        answer = torch_greedy(trained, row, 8)
        assert tuning.generate(source, max_new_tokens=8) == answer
        assert again.generate(source, max_new_tokens=8) == answer
        assert greedy_in_onnxruntime(tuned, row, 8, trained.config) == answer
    for each in (tuning, again):
        each.fit(rows, epochs=3, batch_size=1, seed=1, progress=False)
    assert again.session.history == tuning.session.history
    again.save(tuned)  # in place
    assert FineTuning.load(tuned).session.steps_done == tuning.session.steps_done


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.optional("peft", "llm")
def test_all_weights_are_trained_and_served(folder: Path, kind: str, tmp_path: Path) -> None:
    tuning, rows = FineTuning(folder, None, learning_rate=RATE), rows_of(kind)
    history = tuning.fit(rows, 30, progress=False)
    tuning.save(tmp_path / "tuned")
    assert history[-1]["loss"] < 0.2 * history[0]["loss"]
    config = torch_model(kind).config
    for row in rows:
        found = greedy_in_onnxruntime(tmp_path / "tuned", row, 9, config)
        assert found == row["labels"][:-1]
    again = FineTuning.load(tmp_path / "tuned")
    assert again.evaluate(rows) == tuning.evaluate(rows)


def greedy_in_onnxruntime(folder: Path, row: dict[str, Any], count: int, config: Any) -> list[int]:
    """Generates as a server does, with the files of a folder."""

    def opened(name: str) -> Any:
        files = list(folder.rglob(f"{name}.onnx"))
        return onnxruntime.InferenceSession(files[0]) if files else None

    def run(session: Any, feeds: dict[str, Any]) -> dict[str, Any]:
        known = {value.name for value in session.get_inputs()}
        outputs = [value.name for value in session.get_outputs()]
        given = {name: array for name, array in feeds.items() if name in known}
        return dict(zip(outputs, session.run(None, given), strict=True))

    together = opened("decoder_model_merged")
    first = together or opened("decoder_model")
    later = together or opened("decoder_with_past_model")
    feeds: dict[str, Any] = {"use_cache_branch": np.array([False])}
    if "input_features" in row:
        source = {"input_features": row["input_features"][None]}
    else:
        source = {"input_ids": np.array([row["input_ids"]])}
        source["attention_mask"] = np.ones_like(source["input_ids"])
        feeds["encoder_attention_mask"] = source["attention_mask"]
    feeds["encoder_hidden_states"] = run(opened("encoder_model"), source)["last_hidden_state"]
    for name in cache_names("t5", "past_key_values", ("decoder", "encoder")):
        feeds[name] = np.zeros((1, 2, 0 if "decoder" in name else 7, 8), np.float32)
    token, found, session = config.decoder_start_token_id, list[int](), first
    while len(found) < count:
        results = run(session, feeds | {"input_ids": np.array([[token]])})
        token = int(results["logits"][0, -1].argmax())
        if token == END:
            break
        found.append(token)
        for name, array in results.items():
            if name.startswith("present") and (session is first or "decoder" in name):
                feeds[name.replace("present", "past_key_values")] = array
        session, feeds["use_cache_branch"] = later, np.array([True])
    return found


@pytest.mark.slow
def test_merged_decoder_alone(tmp_path: Path) -> None:
    import torch

    folder = as_merged(write(tmp_path / "split", "gpt2"), tmp_path / "merged")
    shutil.move(folder / "onnx" / "decoder_model_merged.onnx", folder)
    (folder / "onnx").rmdir()
    rows = [row["input_ids"] for row in rows_of("gpt2")]
    tuning = FineTuning(folder, 8, 16, learning_rate=RATE)
    model = torch_model("gpt2")
    batch = torch_batch([{"input_ids": row, "labels": row} for row in rows])
    with torch.no_grad():
        expected = model(**batch).loss.item()
    np.testing.assert_allclose(tuning.evaluate(rows)["loss"], expected, atol=1e-5)
    history = tuning.fit(rows, epochs=60, progress=False)
    assert history.history["loss"][-1] < expected / 3
    tuned = tmp_path / "tuned"
    tuning.save(tuned)

    session = onnxruntime.InferenceSession(tuned / "decoder_model_merged.onnx")
    tokens = np.array([rows[1]])
    caches = cache_names("gpt2", "past_key_values", ())
    feeds = {name: np.zeros((1, 2, 0, 8), np.float32) for name in caches}
    feeds |= {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    whole = session.run(None, {**feeds, "use_cache_branch": np.array([False])})[0]
    trained = tuning.session.predict(
        {"input_ids": tokens, "attention_mask": feeds["attention_mask"]}
    )
    np.testing.assert_allclose(whole, trained["logits"], atol=1e-5)
    begin = {"input_ids": tokens[:, :-1], "attention_mask": feeds["attention_mask"][:, :-1]}
    _, *present = session.run(None, {**feeds, **begin, "use_cache_branch": np.array([False])})
    feeds |= dict(zip(caches, present, strict=True)) | {"input_ids": tokens[:, -1:]}
    last = session.run(None, {**feeds, "use_cache_branch": np.array([True])})[0]
    np.testing.assert_allclose(last[:, -1], whole[:, -1], atol=1e-5)

    answer = tuning.generate(rows[1][:2], max_new_tokens=4)
    assert answer == rows[1][2:6]
    assert FineTuning.load(tuned).generate(rows[1][:2], max_new_tokens=4) == answer


@pytest.mark.slow
@pytest.mark.torch
def test_whisper_with_tokens_of_language_and_task(opened: Callable[[str], FineTuning]) -> None:
    import torch

    model = torch_model("whisper")
    rows = rows_of("whisper")
    rows = [row | {"decoder_prefix": [7, 8 + n]} for n, row in enumerate(rows)]
    tuning = opened("whisper")
    start = model.config.decoder_start_token_id
    batch = torch_batch(
        [{**row, "labels": [*row["decoder_prefix"], *row["labels"]]} for row in rows]
    )
    inputs = torch.nn.functional.pad(batch["labels"][:, :-1], (1, 0), value=start)
    inputs[inputs == -100] = model.config.pad_token_id
    batch["labels"][:, :2] = -100
    with torch.no_grad():
        expected = model(**batch, decoder_input_ids=inputs).loss.item()
    assert tuning.evaluate(rows)["loss"] == pytest.approx(expected, rel=1e-5)
    whole = [row | {"decoder_prefix": [start, *row["decoder_prefix"]]} for row in rows]
    assert tuning.evaluate(whole) == tuning.evaluate(rows)
    without = [{k: v for k, v in row.items() if k != "decoder_prefix"} for row in rows]
    assert tuning.evaluate(without) != tuning.evaluate(rows)

    features, prefix = rows[0]["input_features"], rows[0]["decoder_prefix"]
    found, tokens = list[int](), [start, *prefix]
    with torch.no_grad():
        while len(found) < 5:
            given = {"input_features": torch.tensor(features[None])}
            scores = model(**given, decoder_input_ids=torch.tensor([tokens])).logits
            if (token := int(scores[0, -1].argmax())) == END:
                break
            found.append(token)
            tokens.append(token)
    assert tuning.generate(features, max_new_tokens=5, decoder_prefix=prefix) == found
    tuning.session.learning_rate = 0.0  # other tests have it, too
    tuning.fit(rows, epochs=1, progress=False)


@pytest.mark.slow
@pytest.mark.optional("tokenizers", "llm")
def test_texts(
    exported: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import tokenizers

    folder = Path(shutil.copytree(exported("t5"), tmp_path / "t5"))
    words = {"<pad>": 0, "</s>": END, "<unk>": 2, "<start>": 3}
    words |= {letter: number for number, letter in enumerate(LETTERS, 4)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", "<start>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    rows = [{"prompt": "say hi", "completion": "hi."}, {"prompt": "say no", "completion": "no!"}]
    tuning = FineTuning(folder, 8, 16, learning_rate=0.02)
    ids = {row["prompt"]: tuning.tokenizer.tokens(row["prompt"]) for row in rows}
    assert ids["say hi"][-1] == END
    same = [
        {"input_ids": ids[row["prompt"]], "labels": tuning.tokenizer.tokens(row["completion"])}
        for row in rows
    ]
    assert tuning.evaluate(rows) == tuning.evaluate(same)
    first = [row | {"decoder_prefix": "no"} for row in rows]
    prefix = tuning.tokenizer.tokens("no", special=False)
    assert tuning.evaluate(first) == tuning.evaluate([r | {"decoder_prefix": prefix} for r in same])
    tuning.fit(rows, epochs=150, progress=False)
    assert [tuning.generate(row["prompt"]) for row in rows] == ["hi.", "no!"]
    with caplog.at_level(logging.WARNING, "ortops"):
        tuning.evaluate(rows, max_length=3)
    assert caplog.records[-1].getMessage() == "2 rows were truncated to max_length=3 tokens"


@pytest.mark.nightly(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2]], r"row 1 must have prompt and completion, input_ids and labels, or input_feat"),
        ([{"input_ids": [4]}], r"row 1 must have .*\('text'\)"),
        ([{"input_ids": [4], "labels": [-100]}], "row 1 has no token to train"),
        ([{"input_features": [1.0], "labels": [4]}], r"must be \[bins, frames\], got \[1\]"),
        ([], "there are no rows"),
    ],
)
def test_rows_of_other_forms(untrained: FineTuning, rows: Any, message: str) -> None:
    with pytest.raises(ortops.FeedError, match=message):
        untrained.fit(rows, progress=False)


@pytest.mark.slow
def test_folders_that_cannot_be_trained(
    split_folder: Path, untrained: FineTuning, tmp_path: Path
) -> None:
    incomplete = tmp_path / "incomplete"
    incomplete.mkdir()
    shutil.copy(split_folder / "encoder_model.onnx", incomplete)
    with pytest.raises(ortops.ModelError, match=r"neither decoder_model\.onnx nor decoder_model_m"):
        FineTuning(incomplete)
    other = tmp_path / "other"
    shutil.copytree(split_folder, other)
    model = onnx.load(other / "decoder_with_past_model.onnx")
    matrix = next(t for t in model.graph.initializer if len(t.dims) == 2)
    array = onnx.numpy_helper.to_array(matrix) + 1
    matrix.CopyFrom(onnx.numpy_helper.from_array(array, matrix.name))
    onnx.save(model, other / "decoder_with_past_model.onnx")
    with pytest.raises(ortops.ModelError, match=r"so the files do not belong together; export"):
        FineTuning(other)
    with pytest.raises(ortops.ArgumentError, match="prompt must be a text, tokens, or features"):
        untrained.generate([])
    untrained.save(tmp_path / "tuned")
    (tmp_path / "tuned" / "training.state").unlink()
    with pytest.raises(ortops.ModelError, match="the training cannot be continued"):
        FineTuning.load(tmp_path / "tuned")
