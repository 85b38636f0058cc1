"""Fine-tunes a scikit-learn pipeline that was converted to ONNX.

A pipeline of StandardScaler and MLPClassifier learns handwritten digits and is converted by
skl2onnx. Then the scanner is replaced: the new one shifts each image by a pixel and is fainter.
ortops fine-tunes the file on 700 labelled images of the new scanner, and 700 old ones to avoid
forgetting. Its outputs, label and probabilities, do not change in name or type.

Accuracy on test images, before and after: old scanner 0.983 and 0.972, new one 0.331 and 0.939.
"""

import argparse

import numpy as np
import onnx
import onnxruntime

try:
    import skl2onnx
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
except ImportError as error:
    raise ImportError("this example needs: pip install scikit-learn skl2onnx") from error

import ortops
from models import digits

QUICK = {"old": 0.9, "new": 0.85}


def rescanned(images: np.ndarray) -> np.ndarray:
    """Returns images as from the new scanner: shifted by a pixel to the right, and fainter."""
    shifted = np.roll(images.reshape(-1, 8, 8), 1, axis=2)
    shifted[:, :, 0] = 0
    return (0.6 * shifted**2).reshape(-1, 64)


def accuracy(model: onnx.ModelProto, images: np.ndarray, labels: np.ndarray) -> float:
    """Returns the accuracy in stock onnxruntime."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (found,) = session.run(["label"], {"X": images})
    return float(np.mean(found == labels))


def main(quick: bool) -> dict[str, float]:
    """Trains, converts and fine-tunes the pipeline; returns the accuracy on both scanners."""
    train, test = digits.load()
    old, old_test = train.images.reshape(-1, 64), test.images.reshape(-1, 64)
    new, new_test = rescanned(old), rescanned(old_test)

    pipeline = make_pipeline(
        StandardScaler(), MLPClassifier((64,), max_iter=60, learning_rate_init=0.01, random_state=0)
    )
    pipeline.fit(old, train.labels)
    served = skl2onnx.to_onnx(pipeline, old[:1], options={"zipmap": False}, target_opset=21)

    trainable = ortops.build_training_model(
        served, loss="SoftmaxCrossEntropy", optimizer=ortops.optimizers.Adam(1e-3)
    )
    session = ortops.TrainingSession(trainable)
    rows = np.concatenate([new[:700], old[700:1400]])
    epochs = 15 if quick else 60
    session.fit({"X": rows, "labels": train.labels[:1400]}, epochs=epochs, progress=False)
    tuned = session.inference_model(original=served)

    figures = {}
    for scanner, images in (("old", old_test), ("new", new_test)):
        before = accuracy(served, images, test.labels)
        figures[scanner] = accuracy(tuned, images, test.labels)
        print(f"{scanner} scanner: accuracy {before:.3f} before, {figures[scanner]:.3f} after")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    main(parser.parse_args().quick)
