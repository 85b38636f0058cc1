"""Callbacks of `ortops.TrainingSession.fit`: ``fit(data, callbacks=[…])``.

| callback | effect |
| --- | --- |
| `EarlyStopping` | stops training when a metric no longer improves, and restores the best epoch |
| `ReduceLROnPlateau` | reduces the learning rate when a metric no longer improves |
| `BestModel` | writes the best model so far |
| `Checkpoint` | saves every few steps or minutes, and when fit is interrupted |
| `CSVLog`, `JSONLines` | write the metrics of epochs (and steps) to a file |
| `TensorBoard` | writes them for TensorBoard |
| `Tracker` | records hyper-parameters and metrics with W&B or MLflow |
| `OptunaPruning` | ends trials that Optuna prunes |
| `LossPlot` | plots them |

Subclass `Callback` to write your own. All callbacks resume exactly: ``fit(…, resume=True)`` with
the same callbacks has the same results as a fit without interruption.
"""

from typing import NoReturn

from ortops._common.other_names import CALLBACKS, explain_arguments_of
from ortops.callbacks.best import BestModel, EarlyStopping
from ortops.callbacks.checkpoint import Checkpoint
from ortops.callbacks.logs import CSVLog, JSONLines, TensorBoard
from ortops.callbacks.plateau import ReduceLROnPlateau
from ortops.callbacks.plot import LossPlot
from ortops.callbacks.rate_finder import LearningRateCurve, find_learning_rate
from ortops.callbacks.tracking import OptunaPruning, Tracker
from ortops.engine.training.callback import Callback, Record
from ortops.errors import did_you_mean

__all__ = [
    "BestModel",
    "CSVLog",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "JSONLines",
    "LearningRateCurve",
    "LossPlot",
    "OptunaPruning",
    "Record",
    "ReduceLROnPlateau",
    "TensorBoard",
    "Tracker",
    "find_learning_rate",
]

explain_arguments_of((EarlyStopping, BestModel, Checkpoint, ReduceLROnPlateau, TensorBoard))


def __getattr__(name: str) -> NoReturn:
    hint = CALLBACKS.get(name) or did_you_mean(name, __all__)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'; {hint}")
