"""Functions as metrics, with ortops' signature or scikit-learn's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from ortops._common.arguments import choice, function
from ortops.metrics.classification import Accuracy
from ortops.metrics.metric import (
    Array,
    StreamingMetric,
    as_number,
    check_same_shape,
    class_rows,
    direction,
    probabilities,
    yes_border,
)
from ortops.metrics.regression import MeanAbsoluteError

_TAKES = {
    "y_pred": "labels",
    "y_score": "scores",
    "y_prob": "probabilities",
    "y_proba": "probabilities",
    "pred_decision": "scores",
}
"""What functions with scikit-learn's signature expect, by the name of the parameter."""

_PROBABILITIES = ("log_loss", "d2_log_loss_score")
"""Functions of scikit-learn whose ``y_pred`` are probabilities."""


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function without the arguments that `functools.partial` gave it."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _module(function: Callable[..., Any]) -> str:
    return str(getattr(_whole(function), "__module__", ""))


def _direction(function: Callable[..., Any]) -> bool | None:
    """Returns whether more of the result of a function is better; None if that is not known."""
    whole = _whole(function)
    for each in (function, whole):
        own = getattr(each, "higher_is_better", None)  # as in torchmetrics
        if isinstance(own, bool):
            return own
    name = str(getattr(whole, "__name__", ""))
    if not _module(function).startswith("sklearn.metrics"):
        return None
    if name.endswith(("_score", "_corrcoef")):
        return True
    return False if name.endswith(("_loss", "_error", "_deviance")) else None


@dataclass
class Function(StreamingMetric):
    """A metric computed by a function of all outputs and targets of a data set.

    Outputs and targets are kept in memory. A function with a parameter ``y_true`` has
    scikit-learn's signature. It is called by keyword, with further axes flattened into rows and
    ignored targets removed:

    - ``y_pred`` receives predictions: labels for outputs with a class axis; 0 and 1 for logits and
      probabilities of the targets' shape, if all targets are 0 or 1; other outputs unchanged.
      scikit-learn's regression metrics always receive unchanged outputs.
    - ``y_prob``, ``y_proba`` and the ``y_pred`` of scikit-learn's ``log_loss`` receive
      probabilities of shape (rows, classes), or of the second of two classes.
    - ``y_score`` receives the same, or unchanged values; ``pred_decision`` receives unchanged
      outputs, for two classes their difference.

    A parameter ``sample_weight`` receives the weights by which the loss averages rows, if there
    are any. Any other function receives outputs and targets, with classes on axis 1: by keyword if
    it has parameters of these names, else by position. Keyword parameters ``kind`` and ``ignored``
    receive those of the metric.

    More is better if the function's attribute ``higher_is_better`` says so, or its name in
    scikit-learn: scores are maximized, losses, errors and deviances minimized.

    Args:
        function: The function, which returns a number. Use `functools.partial` for its own
            arguments.
        takes: What a function with scikit-learn's signature expects: ``"labels"``,
            ``"probabilities"``, ``"scores"`` or unchanged ``"values"``; by default as above.
        higher_is_better: Whether more is better; by default as above, or not known.

    Raises:
        ArgumentError: If an argument is invalid.
        OrtopsError: If the function has ``y_true``, but none of the other names, and ``takes`` is
            None.

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
    _: KW_ONLY
    higher_is_better: bool | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        function("metric", self.function)
        super().__post_init__()
        if self.takes is not None:
            forms = ("labels", "probabilities", "scores", "values")
            choice(self.named("takes"), self.takes, forms)
        if direction(self) is None:
            self.higher_is_better = _direction(self.function)
        try:
            self._parameters: Mapping[str, inspect.Parameter] = inspect.signature(
                self.function
            ).parameters
        except (TypeError, ValueError):  # not written in Python
            self._parameters = {}
        self._answers = next((name for name in self._parameters if name in _TAKES), None)
        if "y_true" in self._parameters and self._answers is None:
            others = [name for name in self._parameters if name != "y_true"]
            if self.takes is None or not others:
                raise self.wrong(
                    "the function has a parameter 'y_true', but none of "
                    f"{', '.join(map(repr, _TAKES))}; rename one, or use Function(…, takes=)"
                )
            self._answers = others[0]

    @property
    def default_name(self) -> str:
        """The function's name."""
        function = _whole(self.function)
        return str(getattr(function, "__name__", type(function).__name__))

    @property
    def fits(self) -> frozenset[str] | None:  # type: ignore[override]
        """See `StreamingMetric`; functions of users fit anything."""
        module = _module(self.function)
        if not module.startswith("sklearn.metrics._"):
            return None
        return MeanAbsoluteError.fits if module.endswith("._regression") else Accuracy.fits

    @property
    def takes_weights(self) -> bool:
        """Whether the function has a parameter ``sample_weight``."""
        return "sample_weight" in self._parameters

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """Stores a batch."""
        if outputs.ndim == targets.ndim + 1 and self.axis is not None:
            outputs = np.moveaxis(outputs, self.axis, 1)
        self._outputs.append(outputs.copy())  # a loader may reuse the memory
        self._targets.append(targets.copy())
        weights = self.weights_like(targets, sample_weight)
        if weights is not None and self.takes_weights:
            self._weights.append(weights.copy())

    def result(self) -> float:
        """Calls the function."""
        if not self._outputs:
            return float("nan")
        outputs, targets = self._joined("outputs"), self._joined("targets")
        if "y_true" in self._parameters:
            assert self._answers is not None
            given, true = self._for_sklearn(outputs, targets)
            both = {"y_true": true, self._answers: given}
            if self._weights:
                both["sample_weight"] = self._weights_of_rows(targets, len(true))
            positional = [
                both.pop(name)
                for name, parameter in self._parameters.items()
                if name in both and parameter.kind is inspect.Parameter.POSITIONAL_ONLY
            ]
            return as_number(self, self.function(*positional, **both))
        known: dict[str, Any] = {"kind": self.kind, "ignored": self.ignored}
        if self._weights:
            known["sample_weight"] = np.concatenate(self._weights)
        asked = {
            name: value
            for name, value in known.items()
            if name in self._parameters
            and (
                self._parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
                or name == "sample_weight"
            )
            and (value is not None or name == "ignored")
        }
        named = {"outputs": outputs, "targets": targets}
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if all(n in self._parameters and self._parameters[n].kind in by_name for n in named):
            return as_number(self, self.function(**named, **asked))
        return as_number(self, self.function(outputs, targets, **asked))

    def _weights_of_rows(self, targets: Array, rows: int) -> Array:
        """Returns the weights of the rows that a function of scikit-learn receives."""
        weights, kept = np.concatenate(self._weights), self.counts(targets)
        found = weights[kept].reshape(rows, -1)
        if (found != found[:, :1]).any():
            raise self.wrong(
                "sample_weight must be the same for all targets of a row, because scikit-learn's "
                "functions weigh rows; give one weight for each row"
            )
        return np.asarray(found[:, 0])

    def _joined(self, which: str) -> Array:
        parts = self._outputs if which == "outputs" else self._targets
        shapes = {part.shape[1:] for part in parts}
        if len(shapes) > 1 or not parts[0].ndim:
            first, second = (list(part.shape) for part in (parts[0], parts[-1]))
            raise self.wrong(
                f"cannot concatenate {which} of shapes {first} and {second}; use batches of one "
                "shape, or a StreamingMetric"
            )
        return np.concatenate(parts)

    def _for_sklearn(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        takes = self.takes
        if takes is None:
            takes = _TAKES[self._answers or ""]
            if self.default_name in _PROBABILITIES:
                takes = "probabilities"
            elif _module(self.function).endswith("._regression"):
                takes = "values"
        if outputs.ndim == targets.ndim + 1:
            # `update` has moved the class axis to 1.
            axis, self.axis = self.axis, 1
            try:
                scores, labels = class_rows(self, outputs, targets)
            finally:
                self.axis = axis
            return self._of_classes(scores, takes), labels
        hint = ", or outputs with an additional class axis"
        check_same_shape(self, outputs, targets, hint=hint)
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
        unchanged = self.kind == "values" or self._answers == "pred_decision"
        if takes == "scores" and unchanged:
            return scores[:, 1] - scores[:, 0] if two else scores
        if takes == "values":
            return scores
        found = probabilities(self, scores, classes=True)
        return found[:, 1] if two else found

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._outputs: list[Array] = []
        self._targets: list[Array] = []
        self._weights: list[Array] = []
