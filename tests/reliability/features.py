"""The features of `TrainingSession.fit` as axes, and random draws from their product.

A `Draw` has one value of each feature. `RULES` lists the combinations that ortops refuses by design
or that mean nothing, with the reason. `draws` makes as many draws as wanted from a seed: the first
ones are chosen so that every legal pair of values of two axes occurs, the rest are independent.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any

from ortops.engine.training.fit_options import OPTIONS
from ortops.optimizers import OPTIMIZERS

ROWS = 10
"""Rows in a data set."""


def _installed(package: str, *values: str) -> tuple[str, ...]:
    """Returns values that need an optional package, or nothing where it is missing."""
    return values if importlib.util.find_spec(package) is not None else ()


ROW_FORMS = (
    *("dict", "tuple", "lists", "strided", "memory map", "file of arrays", "stored", "records"),
    *("function of rows", "samples", "samples by name", "refilled samples", "stored table"),
    *("collated", "list of samples"),
    "single array",
    *_installed("pandas", "pandas"),
    *_installed("pyarrow", "pyarrow", "parquet"),
    *_installed("scipy", "sparse"),
)
"""Forms of data as rows."""

COLLATED = ("collated", "list of samples")
"""Forms of data as samples that `collate=` joins."""

BATCH_FORMS = (
    *("list of batches", "tuple of batches", "list of tuples", "loader", "refilled loader"),
    *("generator", "generator of an epoch", "iterator", "sequence", "refilled sequence"),
)
"""Forms of data as batches."""

OF_FIT = {name: option.tried for name, option in OPTIONS.items() if option.tried}
"""Arguments of fit of which any value is tried with any other."""

WITHOUT_AXIS = {
    "seed": "it is drawn with the weights and the data",
    "validation_split": "tests/test_validation_split.py divides each form of data",
    "max_steps": "tests/test_fit_limits.py ends trainings by it and resumes them",
    "max_minutes": "tests/test_fit_limits.py ends trainings by it and resumes them",
    "class_weight": "a value of the axis sample_weight",
    "collate": "values of the axis data",
    "group_by_length": "tests/test_collate.py looks at the lengths in a batch",
    "schedule": "a value of the axis rate",
    "resume": "the axes end, twice and goes_on",
    "fast_dev_run": "it leaves nothing to compare; see tests/test_fast_dev_run.py",
    "entry": "the axis entries trains one of two",
}
"""Arguments of fit without an axis of their own, and why."""

AXES: Mapping[str, tuple[Any, ...]] = {
    "model": (
        *("affine", "double", "classifier", "convolutional", "tokens", "tagger", "branching"),
        *("half", "half overflowing", "lora", "dora", "stateful"),
    ),
    "dropout": (False, True),
    "opset": (21, 13, 17, 22),
    "fixed": (False, True),
    "source": ("model", "bytes", "path", "external"),
    "file": ("model", "bytes", "path", "external"),
    "loss": (
        *("MeanSquaredError", "Huber", "L1", "SoftmaxCrossEntropy", "smoothed", "ignoring"),
        *("weighted", "sum of losses", "sum of classes", "summed", "function", "by output"),
    ),
    "sample_weight": ("", "column", "array", "classes"),
    "unweighted": (False, True),
    "entries": (False, True),
    "optimizer": tuple(OPTIMIZERS),
    "rate": (
        *("number", "by epoch", "constant", "step", "exponential", "polynomial", "cosine"),
        *("one_cycle", "warmup_cosine", "warmup_linear", "function of the step", "sequence"),
    ),
    "clip": ("", "norm", "value", "both"),
    "ema": (False, True),
    "groups": (False, True),
    "trainable": ("all", "some", "not some"),
    "properties": (False, True),
    "batch_normalization": ("auto", "train", "frozen"),
    "kernels": ("onnx", "python", *_installed("llvmlite", "compiled", "auto")),
    "recompute": (None, "sqrt", 1, ("hidden",), "elementwise"),
    "in_backward": (False, True),
    "data": (*BATCH_FORMS, *ROW_FORMS),
    **OF_FIT,
    "validation": ("", "dict", "same"),
    "metrics": (False, True),
    "callbacks": (
        *("", "user", "Checkpoint", "Checkpoint every", "EarlyStopping", "restore_best"),
        *("restore_best in memory", "BestModel", "CSVLog", "JSONLines", "all"),
    ),
    "end": ("", "stop", "error", "KeyboardInterrupt", "SIGINT", "SIGTERM", "killed"),
    "stop": (1, 2, 3, 5),
    "twice": (False, True),
    "goes_on": ("session", "file", "model", "bytes"),
    "moved": (False, True),
    "longer": (False, True),
    "reference": ("step", "run_steps", "reduce", "gradients", "fit"),
    "also": (
        *("", "evaluate", "predict", "serve", "one big batch", "step graph", "lower", "reset"),
        *("reopen", "resume again", "plain kernels"),
    ),
}
"""The values of each feature, the simplest one first."""


class Shown:
    """A combination of features, whose defaults are the simplest values."""

    def __repr__(self) -> str:
        """Returns Python that makes it, without the simplest values."""
        given = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__}({', '.join(given)})"


class _Values(Shown):
    """One combination of features.

    Attributes:
        model: What is trained; see `feature_models.MODELS`.
        dropout: Whether it has a Dropout layer.
        opset: Its opset.
        fixed: Whether its batch dimension is fixed at `batch_size`.
        source: How it is given to `build_training_model`.
        file: How the trainable model is given to `TrainingSession`.
        loss: The loss; see `feature_models.LOSSES`.
        sample_weight: How the loss gets weights of rows, "" for none: as a column of the data, or
            by an argument of fit, an array or weights of classes.
        unweighted: Whether the file was built without weights of rows, which fit is given.
        entries: Whether the file has a second training_info entry, for the other weights. It makes
            no steps.
        optimizer: The optimizer.
        rate: The learning rate: a number, a schedule of `ortops.schedules`, or one set by epoch.
        clip: Which gradients are clipped.
        ema: Whether averages of the parameters are kept.
        groups: Whether some parameters have settings of their own.
        trainable: Which parameters are trained.
        properties: Whether the session has properties, set before and after an interruption.
        batch_normalization: Which BatchNormalization layers use statistics of the batch.
        kernels: What computes updates.
        recompute: What is recomputed in the backward pass.
        in_backward: Whether parameters are updated in the backward pass.
        data: The form of the training data; see `feature_models.in_form`.
        batch_size: Rows in a batch.
        epochs: Epochs.
        shuffle: Whether rows are shuffled.
        drop_last: Whether a last batch of fewer rows is left out.
        prefetch: Batches that a thread reads ahead.
        accumulate: Batches that make one step.
        validation: The form of the validation data, "" for none.
        metrics: Whether a metric is computed on it.
        validate_every: After how many steps there is a validation within an epoch; None for none.
        train_metrics: Whether metrics are computed on the training data, too.
        detect_anomaly: Whether values that are not finite are looked for.
        callbacks: Which callbacks there are; see `feature_checks.callbacks_of`.
        progress: Whether progress is shown.
        stop_on_nan: Whether a loss that is NaN stops the training.
        end: What interrupts the training.
        stop: After how many steps it does.
        twice: Whether it is interrupted again one step later.
        goes_on: What the interrupted training is resumed from.
        moved: Whether its data have another form then.
        longer: Whether it was begun with fewer epochs than it has in the end.
        reference: How the reference makes its steps.
        also: What is checked besides.
        seed: Determines weights, data and order.
    """

    @property
    def has_rows(self) -> bool:
        """Whether the data are rows, which ortops cuts and shuffles, and not batches."""
        return self.data not in BATCH_FORMS


Draw = make_dataclass(
    "Draw",
    [(name, Any, field(default=values[0])) for name, values in {**AXES, "seed": (0,)}.items()],
    bases=(_Values,),
    frozen=True,
    repr=False,
)


@dataclass(frozen=True)
class Rule:
    """A combination of values that is not drawn.

    Attributes:
        reason: Why it is refused, or means nothing.
        forbids: Whether a combination is such, by the values of the axes that it names.
    """

    reason: str
    forbids: Callable[..., bool]

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that it looks at."""
        return tuple(inspect.signature(self.forbids).parameters)


WITHOUT_LABELS = ("MeanSquaredError", "Huber", "L1", "summed", "sum of losses")
"""Losses that compare with numbers."""

WITH_POSITIONS = ("tagger",)
"""Models with an output for each position of a row."""

EXPORTED = tuple(
    f"{kind} of torch{exporter}"
    for kind in ("convolutional", "tokens")
    for exporter in ("", " by dynamo")
)
"""Models that PyTorch exports, by its older exporter and by its newer one."""

NORMALIZING = ("convolutional", "half overflowing", *EXPORTED[:2])
"""Models with BatchNormalization."""

RESTORING = ("restore_best", "restore_best in memory", "all")
"""Callbacks with which the session goes back to an earlier state."""

MONITORING = ("EarlyStopping", "BestModel", *RESTORING)
"""Callbacks that look for the best validation."""

RULES: tuple[Rule, ...] = (
    Rule(
        "a loss function has no weights but those that it reads",
        lambda sample_weight, loss: bool(sample_weight) and loss == "function",
    ),
    Rule(
        "a file without weights gets them by an argument",
        lambda unweighted, sample_weight: unweighted and sample_weight not in ("array", "classes"),
    ),
    Rule(
        "a file without weights evaluates, serves and exports its own loss",
        lambda unweighted, also: unweighted and also != "",
    ),
    Rule(
        "the held-out rows have a column for weights",
        lambda unweighted, validation: unweighted and bool(validation),
    ),
    Rule(
        "so it has no metrics",
        lambda unweighted, metrics: unweighted and metrics,
    ),
    Rule(
        "nor metrics of training",
        lambda unweighted, train_metrics: unweighted and train_metrics,
    ),
    Rule(
        "nor validations within an epoch",
        lambda unweighted, validate_every: unweighted and validate_every is not None,
    ),
    Rule(
        "these losses get no weights by an argument",
        lambda unweighted, loss: unweighted and loss in ("function", "sum of classes"),
    ),
    Rule(
        "the loss of a single array neither",
        lambda unweighted, data: unweighted and data == "single array",
    ),
    Rule(
        "an array of weights is for rows that are known in advance",
        lambda sample_weight, data: (
            sample_weight == "array" and data in (*BATCH_FORMS, "function of rows")
        ),
    ),
    Rule(
        "what joins samples also joins those of the validation data",
        lambda data, validation: data in COLLATED and validation == "dict",
    ),
    Rule(
        "what joins samples does not join rows of arrays along another axis",
        lambda data, moved: data in COLLATED and moved,
    ),
    Rule(
        "two entries do not train the same weights",
        lambda entries, trainable: entries and trainable != "some",
    ),
    Rule(
        "the weights of an adapter are those of one entry",
        lambda entries, model: entries and model in ("lora", "dora"),
    ),
    Rule(
        "the step graph of a file with two entries makes the steps of both",
        lambda entries, also: entries and also in ("step graph", "lower"),
    ),
    Rule(
        "a single array goes with a loss function, which has no weights",
        lambda sample_weight, data: bool(sample_weight) and data == "single array",
    ),
    Rule(
        "numbers have no classes",
        lambda sample_weight, loss: sample_weight == "classes" and loss in WITHOUT_LABELS,
    ),
    Rule(
        "a row of these models has several labels",
        lambda sample_weight, model: sample_weight == "classes" and model in WITH_POSITIONS,
    ),
    Rule(
        "an input after the weights has no place in a tuple without them",
        lambda sample_weight, loss: (
            sample_weight in ("array", "classes") and loss == "sum of classes"
        ),
    ),
    Rule(
        "batches, and rows whose number is not known, have no last batch to leave out",
        lambda drop_last, data: drop_last and data in (*BATCH_FORMS, "function of rows"),
    ),
    Rule(
        "there is a batch with all of its rows",
        lambda drop_last, batch_size: drop_last and batch_size > ROWS,
    ),
    Rule(
        "the first data set of this check has as many rows as the second",
        lambda drop_last, also: drop_last and also == "one big batch",
    ),
    Rule(
        "an iterator serves one epoch",
        lambda data, epochs: data == "iterator" and epochs > 1,
    ),
    Rule(
        "a model with a fixed batch takes no smaller batch at the end",
        lambda fixed, batch_size: fixed and ROWS % batch_size != 0,
    ),
    Rule(
        "one array is the data set of a model with one input and a loss that adds none",
        lambda data, loss: data == "single array" and loss != "function",
    ),
    Rule(
        "these models have two inputs",
        lambda data, model: data == "single array" and model.split()[0] in ("tokens", "stateful"),
    ),
    Rule(
        "of an exported model the opset is the exporter's choice",
        lambda model, opset: model in EXPORTED and opset != 21,
    ),
    Rule(
        "of an exported model the names of tensors are the exporter's choice",
        lambda model, recompute: model in EXPORTED and recompute == ("hidden",),
    ),
    Rule(
        "scipy has sparse matrices of two dimensions, and none of float16",
        lambda data, model: (
            data == "sparse"
            and model not in ("affine", "double", "classifier", "lora", "dora", "branching")
        ),
    ),
    Rule(
        "summands that are divided by different counts do not add up over parts of a batch",
        lambda loss, accumulate: loss == "sum of classes" and accumulate > 1,
    ),
    Rule(
        "metrics are computed on validation data",
        lambda metrics, validation: metrics and not validation,
    ),
    Rule(
        "there is nothing to validate within an epoch",
        lambda validate_every, validation: validate_every and not validation,
    ),
    Rule(
        "validations within epochs, which the reference does not make, may be the best ones",
        lambda validate_every, callbacks: validate_every and callbacks in MONITORING,
    ),
    Rule(
        "it averages the parameters itself",
        lambda optimizer, ema: optimizer == "ScheduleFreeAdamW" and ema,
    ),
    Rule(
        "it estimates one factor of the learning rate, which groups cannot have of their own",
        lambda optimizer, groups: optimizer == "Prodigy" and groups,
    ),
    Rule(
        "gradients that do not exist together have no common norm",
        lambda in_backward, clip: in_backward and clip in ("norm", "both"),
    ),
    Rule(
        "its factor of the learning rate depends on all gradients",
        lambda in_backward, optimizer: in_backward and optimizer == "Prodigy",
    ),
    Rule(
        "with a scale of the loss an update waits for all gradients to be finite",
        lambda in_backward, model: in_backward and model in ("half", "half overflowing"),
    ),
    Rule(
        "gradients that are freed are not added up",
        lambda in_backward, accumulate: in_backward and accumulate > 1,
    ),
    Rule(
        "updates in the backward pass are standard operators",
        lambda in_backward, kernels: in_backward and kernels == "python",
    ),
    Rule(
        "the step of several entries might fail in the second one",
        lambda in_backward, entries: in_backward and entries,
    ),
    Rule(
        "these checks take gradients apart from updates",
        lambda in_backward, also: in_backward and also in ("one big batch", "plain kernels"),
    ),
    Rule(
        "metrics of training are the metrics of validation",
        lambda train_metrics, metrics: train_metrics and not metrics,
    ),
    Rule(
        "metrics are computed on validation data, those of training too",
        lambda train_metrics, validation: train_metrics and not validation,
    ),
    Rule(
        "a metric of training needs an input to compare with",
        lambda train_metrics, loss: train_metrics and loss == "function",
    ),
    Rule(
        "with a single array a metric of training has nothing to compare outputs with",
        lambda train_metrics, data: train_metrics and data == "single array",
    ),
    Rule(
        "a metric that is a function is left out in an epoch that is resumed",
        lambda train_metrics, callbacks, end: (
            train_metrics and callbacks in ("CSVLog", "all") and end
        ),
    ),
    Rule(
        "a metric needs an input to compare with",
        lambda metrics, loss: metrics and loss == "function",
    ),
    Rule(
        "an iterator that was gone through serves no validation",
        lambda data, validation: data == "iterator" and validation == "same",
    ),
    Rule(
        "steps of several batches are made by fit, or by hand with gradients",
        lambda accumulate, reference: (
            accumulate > 1 and reference in ("step", "run_steps", "reduce")
        ),
    ),
    Rule(
        "onnxruntime computes float16 in float32, and rounds where a recomputation begins",
        lambda model, recompute, reference: (
            model in ("half", "half overflowing")
            and recompute is not None
            and reference in ("reduce", "gradients")
        ),
    ),
    Rule(
        "run_steps does not tell which of its steps overflowed",
        lambda reference, model, callbacks: (
            reference == "run_steps"
            and model == "half overflowing"
            and callbacks in ("user", "Checkpoint", "Checkpoint every", "all")
        ),
    ),
    Rule(
        "run_steps returns the loss alone, and not its summands",
        lambda reference, loss: reference == "run_steps" and loss == "sum of classes",
    ),
    Rule(
        "without an interruption nothing is resumed",
        lambda end, stop: not end and stop > 1,
    ),
    Rule(
        "without an interruption there is no second one",
        lambda end, twice: not end and twice,
    ),
    Rule(
        "without an interruption the data stay as they are",
        lambda end, moved: not end and moved,
    ),
    Rule(
        "an epoch has other batches in no other form",
        lambda data, moved: data == "generator of an epoch" and moved,
    ),
    Rule(
        "without an interruption the session stays as it is",
        lambda end, goes_on: not end and goes_on != "session",
    ),
    Rule(
        "an iterator serves one epoch, so that its training cannot get longer",
        lambda data, longer: data == "iterator" and longer,
    ),
    Rule(
        "one epoch cannot be begun as fewer",
        lambda longer, epochs: longer and epochs == 1,
    ),
    Rule(
        "a learning rate by epoch depends on the number of epochs",
        lambda longer, rate: longer and rate == "by epoch",
    ),
    Rule(
        "the best state is already restored at the end of the fewer epochs",
        lambda longer, callbacks: longer and callbacks in RESTORING,
    ),
    Rule(
        "a killed training leaves nothing but its file",
        lambda end, goes_on: end == "killed" and goes_on != "file",
    ),
    Rule(
        "a best state in memory is lost with its session",
        lambda callbacks, goes_on: callbacks == "restore_best in memory" and goes_on != "session",
    ),
    Rule(
        "a best state in memory is lost with its process",
        lambda callbacks, end: callbacks == "restore_best in memory" and end == "killed",
    ),
    Rule(
        "with a single array there is nothing to compare outputs with",
        lambda data, metrics: data == "single array" and metrics,
    ),
    Rule(
        "when a callback stops the training, the best state is restored, as at its end",
        lambda callbacks, end: callbacks in RESTORING and end == "stop",
    ),
    Rule(
        "Dropout drops other elements in parts of a batch",
        lambda also, dropout: also == "one big batch" and dropout,
    ),
    Rule(
        "rows take part in each other's loss through BatchNormalization",
        lambda also, model, batch_normalization: (
            also == "one big batch" and model in NORMALIZING and batch_normalization != "frozen"
        ),
    ),
    Rule(
        "its summands are divided by different counts, which do not add up over parts",
        lambda also, loss: also == "one big batch" and loss == "sum of classes",
    ),
    Rule(
        "reset goes back to the model that the session was opened on",
        lambda also, goes_on: also == "reset" and goes_on != "session",
    ),
    Rule(
        "reset goes back to the file that a killed training went on from",
        lambda also, end: also == "reset" and end == "killed",
    ),
    Rule(
        "reset computes the scale of the loss anew, which is smaller than that in the file",
        lambda also, model: also == "reset" and model == "half overflowing",
    ),
    Rule(
        "a batch of fixed size has no parts",
        lambda also, fixed: also == "one big batch" and fixed,
    ),
    Rule(
        "a step that overflows changes nothing",
        lambda also, model: also == "one big batch" and model == "half overflowing",
    ),
)

# ----------------------------------------------------------------------------------------- draws


TRIES = 100
"""How often a draw with given values is tried."""

Pair = tuple[tuple[str, Any], tuple[str, Any]]
"""Two axes, in their order, each with a value."""


@dataclass(frozen=True)
class Space:
    """All combinations of some features.

    Attributes:
        draw: The class of a combination.
        axes: The values of each feature, the simplest one first.
        rules: The combinations that are not drawn.
    """

    draw: Callable[..., Any]
    axes: Mapping[str, tuple[Any, ...]]
    rules: Sequence[Rule]

    @functools.cached_property
    def _rules(self) -> dict[str, list[Rule]]:
        return {axis: [r for r in self.rules if axis in r.axes] for axis in self.axes}

    def _forbidden(self, values: Mapping[str, Any], axis: str) -> bool:
        """Whether a rule that looks at an axis forbids values of some axes."""
        return any(
            rule.forbids(*(values[name] for name in rule.axes))
            for rule in self._rules[axis]
            if all(name in values for name in rule.axes)
        )

    def is_legal(self, draw: Any) -> bool:
        """Whether no rule forbids a draw."""
        values = {axis: getattr(draw, axis) for axis in self.axes}
        return not any(self._forbidden(values, axis) for axis in self.axes)

    def _completed(
        self,
        rng: random.Random,
        given: Mapping[str, Any],
        missing: Mapping[str, Mapping[Any, set[Any]]],
    ) -> dict[str, Any]:
        for _ in range(TRIES):
            values = self.complete(rng, given, missing)
            if values is not None:
                return values
        raise ValueError(f"no legal draw has {given}; add a rule that says why")

    def complete(
        self,
        rng: random.Random,
        chosen: Mapping[str, Any],
        missing: Mapping[str, Mapping[Any, set[Any]]],
    ) -> dict[str, Any] | None:
        """Chooses a legal value for each axis.

        Args:
            rng: What is random.
            chosen: Values that are given.
            missing: For each axis and value the pairs that are to occur: the values that have not
                been beside it. A value with the most of these is chosen.

        Returns:
            The values; None where these choices left none for an axis.
        """
        values = dict(chosen)
        others = [axis for axis in self.axes if axis not in values]
        rng.shuffle(others)
        for axis in others:
            options = list(self.axes[axis])
            rng.shuffle(options)
            if missing:
                taken = set(values.items())
                options.sort(key=lambda value: -len(missing[axis][value] & taken))
            for value in options:
                values[axis] = value
                if not self._forbidden(values, axis):
                    break
            else:
                return None
        return values

    def legal_pairs(self) -> set[Pair]:
        """Returns the pairs of values of two axes that no rule of these two axes forbids."""
        return {
            ((first, one), (second, other))
            for first, second in itertools.combinations(self.axes, 2)
            for one in self.axes[first]
            for other in self.axes[second]
            if not self._forbidden({first: one, second: other}, first)
            and not self._forbidden({first: one}, first)
            and not self._forbidden({second: other}, second)
        }

    def draws_of(self, seed: int, count: int, **given: Any) -> Iterator[Any]:
        """Yields independent draws that have given values.

        Args:
            seed: Determines them.
            count: How many.
            **given: The values, by axis.
        """
        rng = random.Random(f"{seed} {given}")
        for number in range(count):
            yield self.draw(**self._completed(rng, given, {}), seed=number)

    def draws(self, seed: int, count: int) -> Iterator[Any]:
        """Yields draws: first such that all pairs occur, then independent ones.

        Args:
            seed: Determines them.
            count: How many.
        """
        rng = random.Random(seed)
        missing: dict[str, dict[Any, set[Any]]] = {
            axis: {value: set() for value in values} for axis, values in self.axes.items()
        }
        left = sorted(self.legal_pairs(), key=repr)
        rng.shuffle(left)
        for one, other in left:
            missing[one[0]][one[1]].add(other)
            missing[other[0]][other[1]].add(one)
        for number in range(count):
            while left and left[-1][1] not in missing[left[-1][0][0]][left[-1][0][1]]:
                left.pop()
            values = self._completed(rng, dict(left[-1]) if left else {}, missing if left else {})
            for one, other in itertools.combinations(values.items(), 2):
                missing[one[0]][one[1]].discard(other)
                missing[other[0]][other[1]].discard(one)
            yield self.draw(**values, seed=number)

    def pairs_of(self, draw: Any) -> set[Pair]:
        """Returns the pairs of values that a draw has."""
        return set(itertools.combinations(((axis, getattr(draw, axis)) for axis in self.axes), 2))

    def shrink(self, draw: Any, fails: Callable[[Any], bool]) -> Any:
        """Returns the simplest draw near one that fails which fails, too.

        Args:
            draw: One that fails.
            fails: Whether a draw fails in the same way.
        """
        before = None
        while draw != before:
            before = draw
            for axis, values in {**self.axes, "seed": (0, draw.seed)}.items():
                given = getattr(draw, axis)  # a test may ask for a model that is not drawn
                for value in values[: values.index(given) if given in values else 0]:
                    simpler = replace(draw, **{axis: value})
                    if self.is_legal(simpler) and fails(simpler):
                        draw = simpler
                        break
        return draw


FIT = Space(Draw, AXES, RULES)
"""The combinations of features of fit."""
