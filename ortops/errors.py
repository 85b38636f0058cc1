"""The exceptions that ortops raises.

Every message says what is wrong, with the value, and what to do about it: ``epochs must be an
integer >= 1, got 0``, ``Conv node 'c1': no gradient for auto_pad='SAME_UPPER' with dynamic sizes;
export with explicit pads``. A node without a name is called by its first output.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "DivergedError",
    "FeedError",
    "KernelError",
    "ModelError",
    "OrtopsError",
    "UnexpectedArgumentError",
    "UnknownVariableError",
    "UnsupportedError",
    "did_you_mean",
    "is_raised_by",
]

FREE_BATCH = "ortops.surgery.free_batch(model), before training, makes it dynamic"


class OrtopsError(Exception):
    """Base class of the exceptions of ortops.

    Example:
        >>> import ortops
        >>> try:
        ...     ortops.losses.resolve("Huberr")
        ... except ortops.OrtopsError as error:
        ...     print(f"{type(error).__name__}: {error}")
        ArgumentError: unknown loss 'Huberr'; did you mean 'Huber'?
    """


class ArgumentError(OrtopsError, ValueError):
    """An argument has an invalid type or value.

    Example:
        >>> from ortops._common.arguments import whole_number
        >>> try:
        ...     whole_number("epochs", 0, minimum=1)
        ... except ValueError as error:
        ...     print(f"{type(error).__name__}: {error}")
        ArgumentError: epochs must be an integer >= 1, got 0
    """


class UnexpectedArgumentError(ArgumentError, TypeError):
    """A function has no such argument.

    It is also a TypeError, which Python raises for arguments that a function does not have.

    Example:
        >>> import ortops
        >>> from ortops.docs import examples
        >>> try:
        ...     examples.session().fit(examples.BATCH, verbose=0)
        ... except TypeError as error:
        ...     print(error)
        fit has no argument 'verbose'; use progress=True or progress=False
    """


class ModelError(OrtopsError, ValueError):
    """The model is invalid, or does not have what was asked for.

    Example:
        >>> import ortops
        >>> from onnx.parser import parse_model
        >>> model = parse_model('<ir_version: 10, opset_import: ["": 21]> '
        ...     "m (float[2] x) => (float[2] y) { y = Relu (x) }")
        >>> ortops.derivatives.gradient(model, xs="z")
        Traceback (most recent call last):
        ...
        ortops.errors.ModelError: xs: the main graph has no tensor 'z'; known names: 'x', 'y'
    """


class UnsupportedError(OrtopsError, NotImplementedError):
    """The model is valid, but ortops has no gradient rule for, or cannot run, a part of it.

    Example:
        >>> import onnx
        >>> import ortops
        >>> model = onnx.parser.parse_model('<ir_version: 10, opset_import: '
        ...     '["": 21, "mine": 1]> m (float[2] x) => (float[2] y) { y = mine.Own (x) }')
        >>> try:
        ...     ortops.derivatives.gradient(model, lowered=True)
        ... except ortops.UnsupportedError as error:
        ...     print(str(error).split(",")[0])
        Own node 'y': there is no gradient rule for Own of domain 'mine'
    """


class FeedError(OrtopsError, ValueError):
    """The arrays passed to a run, a step or an evaluation do not fit the model.

    Example:
        >>> import numpy as np
        >>> import ortops
        >>> from ortops.docs import examples
        >>> session = ortops.TrainingSession(
        ...     ortops.build_training_model(examples.mlp((4, 2)), loss="L1", optimizer="SGD"))
        >>> try:
        ...     session.step({"images": np.ones((8, 4), np.float32)})
        ... except ortops.FeedError as error:
        ...     print(error)
        feeds: input 'targets' is missing; the inputs are 'images', 'targets'
    """


class DivergedError(OrtopsError, ArithmeticError):
    """The training loss became NaN or infinite.

    Example:
        >>> import numpy as np
        >>> import ortops
        >>> from ortops.docs import examples
        >>> session = ortops.TrainingSession(
        ...     ortops.build_training_model(examples.mlp((4, 2)), loss="L1", optimizer="SGD"))
        >>> images, targets = np.full((8, 4), np.inf, np.float32), np.ones((8, 2), np.float32)
        >>> try:
        ...     session.fit({"images": images, "targets": targets}, progress=False)
        ... except ortops.DivergedError as error:
        ...     print(str(error).split(":")[0])
        loss is nan at step 1 (batch 1 of epoch 1)
    """


class UnknownVariableError(OrtopsError, KeyError):
    """The training algorithm has no variable of the given name."""

    __str__ = OrtopsError.__str__  # a KeyError shows its message in quotes


class KernelError(OrtopsError, RuntimeError):
    """A kernel of onnxruntime or in Python failed during a run.

    Example:
        >>> import numpy as np
        >>> import ortops
        >>> with ortops.Tape() as tape:
        ...     table = tape.initializer("table", np.ones((3, 2), np.float32))
        ...     ids = tape.input("ids", np.int64, ["n"])
        ...     rows = tape.output(ortops.op.Gather(table, ids), "rows")
        >>> session = ortops.TrainingSession(
        ...     ortops.build_training_model(tape.model(), loss="L1", optimizer="SGD"))
        >>> try:
        ...     session.step({"ids": np.array([7]), "targets": np.ones((1, 2), np.float32)})
        ... except ortops.KernelError:
        ...     print(session.steps_done)
        0
    """


def is_raised_by(error: BaseException, *packages: str) -> bool:
    """Whether an exception was raised by the code of some packages.

    It is false for exceptions from signal handlers, which may be raised at any line.

    Args:
        error: The exception, caught.
        *packages: Their names. C code counts as part of the Python code that called it.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in packages


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a hint for messages: the most similar known name, or the first known names.

    Args:
        name: The name that was not found.
        known: The names that exist.

    Example:
        >>> did_you_mean("lables", ["labels", "images"])
        "did you mean 'labels'?"
        >>> did_you_mean("x", ["labels", "images"])
        "known names: 'labels', 'images'"
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), map(str, names), n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    if not names:
        return "there are none"
    shown = ", ".join(repr(other) for other in names[:10])
    return f"known names: {shown}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")
