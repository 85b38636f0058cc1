"""scikit-learn estimators that train ONNX models, for pipelines, searches and cross-validation.

They require scikit-learn (``pip install ortops[sklearn]``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops import losses
from ortops._common.arguments import boolean, number
from ortops._common.numbers import cast_numbers, integer, is_numeric
from ortops._common.optional import missing_package
from ortops.callbacks import EarlyStopping
from ortops.engine.building.builder import build_training_model
from ortops.engine.training.fit_options import OPTIONS
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, FeedError, ModelError, OrtopsError
from ortops.graph.files.external import serialize
from ortops.graph.files.loading import ModelLike
from ortops.graph.row_axes import rows_first, rows_to
from ortops.losses import Combined, LossLike
from ortops.optimizers import Optimizer, UpdateRule

try:
    from scipy.special import expit  # type: ignore[import-untyped]
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise missing_package("ortops.sklearn", "scikit-learn 1.6 or later", "sklearn") from error

__all__ = ["OnnxClassifier", "OnnxRegressor"]

Array: TypeAlias = npt.NDArray[Any]
MakesModel: TypeAlias = Callable[[int, int], ModelLike]
"""A function that returns a model for a number of features and a number of outputs."""


@dataclass(eq=False, repr=False)
class _Onnx(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no type hints
    """Base class of both estimators. The arguments are those of `OnnxRegressor`."""

    model: ModelLike | MakesModel
    _: KW_ONLY
    loss: LossLike = "MeanSquaredError"
    optimizer: str | Optimizer | type[Optimizer] | UpdateRule = "Adam"
    learning_rate: float | None = None
    epochs: int = 10
    batch_size: int = 32
    shuffle: bool = True
    random_state: int | np.random.RandomState | None = 0
    trainable: Sequence[str] | None = None
    batch_normalization: str = "auto"
    callbacks: Sequence[Any] = ()
    warm_start: bool = False
    early_stopping: bool = False
    validation_fraction: float = 0.1
    progress: bool = False

    _score_of_epochs = "r2"

    # ----------------------------------------------------------------------------- training

    def _begin(self, features: int, outputs: int, *, weighted: bool) -> None:
        """Builds the trainable model and creates a new session.

        Args:
            features: The number of features.
            outputs: The number of outputs.
            weighted: Whether the loss has a weight for each row.
        """
        loss = losses.resolve(self.loss)
        self._weight = getattr(loss, "sample_weight", None)
        if weighted and self._weight is None:
            if not isinstance(loss, losses.Loss) or isinstance(loss, Combined):
                raise ArgumentError(
                    f"{type(self).__name__}: sample_weight and class_weight need one loss of "
                    f"ortops.losses, got {self.loss!r:.80}; leave the weights out, or choose one"
                )
            self._weight = "sample_weight"
            loss = replace(loss, sample_weight=self._weight)
        seed, draw = integer(self.random_state), check_random_state
        self._seed = draw(self.random_state).randint(2**31 - 1) if seed is None else seed
        model = self.model(features, outputs) if callable(self.model) else self.model
        trainable = build_training_model(
            model,
            loss=loss,
            optimizer=self.optimizer,
            trainable=self.trainable,
            batch_normalization=self.batch_normalization,  # type: ignore[arg-type]
            seed=self._seed,
        )
        self._open(trainable)
        self._built = self._of_algorithm()
        self._own_rate = self._rate = None
        with contextlib.suppress(OrtopsError):  # an algorithm may have none
            self._own_rate = self._rate = self.session_.peak_learning_rate

    def _of_algorithm(self) -> dict[str, Any]:
        """Returns the parameters that the trainable model was built from."""
        names = ("loss", "optimizer", "trainable", "batch_normalization")
        return {name: getattr(self, name) for name in names}

    def _set_rate(self, *, fresh: bool) -> None:
        """Sets the learning rate before a part of the training.

        Args:
            fresh: Whether it begins at the parameter's rate, as in each `fit`, whatever callbacks
                have made of it; otherwise, only a rate that was changed since is set.

        Raises:
            ArgumentError: If another parameter was changed that the algorithm was built from.
        """
        for name, value in self._of_algorithm().items():
            if value is not self._built[name] and value != self._built[name]:
                raise ArgumentError(
                    f"{type(self).__name__}: {name} was changed to {value!r:.80}, but a warm "
                    f"start needs {self._built[name]!r:.80}; restore it, or set "
                    "warm_start=False to train from the beginning"
                )
        rate = self._own_rate if self.learning_rate is None else self.learning_rate
        if rate is not None and (fresh or rate != self._rate):
            self.session_.peak_learning_rate = self._rate = rate

    def _open(self, trainable: onnx.ModelProto) -> None:
        """Creates a session for a trainable model."""
        self.session_ = TrainingSession(trainable)
        of_model = [v.name for v in trainable.graph.input if v.name in self.session_.inputs]
        others = {*of_model, self._weight}
        of_loss = [name for name in self.session_.inputs if name not in others]
        if len(of_model) != 1 or len(of_loss) != 1:
            raise ModelError(
                f"{type(self).__name__}: X and y require one input of the model and one of the "
                f"loss, got {', '.join(of_model)} and {', '.join(of_loss) or 'none'}; for several "
                "inputs, use ortops.TrainingSession"
            )
        (self._input,), (self._target,) = of_model, of_loss

    def _train(self, X: Array, y: Array, epochs: int | None, weights: Array | None) -> None:
        """Trains; ``epochs`` is None for a part of the data."""
        self._set_rate(fresh=epochs is not None)
        if self._weight is not None:
            weights = np.ones(len(X)) if weights is None else weights
            weights = self._typed("sample_weight", weights, self._weight)
        elif weights is not None:
            raise ArgumentError(
                f"{type(self).__name__}: the training began without weights, so sample_weight must "
                "be None now; give weights in the first call too, all 1 if need be"
            )
        options: dict[str, Any] = {
            name: getattr(self, name) for name, each in OPTIONS.items() if each.in_estimators
        }
        options |= {"epochs": 1 if epochs is None else epochs, "seed": self._seed}
        rows = np.arange(len(X))
        if boolean("early_stopping", self.early_stopping):
            if epochs is None:
                raise ArgumentError("early_stopping must be False for partial_fit, got True")
            share = number("validation_fraction", self.validation_fraction, above=0, below=1)
            strata = y if is_classifier(self) else None
            rows, held = train_test_split(
                rows, test_size=share, random_state=self._seed, stratify=strata
            )
            monitor = f"validation_{self._score_of_epochs}"
            stop = EarlyStopping(10, monitor, minimum_change=1e-4, restore_best=True)
            options["callbacks"] = [*self.callbacks, stop]
            options |= {"validation": self._part(X, y, weights, held), "metrics": monitor[11:]}
        self.session_.fit(self._part(X, y, weights, rows), **options)
        self.history_ = self.session_.history

    def _part(self, X: Array, y: Array, weights: Array | None, rows: Array) -> dict[str, Array]:
        """Returns some rows as data for a session."""
        targets = rows_to(y[rows], self.session_.inputs.axis_of(self._target))
        data = {self._input: self._shaped(X[rows]), self._target: targets}
        return data if weights is None else data | {self._weight: weights[rows]}

    def _checked_weights(self, weights: Any, X: Array) -> Array | None:
        """Returns weights of rows, as scikit-learn's estimators check them."""
        if weights is None:
            return None
        found: Array = _check_sample_weight(weights, X, dtype=np.float64, ensure_non_negative=True)
        return found

    def _shaped(self, X: Array) -> Array:
        """Converts rows to the type and shape of the model's input, for example of images."""
        wanted = self.session_.inputs[self._input]
        array = self._typed("X", X, self._input)
        axis = self.session_.inputs.axis_of(self._input)
        dims = () if wanted.dims is None else (*wanted.dims[:axis], *wanted.dims[axis + 1 :])
        sizes = tuple(dim for dim in dims if isinstance(dim, int))
        if wanted.dims is not None and len(sizes) == len(dims) and array.shape[1:] != sizes:
            size = array[:1].size
            long, needed = ([n for n in one if n != 1] for one in (array.shape[1:], sizes))
            in_order = long == needed or len(long) < 2 or len(needed) < 2
            if size != int(np.prod(sizes)) or not in_order:
                got = f"shape {list(array.shape[1:])}" if len(long) > 1 else f"{size} numbers"
                raise FeedError(
                    f"X: a row must have shape {list(sizes)}, that of the model's input "
                    f"'{self._input}', got {got}; transpose or reshape X"
                )
            array = array.reshape(-1, *sizes)
        return rows_to(array, axis)

    def _typed(self, what: str, given: Array, name: str) -> Array:
        """Converts an array to the type of an input.

        Raises:
            FeedError: If it is not numeric, or a value is out of range for the type.
            TypeError: If it has objects that are not numbers, as in scikit-learn's estimators.
        """
        array = given.astype(np.float64) if given.dtype == object else given
        if not is_numeric(array.dtype):
            raise FeedError(f"{what} must be numeric, got type {given.dtype}")
        wanted = self.session_.inputs[name].dtype
        if wanted is None:
            return array
        result, lost = cast_numbers(array, wanted)
        if lost is not None:
            raise FeedError(
                f"{what} has the value {lost}, which is out of range for {wanted}, the type of "
                f"input '{name}'; scale or clip {what}, or use a model whose input has another type"
            )
        return result

    def _outputs(self, X: Array, name: str) -> Array:
        """Returns a tensor of the model, rows first."""
        found = self.session_.predict({self._input: self._shaped(X)}, outputs=name)
        assert isinstance(found, np.ndarray)
        return rows_first(found, self.session_.row_axis(name))

    # -------------------------------------------------------------------------------- files

    def inference_model(self) -> onnx.ModelProto:
        """Returns the trained model (see `ortops.TrainingSession.inference_model`)."""
        check_is_fitted(self, "session_")
        original = None if callable(self.model) else self.model
        return self.session_.inference_model(original)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle: the trainable file in place of the session."""
        state = dict(super().__getstate__())
        state.pop("_built", None)  # of the parameters, which are in the state
        session = state.pop("session_", None)
        if session is not None:
            state["_file"] = serialize(session.model())
        if isinstance(state.get("model"), onnx.ModelProto):
            state["model"] = serialize(state["model"])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the session from the file."""
        file = state.pop("_file", None)
        super().__setstate__(state)
        if file is not None:
            self._open(onnx.load_model_from_string(file))
            self._built = self._of_algorithm()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "session_")


@dataclass(eq=False, repr=False)
class OnnxClassifier(ClassifierMixin, _Onnx):  # type: ignore[misc]
    """A scikit-learn classifier that trains an ONNX model.

    Args:
        model: An inference model, as for `ortops.build_training_model`, or a function of the number
            of features and the number of classes that returns one. Its outputs are class scores
            of shape [batch, classes], or a single score for the second of two classes.
        loss: A classification loss; for a single score ``"BinaryCrossEntropyWithLogits"`` or
            ``"BinaryCrossEntropy"``.
        optimizer: An optimizer of `ortops.optimizers`, its name, or an update rule.
        learning_rate: Overrides the optimizer's learning rate.
        epochs: The number of passes over the data in `fit`.
        batch_size: Rows per batch.
        shuffle: Whether to shuffle the rows before each epoch.
        random_state: The seed of shuffling, Dropout and the rows that are set aside; or, as in
            scikit-learn, a RandomState that draws one, or None for that of numpy.
        trainable: The weights to train (see `ortops.build_training_model`).
        batch_normalization: ``"auto"``, ``"train"`` or ``"frozen"`` (see there).
        callbacks: Callbacks, see `ortops.callbacks`.
        warm_start: Whether `fit` continues the previous training, with the current learning rate,
            epochs, batch size and callbacks; the parameters of the algorithm have to stay.
        early_stopping: Whether `fit` sets rows of each class aside, stops when the accuracy on them
            has not risen by 1e-4 for 10 epochs, and restores the best epoch; as in scikit-learn's
            MLPClassifier.
        validation_fraction: The fraction of the rows that are then set aside.
        progress: Whether to show progress.
        classes: The labels in the order of the model's outputs; by default the sorted labels that
            `fit` receives.
        class_weight: A weight for each label in a dict, 1 if it is missing, or ``"balanced"``: rows
            / (classes · rows of the class), as `sklearn.utils.class_weight.compute_sample_weight`
            computes it. It multiplies ``sample_weight`` of `fit`.

    Attributes:
        classes_: The labels, sorted, as scikit-learn's scorers expect.
        n_features_in_: The number of features, if X is a table.
        session_: The `ortops.TrainingSession`.
        history_: The history of the last `fit`.

    Example:
        >>> from ortops.docs import examples
        >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array(["a", "a", "b", "b"])
        >>> def model(features, classes):
        ...     return examples.mlp((features, 8, classes))
        >>> classifier = OnnxClassifier(model, learning_rate=0.1, epochs=50).fit(X, y)
        >>> classifier.predict([[0.5], [2.5]]).tolist(), classifier.score(X, y)
        (['a', 'b'], 1.0)
    """

    _: KW_ONLY
    loss: LossLike = "SoftmaxCrossEntropy"
    classes: Sequence[Any] | None = None
    class_weight: Mapping[Any, float] | str | None = None

    _score_of_epochs = "accuracy"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxClassifier:
        """Trains the model.

        Args:
            X: An array of shape [rows, features], or of the shape of the model's input.
            y: A label for each row.
            sample_weight: A weight >= 0 for each row. The loss of a batch is Σ w · loss / Σ w.

        Raises:
            ModelError: If the loss or the optimizer does not match the model.
            FeedError: If X does not match the model.
            ValueError: If y does not contain labels, as in scikit-learn.
        """
        again = self.warm_start and hasattr(self, "session_")
        return self._fit(X, y, self.classes, sample_weight, again=again, epochs=self.epochs)

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> OnnxClassifier:
        """Trains one pass over a part of the data; starts a training in the first call.

        Args:
            X: As for `fit`.
            y: As for `fit`.
            classes: All labels that can occur; required in the first call, unless the estimator
                has ``classes``.
            sample_weight: As for `fit`; if any call has weights, the first one needs them too.
        """
        if self.class_weight == "balanced":
            raise ArgumentError(
                "class_weight must be a dict or None for partial_fit, got 'balanced', whose "
                "weights depend on all labels; compute them from all data"
            )
        again = hasattr(self, "session_")
        given = self.classes if classes is None else classes
        if not again and given is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        return self._fit(X, y, given, sample_weight, again=again, epochs=None)

    def _weights(self, given: Any, X: Array, y: Array) -> Array | None:
        """Returns the weights of rows, times those of their classes; None if there are none."""
        weights = self._checked_weights(given, X)
        if self.class_weight is None:
            return weights
        by_class: Array = compute_sample_weight(self.class_weight, y)
        return by_class if weights is None else by_class * weights

    def _fit(
        self, X: Any, y: Any, classes: Any, sample_weight: Any, *, again: bool, epochs: int | None
    ) -> OnnxClassifier:
        X, y = validate_data(self, X, y, reset=not again, allow_nd=True, dtype=None)
        check_classification_targets(y)
        weights = self._weights(sample_weight, X, y)
        if not again:
            labels = np.unique(y) if classes is None else np.asarray(classes)
            self.classes_, self._places = np.unique(labels, return_index=True)
            if len(labels) != len(self.classes_):
                raise ArgumentError(f"classes must be distinct labels, got {labels.tolist()}")
            if len(self.classes_) < 2:
                raise ValueError(
                    f"y must have at least two classes, got one class, {self.classes_[0]!r}"
                )
            weighted = sample_weight is not None or self.class_weight is not None
            self._begin(int(np.prod(X.shape[1:])), len(self.classes_), weighted=weighted)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ArgumentError(
                f"classes must be the same as in the first call, {self.classes_.tolist()}, got "
                f"{list(classes)}; they may be left out"
            )
        places = dict(zip(self.classes_.tolist(), self._places.tolist(), strict=True))
        unknown = [label for label in np.unique(y).tolist() if label not in places]
        if unknown:
            raise ValueError(
                f"y has the unknown label {unknown[0]!r}; the classes are {list(places)}"
            )
        numbers = np.array([places[label] for label in y.tolist()])
        self._train(X, self._as_targets(numbers), epochs, weights)
        return self

    def _as_targets(self, numbers: Array) -> Array:
        """Converts class numbers to the type and shape of the target input."""
        wanted = self.session_.inputs[self._target]
        if wanted.dtype is None or wanted.dtype.kind != "f":
            return numbers
        if len(self.classes_) != 2:
            raise ModelError(
                f"OnnxClassifier: the loss has floating-point targets ('{self._target}'), which "
                f"can only encode two classes, got {len(self.classes_)}; use SoftmaxCrossEntropy"
            )
        column = wanted.dims is not None and len(wanted.dims) == 2
        array = numbers.astype(wanted.dtype)
        return array[:, None] if column else array

    def predict_proba(self, X: Any) -> Array:
        """Returns the probability of each class, float64, of shape [rows, classes].

        Args:
            X: As for `fit`.

        Raises:
            ModelError: If the loss reads neither logits nor probabilities, or the model has another
                number of classes.
        """
        check_is_fitted(self, "session_")
        X = validate_data(self, X, reset=False, allow_nd=True, dtype=None)
        noted = self.session_.metadata.prediction
        values = self._outputs(X, noted.tensor).astype(np.float64)
        single = values.ndim == 1 or values.shape[1:] == (1,)
        if noted.kind == "values":
            raise ModelError(
                f"OnnxClassifier: the loss does not read '{noted.tensor}' as logits or "
                "probabilities; use SoftmaxCrossEntropy or BinaryCrossEntropyWithLogits"
            )
        if single:
            p = values.reshape(-1)
            both = [expit(-p), expit(p)] if noted.kind == "logits" else [1 - p, p]
            return np.stack(both, axis=1)[:, self._places]
        if values.shape[1:] != (len(self.classes_),):
            raise ModelError(
                f"OnnxClassifier: '{noted.tensor}' has shape {list(values.shape)}, but there are "
                f"{len(self.classes_)} classes; list the labels of all outputs in classes=, or use "
                "a model with as many outputs"
            )
        if noted.kind == "logits":
            values = values - values.max(axis=1, keepdims=True)
        if noted.kind != "probabilities":
            values = np.exp(values)
        probabilities: Array = values / values.sum(axis=1, keepdims=True)
        return probabilities[:, self._places]

    def predict(self, X: Any) -> Array:
        """Returns the label of the most probable class for each row.

        Args:
            X: As for `fit`.
        """
        check_is_fitted(self, "session_")
        found: Array = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return found


class OnnxRegressor(RegressorMixin, _Onnx):  # type: ignore[misc]
    """A scikit-learn regressor that trains an ONNX model.

    Args:
        model: An inference model, as for `ortops.build_training_model`, or a function of the number
            of features and the number of targets that returns one.
        loss: A regression loss.
        optimizer: An optimizer of `ortops.optimizers`, its name, or an update rule.
        learning_rate: Overrides the optimizer's learning rate.
        epochs: The number of passes over the data in `fit`.
        batch_size: Rows per batch.
        shuffle: Whether to shuffle the rows before each epoch.
        random_state: The seed of shuffling, Dropout and the rows that are set aside; or, as in
            scikit-learn, a RandomState that draws one, or None for that of numpy.
        trainable: The weights to train (see `ortops.build_training_model`).
        batch_normalization: ``"auto"``, ``"train"`` or ``"frozen"`` (see there).
        callbacks: Callbacks, see `ortops.callbacks`.
        warm_start: Whether `fit` continues the previous training, with the current learning rate,
            epochs, batch size and callbacks; the parameters of the algorithm have to stay.
        early_stopping: Whether `fit` sets rows aside, stops when R² on them has not risen by 1e-4
            for 10 epochs, and restores the best epoch; as in scikit-learn's MLPRegressor.
        validation_fraction: The fraction of the rows that are then set aside.
        progress: Whether to show progress.

    Attributes:
        n_features_in_: The number of features, if X is a table.
        session_: The `ortops.TrainingSession`.
        history_: The history of the last `fit`.

    Example:
        >>> from ortops.docs import examples
        >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([1.0, 3.0, 5.0, 7.0])
        >>> def model(features, targets):
        ...     return examples.mlp((features, targets))
        >>> regressor = OnnxRegressor(model, learning_rate=0.1, epochs=200).fit(X, y)
        >>> regressor.predict([[10.0]]).round(1).tolist(), round(regressor.score(X, y), 3)
        ([21.0], 1.0)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxRegressor:
        """Trains the model.

        Args:
            X: An array of shape [rows, features], or of the shape of the model's input.
            y: Targets of shape [rows] or [rows, targets].
            sample_weight: A weight >= 0 for each row. The loss of a batch is Σ w · loss / Σ w.
        """
        again = self.warm_start and hasattr(self, "session_")
        return self._fit(X, y, sample_weight, again=again, epochs=self.epochs)

    def __sklearn_tags__(self) -> Any:
        """Declares, for scikit-learn, that y may have several columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> OnnxRegressor:
        """Trains one pass over a part of the data; starts a training in the first call.

        Args:
            X: As for `fit`.
            y: As for `fit`.
            sample_weight: As for `fit`; if any call has weights, the first one needs them too.
        """
        return self._fit(X, y, sample_weight, again=hasattr(self, "session_"), epochs=None)

    def _fit(
        self, X: Any, y: Any, sample_weight: Any, *, again: bool, epochs: int | None
    ) -> OnnxRegressor:
        X, y = validate_data(
            self,
            X,
            y,
            reset=not again,
            allow_nd=True,
            dtype=None,
            multi_output=True,
            y_numeric=True,
        )
        weights = self._checked_weights(sample_weight, X)
        if not again:
            self._is_flat = y.ndim == 1
            outputs = 1 if y.ndim == 1 else y.shape[1]
            self._begin(int(np.prod(X.shape[1:])), outputs, weighted=weights is not None)
        wanted = self.session_.inputs[self._target]
        targets = self._typed("y", y, self._target)
        if wanted.dims is not None and targets.ndim == 1 and len(wanted.dims) == 2:
            targets = targets[:, None]
        elif wanted.dims is not None and len(wanted.dims) == 1 and targets.shape[1:] == (1,):
            targets = targets[:, 0]
        self._train(X, targets, epochs, weights)
        return self

    def predict(self, X: Any) -> Array:
        """Returns the model's outputs, float64, of shape [rows] if y had that shape.

        Args:
            X: As for `fit`.
        """
        check_is_fitted(self, "session_")
        X = validate_data(self, X, reset=False, allow_nd=True, dtype=None)
        noted = self.session_.metadata.prediction  # its tensor may be logits before the output
        found = self._outputs(X, noted.output or noted.tensor).astype(np.float64)
        return found.reshape(len(found)) if self._is_flat and found[:1].size == 1 else found
