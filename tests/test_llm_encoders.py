"""Text encoders beside PyTorch: classification, pairs and retrieval."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from encoder_folders import encoder, tokenizer, write
from violations import all_violations

import ortops
from ortops import docs
from ortops.cli import main
from ortops.errors import ArgumentError, FeedError, ModelError, OrtopsError, UnsupportedError
from ortops.llm import FineTuning
from ortops.llm.checking import check_folder
from ortops.llm.encoder_rows import labels_in
from ortops.llm.folder import open_folder
from ortops.llm.options import TASKS
from ortops.optimizers import SGD

pytestmark = [pytest.mark.torch]

TEXTS = [
    *(("it was a good film", "good"), ("a very nice book", "good"), ("the plot was fine", "good")),
    *(("it was awful", "bad"), ("a poor plot", "bad"), ("the film was very bad at all", "bad")),
]
CLASSES = ["bad", "good"]
CLASSIFY = {"task": "classification"}
RATE = 0.1
CALL = {"epochs": 2, "batch_size": 3, "shuffle": False, "progress": False}


def feeds(texts: list[Any], model: Any) -> dict[str, Any]:
    """Returns the tensors of texts, or of pairs, padded."""
    import torch

    made = tokenizer()
    made.enable_padding()
    found = [made.encode_batch(texts)][0]
    arrays = {
        "input_ids": [each.ids for each in found],
        "attention_mask": [each.attention_mask for each in found],
        "token_type_ids": [each.type_ids for each in found],
    }
    if not type(model).__name__.startswith("Bert"):
        del arrays["token_type_ids"]
    return {name: torch.tensor(rows) for name, rows in arrays.items()}


def curve(model: Any, batches: list[Any], loss: Any) -> list[float]:
    """Trains a model of PyTorch with SGD for two epochs; returns the loss of each epoch.

    Adam would make steps of the rounding errors of key biases, whose gradient is 0.
    """
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    found = []
    for _ in range(2):
        values = []
        for batch in batches:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            values.append(value.item())
        found.append(float(np.mean(values)))
    return found


def classified(model: Any, rows: list[Any]) -> Any:
    import torch

    target = torch.tensor([CLASSES.index(row[-1]) for row in rows])
    texts = [row[0] if len(row) == 2 else row[:2] for row in rows]
    return torch.nn.functional.cross_entropy(model(**feeds(texts, model))[0], target)


BERT, SMALL = "BertForSequenceClassification", "DistilBertForSequenceClassification"


@pytest.mark.quick(1)
@pytest.mark.nightly
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("kind", [BERT, SMALL])
def test_a_classifier_trains_as_in_torch_and_is_saved_as_it_came(
    kind: str, dynamo: bool, training: bool, tmp_path: Path
) -> None:
    model = encoder(kind, id2label=dict(enumerate(CLASSES)))
    folder = write(model, tmp_path / "base", dynamo=dynamo, training=training)
    rows = [{"text": text, "label": label} for text, label in TEXTS]
    tuning = FineTuning(folder, None, task="classification", optimizer=SGD(RATE))
    history = tuning.fit(rows, **CALL, save=tmp_path / "tuned")
    expected = curve(model, [TEXTS[:3], TEXTS[3:]], classified)
    np.testing.assert_allclose([each["loss"] for each in history], expected, rtol=2e-5)
    assert 0 <= tuning.evaluate(rows)["accuracy"] <= 1
    names = {"model.onnx", "config.json", "tokenizer.json", "training.state"}
    assert {file.name for file in (tmp_path / "tuned").iterdir()} == names
    given = {name: tensor.numpy() for name, tensor in feeds([t for t, _ in TEXTS], model).items()}
    served = onnxruntime.InferenceSession(tmp_path / "tuned/model.onnx").run(["logits"], given)[0]
    torch_logits = model(**feeds([t for t, _ in TEXTS], model))[0].detach().numpy()
    np.testing.assert_allclose(served, torch_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.nightly(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_pairs_of_texts_have_a_class(dynamo: bool, tmp_path: Path) -> None:
    model = encoder("BertForSequenceClassification", id2label=dict(enumerate(CLASSES)))
    folder = write(model, tmp_path / "base", dynamo=dynamo)
    pairs = [(text, "what was it", label) for text, label in TEXTS]
    rows = [{"sentence1": a, "sentence2": b, "label": label} for a, b, label in pairs]
    tuning = FineTuning(folder, None, task="pairs", optimizer=SGD(RATE))
    history = tuning.fit(rows, **CALL)
    expected = curve(model, [pairs[:3], pairs[3:]], classified)
    np.testing.assert_allclose([each["loss"] for each in history], expected, rtol=2e-5)


def embedded(model: Any, texts: list[str], pooling: str) -> Any:
    """Returns embeddings as sentence-transformers computes them, normalized."""
    import torch

    given = feeds(texts, model)
    hidden, mask = model(**given)[0], given["attention_mask"][..., None].float()
    if pooling == "cls":
        found = hidden[:, 0]
    elif pooling == "max":
        found = hidden.masked_fill(mask == 0, -1e9).amax(1)
    else:
        found = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(found, dim=1)


ANSWERS = [
    ("what was it", "a good film", "a bad book"),
    ("why not", "it was poor", "it was fine at all"),
    ("what plot", "the plot was nice", "the book"),
    ("why bad", "it was a very awful film", "good"),
]


def in_batch(pooling: str, *, negatives: bool) -> Any:
    """MultipleNegativesRanking of sentence-transformers: scale 20, cosines."""

    def loss(model: Any, rows: list[Any]) -> Any:
        import torch

        columns = [[row[n] for row in rows] for n in range(3 if negatives else 2)]
        a, *others = (embedded(model, column, pooling) for column in columns)
        scores = 20 * a @ torch.cat(others).T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(rows)))

    return loss


def triplets(pooling: str) -> Any:
    """TripletLoss of sentence-transformers: distances of Euclid, margin 5."""

    def loss(model: Any, rows: list[Any]) -> Any:
        import torch

        columns = [[row[n] for row in rows] for n in range(3)]
        a, p, n = (embedded(model, column, pooling) for column in columns)
        distance = torch.nn.functional.pairwise_distance
        return torch.relu(distance(a, p) - distance(a, n) + 5).mean()

    return loss


def similarities(model: Any, rows: list[Any]) -> Any:
    """CosineSimilarityLoss of sentence-transformers: squared errors of cosines."""
    import torch

    a, b = (embedded(model, [row[n] for row in rows], "mean") for n in range(2))
    return torch.nn.functional.mse_loss((a * b).sum(1), torch.tensor([row[2] for row in rows]))


SCORED = [(a, b, n / 4) for n, (a, b, _) in enumerate(ANSWERS)]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("case", ["retrieval", "negatives", "triplet", "cls", "max", "pairs"])
def test_embeddings_train_as_in_sentence_transformers(
    case: str, dynamo: bool, tmp_path: Path
) -> None:
    pooling = case if case in ("cls", "max") else "mean"
    model = encoder("BertModel")
    folder = write(model, tmp_path / "base", dynamo=dynamo, pooling=pooling)
    loss, names, data = in_batch(pooling, negatives=False), ("anchor", "positive"), ANSWERS
    more: dict[str, Any] = {"task": "retrieval"}
    if case == "negatives":
        loss, names = in_batch(pooling, negatives=True), ("anchor", "positive", "negative")
    elif case == "triplet":
        loss, names = triplets(pooling), ("anchor", "positive", "negative")
        more["loss"] = "Triplet"
    elif case == "pairs":
        loss, names, data = similarities, ("sentence1", "sentence2", "score"), SCORED
        more["task"] = "pairs"
    rows = [dict(zip(names, row, strict=False)) for row in data]
    tuning = FineTuning(folder, None, optimizer=SGD(RATE), **more)
    call = {**CALL, "batch_size": 2}
    history = tuning.fit(rows, **call, save=tmp_path / "tuned")
    expected = curve(model, [data[:2], data[2:]], loss)
    np.testing.assert_allclose([each["loss"] for each in history], expected, rtol=5e-5)
    for file in ("onnx/model.onnx", "modules.json", "1_Pooling/config.json", "tokenizer.json"):
        assert (tmp_path / "tuned" / file).is_file(), file
    served = onnxruntime.InferenceSession(tmp_path / "tuned/onnx/model.onnx")
    given = {name: t.numpy() for name, t in feeds([row[0] for row in data], model).items()}
    (hidden,) = served.run(None, given)
    expected_hidden = model(**feeds([row[0] for row in data], model))[0].detach().numpy()
    np.testing.assert_allclose(hidden, expected_hidden, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------- heads and LoRA


@pytest.mark.slow
def test_a_model_of_hidden_states_gets_a_head(tmp_path: Path) -> None:
    """Beside torch with the same initial head: the first hidden state and a linear layer."""
    import torch

    model = encoder("BertModel")
    folder = write(model, tmp_path / "base")
    rows = [{"text": text, "label": label} for text, label in TEXTS]
    with pytest.raises(ArgumentError, match="labels must be the names of the classes"):
        FineTuning(folder, None, task="classification")
    tuning = FineTuning(folder, None, task="classification", labels=CLASSES, optimizer=SGD(RATE))
    weight, bias = (tuning.session.parameters[f"classifier.{n}"] for n in ("weight", "bias"))
    head = torch.nn.Linear(16, 2)
    head.weight.data, head.bias.data = torch.tensor(weight.copy()), torch.tensor(bias.copy())
    assert abs(weight).max() < 0.1
    history = tuning.fit(rows, **CALL, save=tmp_path / "tuned")

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = model, head

        def forward(self, **given: Any) -> Any:
            return (self.head(self.model(**given)[0][:, 0]),)

    Classifier.__name__ = "BertClassifier"
    expected = curve(Classifier(), [TEXTS[:3], TEXTS[3:]], classified)
    np.testing.assert_allclose([each["loss"] for each in history], expected, rtol=2e-5)
    served = onnxruntime.InferenceSession(tmp_path / "tuned/model.onnx")
    assert [value.name for value in served.get_outputs()] == ["logits"]
    config = json.loads((tmp_path / "tuned/config.json").read_text())
    assert config["label2id"] == {"bad": 0, "good": 1}
    assert config["id2label"] == {"0": "bad", "1": "good"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, about transformers
@pytest.mark.parametrize("dynamo", [False, True])
def test_an_adapter_trains_as_in_peft(dynamo: bool, tmp_path: Path) -> None:
    """With the same initial A; the head is trained whole, as PEFT does for classifiers."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = encoder("BertForSequenceClassification", id2label=dict(enumerate(CLASSES)))
    folder = write(model, tmp_path / "base", dynamo=dynamo)
    rows = [{"text": text, "label": label} for text, label in TEXTS]
    chosen = ["query", "value"]
    tuning = FineTuning(folder, 4, 8, targets=chosen, task="classification", optimizer=SGD(RATE))
    config = LoraConfig(r=4, lora_alpha=8, target_modules=chosen, task_type="SEQ_CLS")
    theirs = get_peft_model(model, config)
    own = dict(theirs.named_parameters())
    for name, array in tuning.session.parameters.items():
        if "lora_A" in name:
            layer = name.partition(".lora_A")[0]
            (found,) = (n for n in own if layer.removeprefix("model.") in n and "lora_A" in n)
            is_turned = array.shape != tuple(own[found].shape)
            own[found].data = torch.tensor(array.T.copy() if is_turned else array.copy())
    history = tuning.fit(rows, **CALL, save=tmp_path / "tuned")

    def loss(peft: Any, batch: list[Any]) -> Any:
        target = torch.tensor([CLASSES.index(row[-1]) for row in batch])
        given = feeds([row[0] for row in batch], model)
        return torch.nn.functional.cross_entropy(peft(**given)[0], target)

    expected = curve(theirs, [TEXTS[:3], TEXTS[3:]], loss)
    np.testing.assert_allclose([each["loss"] for each in history], expected, rtol=2e-5)
    given = {n: t.numpy() for n, t in feeds([text for text, _ in TEXTS], model).items()}
    served = onnxruntime.InferenceSession(tmp_path / "tuned/model.onnx").run(None, given)[0]
    logits = theirs(**feeds([text for text, _ in TEXTS], model))[0].detach().numpy()
    np.testing.assert_allclose(served, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 2])
def test_training_resumes_bit_for_bit(rank: int | None, tmp_path: Path) -> None:
    model = encoder("BertModel")
    folder = write(model, tmp_path / "base", pooling="mean")
    rows = [{"anchor": a, "positive": p} for a, p, _ in ANSWERS]
    call: dict[str, Any] = {"batch_size": 2, "progress": False, "seed": 3}
    whole = FineTuning(folder, rank, task="retrieval")
    whole.fit(rows, epochs=3, **call)
    begun = FineTuning(folder, rank, task="retrieval")
    begun.fit(rows, epochs=3, **call, max_steps=3, save=tmp_path / "tuned")
    loaded = FineTuning.load(tmp_path / "tuned")
    loaded.fit(rows, epochs=3, **call, resume=True, save=tmp_path / "tuned")
    assert loaded.session.steps_done == whole.session.steps_done == 6
    for name, array in whole.session.state.items():
        np.testing.assert_array_equal(loaded.session.state[name], array, err_msg=name)


# ----------------------------------------------------------------------------- the command line


@pytest.mark.slow
def test_a_classifier_from_a_table(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write(encoder("BertModel"), tmp_path / "base")
    lines = ["review,stars", *(f"{text},{1 + 4 * (label == 'good')}" for text, label in TEXTS)]
    Path("reviews.csv").write_text("\n".join(lines * 1))
    call = "tune base reviews.csv --task classification --columns text=review label=stars "
    assert main([*(call + "--epochs 30 --learning-rate 0.01 --save tuned").split()]) == 0
    config = json.loads(Path("tuned/config.json").read_text())
    assert config["id2label"] == {"0": "1", "1": "5"}
    served = onnxruntime.InferenceSession("tuned/model.onnx")
    model = encoder("BertModel")
    given = {n: t.numpy() for n, t in feeds([text for text, _ in TEXTS], model).items()}
    found = served.run(["logits"], given)[0].argmax(axis=1)
    assert [CLASSES[n] for n in found] == [label for _, label in TEXTS]
    assert main([*(call + "--resume --epochs 31 --learning-rate 0.01 --save tuned").split()]) == 0


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write(encoder("BertModel"), tmp_path / "minilm", pooling="mean")
    page = (Path(docs.__file__).parent / "encoders.md").read_text()
    (table,) = re.findall(r"```csv\n(.*?)```", page, re.DOTALL)
    (console,) = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    Path("reviews.csv").write_text(table)
    commands = re.findall(r"\$ ortops (.*)\n((?:[^$].*\n)*)", console)
    assert len(commands) == 2
    for command, output in commands:
        capsys.readouterr()
        assert main(command.split()) == 0
        said = capsys.readouterr()
        assert (said.out + said.err).strip() == output.strip()
    served = onnxruntime.InferenceSession("tuned/onnx/model.onnx")
    given = {n: t.numpy() for n, t in feeds(["it was a fine film"], encoder("BertModel")).items()}
    assert not Path("tuned/modules.json").exists()  # it is not a model of embeddings any more
    assert not Path("tuned/1_Pooling").exists()
    names = json.loads(Path("tuned/config.json").read_text())["id2label"]
    assert names[str(served.run(["logits"], given)[0][0].argmax())] == "good"


@pytest.mark.slow
def test_wrong_data_and_options_on_the_command_line(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write(encoder("BertModel"), Path("plain"))
    write(encoder(BERT, id2label=dict(enumerate(CLASSES))), Path("classifier"))
    for name, text in (
        ("none.jsonl", ""),
        ("none.json", "[]"),
        ("none.csv", "text,label\n"),
        ("one.csv", "text\ngood\n"),
        ("pairs.csv", "sentence1,sentence2,label\ngood film,nice,good\nbad,awful,bad\n"),
    ):
        Path(name).write_text(text)
    empty = "there are no rows; give at least one"
    with all_violations() as check:
        for words, message in (
            ("plain none.jsonl --task classification", f"data 'none.jsonl': {empty}"),
            ("plain none.json --task classification", f"data 'none.json': {empty}"),
            ("classifier none.json --task classification", f"data 'none.json': {empty}"),
            ("plain none.csv --task classification", f"data 'none.csv': {empty}"),
            ("plain one.csv --task classification", "data 'one.csv': row 1 must have label"),
            ("plain one.csv --task retrieval --label-smoothing 0.1", "smoothing: InfoNCE has none"),
            ("plain one.csv --task retrieval --loss Triplet --beta 1", "--beta: Triplet has none"),
            ("plain one.csv --task retrieval --beta 1", "InfoNCE has none; give --loss DPO"),
            ("classifier pairs.csv --task pairs --label-smoothing 0.1", "wrote tuned"),
        ):
            with check(words):
                main(["tune", *words.split(), "--save", "tuned"])
                assert message in capsys.readouterr().err


def test_classes_in_data() -> None:
    cases = [
        ([2, 10, "1", 2.0], ["1", "2", "10"]),
        (["b", " a", "a "], ["a", "b"]),
        ([True, False], ["False", "True"]),
    ]
    with all_violations() as check:
        for labels, expected in cases:
            with check(labels):
                assert labels_in([{"text": "x", "label": each} for each in labels]) == expected
        with check("a CSV file of scores"), pytest.raises(FeedError, match=r"label -0\.5 is a num"):
            labels_in([{"text": "x", "label": each} for each in ("1.0", "-0.5")])
        for label in (float("nan"), "", " ", ["a"], 0.5, None):
            with check(label), pytest.raises(FeedError, match="row 2"):
                labels_in([{"text": "x", "label": each} for each in ("a", label)])


@pytest.mark.slow
def test_texts_are_cut_as_the_folder_says(tmp_path: Path) -> None:
    folder = write(encoder("BertModel"), tmp_path / "base", pooling="mean")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    rows = [{"anchor": "it was a good film", "positive": "nice"}]
    tuning = FineTuning(folder, 2, task="retrieval")
    assert tuning.show(rows) == "row 1: [CLS] it was [SEP] | [CLS] nice [SEP]"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Roberta", "MPNet", "XLMRoberta", "Bert", "GPT2"])
def test_the_longest_text_is_transformers(kind: str, tmp_path: Path) -> None:
    """Positions of RoBERTa begin behind the token of padding; GPT-2 has another name for them."""
    import torch
    import transformers

    sizes = {"vocab_size": 24, "pad_token_id": 3, "max_position_embeddings": 18, "n_positions": 18}
    sizes |= {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    longest = open_folder(tmp_path).context_length
    assert longest is not None
    for length in (longest, longest + 1):
        try:
            with torch.no_grad():
                model(torch.full((1, length), 5), attention_mask=torch.ones(1, length))
        except (IndexError, RuntimeError):
            break
    assert length == longest + 1


@pytest.mark.slow
def test_a_model_of_one_number_needs_labels(tmp_path: Path) -> None:
    model = encoder("BertForSequenceClassification", num_labels=1)
    folder = write(model, tmp_path / "base")
    message = "labels must be the names of at least 2 classes, as 'model.onnx' computes one number"
    for task in ("classification", "pairs"):
        with pytest.raises(ArgumentError, match=f"{message} .* got none"):
            FineTuning(folder, 2, task=task)
    found = check_folder(folder)
    assert not found.tasks
    assert all(message in each for each in found.problems)
    tuning = FineTuning(folder, 2, task="classification", labels=CLASSES)
    tuning.fit([{"text": text, "label": label} for text, label in TEXTS], progress=False)


@pytest.mark.slow
def test_a_model_of_several_labels_is_no_classifier(tmp_path: Path) -> None:
    model = encoder(BERT, num_labels=2, problem_type="multi_label_classification")
    folder = write(model, tmp_path / "base")
    message = "problem_type 'multi_label_classification', but task='classification' trains one"
    for labels in (None, ["LABEL_0", "LABEL_1"]):
        with pytest.raises(ModelError, match=message):
            FineTuning(folder, 2, task="classification", labels=labels)
    assert not check_folder(folder).tasks
    tuning = FineTuning(folder, 2, task="classification", labels=["a", "b", "c"])
    tuning.fit([{"text": "good", "label": name} for name in "abc"], progress=False)
    tuning.save(tmp_path / "tuned")
    saved = json.loads((tmp_path / "tuned/config.json").read_text())
    assert saved["problem_type"] == "single_label_classification"


@pytest.mark.slow
def test_embeddings_are_made_as_the_folder_says(tmp_path: Path) -> None:
    """Pooling may be at another place, texts in lower case, and there may be further modules."""
    lower = [{"anchor": a, "positive": b} for a, b in (("it was good", "nice"), ("a film", "bad"))]
    rows = [{name: text.title() for name, text in row.items()} for row in lower]
    model = encoder("BertModel")

    def loss(folder: Path, rows: Any) -> float:
        return float(FineTuning(folder, 2, task="retrieval").evaluate(rows)["loss"])

    folder = write(model, tmp_path / "cls", pooling="cls")
    expected, mean = loss(folder, lower), loss(write(model, tmp_path / "m", pooling="mean"), lower)
    assert len({expected, mean, loss(folder, rows)}) == 3
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "pool"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").rename(folder / "pool")
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert loss(folder, rows) == loss(folder, lower) == expected
    FineTuning(folder, 2, task="retrieval").save(tmp_path / "tuned")
    assert loss(tmp_path / "tuned", rows) == pytest.approx(expected, abs=1e-5)
    classifier = FineTuning(folder, 2, task="classification", labels=CLASSES)  # for no such reader
    assert "[UNK]" in classifier.show([{"text": "Good", "label": "good"}])
    for name in ("Dense", "LayerNorm"):
        more = {"idx": 3, "name": "3", "path": f"3_{name}", "type": f"sentence_transformers.{name}"}
        (folder / "modules.json").write_text(json.dumps([*modules, more]))
        message = rf"the module {name} of modules.json is not in 'model.onnx'; export .*_embedding'"
        with pytest.raises(UnsupportedError, match=message):
            loss(folder, rows)
        found = check_folder(folder)
        assert found.tasks == ["classification"]
        assert [each.split(":")[0] for each in found.said] == ["not for pairs", "not for retrieval"]


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True], ids=["TorchScript", "dynamo"])
def test_the_first_token_of_a_decoder_stands_for_no_text(dynamo: bool, tmp_path: Path) -> None:
    causal = encoder("BertModel", is_decoder=True, use_cache=False)
    folder = write(causal, tmp_path / "base", dynamo=dynamo)
    with pytest.raises(ModelError, match=r"sees no later ones.*pooling_mode_mean_tokens"):
        FineTuning(folder, 2, task="classification", labels=CLASSES)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    FineTuning(folder, 2, task="classification", labels=CLASSES)


@pytest.mark.slow
def test_a_check_says_what_a_decoder_cannot_learn(tmp_path: Path) -> None:
    plain = check_folder(write(encoder("BertModel"), tmp_path / "plain"))
    assert plain.tasks == ["classification", "pairs", "retrieval"]
    folder = write(encoder("BertModel", is_decoder=True, use_cache=False), tmp_path / "causal")
    found = check_folder(folder)
    assert found.tasks == ["pairs", "retrieval"]  # which pool the mean
    assert "not for classification: " in str(found)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    assert len(check_folder(folder).problems) == 3


@pytest.mark.slow
def test_a_check_says_that_an_encoder_of_integers_is_not_tuned(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    model = encoder(BERT, id2label=dict(enumerate(CLASSES)))
    folder = write(model, tmp_path / "base")
    quantize_dynamic(folder / "model.onnx", folder / "model.onnx")
    found = check_folder(folder)
    assert not found.tasks
    assert [each.split(":")[0] for each in found.problems] == [
        "not for classification",
        "not for pairs",
    ]
    assert str(found).startswith("text encoder model.onnx\n")
    assert "\nproblems: 2\n" in str(found)
    for rank in (8, None):  # no rank helps
        with pytest.raises(ortops.UnsupportedError, match=r"is INT8.*: give the folder in float"):
            FineTuning(folder, rank, task="classification")


@pytest.mark.slow
def test_a_classifier_of_tokens_is_refused_with_the_call_that_trains_it(tmp_path: Path) -> None:
    folder = write(encoder("BertForTokenClassification", id2label={0: "a", 1: "b"}), tmp_path)
    call = r"train it with ortops.build_training_model\((.*)\)$"
    found = set()
    for given in ({}, *({"task": task} for task in TASKS), {**CLASSIFY, "labels": CLASSES}):
        with pytest.raises(ModelError, match=call) as raised:
            FineTuning(folder, 2, **given)
        found |= {re.search(call, str(raised.value))[1]}
    (problem,) = check_folder(folder).problems
    assert found == {re.search(call, problem)[1]}
    names = {"ortops": ortops, "file": folder / "model.onnx"}
    session = ortops.TrainingSession(eval(f"ortops.build_training_model({found.pop()})", names))
    tokens = np.array([[2, 4, 9, 3]])
    data = {"input_ids": tokens, "attention_mask": tokens**0, "token_type_ids": 0 * tokens}
    data["labels"] = np.array([[-100, 0, 1, -100]])
    losses = [float(session.step(data)["loss"]) for _ in range(99)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_classifier_in_float16(training: bool, tmp_path: Path) -> None:
    import torch
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = encoder(BERT, id2label=dict(enumerate(CLASSES)))
    folder = write(model, tmp_path / "base", training=training)
    half = convert_float_to_float16(onnx.load(folder / "model.onnx"))
    onnx.save(half, folder / "model.onnx")
    rows = [{"text": text, "label": label} for text, label in TEXTS]
    tuning = FineTuning(folder, None, task="classification", optimizer=SGD(RATE))
    history = tuning.fit(rows, **CALL, save=tmp_path / "tuned")
    expected = curve(model, [TEXTS[:3], TEXTS[3:]], classified)
    np.testing.assert_allclose([each["loss"] for each in history], expected, rtol=2e-3)
    saved = onnx.load(tmp_path / "tuned" / "model.onnx")
    types = {tensor.name: tensor.data_type for tensor in saved.graph.initializer}
    assert types["classifier.weight"] == onnx.TensorProto.FLOAT16
    given = {name: tensor.numpy() for name, tensor in feeds([t for t, _ in TEXTS], model).items()}
    served = onnxruntime.InferenceSession(saved.SerializeToString()).run(["logits"], given)[0]
    with torch.no_grad():
        logits = model(**feeds([t for t, _ in TEXTS], model))[0].numpy()
    np.testing.assert_allclose(served, logits, atol=5e-3)


@pytest.mark.slow
def test_wrong_rows_arguments_and_models_are_refused(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    integers = "is INT8, read by MatMulInteger node .*: give the folder in floating point"
    encoders = {
        "plain": write(encoder("BertModel"), tmp_path / "plain"),
        "classifier": write(
            encoder("BertForSequenceClassification", id2label=dict(enumerate(CLASSES))),
            tmp_path / "classifier",
        ),
        "unmasked": write(encoder("BertModel"), tmp_path / "unmasked"),
        "distil": write(encoder("DistilBertForSequenceClassification"), tmp_path / "distil"),
        "integers": write(encoder("BertModel"), tmp_path / "integers"),
    }
    quantize_dynamic(tmp_path / "plain/model.onnx", tmp_path / "integers/model.onnx")
    for name, file, content in (
        ("wrong", "modules.json", "3"),
        ("last", "1_Pooling/config.json", '{"pooling_mode_lasttoken": true}'),
    ):
        encoders[name] = write(encoder("BertModel"), tmp_path / name, pooling="mean")
        (encoders[name] / file).write_text(content)
    unmasked = onnx.load(tmp_path / "unmasked/model.onnx")
    for node in unmasked.graph.node:
        node.input[:] = ["input_ids" if n == "attention_mask" else n for n in node.input]
    onnx.save(unmasked, tmp_path / "unmasked/model.onnx")
    with all_violations() as check:
        for folder, arguments, message in (
            ("plain", {}, "is not a language model: it is an encoder.*task="),
            ("plain", {"task": "nothing"}, "task must be"),
            ("distil", {}, "is not a language model: it has no logits of each token.*task="),
            ("integers", {"task": "retrieval"}, integers),
            ("integers", {"task": "pairs"}, integers),
            ("integers", {**CLASSIFY, "labels": CLASSES}, integers),
            ("plain", {"task": "classification"}, "labels must be the names"),
            ("plain", {"task": "retrieval", "labels": ["a", "b"]}, "labels must be left out"),
            ("plain", {"task": "classification", "labels": ["a"]}, "at least 2 classes"),
            ("plain", {"task": "classification", "labels": ["a", "a"]}, "each once"),
            ("plain", {"task": "retrieval", "loss": "DPO"}, "loss must be InfoNCE or Triplet"),
            ("plain", {"labels": CLASSES}, "labels need task="),
            ("classifier", {"task": "retrieval"}, "has no embeddings"),
            (
                "classifier",
                {**CLASSIFY, "labels": ["good", "bad"]},
                "the order of.*, bad, good, got",
            ),
            ("unmasked", {"task": "retrieval"}, "does not read its attention_mask"),
            ("wrong", {"task": "retrieval"}, "must have a list of modules"),
            ("last", {"task": "retrieval"}, "must choose one of cls, mean, max, got lasttoken"),
        ):
            with check((folder, arguments)), pytest.raises(OrtopsError, match=message):
                FineTuning(encoders[folder], 2, **arguments)
        classifier = FineTuning(encoders["classifier"], 2, task="classification")
        ratings = {"task": "classification", "labels": ["1", "2", "3"]}
        stars = FineTuning(encoders["plain"], 2, **ratings)
        scores = FineTuning(encoders["plain"], 2, task="pairs")
        answers = FineTuning(encoders["plain"], 2, task="retrieval", loss="Triplet")
        nearest = FineTuning(encoders["plain"], 2, task="retrieval")
        for tuning, row, message in (
            (classifier, {"text": "good"}, "must have text.*label"),
            (classifier, {"text": "good", "label": "ugly"}, "must be one of 'bad', 'good'"),
            (classifier, {"text": "good", "label": 2}, "must be one of 'bad', 'good'"),
            (classifier, {"text": "good", "label": float("nan")}, "a text that is not empty.*nan"),
            (classifier, {"text": "good", "label": 0.5}, "an integer or a boolean, got 0.5"),
            (classifier, {"text": "good", "label": ["bad"]}, "an integer or a boolean, got .'bad'"),
            (stars, {"text": "good", "label": 0}, "must be one of '1', '2', '3', got 0"),
            (classifier, {"text": " ", "label": "bad"}, "not empty"),
            (classifier, {"text": 3, "label": "bad"}, "not empty"),
            (classifier, "good", "must have text"),
            (scores, {"sentence1": "good", "score": 1}, "must have sentence1"),
            (scores, {"sentence1": "a", "sentence2": "b", "score": 4}, "from -1 to 1, got 4"),
            (scores, {"sentence1": "a", "sentence2": "b", "score": float("nan")}, "got nan; leave"),
            (scores, {"sentence1": "a", "sentence2": "b"}, "'score'"),
            (
                nearest,
                {"anchor": "a", "positive": "b", "score": 0},
                "score must be left out.*got 0",
            ),
            (nearest, {"premise": "a", "hypothesis": "b", "label": 2}, "label must be left out"),
            (answers, {"anchor": "good", "positive": "bad"}, "negative"),
        ):
            with check(row), pytest.raises(FeedError, match=message):
                tuning.fit([row], progress=False)
        with check("generate"), pytest.raises(UnsupportedError, match="generates no text"):
            scores.generate("good")
    assert scores.show([{"sentence1": "good", "sentence2": "bad", "score": 0.5}]) == (
        "row 1: [CLS] good [SEP] | [CLS] bad [SEP] → 0.5"
    )
