"""Training with the entries of a model in turn, and their learning rates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ortops._common.arguments import whole_number
from ortops.engine.trainable.metadata import LossPart, TrainingMetadata
from ortops.engine.training.data import Data, Source, rows
from ortops.engine.training.feeds import Checked
from ortops.engine.training.fit_options import FitOptions
from ortops.engine.training.gradients import Gradients, number_of
from ortops.engine.training.position import ResumeState
from ortops.engine.training.state import State
from ortops.engine.training.trainer import Array, Batch, Note, StepStrategy, Trainer
from ortops.errors import ArgumentError, OrtopsError, did_you_mean
from ortops.metrics import Metrics

_MOST = 10_000
"""The largest number of turns in a cycle."""


class LearningRates(MutableMapping[str, float]):
    """The learning rates of a session's entries by name; setting one changes the next step.

    Args:
        sessions: A session for each entry, by its name.
    """

    def __init__(self, sessions: Mapping[str, Trainer]) -> None:
        self._sessions = sessions

    def __getitem__(self, entry: str) -> float:
        return self._known(entry).learning_rate

    def __setitem__(self, entry: str, rate: float) -> None:
        self._known(entry).learning_rate = rate

    def __delitem__(self, entry: str) -> None:
        raise ArgumentError(f"learning_rates: that of '{entry}' cannot be removed; set it")

    def __iter__(self) -> Iterator[str]:
        return iter(self._sessions)

    def __len__(self) -> int:
        return len(self._sessions)

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and pickles plain dicts of numbers, which keep their values."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        known: dict[str, float] = {}
        for name, session in self._sessions.items():
            with contextlib.suppress(OrtopsError):  # it has none, or no number of steps yet
                known[name] = session.learning_rate
        return f"LearningRates({known})"

    def _known(self, entry: str) -> Trainer:
        if entry not in self._sessions:
            raise ArgumentError(
                f"learning_rates: there is no entry {entry!r:.80}; "
                + did_you_mean(str(entry), self._sessions)
            )
        return self._sessions[entry]


class Turns:
    """A session whose entries make steps in turn: what `fit` trains with ``entries=``.

    The turn of a batch follows from its place in the epoch, so each epoch begins a new cycle, and a
    training that is resumed continues with the turn that it stopped before.

    Args:
        session: The session with all entries.
        sessions: A session for each entry, by its name.
        strategies: How an entry makes steps, by its name.
        turns: The number of steps of each entry in a cycle, in order.

    Attributes:
        inputs: The inputs that a batch fills: those of the entries that have turns.

    Raises:
        ArgumentError: If ``turns`` is not valid.
        OrtopsError: If an entry has no loss.
    """

    def __init__(
        self,
        session: Trainer,
        sessions: Mapping[str, Trainer],
        strategies: Mapping[str, StepStrategy],
        turns: object,
    ) -> None:
        self._session = session
        self._turns = _checked(turns, sessions)
        self._sessions = {name: sessions[name] for name in self._turns}
        self._first = next(iter(self._sessions.values()))
        self._strategies = strategies
        check_lengths([each.metadata for each in self._sessions.values()], session.state)
        self._cycle = [name for name, count in self._turns.items() for _ in range(count)]
        self.inputs = session.inputs.only(
            name for each in self._sessions.values() for name in each.inputs
        )
        self._losses = {name: each.loss_names()[0] for name, each in self._sessions.items()}
        self.resume_state: ResumeState = session.resume_state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    @property
    def metadata(self) -> TrainingMetadata:
        """The metadata of the first entry, with the loss of each entry as a summand."""
        parts = [LossPart(name, name) for name in self.loss_names()[1:]]
        return replace(
            self._first.metadata, losses=parts, scheduled_learning_rate="", schedule_steps=""
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first entry."""
        return self._first.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._first.learning_rate = rate

    @property
    def peak_learning_rate(self) -> float:
        """That of its schedule, or the learning rate."""
        return self._first.peak_learning_rate

    @peak_learning_rate.setter
    def peak_learning_rate(self, rate: float) -> None:
        self._first.peak_learning_rate = rate

    @property
    def steps_done(self) -> int:
        """The number of finished steps of all entries that have turns."""
        return sum(each.steps_done for each in self._sessions.values())

    def loss_names(self) -> list[str]:
        """Returns the names of the sum of the losses, and of the loss of each entry."""
        return ["loss", *(f"{name}.loss" for name in self._sessions)]

    def evaluate(
        self,
        data: Data | Source,
        *,
        batch_size: int,
        metrics: Metrics,
        **settings: Any,
    ) -> dict[str, float]:
        """Computes the loss of each entry, and metrics of the first one, in inference mode."""
        found: dict[str, float] = {}
        total = 0.0
        for name, session in self._sessions.items():
            own = session.evaluate(
                data, batch_size=batch_size, metrics=() if found else metrics, **settings
            )
            loss = own.pop("loss")
            total += loss
            found |= {f"{name}.loss": loss, **({} if found else own)}
        return {"loss": total, **found}

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets variables in the session."""
        target = self._session if name in ("state", "parameters") else super()
        target.__setattr__(name, value)

    @property
    def state(self) -> State:
        """The variables."""
        return self._session.state

    @staticmethod
    def check(options: FitOptions) -> None:
        """Raises an ArgumentError for arguments of `fit` that need one entry."""
        if options["accumulate"] != 1:
            raise ArgumentError(
                f"accumulate must be 1 with entries=, got {options['accumulate']!r:.80}; give "
                "larger batches, or train one entry at a time with entry="
            )
        if options["train_metrics"]:
            raise ArgumentError(
                "train_metrics must be False with entries=, because metrics are computed from the "
                "outputs of every step; give validation=, or train one entry at a time with entry="
            )

    def strategy(self) -> StepStrategy:
        """Returns how `fit` makes steps."""
        counts = ["", *(f"{name}.count" for name in self._sessions)]
        text = ", ".join(f"{name}: {count}" for name, count in self._turns.items())
        rates = [f"{name}.learning_rate" for name in self._sessions]
        norms = [f"{name}.gradient_norm" for name in self._sessions]
        return StepStrategy(
            *(self._step, self._refuse, self._refuse, counts, self._show),
            entries=text,
            rates=rates,
            norms=dict(zip(norms, norms, strict=True)),
        )

    def _show(self, names: Sequence[str]) -> None:
        for strategy in self._strategies.values():
            strategy.show(names)

    def _refuse(self, *_: Any, **__: Any) -> Gradients:
        raise NotImplementedError  # `check` comes first

    def _step(self, feeds: Batch, outputs: Sequence[str], note: Note) -> object:
        position = self.resume_state.position
        assert position is not None
        turn = self._cycle[position.batch % len(self._cycle)]
        loss, session = self._losses[turn], self._sessions[turn]
        rate, norm = session.metadata.scheduled_learning_rate, session.metadata.gradient_norm
        rates = {n: np.asarray(value) for n, value in position.rates.items()}
        for name, each in self._sessions.items():
            if (name == turn and not rate) or f"{name}.learning_rate" not in rates:
                with contextlib.suppress(OrtopsError):  # the algorithm has none
                    rates[f"{name}.learning_rate"] = np.asarray(each.learning_rate)

        def note_all(found: Mapping[str, Array]) -> None:
            value = np.asarray(number_of(found[loss]))
            zero = np.zeros(())
            arrays = {"loss": value, **rates}
            if rate:
                arrays[f"{turn}.learning_rate"] = found[rate]
            if norm in found:
                arrays[f"{turn}.gradient_norm"] = found[norm]
            for name in self._sessions:
                arrays[f"{name}.loss"] = value if name == turn else zero
                arrays[f"{name}.count"] = np.asarray(float(rows(feeds)) if name == turn else 0.0)
            note(arrays)

        own = Checked({name: feeds[name] for name in session.inputs}, session.inputs)
        return self._strategies[turn].step(own, [loss, *filter(None, [rate, norm])], note_all)


def check_lengths(metadata: Sequence[TrainingMetadata], state: Mapping[str, Array]) -> None:
    """Raises an error if a schedule has no number of steps, which `fit` sets only for one entry.

    Args:
        metadata: The metadata of the entries.
        state: The variables.

    Raises:
        OrtopsError: If there is such a schedule.
    """
    for each in metadata:
        name = each.schedule_steps
        if name and not int(state[name]):
            raise OrtopsError(
                f"fit: the schedule {each.schedule} has no number of steps, and fit sets it only "
                f"for one entry; set session.state['{name}'] to the number of steps of its entry, "
                "or build it with steps= of the schedule"
            )


def _checked(turns: object, known: Mapping[str, object]) -> dict[str, int]:
    """Returns the argument ``entries`` of `fit`, if it is valid."""
    if not isinstance(turns, Mapping) or not turns:
        raise ArgumentError(
            "entries must be a dict with the number of steps of each entry in a cycle, such as "
            f"{{'discriminator': 2, 'main': 1}}, got {turns!r:.80}"
        )
    for name in turns:
        if name not in known:
            raise ArgumentError(
                f"entries: there is no entry {name!r:.80}; {did_you_mean(str(name), known)}"
            )
    return {
        str(name): whole_number(f"entries: {name}", count, 1, _MOST)
        for name, count in turns.items()
    }
