"""Labels and weights in a batch: what losses accept, and how classes weigh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ortops.engine.execution.step import Step
from ortops.engine.training.input_values import Array, Input
from ortops.errors import FeedError
from ortops.graph.labels import Labels, read_labels
from ortops.graph.operators import MOVES, having

_MOVING = MOVES | having("keeps")


def check_labels(name: str, labels: Array, accepted: Labels) -> None:
    """Raises an error if labels are outside of the range of a loss."""
    if not labels.size:
        raise FeedError(
            f"feeds: '{name}' must have at least one row, got shape {list(labels.shape)}"
        )
    classes, ignored = accepted.classes, accepted.ignored
    bits = 8 * labels.itemsize
    largest = labels.view(f"u{labels.itemsize}").max()  # that of negative ones, if any
    if largest < (classes or 2 ** (bits - 1)):
        return
    outside = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    wrong = labels[outside & (labels != ignored)]
    if wrong.size:
        allowed = ">= 0" if classes is None else f"from 0 to {classes - 1}"
        extra = "" if ignored is None else f", or {ignored}, which is ignored"
        raise FeedError(f"feeds: labels in '{name}' must be {allowed}{extra}, got {wrong.flat[0]}")


@dataclass(frozen=True)
class ClassWeights:
    """Weights of classes, which multiply those of rows.

    Attributes:
        name: The input with the weights of rows.
        labels: The input with the classes.
        weights: The weight of each class; of all others, it is 1.
        is_question: Whether the labels are answers to yes/no questions, 0 and 1.
    """

    name: str
    labels: str
    weights: Mapping[int, float]
    is_question: bool = False

    def times(self, weights: Array, labels: Array) -> Array:
        """Returns weights of rows, each times that of its class.

        Args:
            weights: The weights of rows.
            labels: The classes, in a shape with as many elements.

        Raises:
            FeedError: If the shapes do not fit, or an answer to a question is not 0 or 1.
        """
        if self.is_question:
            wrong = labels[(labels != 0) & (labels != 1)]
            if wrong.size:
                raise FeedError(
                    f"class_weight: '{self.labels}' must be 0 or 1, got {wrong.flat[0]:g}; give "
                    "sample_weight= for targets that are not classes"
                )
        if labels.size != weights.size:
            raise FeedError(
                f"class_weight: '{self.labels}' of shape {list(labels.shape)} has a class for each "
                f"of its elements, but '{self.name}' of shape {list(weights.shape)} has a weight "
                f'for each row; declare it with inputs={{"{self.name}": (np.float32, [...])}} of '
                "build_training_model and the dimensions of the labels"
            )
        by_class = np.ones(weights.shape, np.float64)
        for label, weight in self.weights.items():
            by_class[labels.reshape(weights.shape) == label] = weight
        return (weights * by_class).astype(weights.dtype)


def check_weights(name: str, array: Array) -> None:
    """Raises an error for weights that are negative or not finite."""
    wrong = ~np.isfinite(array) | (array < 0)
    if wrong.any():
        raise FeedError(
            f"feeds: '{name}' has the weights of rows, which must be finite and >= 0, got "
            f"{array[wrong].flat[0]:g}"
        )


def remedy_of_labels(value: Input, given: object, labels: Sequence[Labels]) -> str:
    """Returns how class numbers are made of one-hot labels or of a column, if these are given."""
    if not labels or value.dims is None:
        return ""
    try:
        array = value.array(given)
    except FeedError:
        return ""
    if array.ndim != len(value.dims) + 1 or array.dtype.kind not in "biuf" or not array.size:
        return ""
    if array.ndim > 1 and array.shape[-1] == 1:
        return f"leave out the axis of size 1: {value.name}[..., 0]"
    for axis in (array.ndim - 1, 1):  # where Keras and PyTorch have classes
        of_classes = array.shape[axis] == (labels[0].classes or array.shape[axis])
        if of_classes and np.allclose(array.astype(np.float64).sum(axis), 1, atol=1e-3):
            return (
                f"they look like probabilities of classes: use the loss "
                f"SoftmaxCrossEntropy(probabilities=True), or give {value.name}.argmax(axis={axis})"
            )
    return ""


def accepted_labels(step: Step) -> list[tuple[str, Labels]]:
    """Returns the inputs that are labels, by metadata of losses and the nodes that read them."""
    found: list[tuple[str, Labels]] = []
    for value in step.model.graph.inputs:
        if value.name in step.feeds:
            found += [(value.name or "", labels) for labels in read_labels(value)]
    for node in step.model.graph:
        if node.op_type not in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
            continue
        scores, labels = node.inputs[:2]
        while labels is not None and (moved := labels.producer()) and moved.op_type in _MOVING:
            labels = moved.inputs[0]
        if labels is not None and labels.name in step.feeds:
            shape = None if scores is None else scores.shape
            size = None if shape is None or len(shape) < 2 else shape[1]
            classes = size if isinstance(size, int) else None
            ignored = node.attributes.get("ignore_index")
            limit = None if ignored is None else ignored.as_int()
            found.append((labels.name or "", Labels(classes, limit)))
    return found
