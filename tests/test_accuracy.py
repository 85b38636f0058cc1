"""How far gradients in float32 are from those in float64, next to PyTorch's in float32.

Six transformers are exported, and four models come from others' packages. For each parameter g of
Σ weight · output, with fixed random weights, the figure is ‖g − g₆₄‖ / ‖g₆₄‖, the median of five
random batches; that of ortops is at most three times that of PyTorch on the same model. It is
compared twice: for a Gradient node that is lowered and run by onnxruntime, and for what a
TrainingSession computes, with all its passes, which is what Momentum starts from.

g₆₄ is PyTorch's in float64. Of a transformer it is the module's own; the files of others are run
operator by operator with the functions of `torch_operators`. Where BatchNormalization is, a
TrainingSession is compared with its training mode, and a Gradient node with its inference mode.

‖g₆₄‖ divides both figures. So for a gradient that is zero but for rounding, as that of a key's bias
or of one before a normalization, their ratio is that of the absolute errors. The few rounding
errors of a parameter of some numbers may cancel by chance: where it has fewer than 16, PyTorch's
figure counts as no less than the median of its figures.

One batch tells little of the detector: a few numbers near the kinks and ends of its functions make
most of both errors, which are 0.4 to 6 times each other. Over 15 batches of 64×96 pixels, the
medians' ratio is 1.0, and 1.7 for the parameter where it is greatest.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch_operators
from onnx import TensorProto, helper, numpy_helper
from running import plain_session, run_session
from test_exported_models import (
    Export,
    Gradients,
    exported,
    parameters_of,
    pretrained,
    quiet_exporters,  # noqa: F401  a fixture for every test
    with_gradients,
)
from torch.overrides import TorchFunctionMode

import ortops
from ortops import Tensor, op
from ortops.engine.execution.settings import Settings

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """PyTorch's sums depend on its threads; it is compared with those that it has by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


TIMES = 3.0
BATCHES = 5
FEW = 16

Feeds = dict[str, np.ndarray]

# ------------------------------------------------------------------------------------ transformers

BATCH, LENGTH = 8, 64
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"intermediate_size": 128}
TOKENS = {"vocab_size": 100, "max_position_embeddings": LENGTH}
SEQUENCE = {0: "batch", 1: "length"}
IDS = {"input_ids": SEQUENCE, "attention_mask": SEQUENCE}


def masked() -> dict[str, torch.Tensor]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, LENGTH - 9 :] = 0
    return {"input_ids": tokens(LENGTH), "attention_mask": mask}


def tokens(length: int) -> torch.Tensor:
    return torch.randint(1, 100, (BATCH, length))  # 0 is padding, to which no gradient flows


TRANSFORMERS = {
    "bert": (
        "dynamo",
        Export(pretrained("BertModel", (*IDS,), **SMALL, **WIDE, **TOKENS), masked, IDS),
    ),
    "distilbert": (
        "torchscript",
        Export(
            pretrained(
                "DistilBertModel", (*IDS,), dim=64, hidden_dim=128, n_layers=2, n_heads=4, **TOKENS
            ),
            masked,
            IDS,
        ),
    ),
    "gpt2": (
        "torchscript",
        Export(
            pretrained(
                "GPT2LMHeadModel",
                (*IDS,),
                n_embd=64,
                n_layer=2,
                n_head=4,
                n_positions=LENGTH,
                vocab_size=100,
            ),
            masked,
            IDS,
        ),
    ),
    "llama": (
        "dynamo",
        Export(
            pretrained(
                "LlamaForCausalLM", (*IDS,), num_key_value_heads=2, **SMALL, **WIDE, **TOKENS
            ),
            masked,
            IDS,
        ),
    ),
    "t5": (
        "torchscript",
        Export(
            pretrained(
                "T5ForConditionalGeneration",
                ("input_ids", "decoder_input_ids"),
                vocab_size=100,
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                attn_implementation="eager",
            ),
            lambda: {"input_ids": tokens(LENGTH), "decoder_input_ids": tokens(LENGTH // 2)},
            {"input_ids": SEQUENCE, "decoder_input_ids": {0: "batch", 1: "target"}},
        ),
    ),
    "vit": (
        "dynamo",
        Export(
            pretrained("ViTModel", ("pixel_values",), image_size=32, patch_size=8, **SMALL, **WIDE),
            lambda: {"pixel_values": torch.randn(BATCH, 3, 32, 32)},
            {"pixel_values": {0: "batch"}},
        ),
    ),
}
"""Models by name: with which exporter they are exported, and how."""


class _InDouble(TorchFunctionMode):
    """Lets a module compute in float64 where its code says float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = {torch.float32: torch.float64}
        args = [widened.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        named = {
            key: widened.get(a, a) if isinstance(a, torch.dtype) else a
            for key, a in (kwargs or {}).items()
        }
        result = func(*args, **named)
        assert not isinstance(result, torch.Tensor) or result.dtype != torch.float32
        return result


@contextlib.contextmanager
def in_double(module: torch.nn.Module) -> Iterator[None]:
    module.double()
    torch.set_default_dtype(torch.float64)
    try:
        with _InDouble():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        module.float()


class Transformer:
    """An exported transformer, with batches and weights of its output.

    Attributes:
        model: The exported model.
        batches: The feeds.
        weights: The weights of the output, for each batch.
        trainable: The initializers that are parameters.
    """

    def __init__(self, name: str) -> None:
        exporter, example = TRANSFORMERS[name]
        torch.manual_seed(20)
        self.module = example.build().eval()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))  # equal ones would be merged
        self._inputs = [example.inputs() for _ in range(BATCHES)]
        self.model = exported(example, self.module, self._inputs[0], exporter)
        taken = {value.name for value in self.model.graph.input}
        self.batches = [
            {key: value.numpy() for key, value in each.items() if key in taken}
            for each in self._inputs
        ]
        self._known = parameters_of(self.model, self.module)
        self.trainable = list(self._known)
        with torch.no_grad():
            values = [self.module(*each.values()).numpy() for each in self._inputs]
        self.weights = _weights_like(self.model, self.batches, values)

    def expected(self, index: int, *, double: bool, training: bool) -> Gradients:
        """Returns PyTorch's gradients of a batch; nothing differs in training."""
        with in_double(self.module) if double else contextlib.nullcontext():
            given = self._inputs[index].values()
            if double:
                given = [x.double() if x.is_floating_point() else x for x in given]
            weight = torch.from_numpy(self.weights[index])
            loss = (self.module(*given) * (weight.double() if double else weight)).sum()
            names, parameters = zip(*self.module.named_parameters(), strict=True)
            made = torch.autograd.grad(loss, parameters, materialize_grads=True)
        return {name: gradient.numpy() for name, gradient in zip(names, made, strict=True)}

    def by_parameter(self, made: Gradients) -> Gradients:
        """Returns gradients of initializers by the names of the module's parameters."""
        found: Gradients = {}
        for key, gradient in made.items():
            name, axes = self._known[key]
            gradient = gradient if axes is None else gradient.transpose(axes)
            found[name] = found.get(name, 0) + gradient  # one parameter in several places
        return found


# --------------------------------------------------------------------------------- files of others

FOLDER = Path(__file__).parents[1] / ".models"
DETECTOR, RECOGNIZER = "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx"
CLASSIFIER, VOICE = "ch_ppocr_mobile_v2.0_cls_mobile.onnx", "silero_vad_op18_ifless.onnx"

FILES: dict[str, dict[str, Any]] = {
    VOICE: {"input": (4, 576), "state": (2, 4, 128), "sr": np.array(16000)},
    CLASSIFIER: {"x": (2, 3, 48, 96)},
    RECOGNIZER: {"x": (2, 3, 48, 64)},
    DETECTOR: {"x": (2, 3, 96, 128)},
}
"""Files, the fastest first: what they are fed, arrays or the shapes of random ones."""

BOUNDS = {DETECTOR: 1e-2, VOICE: 5e-5}
"""Files of which a lowered model reaches a figure, and not three times PyTorch's.

They end in a Sigmoid whose values are small, of which onnxruntime's kernel has few digits: it is
right to 3e-8 of 1. A lowered model keeps the operators that are served, and its gradient is that of
what they compute. A TrainingSession takes Sigmoid apart (`ortops.graph.passes.rounding`).
"""


class File:
    """A model that others wrote; see `Transformer` for the attributes.

    Args:
        name: The file.
        output: The tensor that is the output; the first one of the model by default.
    """

    trainable = None

    def __init__(self, name: str, output: str = "") -> None:
        self.model = onnx.load(FOLDER / name)
        output = output or self.model.graph.output[0].name
        del self.model.graph.output[:]
        self.model.graph.output.append(helper.make_tensor_value_info(output, 1, None))
        rng = np.random.default_rng(20)
        self.batches: list[Feeds] = [
            {
                key: rng.standard_normal(given, np.float32) if isinstance(given, tuple) else given
                for key, given in FILES[name].items()
            }
            for _ in range(BATCHES)
        ]
        self._graph = onnx.version_converter.convert_version(self.model, 21).graph
        self._parameters = _parameters_out_of(self._graph)
        with torch.no_grad():
            values = [self._run(feeds, self._tensors()).numpy() for feeds in self.batches]
        self.weights = _weights_like(self.model, self.batches, values)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch_operators.constant(p) for name, p in self._parameters.items()}

    def _run(self, feeds: Feeds, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        given = {name: torch_operators.constant(array) for name, array in feeds.items()}
        (y,) = torch_operators.evaluate(self._graph, {**given, **parameters}).values()
        return y

    def expected(self, index: int, *, double: bool, training: bool) -> Gradients:
        """Returns PyTorch's gradients of a batch, of the model as it is or as it is trained."""
        for node in self._graph.node:
            if node.op_type == "BatchNormalization":
                kept = [a for a in node.attribute if a.name != "training_mode"]
                del node.attribute[:]
                mode = helper.make_attribute("training_mode", int(training))
                node.attribute.extend([*kept, mode])
        with torch_operators.precision(np.float64 if double else np.float32):
            parameters = self._tensors()
            for parameter in parameters.values():
                parameter.requires_grad_()
            y = self._run(self.batches[index], parameters)
            assert y.dtype == (torch.float64 if double else torch.float32)
            loss = (y * torch_operators.constant(self.weights[index])).sum()
            made = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        return {name: gradient.numpy() for name, gradient in zip(parameters, made, strict=True)}

    def by_parameter(self, made: Gradients) -> Gradients:
        return made


def _parameters_out_of(graph: onnx.GraphProto) -> Gradients:
    """Takes out what may be trained: initializers and values of Constant nodes, but no scalars."""
    found: Gradients = {}
    for tensor in list(graph.initializer):
        if tensor.data_type == TensorProto.FLOAT and tensor.dims:
            found[tensor.name] = numpy_helper.to_array(tensor)
            graph.initializer.remove(tensor)
    for node in list(graph.node):
        if node.op_type == "Constant":
            tensor = node.attribute[0].t
            if tensor.data_type == TensorProto.FLOAT and tensor.dims:
                found[node.output[0]] = numpy_helper.to_array(tensor)
                graph.node.remove(node)
    return found


def _weights_like(
    model: onnx.ModelProto, batches: Sequence[Feeds], values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns weights of outputs, which are PyTorch's and have to be onnxruntime's too."""
    session = plain_session(model)
    output = model.graph.output[0].name
    for feeds, value in zip(batches, values, strict=True):
        (found,) = run_session(session, feeds, [output])
        np.testing.assert_allclose(found, value, rtol=1e-3, atol=1e-4)
    rng = np.random.default_rng(20)
    return [rng.standard_normal(value.shape, np.float32) for value in values]


# ------------------------------------------------------------------------------------- the figures

Model = Transformer | File


def by_session(subject: Model, settings: Settings | None = None) -> list[Gradients]:
    """Returns the gradients that a TrainingSession computes."""

    def weighted(prediction: Tensor, targets: Tensor) -> Tensor:
        return op.ReduceSum(prediction * targets, keepdims=0)

    optimizer = ortops.optimizers.Momentum(learning_rate=0.0, alpha=0.0)
    model = ortops.build_training_model(
        subject.model, loss=weighted, optimizer=optimizer, trainable=subject.trainable
    )
    session = ortops.TrainingSession(model, settings=settings)
    found = []
    for feeds, weight in zip(subject.batches, subject.weights, strict=True):
        session.step({**feeds, "targets": weight})
        momenta = [name for name in session.state if name.endswith(".V")]
        found.append({name.removesuffix(".V"): session.state[name] for name in momenta})
    return found


def by_lowered(subject: Model, names: Sequence[str]) -> list[Gradients]:
    """Returns the gradients of a lowered Gradient node."""
    model = with_gradients(subject.model, list(names), subject.weights[0])
    weight = model.graph.initializer.pop()
    model.graph.input.append(
        helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
    )
    model.ir_version = max(model.ir_version, 4)
    session = plain_session(ortops.lower(model))
    return [
        dict(zip(names, run_session(session, {**feeds, weight.name: array}), strict=True))
        for feeds, array in zip(subject.batches, subject.weights, strict=True)
    ]


def expected(subject: Model, *, training: bool) -> tuple[list[Gradients], list[Gradients]]:
    """Returns PyTorch's gradients in float64 and in float32."""
    exact, rounded = (
        [subject.expected(i, double=double, training=training) for i in range(BATCHES)]
        for double in (True, False)
    )
    return exact, rounded


def figures(found: Sequence[Gradients], exact: Sequence[Gradients]) -> dict[str, float]:
    """Returns the figure of each parameter; an absolute error where the gradient is 0."""
    return {
        name: float(
            np.median(
                [
                    np.linalg.norm(g[name] - right[name]) / (np.linalg.norm(right[name]) or 1.0)
                    for g, right in zip(found, exact, strict=True)
                ]
            )
        )
        for name in found[0]
    }


def too_far(
    subject: Model, found: Sequence[Gradients], exact: list[Gradients], rounded: list[Gradients]
) -> dict[str, tuple[float, float]]:
    """Returns the figures, ortops' and PyTorch's, where one is more than three times the other."""
    found = [subject.by_parameter(each) for each in found]
    ours, theirs = figures(found, exact), figures(rounded, exact)
    middle = float(np.median([theirs[name] for name in ours]))
    return {
        name: (figure, theirs[name])
        for name, figure in ours.items()
        if figure > TIMES * max(theirs[name], middle if exact[0][name].size < FEW else 0.0)
    }


@functools.cache
def file(name: str) -> File:
    return File(name)


@functools.cache
def trained(name: str) -> tuple[list[Gradients], list[Gradients]]:
    return expected(file(name), training=True)


FETCHED = [pytest.param(name, marks=pytest.mark.fetched(FOLDER / name)) for name in FILES]


# Those of the older exporter first, which takes a second where the other one takes ten.
@pytest.mark.nightly(1)
@pytest.mark.parametrize(
    "name", sorted(TRANSFORMERS, key=lambda name: TRANSFORMERS[name][0], reverse=True)
)
def test_transformers(name: str) -> None:
    subject = Transformer(name)
    right = expected(subject, training=False)
    assert not too_far(subject, by_session(subject), *right)
    assert not too_far(subject, by_lowered(subject, subject.trainable), *right)


@pytest.mark.nightly(1)
@pytest.mark.parametrize("name", FETCHED)
def test_sessions_of_files(name: str) -> None:
    assert not too_far(file(name), by_session(file(name)), *trained(name))


@pytest.mark.nightly(1)
@pytest.mark.parametrize("name", FETCHED)
def test_lowered_files(name: str) -> None:
    exact, rounded = expected(file(name), training=False)
    found = by_lowered(file(name), list(exact[0]))
    if name in BOUNDS:
        assert max(figures(found, exact).values()) < BOUNDS[name]
    else:
        assert not too_far(file(name), found, exact, rounded)


@pytest.mark.nightly(0)
@pytest.mark.fetched(FOLDER / DETECTOR)
def test_a_lowered_file_without_its_sigmoid() -> None:
    *_, last = (
        node for node in onnx.load(FOLDER / DETECTOR).graph.node if node.op_type == "Sigmoid"
    )
    subject = File(DETECTOR, output=last.input[0])
    exact, rounded = expected(subject, training=False)
    assert not too_far(subject, by_lowered(subject, list(exact[0])), exact, rounded)


@pytest.mark.fetched(FOLDER / VOICE)
def test_it_can_fail() -> None:
    found = [
        {name: gradient * (1 + 1e-3) for name, gradient in batch.items()}
        for batch in by_session(file(VOICE))
    ]
    changed = {name for name, gradient in found[0].items() if gradient.any()}  # not those at 8 kHz
    assert changed
    assert too_far(file(VOICE), found, *trained(VOICE)).keys() == changed


@pytest.mark.nightly(0)
@pytest.mark.fetched(FOLDER / DETECTOR)
def test_a_detector_needs_the_pass_for_rounding() -> None:
    found = by_session(file(DETECTOR), Settings().without("rounding"))
    assert len(too_far(file(DETECTOR), found, *trained(DETECTOR))) > 100
