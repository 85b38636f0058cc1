"""Trains a convolutional network on handwritten digits with stock onnxruntime, and evaluates it.

Writes digits.onnx (the trained model, which is also a checkpoint), digits_step.onnx (one training
step as a flat graph) and digits_loss.png to the current folder.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

sys.path.insert(0, str(Path(__file__).parents[1]))

import ortops
from models import digits, lenet


def main() -> None:
    """Runs the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--epochs", type=int, default=20, help="passes over the images (default: 20)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and of shuffling (default: 0)"
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="the output folder")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    data = digits.load()
    train = {"images": data.train.images, "labels": data.train.labels}
    test = {"images": data.test.images, "labels": data.test.labels}
    trainable = ortops.build_training_model(
        lenet.lenet(seed=options.seed), loss="SoftmaxCrossEntropy", optimizer="Adam"
    )
    session = ortops.TrainingSession(trainable)
    print(f"Training on {len(data.train.labels)} images, testing on {len(data.test.labels)}:")
    history = session.fit(
        train,
        epochs=options.epochs,
        validation=test,
        metrics=["accuracy"],
        schedule=lambda done: 2e-3 * (1 + math.cos(math.pi * done)) / 2,
    )
    model_file = options.folder / "digits.onnx"
    session.save(model_file)
    print(f"Trained in {time.perf_counter() - start:.1f} s; wrote {model_file}")

    plot = options.folder / "digits_loss.png"
    draw(history, plot)
    print(f"Wrote {plot}")

    plain = onnxruntime.InferenceSession(model_file)
    logits = plain.run(["logits"], {"images": data.test.images})[0]
    accuracy = np.mean(logits.argmax(axis=1) == data.test.labels)
    print(f"{model_file} in plain onnxruntime: {accuracy:.2%} of the test images correct")

    compare_kernels(trainable, train, options.folder / "digits_step.onnx")


def compare_kernels(
    trainable: onnx.ModelProto, train: dict[str, np.ndarray], step_file: Path
) -> None:
    """Runs a few steps of the step graph on Python custom ops and on standard operators."""
    step = ortops.step_graph(trainable)
    onnx.save(step, step_file)
    entry = next(entry for entry in step.metadata_props if entry.key == "ortops.step_graph")
    updates = json.loads(entry.value)

    with_library, without = onnxruntime.SessionOptions(), onnxruntime.SessionOptions()
    for options in (with_library, without):
        options.log_severity_level = 3  # hides a warning for each input with a default value
    ortops.register_custom_ops(with_library)
    sessions = {
        "Python custom ops": onnxruntime.InferenceSession(step_file, with_library),
        "standard operators": onnxruntime.InferenceSession(step_file, without),
    }
    losses = {}
    for name, session in sessions.items():
        outputs = ["loss", *updates.values()]
        state: dict[str, np.ndarray] = {}
        losses[name] = []
        for start in range(0, 160, 32):
            batch = {key: array[start : start + 32] for key, array in train.items()}
            loss, *new = session.run(outputs, {**batch, **state})
            state = dict(zip(updates, new, strict=True))
            losses[name].append(float(loss))
    print(f"Five steps of {step_file} in plain onnxruntime.InferenceSession:")
    for name, values in losses.items():
        print(f"  on {name + ':':<20}", " ".join(f"{value:.6f}" for value in values))
    first, second = losses.values()
    difference = np.max(np.abs(np.subtract(first, second)))
    agree = "they agree" if difference < 1e-4 else "THEY DIFFER"
    print(f"  largest difference of the losses {difference:.1e}: {agree}")


def draw(history: list[dict[str, float]], path: Path) -> None:
    """Plots loss and accuracy over the epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    epochs = range(1, len(history) + 1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    left.plot(epochs, [entry["loss"] for entry in history], label="training")
    left.plot(epochs, [entry["validation_loss"] for entry in history], label="test")
    left.set(xlabel="epoch", ylabel="softmax cross-entropy", yscale="log")
    left.legend(frameon=False)
    right.plot(epochs, [100 * entry["validation_accuracy"] for entry in history], color="C2")
    right.set(xlabel="epoch", ylabel="test accuracy (%)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle("Handwritten digits, trained with onnxruntime")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
