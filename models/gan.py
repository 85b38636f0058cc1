"""A generative adversarial network of points in the plane, with two training algorithms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx

import ortops
from models.layers import he
from ortops import Tape, Tensor, op
from ortops.optimizers import Adam

__all__ = ["gan"]


def gan(width: int = 128, *, rate: float = 1e-3, seed: int = 0) -> onnx.ModelProto:
    """Builds a generator and a discriminator in one file, with an algorithm for each.

    The losses follow Goodfellow et al. 2014, with the generator's in the form that does not
    saturate: -log D(fake), and -log D(real) - log(1 - D(fake)).

    Args:
        width: The width of the hidden layers.
        rate: The learning rate of both.
        seed: The seed of the initial weights.

    Returns:
        A trainable model from ``noise`` and ``real``, float32 (batch, 2), to ``fake`` (batch, 2)
        and the logits of the discriminator. Its entries are ``main``, which trains the generator
        and reads only ``noise``, and ``discriminator``.

    Example:
        >>> [entry.algorithm.name for entry in gan(16).training_info]
        ['main', 'discriminator']
    """
    rng = np.random.default_rng(seed)
    with Tape(name="gan") as tape:
        noise = tape.input("noise", np.float32, ["batch", 2])
        real = tape.input("real", np.float32, ["batch", 2])
        weights = _weights(tape, "generator", (2, width, width, 2), rng)
        fake = tape.output(_mlp(noise, weights), "fake")
        weights = _weights(tape, "discriminator", (2, width, width, 1), rng)
        tape.output(_mlp(fake, weights), "fake_logits")  # the same weights twice
        tape.output(_mlp(real, weights), "real_logits")
    adam = Adam(learning_rate=rate, alpha=0.5, epsilon_after_correction=True)
    trainable = ortops.build_training_model(
        tape.model(),
        loss=_generator_loss,
        optimizer=adam,
        trainable=["generator.*"],
        ema_decay=0.99,
    )
    return ortops.add_training(
        trainable, name="discriminator", loss=_discriminator_loss, optimizer=adam
    )


def _generator_loss(fake_logits: Tensor) -> Tensor:
    return op.Softplus(-fake_logits).mean()


def _discriminator_loss(fake_logits: Tensor, real_logits: Tensor) -> Tensor:
    return op.Softplus(-real_logits).mean() + op.Softplus(fake_logits).mean()


def _weights(
    tape: Tape, name: str, sizes: Sequence[int], rng: np.random.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Adds the weights and biases of linear layers."""
    return [
        (
            tape.initializer(f"{name}.{number}.weight", he(rng, (outputs, inputs))),
            tape.initializer(f"{name}.{number}.bias", np.zeros(outputs, np.float32)),
        )
        for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes))
    ]


def _mlp(x: Tensor, weights: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Emits linear layers with a LeakyRelu between them."""
    for number, (weight, bias) in enumerate(weights):
        x = op.Gemm(op.LeakyRelu(x, alpha=0.2) if number else x, weight, bias, transB=1)
    return x
