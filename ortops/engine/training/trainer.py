"""What `fit` needs of a session, and how steps are made, by one process or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt
import onnx

from ortops.engine.trainable.metadata import TrainingMetadata
from ortops.engine.training.data import Data
from ortops.engine.training.feeds import Inputs
from ortops.engine.training.gradients import Accumulation, Gradients
from ortops.engine.training.position import ResumeState
from ortops.engine.training.state import State
from ortops.engine.training.training_metrics import TrainingMetrics
from ortops.metrics import Metrics, StreamingMetric

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = Mapping[str, Array]
Note: TypeAlias = Callable[[Mapping[str, Any]], object]
Step: TypeAlias = Callable[[Batch, Sequence[str], Note], object]
Apply: TypeAlias = Callable[[Gradients, Sequence[str], Note], object]


class Trainer(Protocol):
    """The interface of a session for the modules that train it, which it imports itself."""

    learning_rate: float
    peak_learning_rate: float
    resume_state: ResumeState

    @property
    def metadata(self) -> TrainingMetadata:
        """What the builder wrote about the model."""

    @property
    def inputs(self) -> Inputs:
        """The inputs that a batch fills."""

    @property
    def state(self) -> State:
        """The variables."""

    @property
    def steps_done(self) -> int:
        """The number of finished steps."""

    @property
    def saved_in(self) -> str:
        """The file that the current state was saved in; "" if it was not saved."""

    def loss_names(self) -> list[str]:
        """Returns the names of the loss and its parts."""

    def directions(self, metrics: Mapping[str, StreamingMetric]) -> dict[str, bool | None]:
        """Returns whether higher results of metrics are better."""

    def training_metrics(self, metrics: Mapping[str, StreamingMetric]) -> TrainingMetrics:
        """Returns metrics that read the outputs of training steps."""

    def model(self) -> onnx.ModelProto:
        """Returns the trainable model."""

    def evaluate(self, data: Data, *, batch_size: int, metrics: Metrics) -> dict[str, float]:
        """Computes loss and metrics of a data set."""

    def predict(self, data: Data, *, outputs: str) -> Array:
        """Computes a tensor of the model."""


class Differentiate(Protocol):
    """Computes the gradients of a batch."""

    def __call__(
        self, feeds: Batch, *, outputs: Sequence[str], after: Gradients | None
    ) -> Gradients:
        """Returns the gradients; see `ortops.TrainingSession.gradients`."""


@dataclass(frozen=True)
class Shared:
    """What several processes do together. All make the same calls in the same order, and wait.

    Attributes:
        agree: Combines the states of all processes. Arguments: the reason why training stops and
            the name of the signal that ends it ("" for none), and an object that should be the same
            in all processes. Returns the reason and the signal of any process, and whether the
            objects are the same.
        same: Raises an error if processes differ in an object. Arguments: its name and the object.
        add_up: Returns the gradients of a whole batch, given those of this process's parts.
    """

    agree: Callable[[str, str, object], tuple[str, str, bool]]
    same: Callable[[str, object], None]
    add_up: Callable[[Accumulation], Gradients]


@dataclass(frozen=True)
class StepStrategy:
    """How steps are made with the batches of a data set, by one process or several.

    Attributes:
        step: Makes a step with a batch. It calls its last argument with the outputs that its second
            argument names, before anything changes.
        gradients: Computes the gradients of a batch, or of this process's part of it.
        apply: Makes a step with gradients, like ``step``.
        counts: For the loss and each of its parts, the output with its divisor; "" if all rows
            count.
        show: Sets the tensors that steps can return in addition to outputs.
        leads: Whether this process shows progress and calls callbacks that write.
        shared: What several processes do together; None for one process.
        entries: The training_info entries that make the steps; "" for all of them in each step.
        entry: The index of the training_info entry that makes all steps; None if several do.
        rates: The outputs that are the learning rates of entries in turn.
        norms: The outputs that are norms of gradients, by the names of their records.
        later: Like ``step``, but leaves the outputs on the device that computed them, in whose
            memory they are for the last argument; None if it would be the same.
    """

    step: Step
    gradients: Differentiate
    apply: Apply
    counts: Sequence[str]
    show: Callable[[Sequence[str]], object]
    leads: bool = True
    shared: Shared | None = None
    entries: str = ""
    entry: int | None = None
    rates: Sequence[str] = ()
    norms: Mapping[str, str] = field(default_factory=dict)
    later: Step | None = None
