"""What `ortops.TrainingSession.fit` calls as it goes on: ``fit(data, callbacks=[…])``.

| callback | what it does |
| --- | --- |
| `EarlyStopping` | ends fit when a number no longer improves, and goes back to the best epoch |
| `BestModel` | writes the best model so far |
| `Checkpoint` | saves every so many steps or minutes, and where fit is interrupted |
| `CSVLog`, `JSONLines` | write the numbers of epochs (and steps) into a file |
| `TensorBoard` | writes them for TensorBoard |
| `LossPlot` | draws them |

Subclass `Callback` for your own. All are exact where fit is resumed: ``fit(…, resume=True)`` with
the same callbacks does what the fit that was interrupted would have done.
"""

from ortops.callbacks.best import BestModel, EarlyStopping
from ortops.callbacks.checkpoint import Checkpoint
from ortops.callbacks.logs import CSVLog, JSONLines, TensorBoard
from ortops.callbacks.plot import LossPlot
from ortops.callbacks.rate_finder import LearningRateCurve, find_learning_rate
from ortops.training.callback import Callback, Record

__all__ = [
    "BestModel",
    "CSVLog",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "JSONLines",
    "LearningRateCurve",
    "LossPlot",
    "Record",
    "TensorBoard",
    "find_learning_rate",
]
