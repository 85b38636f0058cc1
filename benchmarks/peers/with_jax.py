"""JAX: networks in jax.numpy; a step is one compiled function with donated buffers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import Step
from benchmarks.task import OPTIMIZERS, UPDATE, Task

Weights: TypeAlias = dict[str, jax.Array]
Network: TypeAlias = Callable[[Weights, jax.Array], tuple[jax.Array, Weights]]
"""Maps weights and samples to logits and new batch normalization statistics."""

MOMENTUM = 0.9
"""The weight of the old running statistics in the new ones."""


def make(task: Task, optimizer: str) -> Step:
    """Returns the step function.

    Args:
        task: The task.
        optimizer: ``Adam`` or ``Momentum``.
    """
    return (_update if task.network == UPDATE else _training)(task, optimizer)


def _training(task: Task, optimizer: str) -> Step:
    start, update = _OPTIMIZERS[optimizer]
    network = {
        "mlp": _mlp,
        "lenet": _lenet,
        "resnet": _resnet,
        "transformer": partial(_transformer, heads=task.heads),
        "lstm": _lstm,
        "bert": partial(_bert, heads=12),
        "mobilenet": _mobilenet,
        "gpt2": partial(_gpt2, heads=8),
    }[task.network.removesuffix(" in training mode")]

    def loss_of(
        weights: Weights, statistics: Weights, samples: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, Weights]:
        logits, new_statistics = network(weights | statistics, samples)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return -chosen.mean(), new_statistics

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(
        weights: Weights, statistics: Weights, state: Any, samples: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, tuple[Weights, Weights, Any]]:
        (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            weights, statistics, samples, labels
        )
        weights, state = update(weights, gradients, state)
        return loss, (weights, statistics, state)

    everything = {name: jnp.array(array) for name, array in task.weights().items()}
    everything.pop("inner.lm_head.weight", None)  # tied to the embedding
    statistics = {name: everything.pop(name) for name in list(everything) if ".running_" in name}
    held = (everything, statistics, start(everything))
    batches = itertools.cycle(task.batches())

    def run() -> float:
        nonlocal held
        samples, labels = next(batches).values()
        if samples.dtype == np.int64:
            samples = samples.astype(np.int32)
        loss, held = step(*held, samples, labels.astype(np.int32))
        return loss.item()

    return Step(run, dict)


def _update(task: Task, optimizer: str) -> Step:
    start, update = _OPTIMIZERS[optimizer]

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Weights, state: Any, gradients: Weights) -> tuple[Weights, Any]:
        return update(weights, gradients, state)

    weights = {name: jnp.array(array) for name, array in task.weights().items()}
    held = (weights, start(weights))
    batches = itertools.cycle(
        [{n: jnp.array(feeds[f"{n}_gradient"]) for n in weights} for feeds in task.batches()]
    )

    def run() -> None:
        nonlocal held
        held = step(*held, next(batches))
        jax.block_until_ready(held)

    return Step(run, lambda: {name: np.asarray(each) for name, each in held[0].items()})


# ----------------------------------------------------------------------------------- optimizers


def _start_adam(weights: Weights) -> Any:
    return jnp.zeros((), jnp.int32), *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2))


def _adam(weights: Weights, gradients: Weights, state: Any) -> tuple[Weights, Any]:
    alpha, beta, epsilon, rate = (
        OPTIMIZERS["Adam"][name] for name in ("alpha", "beta", "epsilon", "learning_rate")
    )
    t, mean, square = state
    t = t + 1
    mean = jax.tree.map(lambda m, g: alpha * m + (1 - alpha) * g, mean, gradients)
    square = jax.tree.map(lambda s, g: beta * s + (1 - beta) * g * g, square, gradients)
    step = rate / (1 - alpha ** t.astype(jnp.float32))
    correction = 1 / jnp.sqrt(1 - beta ** t.astype(jnp.float32))
    weights = jax.tree.map(
        lambda x, m, s: x - step * m / (jnp.sqrt(s) * correction + epsilon), weights, mean, square
    )
    return weights, (t, mean, square)


def _start_momentum(weights: Weights) -> Any:
    return jax.tree.map(jnp.zeros_like, weights)


def _momentum(weights: Weights, gradients: Weights, state: Any) -> tuple[Weights, Any]:
    settings = OPTIMIZERS["Momentum"]
    state = jax.tree.map(lambda v, g: settings["alpha"] * v + g, state, gradients)
    rate = settings["learning_rate"]
    return jax.tree.map(lambda x, v: x - rate * v, weights, state), state


_OPTIMIZERS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "Adam": (_start_adam, _adam),
    "Momentum": (_start_momentum, _momentum),
}


# ------------------------------------------------------------------------------------- networks


def _linear(p: Weights, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _mlp(p: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    depth = sum(name.endswith(".weight") for name in p)
    for number in range(1, depth):
        x = jax.nn.relu(_linear(p, f"fc{number}", x))
    return _linear(p, f"fc{depth}", x), {}


def _conv(p: Weights, name: str, x: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves images of shape (N, H, W, channels), XLA's fastest layout."""
    weight = p[f"{name}.weight"]
    return jax.lax.conv_general_dilated(
        x,
        weight,
        (stride, stride),
        [(weight.shape[2] // 2,) * 2] * 2,
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
    )


def _max_pool(x: jax.Array) -> jax.Array:
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


def _lenet(p: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    x = x.transpose(0, 2, 3, 1)
    for name in ("conv1", "conv2"):
        x = _max_pool(jax.nn.relu(_conv(p, name, x) + p[f"{name}.bias"]))
    x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)  # the weights are ordered by channel
    return _linear(p, "fc2", jax.nn.relu(_linear(p, "fc1", x))), {}


def _resnet(p: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    statistics: Weights = {}

    def norm(name: str, x: jax.Array) -> jax.Array:
        mean = x.mean((0, 1, 2))
        variance = jnp.square(x - mean).mean((0, 1, 2))
        for part, value in (("running_mean", mean), ("running_var", variance)):
            old = p[f"{name}.{part}"]
            statistics[f"{name}.{part}"] = jax.lax.stop_gradient(
                MOMENTUM * old + (1 - MOMENTUM) * value
            )
        scale = p[f"{name}.weight"] * jax.lax.rsqrt(variance + 1e-5)
        return (x - mean) * scale + p[f"{name}.bias"]

    x = jax.nn.relu(norm("bn1", _conv(p, "conv1", x.transpose(0, 2, 3, 1))))
    blocks = sorted(
        name.removesuffix(".conv1.weight") for name in p if name.endswith(".conv1.weight")
    )
    for block in blocks:
        shortcut = f"{block}.downsample.0.weight" in p
        stride = 2 if shortcut else 1
        y = jax.nn.relu(norm(f"{block}.bn1", _conv(p, f"{block}.conv1", x, stride)))
        y = norm(f"{block}.bn2", _conv(p, f"{block}.conv2", y))
        if shortcut:
            x = norm(f"{block}.downsample.1", _conv(p, f"{block}.downsample.0", x, stride))
        x = jax.nn.relu(x + y)
    return _linear(p, "fc", x.mean((1, 2))), statistics


def _layer_norm(p: Weights, name: str, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + epsilon)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def _attention(p: Weights, name: str, x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    packed = x @ p[f"{name}.in_proj_weight"].T + p[f"{name}.in_proj_bias"]
    query, key, value = jnp.moveaxis(packed.reshape(batch, length, 3, heads, -1), 2, 0)
    mixed = jax.nn.dot_product_attention(query, key, value)
    return _linear(p, f"{name}.out_proj", mixed.reshape(batch, length, width))


def _transformer(p: Weights, x: jax.Array, *, heads: int) -> tuple[jax.Array, Weights]:
    x = _linear(p, "embedding", x) + p["positions.weight"][: x.shape[1]]
    for layer in range(sum(name.endswith(".linear1.weight") for name in p)):
        name = f"encoder.layers.{layer}"
        x = x + _attention(p, f"{name}.self_attn", _layer_norm(p, f"{name}.norm1", x), heads)
        hidden = _linear(p, f"{name}.linear1", _layer_norm(p, f"{name}.norm2", x))
        x = x + _linear(p, f"{name}.linear2", jax.nn.gelu(hidden, approximate=False))
    return _linear(p, "classifier", _layer_norm(p, "encoder.norm", x).mean(1)), {}


def _lstm(p: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    weight, recurrence = p["lstm.W"][0], p["lstm.R"][0]
    bias = p["lstm.B"][0].reshape(2, -1).sum(0)
    gates = x.transpose(1, 0, 2) @ weight.T + bias  # for all time steps at once

    def advance(
        state: tuple[jax.Array, jax.Array], gates: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        hidden, cell = state
        i, o, f, c = jnp.split(gates + hidden @ recurrence.T, 4, axis=1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(c)
        return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

    zeros = jnp.zeros((len(x), recurrence.shape[1]))
    (last, _), _ = jax.lax.scan(advance, (zeros, zeros), gates)
    return _linear(p, "fc", last), {}


# ------------------------------------------------- modules of transformers, by its names of weights


def _bert(p: Weights, ids: jax.Array, *, heads: int) -> tuple[jax.Array, Weights]:
    def norm(name: str, x: jax.Array) -> jax.Array:
        return _layer_norm(p, f"{name}.LayerNorm", x, 1e-12)

    table = "inner.bert.embeddings"
    x = p[f"{table}.word_embeddings.weight"][ids] + p[f"{table}.token_type_embeddings.weight"][0]
    x = norm(table, x + p[f"{table}.position_embeddings.weight"][: ids.shape[1]])
    for layer in range(sum(name.endswith(".intermediate.dense.weight") for name in p)):
        name = f"inner.bert.encoder.layer.{layer}"
        query, key, value = (
            _linear(p, f"{name}.attention.self.{part}", x).reshape(*ids.shape, heads, -1)
            for part in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(query, key, value).reshape(x.shape)
        x = x + _linear(p, f"{name}.attention.output.dense", mixed)
        x = norm(f"{name}.attention.output", x)
        hidden = _linear(p, f"{name}.intermediate.dense", x)
        y = _linear(p, f"{name}.output.dense", jax.nn.gelu(hidden, approximate=False))
        x = norm(f"{name}.output", x + y)
    first = jnp.tanh(_linear(p, "inner.bert.pooler.dense", x[:, 0]))
    return _linear(p, "inner.classifier", first), {}


def _gpt2(p: Weights, ids: jax.Array, *, heads: int) -> tuple[jax.Array, Weights]:
    def linear(name: str, x: jax.Array) -> jax.Array:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    table = p["inner.transformer.wte.weight"]
    x = table[ids] + p["inner.transformer.wpe.weight"][: ids.shape[1]]
    for layer in range(sum(name.endswith(".mlp.c_fc.weight") for name in p)):
        name = f"inner.transformer.h.{layer}"
        packed = linear(f"{name}.attn.c_attn", _layer_norm(p, f"{name}.ln_1", x))
        query, key, value = (
            part.reshape(*ids.shape, heads, -1) for part in jnp.split(packed, 3, axis=-1)
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(f"{name}.attn.c_proj", mixed.reshape(x.shape))
        hidden = linear(f"{name}.mlp.c_fc", _layer_norm(p, f"{name}.ln_2", x))
        x = x + linear(f"{name}.mlp.c_proj", jax.nn.gelu(hidden, approximate=True))
    return _layer_norm(p, "inner.transformer.ln_f", x) @ table.T, {}


def _mobilenet(p: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    def conv(name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        weight, bias = (p[f"{name}.convolution.{part}"] for part in ("weight", "bias"))
        groups = x.shape[3] // weight.shape[1]
        y = jax.lax.conv_general_dilated(
            *(x, weight, (stride, stride), "SAME"),
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
            feature_group_count=groups,
        )
        return y + bias

    relu6 = jax.nn.relu6
    stem = "inner.mobilenet_v2.conv_stem"
    x = relu6(conv(f"{stem}.first_conv", x.transpose(0, 2, 3, 1), 2))
    x = conv(f"{stem}.reduce_1x1", relu6(conv(f"{stem}.conv_3x3", x)))
    for layer, stride in enumerate([2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1]):
        name = f"inner.mobilenet_v2.layer.{layer}"
        y = relu6(conv(f"{name}.conv_3x3", relu6(conv(f"{name}.expand_1x1", x)), stride))
        y = conv(f"{name}.reduce_1x1", y)
        x = x + y if x.shape == y.shape else y
    x = relu6(conv("inner.mobilenet_v2.conv_1x1", x)).mean((1, 2))
    return _linear(p, "inner.classifier", x), {}
