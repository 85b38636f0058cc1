"""Memory and speed of tuning a language model of 1.1e9 parameters with LoRA.

Writes a Llama with random weights, as onnxruntime-genai's builder does (int4 in blocks of 32), and
tunes it in a process of its own::

    python -m benchmarks.language FOLDER             # writes the model into FOLDER, if it is empty
    python -m benchmarks.language FOLDER --peer torch --dtype bfloat16 --recompute 1
    python -m benchmarks.language FOLDER --dtype float16 --providers CUDAExecutionProvider

The weights are written one by one, so a model may be larger than memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.start import PROJECT, peak_megabytes
from benchmarks.task import threads

__all__ = ["Sizes", "main", "measure", "run", "write"]

BLOCK = 32
_MICROSOFT = ("GroupQueryAttention", "MatMulNBits", "SkipSimplifiedLayerNormalization")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama; by default, 1.1e9 parameters.

    Attributes:
        layers: The number of layers.
        hidden: The width.
        heads: The number of attention heads.
        pairs: The number of heads of keys and values.
        wide: The width inside the MLP.
        words: The size of the vocabulary.
        context: The context length.
        bits: The bits of a weight: 4, or as many as other tensors have.
        dtype: The type of all tensors that are not quantized: float32 or float16, or another of
            PyTorch's for PyTorch.
    """

    layers: int = 22
    hidden: int = 2048
    heads: int = 32
    pairs: int = 4
    wide: int = 5632
    words: int = 32000
    context: int = 2048
    bits: int = 4
    dtype: str = "float32"

    @property
    def head(self) -> int:
        """The width of a head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """The number of weights in matrices."""
        attention = self.hidden * (2 * self.hidden + 2 * self.pairs * self.head)
        return self.layers * (attention + 3 * self.hidden * self.wide) + (
            2 * self.words * self.hidden
        )


class _Writer:
    """Collects nodes, and writes weights to the data file as they come."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self._stream = (folder / "model.onnx.data").open("wb")
        self._sizes = sizes
        self._draw = np.random.default_rng(0)

    def node(self, kind: str, inputs: Sequence[str], name: str, count: int = 1, **more: Any) -> str:
        outputs = [f"{name}/output_{number}" for number in range(count)]
        domain = "com.microsoft" if kind in _MICROSOFT else ""
        self.nodes.append(helper.make_node(kind, inputs, outputs, name, domain=domain, **more))
        return outputs[0]

    def store(self, name: str, array: np.ndarray) -> str:
        if array.nbytes < 1024:
            self.tensors.append(numpy_helper.from_array(array, name))
            return name
        offset = -(-self._stream.tell() // 4096) * 4096
        self._stream.seek(offset)
        self._stream.write(array.data)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        where = {"location": "model.onnx.data", "offset": offset, "length": array.nbytes}
        for key, value in where.items():
            tensor.external_data.add(key=key, value=str(value))
        self.tensors.append(tensor)
        return name

    def normal(self, name: str, shape: Sequence[int], scale: float) -> str:
        values = self._draw.standard_normal(shape, np.float32)
        return self.store(name, self.floats(np.multiply(values, scale, dtype=np.float32)))

    def floats(self, values: np.ndarray) -> np.ndarray:
        """Returns values in the model's type."""
        return values.astype(self._sizes.dtype, copy=False)

    def linear(self, x: str, scope: str, into: int, out: int) -> str:
        name, weight = f"/{scope.replace('.', '/')}/MatMul", f"{scope}.MatMul.weight"
        if self._sizes.bits != 4:
            return self.node("MatMul", [x, self.normal(weight, (into, out), into**-0.5)], name)
        numbers = self._draw.integers(0, 256, (out, into // BLOCK, BLOCK // 2), np.uint8)
        spread = (into * (2**8 - 1) / 12) ** -0.5  # integers from 0 to 15 have variance 255 / 12
        scales = self.floats(spread * self._draw.uniform(0.8, 1.2, (out, into // BLOCK)))
        inputs = [self.store(f"{weight}_Q4", numbers), self.store(f"{weight}_scales", scales)]
        settings = {"K": into, "N": out, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
        return self.node("MatMulNBits", [x, *inputs], f"{name}_Q4", **settings)

    def norm(self, x: Sequence[str], scope: str) -> tuple[str, str]:
        weight = self.store(f"{scope}.weight", np.ones(self._sizes.hidden, self._sizes.dtype))
        name = "/" + scope.replace(".", "/")
        if len(x) == 1:
            kind = "SimplifiedLayerNormalization"
            return x[0], self.node(kind, [*x, weight], name, axis=-1, epsilon=1e-5)
        kind = "SkipSimplifiedLayerNormalization"
        y = self.node(kind, [*x, weight], name, 4, epsilon=1e-5)
        self.nodes[-1].output[1] = self.nodes[-1].output[2] = ""
        return self.nodes[-1].output[3], y

    def close(self) -> None:
        self._stream.close()


def write(folder: str | Path, sizes: Sizes) -> Path:
    """Writes the folder of a model, which onnxruntime-genai opens; weights are external data."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    writer = _Writer(path, sizes)
    node, store = writer.node, writer.store
    store("one", np.array([1])), store("second", np.array(1))
    count = node("ReduceSum", ["attention_mask", "one"], "/mask/ReduceSum", keepdims=1)
    last = node("Sub", [count, "one"], "/mask/Sub")
    lengths = node("Cast", [last], "/mask/Cast", to=TensorProto.INT32)
    total = node("Shape", ["attention_mask"], "/mask/Shape")
    total = node("Gather", [total, "second"], "/mask/Gather", axis=0)
    total = node("Cast", [total], "/mask/Cast_1", to=TensorProto.INT32)
    rates = 10000.0 ** (-np.arange(0, sizes.head, 2) / sizes.head)
    angles = np.outer(np.arange(sizes.context), rates)
    caches = [store(f"{f.__name__}_cache", writer.floats(f(angles))) for f in (np.cos, np.sin)]
    table = writer.normal("model.embed_tokens.weight", (sizes.words, sizes.hidden), 1)
    x = node("Gather", [table, "input_ids"], "/model/embed_tokens/Gather")
    x, y = writer.norm([x], "model.layers.0.input_layernorm")
    for layer in range(sizes.layers):
        scope = f"model.layers.{layer}"
        width = (sizes.heads + 2 * sizes.pairs) * sizes.head
        qkv = writer.linear(y, f"{scope}.attn.qkv_proj", sizes.hidden, width)
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        settings = {"num_heads": sizes.heads, "kv_num_heads": sizes.pairs, "do_rotary": 1}
        inputs = [qkv, "", "", *past, lengths, total, *caches]
        name = f"/model/layers.{layer}/attn/GroupQueryAttention"
        y = node("GroupQueryAttention", inputs, name, 3, **settings, scale=sizes.head**-0.5)
        writer.nodes[-1].output[1:] = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        y = writer.linear(y, f"{scope}.attn.o_proj", sizes.hidden, sizes.hidden)
        x, y = writer.norm([x, y], f"{scope}.post_attention_layernorm")
        gate = writer.linear(y, f"{scope}.mlp.gate_proj", sizes.hidden, sizes.wide)
        up = writer.linear(y, f"{scope}.mlp.up_proj", sizes.hidden, sizes.wide)
        sigmoid = node("Sigmoid", [gate], f"/model/layers.{layer}/mlp/act_fn/Sigmoid")
        gate = node("Mul", [gate, sigmoid], f"/model/layers.{layer}/mlp/act_fn/Mul")
        y = node("Mul", [gate, up], f"/model/layers.{layer}/mlp/Mul")
        y = writer.linear(y, f"{scope}.mlp.down_proj", sizes.wide, sizes.hidden)
        x, y = writer.norm([x, y], f"model.layers.{layer + 1}.input_layernorm")
    writer.linear(y, "lm_head", sizes.hidden, sizes.words)
    writer.nodes[-1].output[0] = "logits"
    writer.close()
    onnx.save(_model(writer, sizes), path / "model.onnx")
    (path / "genai_config.json").write_text(json.dumps({"model": _settings(sizes)}))
    return path


def _model(writer: _Writer, sizes: Sizes) -> onnx.ModelProto:
    floats = helper.np_dtype_to_tensor_dtype(np.dtype(sizes.dtype))
    integers = TensorProto.INT64

    def caches(kind: str, length: str) -> list[onnx.ValueInfoProto]:
        shape = ["batch_size", sizes.pairs, length, sizes.head]
        names = [f"{kind}.{n}.{what}" for n in range(sizes.layers) for what in ("key", "value")]
        return [helper.make_tensor_value_info(name, floats, shape) for name in names]

    lengths = {"input_ids": "sequence_length", "attention_mask": "total_sequence_length"}
    inputs = [
        helper.make_tensor_value_info(name, integers, ["batch_size", length])
        for name, length in lengths.items()
    ]
    shape = ["batch_size", "sequence_length", sizes.words]
    logits = helper.make_tensor_value_info("logits", floats, shape)
    graph = helper.make_graph(
        writer.nodes,
        "main_graph",
        [*inputs, *caches("past_key_values", "past_sequence_length")],
        [logits, *caches("present", "total_sequence_length")],
        writer.tensors,
    )
    imports = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _settings(sizes: Sizes) -> dict[str, Any]:
    """Returns the part ``model`` of genai_config.json."""
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    past = {f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in ("key", "value")}
    present = {f"present_{kind}_names": f"present.%d.{kind}" for kind in ("key", "value")}
    decoder = {
        "session_options": {"provider_options": []},
        "filename": "model.onnx",
        "head_size": sizes.head,
        "hidden_size": sizes.hidden,
        "inputs": inputs | past,
        "outputs": {"logits": "logits"} | present,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.pairs,
    }
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "vocab_size": sizes.words}
    return {"type": "llama", "context_length": sizes.context, "decoder": decoder} | tokens


def _batches(sizes: Sizes, settings: argparse.Namespace) -> list[list[list[int]]]:
    generator = np.random.default_rng(1)
    shape = settings.steps, settings.batch, settings.length
    return generator.integers(3, sizes.words, shape).tolist()


def _ortops(folder: Path, sizes: Sizes, settings: argparse.Namespace) -> list[float]:
    """Tunes with ortops; returns the seconds of each step."""
    from ortops.llm import FineTuning

    more = {} if settings.recompute is None else {"recompute": settings.recompute or None}
    tuning = FineTuning(folder, rank=settings.rank, providers=settings.providers, **more)
    print(json.dumps({"opened": peak_megabytes()}), file=sys.stderr)
    batches, length = _batches(sizes, settings), settings.length
    seconds = []
    for rows in batches:
        begun = time.perf_counter()
        tuning.fit(rows, batch_size=settings.batch, max_length=length, progress=False)
        seconds.append(time.perf_counter() - begun)
    if settings.save:
        tuning.save(settings.save)
        print(json.dumps({"saved": peak_megabytes()}), file=sys.stderr)
    return seconds


def _torch(folder: Path, sizes: Sizes, settings: argparse.Namespace) -> list[float]:
    """Tunes a model of the same sizes with PyTorch and PEFT; see `_ortops`. It has no files."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(threads())
    config = transformers.LlamaConfig(
        vocab_size=sizes.words,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.wide,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.pairs,
        max_position_embeddings=sizes.context,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.set_default_dtype(getattr(torch, sizes.dtype))  # no copy in another type
    with torch.device(settings.device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if settings.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    adapter = peft.LoraConfig(r=settings.rank, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(model, adapter)
    model.train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, 2e-4, fused=True)
    seconds = []
    for rows in _batches(sizes, settings):
        begun = time.perf_counter()
        tokens = torch.tensor(rows, device=settings.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as ortops reads it
        if settings.device != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begun)
    return seconds


def measure(folder: str | Path, sizes: Sizes, *arguments: str) -> dict[str, Any]:
    """Tunes in a process of its own.

    Args:
        folder: The folder of the model.
        sizes: Its sizes.
        *arguments: Further arguments of the command line.

    Returns:
        ``megabytes``, the peak memory in 10⁶ bytes; ``seconds`` per step, the median without the
        first; and ``tokens``, per second.
    """
    given = [text for name, value in asdict(sizes).items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.language", str(folder), "--run", *given]
    done = subprocess.run(
        [*command, *arguments], cwd=PROJECT, stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(settings: argparse.Namespace) -> dict[str, Any]:
    """Tunes in this process; see `measure`.

    Args:
        settings: The arguments of the command line.
    """
    tune = _torch if settings.peer == "torch" else _ortops
    seconds = tune(settings.folder, sizes_of(settings), settings)
    second = statistics.median(seconds[1:])
    found = {"seconds": second, "tokens": settings.batch * settings.length / second}
    return {"megabytes": peak_megabytes()} | found


def sizes_of(settings: argparse.Namespace) -> Sizes:
    """Returns the sizes in the arguments of the command line."""
    return Sizes(*(getattr(settings, field.name) for field in fields(Sizes)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language")
    parser.add_argument("folder", type=Path)
    for field in fields(Sizes):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1, help="rows in a batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--peer", choices=("ortops", "torch"), default="ortops")
    parser.add_argument("--device", default="cpu", help="where PyTorch trains")
    parser.add_argument("--providers", nargs="+", help="where ortops trains")
    parser.add_argument(
        "--recompute",
        type=lambda text: int(text) if text.isdecimal() else text,
        help="activations to keep, or which to compute again, as for FineTuning; 0 for none",
    )
    parser.add_argument("--save", default="", help="a folder to save to at the end")
    parser.add_argument("--run", action="store_true", help="measure in this process")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    settings = parse(arguments)
    sizes = sizes_of(settings)
    if settings.run:
        print(json.dumps(run(settings)))
        return
    if settings.peer == "ortops" and not (settings.folder / "model.onnx").exists():
        write(settings.folder, sizes)
    kept = sys.argv[2:] if arguments is None else list(arguments)[1:]
    print(f"{sizes.parameters:,} parameters", measure(settings.folder, sizes, *kept))


if __name__ == "__main__":
    main()
