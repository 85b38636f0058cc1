"""Callbacks that watch a number: the end of a training, and its best state."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortops.callbacks.monitor import (
    Mode,
    Monitor,
    begins_anew,
    check_count,
    check_path,
    path_of,
    remembered,
)
from ortops.errors import ModelError, OrtopsError
from ortops.graph import convert
from ortops.graph.files import external, saving
from ortops.training.callback import Callback, Record
from ortops.training.position import read_position
from ortops.training.session import TrainingSession

__all__ = ["BestModel", "EarlyStopping"]

logger = logging.getLogger("ortops")


class EarlyStopping(Callback):
    """Ends fit when a number has not improved for some epochs.

    Each fit begins anew; one that is resumed goes on counting.

    Args:
        patience: After how many epochs in a row without improvement fit ends.
        monitor: The number: ``"loss"``, ``"validation_loss"`` or ``"validation_<metric>"``.
        mode: Whether more is better (``"max"``) or less (``"min"``). ``"auto"`` tells it from the
            name: accuracy, AUC, F1, IoU, precision, R², recall, scores and top-k are better when
            they are more.
        minimum_change: A smaller change than this is no improvement. NaN and infinite numbers are
            none either.
        restore_best: Whether the session goes back to the end of the best epoch when fit ends,
            with all variables, optimizer state and count of steps included. True keeps them in
            memory, so that a fit can be resumed only in the process where it began. A path is a
            trainable file that keeps them for any process. After an interruption the session stays
            where it is, to be resumed.

    Attributes:
        best: The best number so far, or None.
        best_epoch: The epoch of it; 0 if there is none.

    Raises:
        OrtopsError: If an argument is not as told here; in fit, if an epoch has no such number, or
            there is no folder for the file.

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
        self.patience = check_count("EarlyStopping", "patience", patience)
        self._monitor = Monitor("EarlyStopping", monitor, mode, minimum_change)
        if not isinstance(restore_best, bool | str | os.PathLike):
            raise OrtopsError(
                f"EarlyStopping: restore_best is {restore_best!r}; True, False or the path of a "
                "file is accepted"
            )
        self._keeps = restore_best is True
        self._file = None if isinstance(restore_best, bool) else Path(restore_best)
        self._kept: tuple[int, dict[str, npt.NDArray[Any]]] | None = None  # the epoch and its state
        self._due = False  # whether `on_save` has to keep the state
        self._waited = 0
        self._reason = ""  # why it has ended fit
        self._restored = False

    @property
    def best(self) -> float | None:
        """The best number so far, or None."""
        return self._monitor.best

    @property
    def best_epoch(self) -> int:
        """The epoch of the best number; 0 if there is none."""
        return self._monitor.epoch

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Counts the epochs that a resumed fit has behind it.

        Raises:
            OrtopsError: If the best state was in the memory of another process.
        """
        if self._file:
            check_path("EarlyStopping", self._file)
        self._monitor.forget()
        self._waited = 0
        for epoch, values in enumerate(record.history, 1):
            self._waited = 0 if self._monitor.improves(epoch, values) else self._waited + 1
        if self._waited < self.patience:  # it may be another one than before
            self._reason = ""
        if self._reason:
            record.stop(self._reason)
            if self._restored:
                return
        is_last = self.best_epoch == len(record.history) and not record.batch
        self._due = bool(self.best_epoch) and is_last
        if begins_anew(record) or not self.best_epoch:
            self._kept, self._restored = None, False
        elif not self._due:
            self._check_kept(session)
        self._restored = False

    def _check_kept(self, session: TrainingSession) -> None:
        """Looks whether the state of the best epoch is there, for the end of a resumed fit."""
        if self._restored:
            logger.warning(
                "EarlyStopping: training continues from the state of its best epoch, %d, which "
                "restore_best has restored",
                self.best_epoch,
            )
        if self._keeps and (self._kept is None or self._kept[0] != self.best_epoch):
            self._due = self._restored
            if not self._restored:
                raise OrtopsError(
                    f"EarlyStopping: the best state, of epoch {self.best_epoch}, was in the memory "
                    "of the session that fit began with, by restore_best=True; go on with "
                    "restore_best=False, or begin with the path of a file for it"
                )
        if self._file and not self._file.is_file():
            raise OrtopsError(
                f"EarlyStopping: there is no file '{self._file}', which restore_best has for the "
                f"best state, of epoch {self.best_epoch}; bring it back, or go on with "
                "restore_best=False"
            )
        if self._file:  # what was written after the position that fit goes on from comes again
            self._read_file(session, or_later=True)

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Ends fit if this epoch and those before have not improved."""
        self._due = self._monitor.improves(record.epoch, record.values)
        if self._due:
            self._waited = 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            best = "no finite one" if self.best is None else f"{self.best:.6g}"
            where = f" (epoch {self.best_epoch})" if self.best_epoch else ""
            self._reason = (
                f"EarlyStopping: {self._monitor.name} has not improved for {self._waited} "
                f"epoch{'s' * (self._waited > 1)}; the best is {best}{where}"
            )
            record.stop(self._reason)

    def on_end(self, record: Record, session: TrainingSession) -> None:
        """Goes back to the best epoch, if that was asked for and there was no interruption."""
        if record.interrupted or self._restored or not self.best_epoch:
            return
        if self._file:
            session.state = self._read_file(session)
        elif self._kept is not None:
            session.state = self._kept[1]
        self._restored = True

    def state(self) -> dict[str, Any]:
        """Returns whether fit is over, for the file; the history tells the rest."""
        return {"reason": self._reason, "restored": self._restored}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up whether fit is over."""
        self._reason = str(state.get("reason", ""))
        self._restored = state.get("restored") is True

    def on_save(self, record: Record, session: TrainingSession) -> None:
        """Keeps the state of the best epoch, in memory or in the file."""
        if not self._due:
            return
        self._due = False
        if self._keeps:
            self._kept = self.best_epoch, dict(session.state)
        if self._file:
            session.save(self._file)

    def _read_file(
        self, session: TrainingSession, *, or_later: bool = False
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Returns the variables of a session as they are in the file of the best epoch.

        Args:
            session: The session.
            or_later: Whether the file may also be that of a later epoch.

        Raises:
            ModelError: If the file is not of that epoch of this training.
        """
        assert self._file is not None
        proto, data = convert.load_light(self._file)
        graphs = [proto.graph, *(info.algorithm for info in proto.training_info)]
        tensors = {tensor.name: tensor for graph in graphs for tensor in graph.initializer}
        for name in session.state:
            if name not in tensors:
                raise ModelError(
                    f"EarlyStopping: the file '{self._file}' has no '{name}', so that it is of "
                    "another training; the session stays at its last epoch"
                )
        found = read_position(proto)
        epochs = found[0].epoch_state.history if found else None  # None where it would be too long
        if epochs is not None:
            fits = len(epochs) == self.best_epoch or (or_later and len(epochs) > self.best_epoch)
            if not fits or epochs[self.best_epoch - 1].get(self._monitor.name) != self.best:
                raise ModelError(
                    f"EarlyStopping: the file '{self._file}' does not contain epoch "
                    f"{self.best_epoch}, the best epoch of this training; bring that file back, or "
                    "use restore_best=False"
                )
        return {name: external.array_of(tensors[name], data) for name in session.state}


class BestModel(Callback):
    """Writes a file after each epoch that is the best so far.

    The file is replaced as a whole, so that at any time a good one is there. The best is that of
    all epochs that this object has seen; where fit is resumed, of those before as well.

    Args:
        path: The file.
        monitor: The number: ``"loss"``, ``"validation_loss"`` or ``"validation_<metric>"``.
        mode: Whether more is better (``"max"``) or less (``"min"``); see `EarlyStopping`.
        minimum_change: A smaller change than this is no improvement. NaN and infinite numbers are
            none either.
        inference: Whether the file is the inference model, with nothing of training in it, instead
            of the trainable one (see `ortops.TrainingSession.save`).

    Attributes:
        best: The best number so far, or None.
        best_epoch: The epoch of it; 0 if there is none.

    Raises:
        OrtopsError: If an argument is not as told here; in fit, if an epoch has no such number, or
            there is no folder for the file.

    Example:
        >>> BestModel("best.onnx", monitor="validation_accuracy", inference=True)
        BestModel('best.onnx', monitor='validation_accuracy', mode='max')
    """

    saves = True

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
        self._before: float | None = None  # the best of earlier fits
        self._due = False  # whether `on_save` has to write

    def __repr__(self) -> str:
        mode = "max" if self._monitor.is_more_better else "min"
        return f"BestModel('{self.path}', monitor='{self._monitor.name}', mode='{mode}')"

    @property
    def best(self) -> float | None:
        """The best number so far, or None."""
        return self._monitor.best

    @property
    def best_epoch(self) -> int:
        """The epoch of the best number; 0 if there is none."""
        return self._monitor.epoch

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Looks whether the file can be written, and at the epochs a resumed fit has behind it."""
        check_path("BestModel", self.path)
        self._before, self._due = self.best, False
        for epoch, values in enumerate(record.history, 1):
            improved = self._monitor.improves(epoch, values)
            if improved and epoch == len(record.history) and not record.batch:
                self._due = True  # the process may have ended before the file was written
        if record.history and self.best_epoch and not self._due and not self.path.exists():
            logger.warning(
                "BestModel: there is no '%s' yet; it will be written when an epoch is better "
                "than epoch %d, the best epoch so far",
                *(self.path, self.best_epoch),
            )

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Looks whether the epoch is the best."""
        self._due = self._monitor.improves(record.epoch, record.values)

    def on_save(self, record: Record, session: TrainingSession) -> None:
        """Writes the file if the epoch is the best."""
        if not self._due:
            return
        self._due = False
        if self._inference:
            saving.save_model(session.inference_model(), self.path)
        else:
            session.save(self.path)

    def state(self) -> dict[str, Any]:
        """Returns the best number of before this fit, for the file."""
        return {"best": self._before}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up the best number of before the fit that is resumed."""
        self._monitor.forget()
        if state.get("best") is not None:
            self._monitor.best = remembered("BestModel", state, "best")
