"""The arguments of `fit`: each is declared here, and explained where `Fitting.fit` is documented.

The signature of `fit`, its checks, what a file keeps and a resumed training compares, the flags and
the configuration of `ortops train`, the parameters of the estimators, and the axes that tests vary
follow from the declarations. The module imports nothing heavy, since ``ortops --help`` reads it.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar, cast

if TYPE_CHECKING:
    from ortops.engine.training.callback import Callback
    from ortops.engine.training.data import Data
    from ortops.engine.training.sample_weights import ClassWeight, SampleWeight
    from ortops.engine.training.samples import Collate
    from ortops.metrics import Metrics

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """The declaration of an argument.

    Attributes:
        default: Its value if it is left out.
        help: What its option in the group "training loop" of `ortops train` does; without
            ``metavar``, where else the command line has it, or why it does not.
        metavar: What stands for its value in that option; "" if it is a switch.
        check: The function of `ortops._common.arguments` that checks it, if one does. It is not
            called with None, if that is the default.
        bounds: Arguments of that function.
        reads: How the command line reads its value, if not as ``check`` says: a key of a table in
            `ortops.cli.parser`.
        several: Whether that option takes several values.
        saved: What the position in a file has for it, which has to be the same when a training is
            resumed; "" if it does not change the rows of a step.
        in_estimators: Whether the estimators of `ortops.sklearn` have it as a parameter.
        tried: The values that the tests of combinations try, the simplest one first.
    """

    default: Any
    help: str
    metavar: str | None = None
    check: str = ""
    bounds: Mapping[str, Any] = field(default_factory=dict)
    reads: str = ""
    several: bool = False
    saved: str = ""
    in_estimators: bool = False
    tried: Sequence[Any] = ()


_WHOLE: Any = {"check": "whole_number", "bounds": {"minimum": 1}}
_FROM_0: Any = {"check": "whole_number", "bounds": {"minimum": 0}}
_SWITCH: Any = {"check": "boolean", "tried": (False, True)}
_COUNT, _BOOLEAN = "an integer >= 1", "true or false"
_IN_ORDER = "nothing: the command line trains all rows, shuffled"
_IN_PYTHON = "nothing: it is for programs in Python"


class FitOptions(TypedDict, total=False):
    """The arguments of `ortops.TrainingSession.fit` but for the data, in their order."""

    epochs: Annotated[
        int,
        Option(
            *(1, "passes over the data (default: 1)", "N"),
            **_FROM_0,
            saved=_COUNT,
            in_estimators=True,
            tried=(1, 2, 3),
        ),
    ]
    batch_size: Annotated[
        int,
        Option(
            *(32, "--batch-size, with the data"),
            **_WHOLE,
            saved=_COUNT,
            in_estimators=True,
            tried=(5, 4, 1, 16),
        ),
    ]
    shuffle: Annotated[bool, Option(True, _IN_ORDER, **_SWITCH, saved=_BOOLEAN, in_estimators=True)]
    drop_last: Annotated[
        bool,
        Option(
            *(False, "leave out the last batch of each epoch if it has fewer rows", ""),
            **_SWITCH,
            saved=_BOOLEAN,
        ),
    ]
    seed: Annotated[int, Option(0, "--seed", **_FROM_0, saved="an integer >= 0")]
    validation: Annotated[
        "Data | None",
        Option(
            None,
            "data to evaluate after each epoch, or the fraction of --data to hold out, such as 0.1",
            "DATA",
        ),
    ]
    validation_split: Annotated[
        float,
        Option(
            *(0.0, "--validation, a fraction, for rows drawn at random"),
            check="number",
            bounds={"minimum": 0, "below": 1},
            saved="a number >= 0 and < 1",
        ),
    ]
    validate_every: Annotated[
        int | None,
        Option(
            *(None, "also evaluate the validation data within epochs, every N steps", "N"),
            **_WHOLE,
            tried=(None, 1, 2, 3),
        ),
    ]
    max_steps: Annotated[
        int | None, Option(None, "stop after N steps, also within an epoch", "N", **_WHOLE)
    ]
    max_minutes: Annotated[
        float | None,
        Option(
            *(None, "stop after N minutes, also within an epoch; resume with --resume", "N"),
            check="number",
            bounds={"above": 0},
        ),
    ]
    sample_weight: Annotated["SampleWeight", Option(None, "--sample-weight, with the loss")]
    class_weight: Annotated[
        "ClassWeight | None",
        Option(
            None,
            'balanced, or a weight for each class in JSON, such as \'{"0": 1, "1": 5}\'',
            "WEIGHTS",
        ),
    ]
    collate: Annotated["Collate | None", Option(None, _IN_PYTHON)]
    group_by_length: Annotated["bool | Sequence[int]", Option(False, _IN_PYTHON, saved=_BOOLEAN)]
    metrics: Annotated[
        "Metrics",
        Option((), "metrics to compute, such as accuracy", "METRIC", several=True),
    ]
    train_metrics: Annotated[
        bool,
        Option(
            False,
            "compute the metrics on the training data, too, from the outputs of the steps",
            metavar="",
            **_SWITCH,
        ),
    ]
    schedule: Annotated["Callable[[float], float] | None", Option(None, "--learning-rate")]
    callbacks: Annotated[
        "Sequence[Callback]", Option((), "--early-stopping, --best and others", in_estimators=True)
    ]
    accumulate: Annotated[
        int,
        Option(
            *(1, "accumulate gradients over K batches per update (default: 1)", "K"),
            **_WHOLE,
            saved=_COUNT,
            tried=(1, 2, 3, 4),
        ),
    ]
    prefetch: Annotated[int, Option(0, _IN_PYTHON, **_FROM_0, tried=(0, 1, 2, 3))]
    resume: Annotated[bool, Option(False, "--resume", check="boolean")]
    progress: Annotated[bool, Option(True, "--quiet", **_SWITCH, in_estimators=True)]
    stop_on_nan: Annotated[bool, Option(True, _IN_PYTHON, check="boolean", tried=(True, False))]
    detect_anomaly: Annotated[bool, Option(False, _IN_PYTHON, **_SWITCH)]
    fast_dev_run: Annotated[bool, Option(False, _IN_PYTHON, check="boolean")]
    entry: Annotated["int | str | None", Option(None, _IN_PYTHON)]
    entries: Annotated["Mapping[str, int] | None", Option(None, _IN_PYTHON, saved="a string")]


def options_of(declared: type) -> dict[str, Option]:
    """Returns the declarations of a TypedDict by the names of the arguments."""
    return {name: each.__metadata__[0] for name, each in declared.__annotations__.items()}


OPTIONS: Mapping[str, Option] = options_of(FitOptions)
"""The declarations by the names of the arguments."""

SAVED: Mapping[str, Option] = {name: each for name, each in OPTIONS.items() if each.saved}
"""The arguments that determine the rows of each step."""


def with_defaults(given: FitOptions) -> FitOptions:
    """Returns all arguments, with the defaults of those that were not given."""
    return cast(FitOptions, {**{name: each.default for name, each in OPTIONS.items()}, **given})


def checked_options(options: Mapping[str, Any], declared: Mapping[str, Option]) -> dict[str, Any]:
    """Returns all arguments in their plain types, with the defaults of those that are left out.

    Args:
        options: The arguments.
        declared: Their declarations.

    Raises:
        ArgumentError: If one is wrong by itself; others are checked with the data and the session.
    """
    arguments = importlib.import_module("ortops._common.arguments")  # which imports numpy
    found = {name: each.default for name, each in declared.items()} | dict(options)
    for name, option in declared.items():
        is_absent = found[name] is None and option.default is None
        if option.check and not is_absent:
            check = getattr(arguments, option.check)
            found[name] = check(name, found[name], **option.bounds)
    return found


def has_options(declared: type) -> Callable[[_Method], _Method]:
    """Returns a decorator that shows declared arguments in the place of ``**options``."""
    return functools.partial(_with_signature, declared)


def _with_signature(declared: type, method: _Method) -> _Method:
    signature = inspect.signature(method)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    more = [
        inspect.Parameter(
            *(name, inspect.Parameter.KEYWORD_ONLY),
            default=each.__metadata__[0].default,
            annotation=_shown(each.__origin__),
        )
        for name, each in declared.__annotations__.items()
    ]
    shown = signature.replace(parameters=[*own, *more])
    method.__signature__ = shown  # type: ignore[attr-defined]  # `inspect` looks for it
    return method


def _shown(annotation: Any) -> str:
    """Returns a type as it was written."""
    written = getattr(annotation, "__forward_arg__", None)
    return inspect.formatannotation(annotation) if written is None else str(written)
