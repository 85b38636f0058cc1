"""A character-level language model learns to write like Python's language reference.

A causal transformer with 0.25 million weights reads 64 characters of the reference, which comes
with Python (`pydoc`), and predicts each next one. It is trained with AdamW, warm-up and a decaying
learning rate, and clipped gradients. Then stock onnxruntime generates a sample.

Perplexity on the last tenth of the text (of Python 3.11), which is not used for training: 3.64 over
94 characters.
"""

import argparse
import math
from pydoc_data.topics import topics

import numpy as np
import onnx
import onnxruntime

import ortops
from models.layers import embedding, glorot, layer_norm, linear, positions
from ortops import Tape, op

TEXT = "".join(c for c in " ".join(topics.values()) if " " <= c <= "~" or c == "\n")
CHARACTERS, LENGTH = np.unique(list(TEXT)), 64
QUICK = {"perplexity": 22.0}


def decoder(width: int = 96, depth: int = 2) -> onnx.ModelProto:
    """Builds a pre-norm transformer from character ids to the logits of the next characters."""
    rng, count = np.random.default_rng(0), len(CHARACTERS)
    with Tape(name="characters", opset=23) as tape:
        ids = tape.input("ids", np.int64, ["batch", "length"])
        x = positions(embedding(ids, "letters", count, width, rng), "positions", LENGTH, rng)
        for layer in range(depth):
            joined = linear(layer_norm(x, f"{layer}.norm1"), f"{layer}.qkv", 3 * width, rng)
            query, key, value = op.Split(joined, axis=-1, num_outputs=3)
            heard = op.Attention(query, key, value, is_causal=1, q_num_heads=4, kv_num_heads=4)
            x = x + linear(heard, f"{layer}.out", width, rng)
            wide = op.Gelu(linear(layer_norm(x, f"{layer}.norm2"), f"{layer}.up", 4 * width, rng))
            x = x + linear(wide, f"{layer}.down", width, rng)
        tape.output(linear(layer_norm(x, "norm"), "next", count, rng, init=glorot), "logits")
    return tape.model()


def write(model: onnx.ModelProto, start: str, length: int) -> str:
    """Continues a text, character by character, in stock onnxruntime."""
    session, rng = onnxruntime.InferenceSession(model.SerializeToString()), np.random.default_rng(0)
    for _ in range(length):
        ids = np.searchsorted(CHARACTERS, list(start[-LENGTH:]))
        logits = session.run(["logits"], {"ids": ids[None]})[0][0, -1] / 0.7  # the temperature
        start += rng.choice(CHARACTERS, p=np.exp(logits - np.logaddexp.reduce(logits)))
    return start


def main(quick: bool) -> dict[str, float]:
    """Trains the model, prints a sample and returns the perplexity."""
    ids = np.searchsorted(CHARACTERS, list(TEXT))
    windows = np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1)[::LENGTH]
    rows = {"ids": windows[:, :-1], "labels": windows[:, 1:]}
    border = len(windows) * 9 // 10
    train = {name: array[: 2400 if quick else border] for name, array in rows.items()}
    test = {name: array[border:][: 100 if quick else None] for name, array in rows.items()}
    epochs = 1 if quick else 8
    steps = epochs * math.ceil(len(train["ids"]) / 32)
    rate = ortops.schedules.warmup_cosine(3e-3, steps=steps, warmup=steps // 10)
    loss = ortops.losses.SoftmaxCrossEntropy(axis=-1)
    adamw = ortops.optimizers.AdamW(rate)
    trainable = ortops.build_training_model(decoder(), loss=loss, optimizer=adamw, clip_norm=1.0)
    session = ortops.TrainingSession(trainable)
    session.fit(train, epochs=epochs)
    perplexity = session.evaluate(test, metrics=["perplexity"])["perplexity"]
    print(f"perplexity {perplexity:.2f}", write(session.inference_model(), "The ", 300), sep="\n\n")
    return {"perplexity": perplexity}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="on a part of the text, in seconds")
    main(parser.parse_args().quick)
