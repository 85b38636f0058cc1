"""Loss, metrics and predictions of a data set, in inference mode."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops import metrics as metric_functions
from ortops._common.cores import session_threads
from ortops._common.uninterrupted import run_uninterrupted
from ortops.engine.execution.memory import Memory
from ortops.engine.execution.onnxruntime_sessions import run_session
from ortops.engine.execution.providers import CPU
from ortops.engine.execution.tables import Lookup, separate_tables
from ortops.engine.inference import InferenceSession
from ortops.engine.trainable.metadata import LossPart, PredictionNote, TrainingMetadata
from ortops.engine.trainable.step_graph import evaluation_model
from ortops.engine.training.data import Data, rows
from ortops.engine.training.feeds import Checked, Inputs
from ortops.engine.training.gradients import number_of
from ortops.engine.training.input_values import Input
from ortops.engine.training.loaded_model import LoadedModel, reads
from ortops.engine.training.sample_weights import ClassWeight, SampleWeight, Weighed, weigh
from ortops.engine.training.samples import Collate
from ortops.engine.training.training_metrics import Measured, TrainingMetrics, add_batch
from ortops.errors import ArgumentError, OrtopsError, did_you_mean
from ortops.graph.faults import disabled_optimizers
from ortops.graph.files import external
from ortops.graph.files.serialization import to_proto
from ortops.graph.row_axes import Pieces
from ortops.metrics import Metrics, StreamingMetric
from ortops.metrics.metric import as_number, reads_numbers

Array: TypeAlias = npt.NDArray[Any]

_EVALUATIONS = 8
"""How many graphs that evaluate or predict are kept."""


@dataclass(frozen=True)
class Evaluation:
    """An onnxruntime session that computes tensors in inference mode.

    Attributes:
        session: The session.
        inputs: The inputs that a batch has to fit.
        parts: The summands of the loss that it computes.
        tensors: The output for each requested tensor.
        kinds: The kind and the class axis of tensors that are known to be probabilities.
        constants: What the session is fed in every run.
        lookup: Reads the rows of tables that stay in a file; None if it reads none.
    """

    session: onnxruntime.InferenceSession
    inputs: Inputs
    parts: Sequence[LossPart]
    tensors: Mapping[str, str]
    kinds: Mapping[str, tuple[str, int | None]]
    constants: Mapping[str, Array]
    lookup: Lookup | None

    def row_axis(self, name: str) -> int | None:
        """Returns the axis of a tensor that has the rows; None if its shape has none."""
        output = self.tensors[name]
        found = next(each for each in self.session.get_outputs() if each.name == output)
        # onnxruntime has an empty shape for a scalar and for an unknown rank.
        return self.inputs.rows.of_output(found.shape or None)


@dataclass(frozen=True)
class MetricBinding:
    """A metric with the tensor and the target that it compares.

    Attributes:
        metric: The metric that was given.
        note: The tensor, its properties, and the target.
        known: Whether the properties are those of this tensor; otherwise the graph may have better
            ones.
    """

    metric: StreamingMetric
    note: PredictionNote
    known: bool

    def completed(self, kinds: Mapping[str, tuple[str, int | None]]) -> MetricBinding:
        """Returns the binding with the properties of its tensor.

        Args:
            kinds: See `Evaluation`.
        """
        note, tensor = self.note, self.note.tensor
        if self.known or tensor not in kinds:
            return self
        kind, axis = kinds[tensor]
        note = replace(note, kind=kind, axis=axis if note.axis is None else note.axis)
        return replace(self, note=note)

    def begin(self) -> StreamingMetric:
        """Returns a copy of the metric, without any batches."""
        note = self.note
        return self.metric.begun(note.kind, note.axis, note.ignored, **note.shared)


def bind_metric(
    metric: StreamingMetric,
    metadata: TrainingMetadata,
    output: str,
    inputs: Collection[str],
    own: Collection[str],
    head: PredictionNote | None = None,
) -> MetricBinding:
    """Finds out what a metric compares.

    Args:
        metric: The metric.
        metadata: What the builder wrote about the model.
        output: The tensor to read if the builder wrote nothing.
        inputs: The inputs of a step.
        own: The inputs of the model.
        head: The prediction that it measures, if there are several.

    Raises:
        OrtopsError: If there is no such input, or it is not known which one to compare with.
    """
    first = metadata.prediction
    notes = [first, *metadata.predictions] if head is None else [head]
    if metric.output is not None:
        notes = [each for each in notes if metric.output in (each.tensor, each.output)]
    fitting = [each for each in notes if metric.target in (None, each.target)]
    note = next(iter([*fitting, *notes]), PredictionNote())
    own_output = note.output if reads_numbers(metric) else ""
    tensor = metric.output or own_output or note.tensor or output
    known, target = tensor == note.tensor, metric.target or note.target
    if target != note.target:
        note = replace(note, ignored=None, shifted=False, target_lengths="", sample_weight="")
        note = replace(note, form="")
    added = [name for name in inputs if name not in own]
    if not target:
        targets = {each.target for each in (first, *metadata.predictions)} - {""}
        candidates = list(targets) if first.tensor else added
        if len(candidates) == 1:
            (target,) = candidates
        elif candidates:
            raise metric.wrong(
                f"no loss compares '{tensor}' with an input; name the input with target=, for "
                f"example target='{sorted(candidates)[0]}'"
            )
    if not target:
        raise metric.wrong(
            f"the loss has {len(added)} inputs ({', '.join(added)}), and it is not known which one "
            "outputs are compared with; name it with target="
        )
    if target not in inputs:
        raise metric.wrong(f"there is no input '{target}'; {did_you_mean(target, inputs)}")
    return MetricBinding(metric, replace(note, tensor=tensor, target=target), known)


def heads(
    metric: StreamingMetric, metadata: TrainingMetadata, inputs: Mapping[str, Input]
) -> dict[str, PredictionNote]:
    """Returns which of several predictions a metric measures, by the name of each result.

    Args:
        metric: The metric.
        metadata: What the builder wrote about the model.
        inputs: The inputs of a step.

    Returns:
        The predictions; nothing if there is one, or none that the metric names.

    Raises:
        ArgumentError: If it fits none of several.
    """
    several = {
        (note.tensor, note.target): note
        for note in metadata.predictions
        if note.target in inputs
        and metric.output in (None, note.tensor, note.output)
        and metric.target in (None, note.target)
    }
    if len(several) < 2:
        return {}
    fitting = [
        note
        for note in several.values()
        if metric.fits is None or note.compares(inputs[note.target].dtype) in metric.fits
    ]
    if not fitting and metric.output is None:
        known = ", ".join(f"'{note.output or note.tensor}'" for note in several.values())
        raise ArgumentError(
            f"metric '{metric.label}': it fits none of the predictions {known} of the loss; name "
            "the tensor to measure with output="
        )
    names = [note.output or note.tensor for note in fitting]
    if len(fitting) < 2:
        return dict.fromkeys([metric.label], *fitting) if fitting else {}
    labels = [metric.label if metric.output else f"{metric.label}_{name}" for name in names]
    return {
        label if labels.count(label) == 1 else f"{label}_{note.target}": note
        for label, note in zip(labels, fitting, strict=True)
    }


@dataclass
class Total:
    """A part of a loss, accumulated over batches.

    Attributes:
        part: The part.
        total: The sum so far.
        count: The divisor so far.
        batches: The number of batches.
    """

    part: LossPart
    total: float = 0.0
    count: float = 0.0
    batches: int = 0

    def add(self, outputs: Mapping[str, Array], rows: int) -> None:
        """Adds a batch."""
        count = number_of(outputs[self.part.count]) if self.part.count else rows
        if self.part.is_sum:
            count = 1.0
        self.batches += 1
        if count:  # otherwise, it is a mean of nothing
            self.total += number_of(outputs[self.part.name]) * count
            self.count += count

    @property
    def average(self) -> float:
        """The loss of all batches as if they were one."""
        if self.part.is_sum:
            return self.total
        return self.total / self.count if self.count else math.nan


class Evaluator:
    """Computes the loss, metrics and tensors of data sets in inference mode.

    Args:
        loaded: The model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._evaluations: dict[tuple[Any, ...], Evaluation] = {}

    def evaluate(
        self,
        data: Data,
        batch_size: int,
        metrics: Metrics,
        ema: bool,
        sample_weight: SampleWeight = None,
        class_weight: ClassWeight | None = None,
        collate: Collate | None = None,
    ) -> dict[str, float]:
        """Computes the loss and metrics in inference mode, and changes nothing.

        Batches are evaluated one by one; only what a metric stores is kept in memory.

        Args:
            data: As for `fit`: arrays for each input of the model and of the loss, or batches.
            batch_size: The number of rows per batch, if rows are given.
            metrics: The metrics to compute: names, objects and functions (see `ortops.metrics`).
                They read what the loss reads, or any tensor of the model.
            ema: Whether to use the averages of parameters (``ema_decay=`` of
                `ortops.build_training_model`).
            entry: The training_info entry whose loss is computed, by index or name; by default, the
                first one.
            sample_weight: A weight >= 0 for each row, as for `fit`. Metrics are weighted, too,
                unless they have no parameter ``sample_weight``.
            class_weight: A weight for each class, as for `fit`.
            collate: Makes batches of samples, as for `fit`.

        Returns:
            ``loss``, as if all batches were one (averaged over the rows if a loss function returns
            no count; NaN if no label counts); for a sum of losses also ``loss_<name>`` of each; and
            the metrics by name.

        Raises:
            FeedError: If the data do not fit the model.
            ModelError: If there are no averages.
            OrtopsError: If a metric does not fit what it compares.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> session.evaluate(examples.BATCH, metrics=["mean_absolute_error"])
            {'loss': 1.0, 'mean_absolute_error': 1.0}
        """
        bindings = self.bind(metric_functions.resolve(metrics))
        self._loaded.loss_names()
        declared = self._loaded.declared
        read = declared.tensors if declared.pending else ()
        tensors = tuple(dict.fromkeys((*(each.note.tensor for each in bindings.values()), *read)))
        evaluation = self._evaluation(tensors, loss=True)
        totals = [Total(part) for part in evaluation.parts]
        bindings = {name: each.completed(evaluation.kinds) for name, each in bindings.items()}
        streams = {name: each.begin() for name, each in bindings.items()}
        for name, metric in streams.items():
            if bindings[name].note.sample_weight and not metric.takes_weights:
                evaluation.inputs.say(
                    f"metric '{name}' has no parameter sample_weight, so it does not weigh rows"
                )
        for total in totals:
            if total.part.name in streams:
                raise streams[total.part.name].wrong(
                    "a summand of the loss has this name; give the metric another one with name="
                )
        weighed = weigh(data, evaluation.inputs, self._loaded.metadata, sample_weight, class_weight)
        for batch, found in self._batches(weighed, batch_size, evaluation, ema, collate):
            if declared.pending:
                declared.check({n: found[out] for n, out in evaluation.tensors.items()}, batch)
            for total in totals:
                total.add(found, rows(batch))
            for name, metric in streams.items():
                note = bindings[name].note
                add_batch(metric, note, found[evaluation.tensors[note.tensor]], batch)
        counted = [total for total in totals if total.part.is_sum or total.count]
        values = [total.part.weight * total.average for total in counted]
        result = {"loss": sum(values) if values else math.nan}
        if len(totals) > 1:
            result |= {total.part.name: total.average for total in totals}
        return result | {name: as_number(each, each.result()) for name, each in streams.items()}

    def predict(
        self,
        data: Data,
        batch_size: int,
        outputs: str | Sequence[str] | None,
        ema: bool,
        collate: Collate | None = None,
    ) -> Array | dict[str, Array]:
        """Computes tensors of the model for all rows in inference mode, and changes nothing.

        Args:
            data: As for `fit`; only the inputs that the tensors depend on are needed, so labels may
                be omitted.
            batch_size: The number of rows per batch, if rows are given.
            outputs: The names of tensors of the model, outputs or not; all outputs by default. For
                a ZipMap, the tensor that it reads is returned.
            ema: Whether to use the averages of parameters (``ema_decay=`` of
                `ortops.build_training_model`).
            collate: Makes batches of samples, as for `fit`.

        Returns:
            An array for each name, with the batches concatenated along the axis of the rows, which
            is that of the batch dimension of the model; a single array if ``outputs`` is one name.

        Raises:
            FeedError: If the data do not fit the model.
            ModelError: If there are no averages.
            OrtopsError: If there is no such tensor, or it does not have the rows of the batch.

        Example:
            >>> import numpy as np
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> _ = session.step(examples.BATCH)
            >>> session.predict({"x": np.full((3, 1), 4, np.float32)}, batch_size=2, outputs="y")
            array([[2.],
                   [2.],
                   [2.]], dtype=float32)
        """
        names = [outputs] if isinstance(outputs, str) else outputs
        if names is None:
            names = [value.name for value in self._loaded.proto.graph.output]
        if not names or not all(isinstance(name, str) for name in names):
            raise ArgumentError(
                f"outputs must be the name of a tensor or a list of names, got {outputs!r}"
            )
        evaluation = self._evaluation(tuple(dict.fromkeys(names)), loss=False)
        remedy = "leave it out of outputs=, or run session.inference_model()"
        is_one = evaluation.inputs.rows.fixed == 1
        pieces = {
            name: Pieces(name, evaluation.row_axis(name), is_one, "predict", remedy)
            for name in evaluation.tensors
        }
        weighed = Weighed(data, evaluation.inputs, {})
        for batch, found in self._batches(weighed, batch_size, evaluation, ema, collate):
            size = rows(batch)
            for name, output in evaluation.tensors.items():
                array = found[output]
                is_fed = any(np.may_share_memory(array, fed) for fed in batch.values())
                pieces[name].add(array.copy() if is_fed else array, size)  # it may be filled again
        result = {name: each.joined() for name, each in pieces.items()}
        return result[outputs] if isinstance(outputs, str) else result

    def of_steps(self, metrics: Mapping[str, StreamingMetric]) -> TrainingMetrics:
        """Returns metrics that read the outputs of training steps.

        Args:
            metrics: The metrics by name.

        Raises:
            ArgumentError: If a metric has the name of another number of the history.
            OrtopsError: If it is not known what a metric compares, or a step does not compute it.
        """
        loaded = self._loaded
        found: dict[str, Measured] = {}
        for name, binding in self.bind(metrics).items():
            tensor = binding.note.tensor
            output = loaded.in_training_mode(tensor)
            others = ("loss", *loaded.norms(), "learning_rate", "steps", "seconds")
            if name in (*loaded.loss_names(), *others):
                raise ArgumentError(
                    f"train_metrics: the history has a number '{name}' already; give the metric "
                    "another name with name="
                )
            if not loaded.ready().computes(output):
                raise binding.metric.wrong(
                    f"train_metrics: a training step does not compute '{tensor}', as the loss does "
                    "not depend on it; name a tensor that the loss reads with output=, or leave "
                    "out train_metrics"
                )
            kinds = {} if binding.known else self._evaluation((tensor,), loss=True).kinds
            binding = binding.completed(kinds)
            found[name] = Measured(binding.begin(), binding.note, output)
        return TrainingMetrics(found)

    def scheduled(self, peak: float) -> float:
        """Returns the learning rate of the next step for a peak: the same without a schedule.

        Raises:
            OrtopsError: If the schedule has no number of steps yet.
        """
        loaded, name = self._loaded, self._loaded.metadata.scheduled_learning_rate
        if not name:
            return peak
        loaded.check_schedule("learning_rate")
        evaluation = self._evaluation((name,), loss=False)
        peaks = dict.fromkeys(loaded.learning_rates(), np.array(peak, np.float32))
        return number_of(self._run(evaluation, peaks, ema=False)[evaluation.tensors[name]])

    def row_axis(self, name: str) -> int:
        """Returns the axis of a tensor of the model along which `predict` joins batches.

        Args:
            name: The name of the tensor.

        Example:
            >>> from ortops.docs import examples
            >>> examples.session().row_axis("y")
            0
        """
        return self._evaluation((name,), loss=False).row_axis(name) or 0

    def bind(self, metrics: Mapping[str, StreamingMetric]) -> dict[str, MetricBinding]:
        """Finds out what each of some metrics compares, by the names of their results.

        Raises:
            ArgumentError: If a metric fits none of several predictions, or two have one name.
            OrtopsError: If it is not known what a metric compares.
        """
        loaded, graph = self._loaded, self._loaded.proto.graph
        own, first = {value.name for value in graph.input}, graph.output[0].name
        found: dict[str, MetricBinding] = {}
        for name, metric in metrics.items():
            measured = heads(metric, loaded.metadata, loaded.inputs)
            for label, head in measured.items() or [(name, None)]:
                if label in found:
                    raise ArgumentError(
                        f"metric '{label}': this is also the name of another metric; rename one "
                        "with name="
                    )
                each = metric
                if label != name:
                    each = copy.copy(metric)
                    each.name = label
                try:
                    bound = bind_metric(each, loaded.metadata, first, loaded.inputs, own, head)
                except OrtopsError:
                    if metric.output is not None:  # an unknown output has a clearer error
                        self._evaluation((metric.output,), loss=False)
                    raise
                found[label] = bound
        return found

    def _batches(
        self,
        data: Weighed,
        batch_size: int,
        evaluation: Evaluation,
        ema: bool,
        collate: Collate | None,
    ) -> Iterator[tuple[Checked, dict[str, Array]]]:
        """Returns the batches of a data set, each with the outputs for it."""
        source = data.open(batch_size=batch_size, collate=collate)
        if ema:  # raises an error before the first batch if there are no averages
            self._loaded.shared_metadata.averaged(self._loaded.arrays())
        return ((batch, self._run(evaluation, batch, ema)) for batch in source.epoch())

    @reads("evaluate")
    def _run(
        self, evaluation: Evaluation, feeds: Mapping[str, Array], ema: bool
    ) -> dict[str, Array]:
        loaded = self._loaded
        loaded.execution.check_process()
        memories: Mapping[str, Memory] = loaded.execution.memories()
        if ema:
            memories = loaded.shared_metadata.averaged(loaded.arrays())
        outputs = [value.name for value in evaluation.session.get_outputs()]
        given = {**evaluation.constants, **memories, **feeds}
        if evaluation.lookup is not None:
            given |= evaluation.lookup.run(feeds)
        return run_session(evaluation.session, given, outputs)

    def _evaluation(self, tensors: tuple[str, ...], *, loss: bool) -> Evaluation:
        """Returns what computes tensors, and the loss; built once."""
        key = (tensors, loss, tuple(self._loaded.usage.constants))
        if key not in self._evaluations:
            built = run_uninterrupted(lambda: self._build(tensors, loss=loss))
            while len(self._evaluations) >= _EVALUATIONS:
                self._evaluations.pop(next(iter(self._evaluations)), None)
            self._evaluations[key] = built
            return built
        return self._evaluations[key]

    def _build(self, tensors: Sequence[str], *, loss: bool) -> Evaluation:
        loaded = self._loaded
        step, entry = loaded.steps[0], loaded.entries[0]
        step = replace(step, variables=[*step.variables, *loaded.usage.constants])
        found = evaluation_model(loaded.light, entry, step, tensors, loss=loss)
        model, feeds = found.step.model, found.step.feeds
        known = set(feeds) <= loaded.inputs.keys()
        unread = [value.name for value in loaded.proto.graph.input]
        inputs = loaded.inputs
        if not known:
            weights = loaded.metadata.sample_weights
            inputs = Inputs(
                [found.step],
                [*unread, *loaded.inputs],
                rows=loaded.inputs.rows,
                weights=weights,
            )
            inputs.of_loss, inputs.lengths = loaded.inputs.of_loss, loaded.inputs.lengths
        inputs = inputs.only(loaded.inputs if known and loss else feeds)
        if loss:  # metrics may compare with any
            for name, value in loaded.inputs.items():
                inputs.setdefault(name, value)
        _, lookup = separate_tables(found.step, loaded.tables)
        constants = external.move_to_inputs(model, loaded.settings.copied)
        proto = to_proto(model)
        disabled = disabled_optimizers(proto)
        more: dict[str, Any] = {"disabled_optimizers": disabled} if disabled else {}
        more["enable_fallback"] = 0  # onnxruntime would print an error, and use the CPU
        options = loaded.options
        falls_back = [name for name, _ in loaded.providers] != [CPU]
        if options is None and (falls_back or session_threads()):
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = session_threads()
            if falls_back:
                options.log_severity_level = 3  # onnxruntime would warn of it
        session = InferenceSession(proto, options, loaded.providers, kernels="onnx", **more)
        return Evaluation(
            session, inputs, found.parts, found.tensors, found.kinds, constants, lookup
        )
