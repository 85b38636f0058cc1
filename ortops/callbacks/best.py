"""Callbacks that monitor a metric: early stopping, and keeping the best model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import whole_number
from ortops.callbacks.monitor import (
    Mode,
    Monitor,
    _Monitoring,
    begins_anew,
    path_of,
    remembered,
)
from ortops.engine.training.callback import Record
from ortops.engine.training.position import read_position
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, ModelError, OrtopsError
from ortops.graph import convert
from ortops.graph.files import saving
from ortops.graph.files.atomic import check_path
from ortops.graph.files.messages import initializers

logger = logging.getLogger("ortops")


class _OfBest(_Monitoring):
    """Base class of callbacks that find the best epoch and keep something of it."""

    _due = False  # whether `on_save` has to keep the present epoch

    @property
    def best_epoch(self) -> int:
        """The epoch of the best value; 0 if there is none."""
        return self._monitor.epoch

    @property
    def _place(self) -> tuple[int, int]:
        """The epoch and the step of the best value."""
        return self._monitor.epoch, self._monitor.steps

    def _replay(self, record: Record) -> None:
        """Adds the finished epochs of a resumed fit."""
        self._due = False
        for epoch, values in self._monitor.seen(record.history):
            is_best = self._monitor.improves(epoch, values, values.get("steps", 0))
            # If it is the current one, the process may have ended before it was kept.
            self._due = is_best and self._monitor.is_present(values, record)

    def _improves(self, record: Record) -> bool:
        return self._monitor.improves(record.epoch, record.values, record.step)

    def on_save(self, record: Record, session: TrainingSession) -> None:
        """Keeps the current state if it is the best."""
        if self._due:
            self._due = False
            self._keep(session)

    def _keep(self, session: TrainingSession) -> None:
        raise NotImplementedError


class EarlyStopping(_OfBest):
    """Stops training when a metric has not improved for several epochs.

    Each fit starts counting from zero; a resumed fit continues counting. With ``validate_every=``
    of fit, each validation counts like an epoch if the metric is one of validation. An epoch that
    ``max_steps`` or ``max_minutes`` cuts short does not count.

    Args:
        patience: The number of consecutive epochs without improvement after which training stops.
        monitor: The metric: ``"loss"``, ``"validation_loss"`` or ``"validation_<metric>"``.
        mode: Whether higher (``"max"``) or lower (``"min"``) is better. ``"auto"`` is the
            ``higher_is_better`` of the metric, and lower for losses; other numbers need a mode.
        minimum_change: The smallest change that counts as an improvement. NaN and infinite values
            never do.
        restore_best: Whether to restore the session's state at the end of the best epoch when fit
            ends, including optimizer state and step count. True keeps this state in memory; then
            fit can be resumed only in the same process. A path names a trainable file that keeps
            it for any process. After an interruption the session stays as it is, to be resumed.

    Attributes:
        best: The best value so far, or None.
        best_epoch: Its epoch; 0 if there is none.

    Raises:
        ArgumentError: If an argument is invalid; in fit, if it is not known what is better.
        OrtopsError: In fit, if an epoch does not have the metric, or the file's folder does not
            exist.

    Example:
        >>> import ortops
        >>> from ortops.callbacks import EarlyStopping
        >>> model = ortops.Tape(name="line")
        >>> with model:
        ...     x = model.input("x", np.float32, ["batch", 1])
        ...     y = model.output(x @ model.initializer("w", np.zeros((1, 1), np.float32)), "y")
        >>> session = ortops.TrainingSession(ortops.build_training_model(
        ...     model.model(), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.5)))
        >>> data = {"x": np.ones((1, 1), np.float32), "targets": np.ones((1, 1), np.float32)}
        >>> history = session.fit(data, epochs=100, progress=False,
        ...     callbacks=[EarlyStopping(patience=2, monitor="loss")])
        >>> len(history)  # the first step reaches 0, and two more change nothing
        4
    """

    def __init__(
        self,
        patience: int = 5,
        monitor: str = "validation_loss",
        *,
        mode: Mode = "auto",
        minimum_change: float = 0.0,
        restore_best: bool | str | os.PathLike[str] = False,
    ) -> None:
        self.patience = whole_number("EarlyStopping: patience", patience, 1)
        self._monitor = Monitor("EarlyStopping", monitor, mode, minimum_change)
        if not isinstance(restore_best, bool | str | os.PathLike):
            raise ArgumentError(
                "EarlyStopping: restore_best must be True, False or the path of a file, got "
                f"{restore_best!r}"
            )
        self._keeps = restore_best is True
        self._file = None if isinstance(restore_best, bool) else Path(restore_best)
        self._kept: tuple[tuple[int, int], dict[str, npt.NDArray[Any]]] | None = None
        self._reason = ""  # why it has stopped training
        self._restored = False

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Counts the finished epochs of a resumed fit.

        Raises:
            OrtopsError: If the best state was in the memory of another process.
        """
        if self._file:
            check_path("EarlyStopping", self._file)
        self._monitor.begin(record)
        self._monitor.forget()
        self._replay(record)
        if self._monitor.waited < self.patience:  # patience may have been increased
            self._reason = ""
        if self._reason:
            record.stop(self._reason)
            if self._restored:
                return
        if begins_anew(record) or not self.best_epoch:
            self._kept, self._restored = None, False
        elif not self._due:
            self._check_kept(session)
        self._restored = False

    def _check_kept(self, session: TrainingSession) -> None:
        """Checks, in a resumed fit, that the state of the best epoch is available."""
        if self._restored:
            logger.warning(
                "EarlyStopping: training continues from the state of its best epoch, %d, which "
                "restore_best has restored",
                self.best_epoch,
            )
        if self._keeps and (self._kept is None or self._kept[0] != self._place):
            self._due = self._restored
            if not self._restored:
                raise OrtopsError(
                    f"EarlyStopping: the best state, of epoch {self.best_epoch}, is only in the "
                    "memory of the callback that fit started with (restore_best=True); resume with "
                    "restore_best=False, or start again with restore_best= the path of a file"
                )
        if self._file and not self._file.is_file():
            raise OrtopsError(
                f"EarlyStopping: the file '{self._file}' of restore_best, with the best state, of "
                f"epoch {self.best_epoch}, is missing; bring it back, or resume with "
                "restore_best=False"
            )
        if self._file:  # epochs after the resume position run again
            self._read_file(session, or_later=True)

    def _judge(self, record: Record, session: TrainingSession) -> None:
        self._due, waited = self._improves(record), self._monitor.waited
        if waited >= self.patience:
            best = "not finite" if self.best is None else f"{self.best:.6g}"
            where = f" (epoch {self.best_epoch})" if self.best_epoch else ""
            unit = "validation" if record.history.validations else "epoch"
            self._reason = (
                f"EarlyStopping: {self._monitor.name} has not improved for {waited} "
                f"{unit}{'s' * (waited > 1)}; the best value is {best}{where}"
            )
            record.stop(self._reason)

    def on_end(self, record: Record, session: TrainingSession) -> None:
        """Restores the best epoch, if requested and fit was not interrupted."""
        if record.interrupted or self._restored or not self.best_epoch:
            return
        if self._file:
            session.state = self._read_file(session)
        elif self._kept is not None:
            session.state = self._kept[1]
        self._restored = True

    def state(self) -> dict[str, Any]:
        """Returns whether training has stopped, for the file; the history has the rest."""
        return {"reason": self._reason, "restored": self._restored}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores whether training has stopped."""
        self._reason = str(state.get("reason", ""))
        self._restored = state.get("restored") is True

    def _keep(self, session: TrainingSession) -> None:
        if self._keeps:
            self._kept = self._place, dict(session.state)
        if self._file:
            session.save(self._file)

    def _read_file(
        self, session: TrainingSession, *, or_later: bool = False
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Reads the variables of a session from the file of the best epoch.

        Args:
            session: The session.
            or_later: Whether the file may also be of a later epoch.

        Raises:
            ModelError: If the file is not of that epoch of this training.
        """
        assert self._file is not None
        light = convert.load_light(self._file)
        known = {each.name for each in initializers(light.proto, initialization=False)}
        for name in session.state:
            if name not in known:
                raise ModelError(
                    f"EarlyStopping: the file '{self._file}' has no '{name}', so it belongs to "
                    "another training; the session keeps its last epoch"
                )
        found = read_position(light.proto)
        if found is not None:  # None if it would be too long
            seen = self._monitor.seen(found[0].epoch_state.history)
            best = next((each for each in seen if self._monitor.is_best(*each)), None)
            fits = best is not None and (or_later or best is seen[-1])
            if best is None or not fits or best[1].get(self._monitor.name) != self.best:
                raise ModelError(
                    f"EarlyStopping: the file '{self._file}' does not contain epoch "
                    f"{self.best_epoch}, the best epoch of this training; bring that file back, or "
                    "use restore_best=False"
                )
        return light.arrays(session.state)


class BestModel(_OfBest):
    """Writes a file after each epoch that is the best so far.

    With ``validate_every=`` of fit, each validation counts like an epoch if the metric is one of
    validation.

    The file is replaced atomically, so it is complete at any time. The best epoch is chosen among
    all epochs that this object has seen and, if fit is resumed, those before it.

    Args:
        path: The file.
        monitor: The metric: ``"loss"``, ``"validation_loss"`` or ``"validation_<metric>"``.
        mode: Whether higher (``"max"``) or lower (``"min"``) is better; see `EarlyStopping`.
        minimum_change: The smallest change that counts as an improvement. NaN and infinite values
            never do.
        inference: Whether to write the inference model, without any training state, instead of the
            trainable one (see `ortops.TrainingSession.save`).

    Attributes:
        best: The best value so far, or None.
        best_epoch: Its epoch; 0 if there is none.

    Raises:
        ArgumentError: If an argument is invalid; in fit, if it is not known what is better.
        OrtopsError: In fit, if an epoch does not have the metric, or the file's folder does not
            exist.

    Example:
        >>> BestModel("best.onnx", monitor="validation_accuracy", inference=True)
        BestModel('best.onnx', monitor='validation_accuracy', mode='auto')
    """

    saves = True
    _judges_cut = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        monitor: str = "validation_loss",
        *,
        mode: Mode = "auto",
        minimum_change: float = 0.0,
        inference: bool = False,
    ) -> None:
        self.path = path_of("BestModel", path)
        self._monitor = Monitor("BestModel", monitor, mode, minimum_change)
        self._inference = inference
        self._before: float | None = None  # the best value of earlier fits

    def __repr__(self) -> str:
        monitor = self._monitor
        return f"BestModel('{self.path}', monitor='{monitor.name}', mode='{monitor.mode}')"

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Checks that the file can be written, and adds the finished epochs of a resumed fit."""
        check_path("BestModel", self.path)
        self._monitor.begin(record)
        self._before = self.best
        self._replay(record)
        if record.history and self.best_epoch and not self._due and not self.path.exists():
            logger.warning(
                "BestModel: there is no '%s' yet; it will be written when an epoch is better "
                "than epoch %d, the best epoch so far",
                *(self.path, self.best_epoch),
            )

    def _judge(self, record: Record, session: TrainingSession) -> None:
        self._due = self._improves(record)
        if record.cut and self._due:
            self._before = self.best  # a resumed fit replaces the entry of the epoch

    def _keep(self, session: TrainingSession) -> None:
        if self._inference:
            saving.save_model(session.inference_model(), self.path)
        else:
            session.save(self.path)

    def state(self) -> dict[str, Any]:
        """Returns the best value before this fit, for the file."""
        return {"best": self._before}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the best value before the fit that is resumed."""
        self._monitor.forget()
        if state.get("best") is not None:
            self._monitor.best = remembered("BestModel", state, "best")
