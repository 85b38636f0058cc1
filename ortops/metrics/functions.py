"""Functions as metrics: of ortops' form, and of scikit-learn's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortops.errors import OrtopsError
from ortops.metrics.metric import (
    Array,
    StreamingMetric,
    as_number,
    class_rows,
    probabilities,
    yes_border,
)

__all__ = ["Function", "accuracy", "mean_absolute_error"]

_TAKES = {
    "y_pred": "labels",
    "y_score": "scores",
    "y_prob": "probabilities",
    "y_proba": "probabilities",
    "pred_decision": "scores",
}
"""What functions of scikit-learn's form take, by the name of the parameter."""

_PROBABILITIES = ("log_loss", "d2_log_loss_score")
"""Functions of scikit-learn that take probabilities by the name ``y_pred``."""


def accuracy(
    outputs: Array, targets: Array, *, kind: str = "logits", ignored: int | None = None
) -> float:
    """Returns the share of right answers.

    Args:
        outputs: Numbers for each class of shape (N, C, …), of which the largest counts; or numbers
            of the shape of the targets, which tell whether something is so; or class labels.
        targets: Integer labels of shape (N, …), or targets of 0 and 1.
        kind: What outputs of the shape of the targets are: ``"logits"`` mean yes above 0,
            ``"log_probabilities"`` above log ½, ``"probabilities"`` and ``"values"`` above ½.
        ignored: A label that does not count.

    Example:
        >>> accuracy(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
        0.5
        >>> accuracy(np.array([0.1, 0.9]), np.array([0.0, 1.0]), kind="probabilities")
        1.0
    """
    if outputs.ndim == targets.ndim + 1:
        right = outputs.argmax(axis=1) == targets
    elif outputs.dtype.kind in "iub":
        right = outputs == targets
    else:
        right = (outputs > yes_border(kind)) == (targets > 0.5)
    counted = right if ignored is None else right[targets != ignored]
    return float(np.mean(counted)) if counted.size else float("nan")


def mean_absolute_error(outputs: Array, targets: Array) -> float:
    """Returns the average distance between outputs and targets of one shape.

    Raises:
        OrtopsError: If their shapes differ.

    Example:
        >>> mean_absolute_error(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
        0.5
    """
    if outputs.shape != targets.shape:
        raise OrtopsError(
            f"metric 'mean_absolute_error': outputs have shape {list(outputs.shape)}, and targets "
            f"{list(targets.shape)}; one shape is accepted (accuracy compares classes with labels)"
        )
    return float(np.mean(np.abs(outputs - targets)))


@dataclass
class Function(StreamingMetric):
    """A function of all outputs and targets of a data set, which are kept until then.

    A function with a parameter ``y_true`` has scikit-learn's form, and gets both by name, with
    further axes as rows and without what does not count:

    - ``y_pred`` gets answers: labels of outputs with a class axis; 0 and 1 of logits and
      probabilities of the targets' shape, where the targets are all 0 or 1; other outputs as they
      are. scikit-learn's regression metrics get all as they are.
    - ``y_prob``, ``y_proba`` and the ``y_pred`` of scikit-learn's ``log_loss`` get probabilities,
      of shape (rows, classes), or of the second of two classes.
    - ``y_score`` gets the same, or values as they are; ``pred_decision`` outputs as they are, of
      two classes the difference.

    Any other function gets outputs and targets, classes on axis 1: by these names where it has
    parameters of both names, else in this order. By keywords ``kind`` and ``ignored`` it gets what
    is known of them.

    Args:
        function: The function, which returns a number. `functools.partial` gives arguments of its
            own.
        takes: What a function of scikit-learn's form takes: ``"labels"``, ``"probabilities"``,
            ``"scores"`` or ``"values"``, which are outputs as they are; by default as above.

    Raises:
        OrtopsError: If the function has ``y_true`` and none of the other names, and takes is None.

    Example:
        >>> def worst(outputs, targets):
        ...     return np.abs(outputs - targets).max()
        >>> metric = Function(worst, output="y")
        >>> metric.update(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
        >>> metric.label, metric.result()
        ('worst_y', 1.0)
    """

    function: Callable[..., Any]
    takes: str | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        if not callable(self.function):
            raise OrtopsError(f"metric {self.function!r}: a function is accepted")
        super().__post_init__()
        accepted = ("labels", "probabilities", "scores", "values")
        if self.takes not in (None, *accepted):
            raise self.wrong(
                f"takes is {self.takes!r}; {', '.join(map(repr, accepted))} are accepted"
            )
        try:
            self._parameters: Mapping[str, inspect.Parameter] = inspect.signature(
                self.function
            ).parameters
        except (TypeError, ValueError):  # one that is not written in Python
            self._parameters = {}
        self._answers = next((name for name in self._parameters if name in _TAKES), None)
        if "y_true" in self._parameters and self._answers is None:
            others = [name for name in self._parameters if name != "y_true"]
            if self.takes is None or not others:
                raise self.wrong(
                    f"it has a parameter 'y_true' and none of {', '.join(map(repr, _TAKES))}; name "
                    "one so, or say with Function(…, takes=) what it gets"
                )
            self._answers = others[0]

    @property
    def default_name(self) -> str:
        """The function's name."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return str(getattr(function, "__name__", type(function).__name__))

    def update(self, outputs: Array, targets: Array) -> None:
        """Keeps a batch."""
        if outputs.ndim == targets.ndim + 1 and self.axis is not None:
            outputs = np.moveaxis(outputs, self.axis, 1)
        self._outputs.append(outputs.copy())  # a loader may fill the same memory again
        self._targets.append(targets.copy())

    def result(self) -> float:
        """Calls the function."""
        if not self._outputs:
            return float("nan")
        outputs, targets = self._joined("outputs"), self._joined("targets")
        if "y_true" in self._parameters:
            assert self._answers is not None
            given, true = self._for_sklearn(outputs, targets)
            both = {"y_true": true, self._answers: given}
            positional = [
                both.pop(name)
                for name, parameter in self._parameters.items()
                if name in both and parameter.kind is inspect.Parameter.POSITIONAL_ONLY
            ]
            return as_number(self, self.function(*positional, **both))
        known = {"kind": self.kind, "ignored": self.ignored}
        asked = {
            name: value
            for name, value in known.items()
            if name in self._parameters
            and self._parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
            and (value is not None or name == "ignored")
        }
        named = {"outputs": outputs, "targets": targets}
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if all(n in self._parameters and self._parameters[n].kind in by_name for n in named):
            return as_number(self, self.function(**named, **asked))
        return as_number(self, self.function(outputs, targets, **asked))

    def _joined(self, which: str) -> Array:
        parts = self._outputs if which == "outputs" else self._targets
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) > 1 or not parts[0].ndim:
            first, second = (list(part.shape) for part in (parts[0], parts[-1]))
            raise self.wrong(
                f"it takes all {which} at once, and batches of shapes {first} and {second} cannot "
                "be joined; give batches of one shape, or a StreamingMetric"
            )
        return np.concatenate(parts)

    def _for_sklearn(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        takes = self.takes
        if takes is None:
            takes = _TAKES[self._answers or ""]
            if self.default_name in _PROBABILITIES:
                takes = "probabilities"
            elif str(getattr(self.function, "__module__", "")).endswith("._regression"):
                takes = "values"
        if outputs.ndim == targets.ndim + 1:
            # The axis of the classes was moved.
            axis, self.axis = self.axis, 1
            try:
                scores, labels = class_rows(self, outputs, targets)
            finally:
                self.axis = axis
            return self._of_classes(scores, takes), labels
        if outputs.shape != targets.shape:
            raise self.wrong(
                f"outputs have shape {list(outputs.shape)}, and targets {list(targets.shape)}; one "
                "shape is accepted, or outputs with an axis of classes more"
            )
        kept = self.counts(targets)
        if kept is not ...:
            outputs, targets = outputs[kept], targets[kept]
        single = outputs.ndim < 2 or outputs.size == len(outputs)
        shape = (-1,) if single else (len(outputs), -1)
        outputs, targets = outputs.reshape(shape), targets.reshape(shape)
        decides = bool(np.isin(targets, (0, 1)).all()) and outputs.dtype.kind not in "iub"
        if self.kind == "values" or not decides:
            if takes == "probabilities":
                outputs = probabilities(self, outputs, classes=False)
            return outputs, targets
        if takes == "labels":
            return (outputs > yes_border(self.kind)).astype(np.int64), targets.astype(np.int64)
        if takes in ("probabilities", "scores") and self._answers != "pred_decision":
            outputs = probabilities(self, outputs, classes=False)
        return outputs, targets if takes == "values" else targets.astype(np.int64)

    def _of_classes(self, scores: Array, takes: str) -> Array:
        if takes == "labels":
            return np.asarray(scores.argmax(axis=1))
        two = scores.shape[1] == 2
        as_they_are = self.kind == "values" or self._answers == "pred_decision"
        if takes == "scores" and as_they_are:
            return scores[:, 1] - scores[:, 0] if two else scores
        if takes == "values":
            return scores
        found = probabilities(self, scores, classes=True)
        return found[:, 1] if two else found

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._outputs: list[Array] = []
        self._targets: list[Array] = []
