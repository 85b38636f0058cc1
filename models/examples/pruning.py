"""Removes half of the channels of a classifier of digits, and trains what is left to recover.

A network like LeNet (53,002 weights) is trained on digits. `ortops.surgery.prune` removes half of
the channels of each layer: those with the smallest weights, or those whose removal changes the
loss least to first order. Five epochs of training follow. 13,706 weights are left.

Accuracy on 360 new digits: 0.989 before pruning. By weights 0.875 after pruning and 0.994 after
recovery; by the loss 0.869 and 0.986.
"""

import argparse
import time

import numpy as np
import onnx
import onnxruntime

import ortops
from models import digits, lenet

QUICK = {"recovered": 0.85}


def arrays(samples: digits.Samples) -> dict[str, np.ndarray]:
    """Returns samples by the names of the inputs."""
    return {"images": samples.images, "labels": samples.labels}


def trained(model: onnx.ModelProto, rows: dict[str, np.ndarray], epochs: int) -> onnx.ModelProto:
    """Returns the model after some epochs."""
    steps = epochs * -(-len(rows["labels"]) // 32)
    optimizer = ortops.optimizers.Adam(ortops.schedules.cosine(3e-3, steps=steps))
    training = ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=optimizer)
    session = ortops.TrainingSession(training)
    session.fit(rows, epochs=epochs, batch_size=32, progress=False)
    return session.inference_model()


def gradients(model: onnx.ModelProto, rows: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Returns the gradients of eight batches."""
    training = ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="SGD")
    session = ortops.TrainingSession(training)
    parts = [{name: array[n::8] for name, array in rows.items()} for n in range(8)]
    return [session.gradients(part) for part in parts]


def measure(what: str, model: onnx.ModelProto, rows: dict[str, np.ndarray]) -> float:
    """Prints accuracy, number of weights and the time of a batch, and returns the accuracy."""
    served = onnxruntime.InferenceSession(model.SerializeToString())
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        (logits,) = served.run(None, {"images": rows["images"]})
        times.append(time.perf_counter() - begin)
    accuracy = float((logits.argmax(1) == rows["labels"]).mean())
    size = sum(int(np.prod(weight.dims)) for weight in model.graph.initializer)
    print(f"{what:>20}: accuracy {accuracy:.3f}, {size:6,} weights, {1000 * min(times):.2f} ms")
    return accuracy


def main(quick: bool) -> dict[str, float]:
    """Prunes and recovers by both scores; returns the accuracy of the second one."""
    data = digits.load()
    rows, test = arrays(data.train), arrays(data.test)
    model = trained(lenet.lenet(), rows, 3 if quick else 20)
    measure("before", model, test)
    found = 0.0
    for scores, more in (("magnitude", None), ("taylor", gradients(model, rows))):
        pruned = ortops.surgery.prune(model, 0.5, scores=scores, gradients=more)
        measure(f"{scores}, pruned", pruned, test)
        found = measure(f"{scores}, recovered", trained(pruned, rows, 1 if quick else 5), test)
    return {"recovered": found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="with fewer epochs, in seconds")
    main(parser.parse_args().quick)
