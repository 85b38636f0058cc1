"""A call of `fit`: what its arguments mean, its checks, and where it begins."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ortops import metrics as metric_functions
from ortops._common.arguments import function
from ortops.engine.training.anomalies import Anomalies
from ortops.engine.training.callback import Callback
from ortops.engine.training.data import Data, Source, open_data
from ortops.engine.training.feeds import Inputs
from ortops.engine.training.fit_options import OPTIONS, FitOptions, checked_options
from ortops.engine.training.history import History
from ortops.engine.training.interruption import Interruption
from ortops.engine.training.limits import DEV_STEPS, Limits
from ortops.engine.training.loop import Loop
from ortops.engine.training.position import EpochState, Position, call_of
from ortops.engine.training.sample_weights import weigh
from ortops.engine.training.schedule_length import planned_steps, set_length, steps_left
from ortops.engine.training.trainer import Shared, StepStrategy, Trainer
from ortops.engine.training.training_metrics import TrainingMetrics
from ortops.engine.training.validation_split import split_source
from ortops.errors import ArgumentError, OrtopsError

logger = logging.getLogger("ortops")


@dataclass(frozen=True)
class Fitting:
    """Trains on data sets.

    Attributes:
        trainer: The session.
        strategy: How it makes steps.
        inputs: What a batch fills.
    """

    trainer: Trainer
    strategy: StepStrategy
    inputs: Inputs

    def fit(self, data: Data, options: FitOptions) -> History:  # noqa: D417
        """Trains on a data set.

        The seed and the number of finished steps determine the order of the rows. If a signal, an
        error or a callback ends training early, or the process is killed after the session was
        saved, ``resume=True`` continues, even in the middle of an epoch, as if training had never
        stopped: `save` stores the position together with the weights. `reset` discards it. The page
        on training (``ortops/docs/training.md``, "Callbacks and resuming") describes signals.

        Args:
            data: The data set, in any form that `ortops.open_data` accepts: arrays by
                name or in a tuple, a table, a Parquet or Arrow file, samples, an iterable of
                batches, or a function that returns one of these.
            epochs: The number of passes over the data. With ``resume=True``, finished epochs count,
                and a larger number than before extends the training.
            batch_size: The number of rows per batch, if rows are given.
            shuffle: Whether to shuffle the rows before each epoch, if rows are given.
            drop_last: Whether to leave out the last batch of each epoch if it has fewer than
                ``batch_size`` rows. With ``shuffle``, these are other rows in each epoch.
            seed: Determines the order of the rows.
            validation: A data set to evaluate after each epoch.
            validation_split: The fraction of ``data`` to set aside as ``validation``: of n rows,
                the first ``floor(n · (1 - validation_split))`` are for training and the last ones
                for validation, in the order in which they are given, before any shuffling. Of given
                batches, it is the last of these. Data that are only read from the beginning to the
                end, such as iterators and loaders, are refused.
            validate_every: The number of steps between validations within epochs, in addition to
                the one after each epoch: a validation follows each step whose number (`steps_done`)
                is a multiple. The results are in ``validations`` of the returned
                `ortops.History`; callbacks get them in ``on_validation``.
            max_steps: The number of steps after which training ends, also within an epoch. The
                epoch is then validated and recorded. With ``resume=True``, steps of earlier calls
                count, and a larger number than before finishes the epoch, whose entry replaces the
                recorded one.
            max_minutes: The number of minutes after which this call ends, after the current step,
                as with ``max_steps``. Earlier calls do not count; the validation at the end comes
                in addition.
            sample_weight: A weight >= 0 for each row: an array [rows] (or, for labels of several
                axes, of their shape), or the name of a column of the data. The loss of a batch is
                Σ w · loss / Σ w (0 if Σ w is 0); the loss in the file stays as it is. If the loss
                was built with an input for weights, as
                ``SoftmaxCrossEntropy(sample_weight="weight")`` is, data may instead contain them
                under its name; validation data only then have any, and rows without weights have 1.
            class_weight: A weight for each class of the labels, as a dict (other classes have 1),
                a list, or ``"balanced"``: rows / (classes · rows of the class). It multiplies the
                weights of the rows for training, not for validation. If a row has several labels,
                each of them counts by its class.
            collate: A function that makes a batch, a dict or tuple of arrays, of a list of samples;
                or ``"pad"`` or an `ortops.data.Pad`, which pads arrays to the longest of the batch.
                The data are then samples: a list of dicts or tuples, lists of arrays by name or in
                a tuple, a table, or an object with ``__len__`` and ``__getitem__``.
            group_by_length: Whether batches have samples of similar length, which saves padding;
                or the length of each sample. With True, all samples are read once at the beginning,
                and the length of a sample is the largest size of the dynamic axes of the model's
                inputs. Needs ``shuffle``: the order of the batches stays random.
            metrics: The metrics to compute on the validation data (see `ortops.metrics`).
            train_metrics: Whether to compute the metrics on the training data as well, from the
                outputs of each step: in training mode, with the parameters before the step. They
                have the names of the metrics, without ``validation_``. The loss must depend on the
                tensors that they read.
            schedule: A function that returns the learning rate of an epoch, given the fraction of
                ``epochs`` that are finished (0 in the first one). By default, the learning rate
                does not change, or follows the schedule in the model's graph.
            callbacks: Callbacks for each step, each epoch and the end (see `ortops.callbacks`).
            accumulate: The number of batches per step. A step is that of all their rows; the last
                one of an epoch may have fewer.
            prefetch: The number of batches that a thread reads ahead.
            resume: Whether to continue the training that an earlier call began, if there is one,
                with the same ``seed``, ``shuffle``, ``batch_size``, ``accumulate`` and number of
                rows and batches. ``epochs`` must include the epochs that were begun.
            progress: Whether to show a line for each epoch on standard error. A terminal or
                notebook shows it while the epoch runs, a file gets it at the end of the epoch.
            stop_on_nan: Whether to stop at a loss that is NaN or infinite. A float16 step that is
                skipped because its gradients overflowed does not count (see
                `build_training_model`), unless they overflow at the smallest loss scale, too.
            detect_anomaly: Whether to look for values that are not finite in the loss and the
                variables after each step. If there are, the step is repeated, and the error names
                the node that made the first of them, in the forward pass, the backward pass or the
                update. Each step then takes longer and keeps a copy of the variables.
            fast_dev_run: Whether only to try out this call: 3 steps and 3 batches of validation, as
                with ``epochs=1, max_steps=3``. The callbacks of ortops are not called, nor others
                that save or write; the session is afterwards as it was, and ``resume`` has no
                effect.
            entry: The training_info entry that makes the steps, by index or name (see
                `ortops.add_training`); by default all of them, in order, with each batch.
            entries: The number of steps of each entry in a cycle, by name, if entries take turns:
                with ``{"discriminator": 2, "main": 1}``, the first two batches of an epoch are for
                steps of the discriminator, the next one for a step of ``main``, and so on. Each
                epoch begins a new cycle. A batch has the inputs of all these entries. ``loss`` is
                the sum of their mean losses, each of which is ``<entry>.loss``; the learning rate
                of each one's last step is ``<entry>.learning_rate``, and ``learning_rate`` that of
                the entry named first.

        Returns:
            A dict for each epoch: ``loss`` is the mean over its rows, and so is ``loss_<name>`` of
            each summand of a sum of losses (if labels are ignored or weighted, the mean over those
            that count; NaN if there are none); ``validation_loss`` and ``validation_<metric>`` are
            computed on the validation data, and with ``train_metrics`` each metric by its name on
            the training data; ``gradient_norm``, ``learning_rate``, ``steps`` and ``seconds`` are
            explained in `ortops.History`.

        Raises:
            ArgumentError: If an argument is wrong.
            DivergedError: If the loss of a step is NaN or infinite (the step has been made), or if
                float16 gradients overflow at the smallest loss scale.
            FeedError: If the data do not fit the model.
            KernelError: If a kernel failed.
            OrtopsError: If an argument is not that of the training to resume.
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM or SIGHUP.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> history = session.fit(examples.BATCH, epochs=3, progress=False)
            >>> [round(loss, 3) for loss in history.history["loss"]]
            [1.0, 0.25, 0.062]
        """
        given = cast(FitOptions, checked_options(options, OPTIONS))
        wanted = given["epochs"], given["max_steps"]
        if given["fast_dev_run"]:
            given["epochs"], given["resume"] = min(given["epochs"], 1), False
            given["max_steps"] = min(DEV_STEPS, wanted[1] or DEV_STEPS)
        limits = Limits(given["validate_every"], given["max_steps"], given["max_minutes"])
        validated = _is_validated(given)
        if given["fast_dev_run"]:
            given["callbacks"] = [each for each in given["callbacks"] if _is_harmless(each)]
        directions = self._directions(given, validated=validated)
        measured = self._measured(given) if given["train_metrics"] else None
        anomalies = self._anomalies() if given["detect_anomaly"] else None
        source, validation = self._open(data, given)
        trainer, strategy = self.trainer, self.strategy
        call = call_of(given, source.rows, source.batches, strategy.entries)
        begun = trainer.resume_state.position if given["resume"] else None
        position = self._first_position(call, begun)
        if strategy.shared is not None:
            _check_same(strategy.shared, given, position)
        planned = begun.epoch_state.call["epochs"] if begun else 0
        if position.epoch_state.epoch > given["epochs"] and (
            begun is None or begun.epoch_state.epoch > planned
        ):
            return position.epoch_state.history
        if begun is not None and _has_ended(begun, limits, trainer.steps_done):
            return begun.epoch_state.history
        set_length(trainer, {**call, "epochs": wanted[0]}, wanted[1], new=begun is None)
        loop = Loop(
            *(trainer, strategy, given, source, validation, position, limits),
            *(measured, anomalies, directions, Interruption(_run.__code__)),
        )
        strategy.show(measured.outputs if measured else [])
        set_here = bool(trainer.metadata.schedule_steps)  # perhaps to an earlier max_steps
        if begun is not None and (given["epochs"] > planned or set_here) and strategy.leads:
            _warn_if_schedule_ends(trainer, position, given["max_steps"])
        return _run(loop)

    def _directions(self, given: FitOptions, *, validated: bool) -> dict[str, bool | None]:
        """Returns the losses and metrics in the history, each with whether higher is better."""
        trainer, measured = self.trainer, given["train_metrics"]
        trainer.loss_names()
        chosen = metric_functions.resolve(given["metrics"])
        if chosen and not (validated or measured):
            raise OrtopsError(
                f"metrics: '{next(iter(chosen))}' is computed on validation data; give "
                "validation= or validation_split=, or train_metrics=True, or use evaluate"
            )
        if given["schedule"] is not None:
            trainer.metadata.refuse_second_schedule()
        parts = [part.name for part in trainer.metadata.losses]
        losses = ["loss", *(parts if len(parts) > 1 else [])]
        known = {**dict.fromkeys(losses, False), **trainer.directions(chosen)}
        found = {name: more for name, more in known.items() if measured or name in losses}
        if validated:
            found |= {f"validation_{name}": more for name, more in known.items()}
        return found

    def _measured(self, given: FitOptions) -> TrainingMetrics:
        """Returns the metrics of training."""
        chosen = metric_functions.resolve(given["metrics"])
        if not chosen:
            raise ArgumentError("train_metrics: there are no metrics; give metrics=")
        if self.strategy.shared is not None:
            raise ArgumentError(
                "train_metrics: each rank of a joined session has only its rows of a batch, so "
                "metrics of whole batches are not known; leave it out, and give validation="
            )
        return self.trainer.training_metrics(chosen)

    def _anomalies(self) -> Anomalies:
        """Returns what explains values that are not finite."""
        if self.strategy.shared is not None:
            raise ArgumentError(
                "detect_anomaly: a joined session divides each batch, so a step cannot be repeated "
                "by one process; train in one process to find the node"
            )
        if self.strategy.entry is None:
            raise ArgumentError(
                "detect_anomaly: several training_info entries make steps; train one of them with "
                "entry="
            )
        return Anomalies(self.trainer, self.strategy.entry)

    def _open(self, data: Data, given: FitOptions) -> tuple[Source, Source | None]:
        """Returns the data for training, and those for validation, whose classes have no weights.

        Raises:
            ArgumentError: If an argument does not fit the data.
            FeedError: If the data do not fit the inputs.
        """
        reading: dict[str, Any] = {n: given[n] for n in ("batch_size", "epochs", "collate")}
        split, grouping = given["validation_split"], given["group_by_length"]
        weights = given["sample_weight"], given["class_weight"]
        weighed = weigh(data, self.inputs, self.trainer.metadata, *weights, split)
        if grouping is not False and not given["shuffle"]:
            raise ArgumentError(
                "group_by_length changes the order of the rows, so it needs shuffle=True, got False"
            )
        source = weighed.open(prefetch=given["prefetch"], group_by_length=grouping, **reading)
        validation = None
        if given["validation"] is not None:
            validation = open_data(given["validation"], self.inputs, **reading)
        elif split:
            plain = replace(weighed, inputs=self.inputs)
            unweighed = source if weighed.inputs is self.inputs else plain.open(**reading)
            source, validation = split_source(source, split)[0], split_source(unweighed, split)[1]
        if given["drop_last"]:
            source = source.whole_batches(given["batch_size"])
        if given["fast_dev_run"] and validation is not None:
            validation = validation.first(DEV_STEPS)
        return source, validation

    def _first_position(self, call: Mapping[str, Any], begun: Position | None) -> Position:
        """Returns the position at which a call of `fit` starts.

        Args:
            call: The arguments of this call.
            begun: The position to resume from; None for a new training.
        """
        made = self.trainer.steps_done
        if begun is None:
            return Position(EpochState(call, 1, made, History(), 0, list, begun=made))
        position = begun.resumed(call)
        position.check_sums(len(self.trainer.loss_names()))
        return position


def _run(loop: Loop) -> History:
    """Trains until the end, and raises the exception of a signal."""
    interruption = loop.interruption
    try:
        interruption.watch()
        with loop.calls.closing():
            loop.run()
    finally:
        interruption.release()
    if interruption.name:
        if loop.strategy.leads:
            _log_how_to_continue(loop.trainer, interruption.name)
        interruption.throw()
    return loop.results()


def _is_harmless(callback: Callback) -> bool:
    """Whether a callback is called with ``fast_dev_run=True``: one of the user's without files."""
    own = type(callback).__module__.startswith("ortops.")
    return not (callback.saves or callback.writes or own)


def _is_validated(given: FitOptions) -> bool:
    """Whether there are validation data; checks the arguments that are objects or belong to it.

    Raises:
        ArgumentError: If an argument is wrong.
    """
    split, every, callbacks = given["validation_split"], given["validate_every"], given["callbacks"]
    if split and given["validation"] is not None:
        raise ArgumentError("validation_split: validation= is given, too; give one of them")
    validated = given["validation"] is not None or split > 0
    if every is not None and not validated:
        raise ArgumentError(
            f"validate_every: there are no data to validate every {every} steps; give "
            "validation= or validation_split="
        )
    if not isinstance(callbacks, Sequence):
        raise ArgumentError(f"callbacks must be a list of callbacks, got {callbacks!r:.80}")
    if given["schedule"] is not None:
        what = "a function of the fraction of epochs that are finished"
        function("schedule", given["schedule"], what)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ArgumentError(
                "callbacks must be instances of subclasses of ortops.callbacks.Callback, got "
                f"{callback!r:.80}"
            )
    return validated


def _has_ended(begun: Position, limits: Limits, steps: int) -> bool:
    """Whether the training to resume has ended at a limit, and the end was recorded."""
    recorded = begun.epoch_state.cut is not None or not begun.batch
    return recorded and limits.reaches_steps(steps - begun.epoch_state.begun)


def _check_same(shared: Shared, given: FitOptions, position: Position) -> None:
    """Raises an error if processes have different arguments or positions."""
    epoch_state = position.epoch_state
    limits = {n: given[n] for n in ("validate_every", "max_steps", "max_minutes")}
    places = {"epoch": epoch_state.epoch, "first_step": epoch_state.first_step}
    arguments = {**epoch_state.call, **limits, **places, "batch": position.batch}
    shown = (f"{name}={value}" for name, value in arguments.items())
    shared.same("the arguments of fit, and where it begins", ", ".join(shown))


def _warn_if_schedule_ends(trainer: Trainer, position: Position, max_steps: int | None) -> None:
    """Warns if training has more steps than the schedule in its graph."""
    schedule = trainer.metadata.schedule
    found = re.fullmatch(r"\w+\((?:[^()]*, )?steps=(\d+)[^()]*\)", schedule)
    planned = int(found[1]) if found else planned_steps(trainer)
    epoch_state = position.epoch_state
    if not planned:  # it never ends
        return
    if max_steps is not None and epoch_state.begun + max_steps <= planned:
        return
    left = steps_left(epoch_state.call, epoch_state.epoch, position.batch)
    if left is not None and trainer.steps_done + left <= planned:
        return
    logger.warning(
        "fit: the model's schedule, %s, ends after %s steps; later steps keep its final learning "
        "rate, which may be 0",
        *(schedule, planned),
    )


def _log_how_to_continue(trainer: Trainer, name: str) -> None:
    file = trainer.saved_in
    if file:
        how = f"TrainingSession({file!r}).fit(…, resume=True)"
    else:
        how = "fit(…, resume=True) of this session, or of the file that save(path) writes,"
    logger.warning(
        "training interrupted by %s after step %d; call %s to continue",
        *(name, trainer.steps_done, how),
    )
