"""Quantization-aware training: a LeNet with 4-bit weights that is as accurate as with 32 bits.

onnxruntime's quantizer writes the file, with a pair of QuantizeLinear and DequantizeLinear nodes
before each weight (``AddQDQPairToWeight``). ortops trains that file directly, with straight-through
gradients, and stock onnxruntime runs it: weights int4, activations int8.

Accuracy on test digits: 97.8 % in float32, 93.6 % quantized, 97.5 % after further training.
"""

import argparse
import tempfile

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

import ortops
from models import digits, lenet

QUICK = {"float": 0.9, "aware": 0.88}
DIGITS = digits.load()


class Calibration(CalibrationDataReader):
    """Images for the calibration of activations."""

    def __init__(self) -> None:
        self.batches = iter([{"images": DIGITS.train.images[:500]}])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Returns the next batch."""
        return next(self.batches, None)


def accuracy(model: onnx.ModelProto) -> float:
    """Returns the accuracy of a model on test digits in stock onnxruntime."""
    plain = onnxruntime.InferenceSession(model.SerializeToString())
    (logits,) = plain.run(["logits"], {"images": DIGITS.test.images})
    return float((logits.argmax(axis=1) == DIGITS.test.labels).mean())


def trained(model: onnx.ModelProto, epochs: int, peak: float) -> onnx.ModelProto:
    """Returns the model with new weights."""
    adam = ortops.optimizers.Adam(ortops.schedules.cosine(peak, steps=45 * epochs))
    trainable = ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=adam)
    session = ortops.TrainingSession(trainable)
    data = {"images": DIGITS.train.images, "labels": DIGITS.train.labels}
    session.fit(data, epochs=epochs, progress=False)
    return session.inference_model(original=model)


def quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with weights rounded to 4 bits and activations to 8."""
    options = {"AddQDQPairToWeight": True, "QuantizeBias": False}
    with tempfile.TemporaryDirectory() as folder:
        given, written = f"{folder}/float.onnx", f"{folder}/int4.onnx"
        onnx.save(model, given)  # because the quantizer changes a model in memory
        int4 = QuantType.QInt4
        quantize_static(given, written, Calibration(), weight_type=int4, extra_options=options)
        return onnx.load(written)


def main(quick: bool) -> dict[str, float]:
    """Trains, quantizes, trains further, and returns the accuracy after each."""
    start = lenet.lenet(channels=(8, 16), hidden=32)
    model = trained(start, epochs=8 if quick else 20, peak=5e-3)
    rounded = quantized(model)
    aware = trained(rounded, epochs=2 if quick else 10, peak=2e-3)
    models = {"float": model, "quantized": rounded, "aware": aware}
    figures = {name: accuracy(each) for name, each in models.items()}
    print(", ".join(f"{name} {figure:.1%}" for name, figure in figures.items()))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, a lower figure")
    main(parser.parse_args().quick)
