"""Reinforcement learning: a network learns to balance a pole on a cart by trial and error.

Stock onnxruntime plays sixteen games at a time. A game ends when the pole falls, or after 500 steps
(10 s). The loss, REINFORCE, is a custom function with additional inputs: the actions, and the
advantage, how much longer than average the game lasted. Each round ends with a training step.

The pole stays up for 26 steps before training, and for 500 (the maximum) in the last of forty
rounds.
"""

import argparse
import math

import numpy as np
import onnx
import onnxruntime

import ortops
from models import mlp
from ortops import Tensor, op

QUICK = {"steps": 80}
LIMIT = 500


def move(state: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns states 0.02 s later, carts pushed to the right or left; Barto et al. 1983."""
    _, speed, angle, turning = state.T
    push = (np.where(right, 10, -10) + 0.05 * turning**2 * np.sin(angle)) / 1.1
    pull = 9.8 * np.sin(angle) - np.cos(angle) * push
    turn = pull / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
    faster = push - 0.05 * turn * np.cos(angle) / 1.1
    return state + 0.02 * np.stack([speed, faster, turning, turn], axis=1)


def play(policy: onnx.ModelProto, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Plays sixteen games; returns states, actions, and which games were running, by step."""
    plain = onnxruntime.InferenceSession(policy.SerializeToString())
    state, stands, rows = rng.uniform(-0.05, 0.05, (16, 4)), np.ones(16, bool), []
    while stands.any() and len(rows) < LIMIT:
        seen = state.astype(np.float32)
        (logits,) = plain.run(None, {"images": seen})
        done = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)  # sampled from the softmax
        rows.append((seen, done, stands))
        state = move(state, done == 1)
        stands = stands & (abs(state[:, 0]) < 2.4) & (abs(state[:, 2]) < math.pi / 15)
    return tuple(np.stack(column) for column in zip(*rows, strict=True))


def reinforce(logits: Tensor, done: Tensor, advantage: Tensor) -> Tensor:
    """Returns the loss whose gradient increases the probability of good actions."""
    log_p = op.GatherElements(op.LogSoftmax(logits), op.Unsqueeze(done, [1]), axis=1)
    return -(log_p.squeeze(1) * advantage).mean()


def main(quick: bool) -> dict[str, float]:
    """Alternates games and training; returns the duration of games in the last round."""
    inputs = {"done": (np.int64, ["batch"]), "advantage": (np.float32, ["batch"])}
    model, adam = mlp.mlp((4, 32, 2)), ortops.optimizers.Adam(0.02)
    trainable = ortops.build_training_model(model, loss=reinforce, optimizer=adam, inputs=inputs)
    session, rng, steps = ortops.TrainingSession(trainable), np.random.default_rng(0), []
    for _ in range(12 if quick else 40):
        seen, done, stood = play(session.inference_model(), rng)
        steps.append(float(stood.sum(axis=0).mean()))
        reward = stood.astype(np.float32)
        for step in reversed(range(len(reward) - 1)):
            reward[step] += 0.99 * reward[step + 1]  # later rewards are discounted
        reward = reward[stood]
        advantage = (reward - reward.mean()) / reward.std()
        session.step({"images": seen[stood], "done": done[stood], "advantage": advantage})
    print("Steps that poles stood, round by round:", *map(round, steps))
    return {"before": steps[0], "steps": steps[-1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, a lower figure")
    main(parser.parse_args().quick)
