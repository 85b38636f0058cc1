"""Names from other libraries: of losses, optimizers and metrics, and of arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from ortops.errors import UnexpectedArgumentError, did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

_DATA = "give inputs and labels as one data set, such as {'x': x, 'labels': y} or (x, y)"
_EPOCHS = ("n_epochs", "num_epochs", "max_epochs", "max_iter", "num_train_epochs")
_RATE = "set session.learning_rate, or learning_rate= of the optimizer"
_HALF = "leave it out: the types of the model decide, and those in half precision get a loss scale"
_STOPPING = "use callbacks=[ortops.callbacks.EarlyStopping(…)]"

ARGUMENTS_OF_DATA: Mapping[str, str] = {
    **dict.fromkeys(("x", "X", "y", "Y", "labels", "targets"), _DATA),
    "verbose": "leave it out: only fit shows progress",
    "steps": "give as many batches as should be read",
    "workers": "use prefetch= of fit",
}
"""Remedies for arguments of other libraries where `ortops.TrainingSession` reads data."""

ARGUMENTS_OF_FIT: Mapping[str, str] = {
    **ARGUMENTS_OF_DATA,
    **dict.fromkeys(("validation_data", "val_data", "eval_set"), "use validation="),
    "validation_batch_size": "validation uses batch_size=",
    "validation_freq": "leave it out (each epoch), or use validate_every=, in steps",
    "validation_steps": "give validation= as an iterable of that many batches",
    "verbose": "use progress=True or progress=False",
    "steps_per_epoch": "give the data as an iterable of that many batches",
    "initial_epoch": "use resume=True, which continues an earlier call",
    **dict.fromkeys(
        (
            *("workers", "num_workers", "dataloader_num_workers"),
            *("max_queue_size", "use_multiprocessing"),
        ),
        "use prefetch=",
    ),
    **dict.fromkeys(("lr", "learning_rate", "warmup_steps", "lr_scheduler_type"), _RATE),
    **dict.fromkeys(("loss", "optimizer", "clip_norm"), "build_training_model has this argument"),
    **dict.fromkeys(_EPOCHS, "use epochs="),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), "use batch_size="),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val"), "use clip_norm= of the builder"),
    "load_best_model_at_end": "use callbacks=[ortops.callbacks.EarlyStopping(restore_best=True)]",
    **dict.fromkeys(("early_stopping", "early_stopping_rounds", "patience"), _STOPPING),
    **dict.fromkeys(
        ("save_steps", "save_strategy"), "use callbacks=[ortops.callbacks.Checkpoint(…)]"
    ),
    **dict.fromkeys(("fp16", "bf16", "precision", "amp"), _HALF),
    "weight_decay": "use weight_decay= of an optimizer, such as ortops.optimizers.AdamW",
    **dict.fromkeys(
        ("logging_steps", "log_every_n_steps", "report_to"),
        "use callbacks=[ortops.callbacks.TensorBoard(…)], or CSVLog",
    ),
    "gradient_accumulation_steps": "use accumulate=",
    **dict.fromkeys(("val_check_interval", "eval_steps", "eval_strategy"), "use validate_every="),
    **dict.fromkeys(("max_time", "max_duration"), "use max_minutes="),
    **dict.fromkeys(("device", "devices", "accelerator"), "use providers= of TrainingSession"),
    **dict.fromkeys(("collate_fn", "data_collator"), "use collate="),
    "random_state": "use seed=",
}
"""Remedies for arguments that ``fit`` has in other libraries."""

ARGUMENTS_OF_BUILD: Mapping[str, str] = {
    **dict.fromkeys(("lr", "learning_rate"), "use optimizer=ortops.optimizers.Adam(learning_rate)"),
    "weight_decay": "use optimizer=ortops.optimizers.AdamW(weight_decay=…)",
    "criterion": "use loss=",
    "metrics": "give metrics to fit or evaluate",
    **dict.fromkeys(
        ("parameters", "params", "trainable_variables", "requires_grad"), "use trainable="
    ),
    **dict.fromkeys(
        ("frozen_params", "frozen", "freeze"), "use trainable= with patterns such as '!layer.*'"
    ),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "give the optimizer a schedule: learning_rate="),
    **dict.fromkeys(("class_weight", "sample_weight"), "give it to fit or evaluate"),
    "param_groups": "use groups=",
    "additional_output_names": "leave it out: step and predict return any tensor by outputs=",
    **dict.fromkeys(("max_grad_norm", "clipnorm", "global_clipnorm"), "use clip_norm="),
    "clipvalue": "use clip_value=",
    "random_state": "use seed=",
}
"""Remedies for arguments that other libraries have in place of those of the builder."""


ARGUMENTS_OF_CLASSES: Mapping[str, str] = {
    "lr": "use learning_rate=",
    "eps": "use epsilon=",
    "betas": "give each decay by its name (alpha= and beta= of Adam)",
    "restore_best_weights": "use restore_best=",
    **dict.fromkeys(("min_delta", "early_stopping_threshold"), "use minimum_change="),
    **dict.fromkeys(("filepath", "dirpath", "log_dir"), "give the path first"),
}
"""Remedies for arguments that optimizers and callbacks have in other libraries."""

CALLBACKS: Mapping[str, str] = {
    "LearningRateScheduler": "use schedule= of fit, or a function as learning_rate=",
    "ModelCheckpoint": "use BestModel or Checkpoint",
    "CSVLogger": "use CSVLog",
    "EarlyStoppingCallback": "use EarlyStopping",
    "LambdaCallback": "write a class with Callback as its base",
    "TerminateOnNaN": "leave it out: fit raises an error at such a loss (stop_on_nan=)",
}
"""What to use for callbacks of other libraries."""


def explain_arguments_of(classes: Iterable[Any]) -> None:
    """Makes constructors explain arguments of other libraries, in place."""
    for kind in classes:
        if "__init__" in vars(kind):
            kind.__init__ = explains_arguments(**ARGUMENTS_OF_CLASSES)(kind.__init__)


def find_name(name: str, known: Iterable[str], others: Mapping[str, str]) -> tuple[str | None, str]:
    """Finds the name of ortops for a name that a user gave.

    Upper and lower case, underscores, hyphens and spaces do not matter.

    Args:
        name: The name that the user gave.
        known: The names of ortops.
        others: What names of other libraries mean: a known name, or else a hint for the message.
            Keys are lower-case, without underscores.

    Returns:
        The known name, or None; and a hint for messages if it is None.

    Example:
        >>> find_name("adamw", ["Adam", "AdamW"], {})
        ('AdamW', '')
        >>> find_name("MSELoss", ["L1", "MeanSquaredError"], {"mse": "MeanSquaredError"})
        ('MeanSquaredError', '')
        >>> find_name("bce", ["L1"], {"bce": "use the loss of probabilities or that of logits"})
        (None, 'use the loss of probabilities or that of logits')
    """
    names = list(known)
    if name in names:
        return name, ""
    wanted = _plain(name)
    alike = [each for each in names if _plain(each) == wanted]
    if len(alike) == 1:
        return alike[0], ""
    for form in dict.fromkeys((wanted, wanted.removesuffix("loss"), wanted.removesuffix("score"))):
        alike = [each for each in names if _plain(each) == form]
        meant = others.get(form, alike[0] if len(alike) == 1 else None)
        if meant is not None:
            return (meant, "") if meant in names else (None, meant)
    plain = {_plain(each): each for each in names}
    near = difflib.get_close_matches(wanted, plain, n=1)
    return None, f"did you mean '{plain[near[0]]}'?" if near else did_you_mean(name, names)


def declared(base: type[_T], names: Iterable[str], known: Mapping[str, Any]) -> dict[str, type[_T]]:
    """Returns the subclasses of a class among names, in their order.

    Args:
        base: The class.
        names: The names, such as those in ``__all__`` of the modules that define them.
        known: What they are the names of.
    """
    found = {name: known[name] for name in sorted(names, key=str.lower)}
    return {n: v for n, v in found.items() if isinstance(v, type) and issubclass(v, base)}


def other_names(known: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of classes by the names that they declare as ``_other_names``."""
    return {
        other: name for name, kind in known.items() for other in vars(kind).get("_other_names", ())
    }


def foreign(given: object) -> str | None:
    """Returns the name of a function, class or object of PyTorch, Keras or others, if it is one.

    Example:
        >>> foreign(len) is None
        True
    """
    named = given if hasattr(given, "__name__") else type(given)
    package = str(getattr(named, "__module__", "")).partition(".")[0]
    found = package in ("torch", "keras", "tensorflow", "tf_keras", "optax", "flax", "sklearn")
    return str(getattr(named, "__name__", "")) if found else None


def explains_arguments(**others: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator that explains arguments which a function does not have.

    A function that passes keyword arguments on rejects only those of other libraries itself.

    Args:
        **others: A remedy for each argument that other libraries have.

    Example:
        >>> @explains_arguments(verbose="use progress=False")
        ... def fit(data, *, progress=True): ...
        >>> fit(0, verbose=0)
        Traceback (most recent call last):
        ...
        ortops.errors.UnexpectedArgumentError: fit has no argument 'verbose'; use progress=False
    """

    def decorate(call: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = inspect.signature(call).parameters
        name_of_call = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        places = [each for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]

        is_open = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

        @functools.wraps(call)
        def explained(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in parameters and (name in others or not is_open):
                    hint = others.get(name) or did_you_mean(name, set(parameters) - {"self"})
                    raise UnexpectedArgumentError(
                        f"{name_of_call} has no argument '{name:.80}'; {hint}"
                    )
            if len(args) > len(places):
                own = [each.name for each in places if each.name != "self"]
                hint = others.get("y") or "give the others by name"
                raise UnexpectedArgumentError(
                    f"{name_of_call} takes {len(own)} positional argument{'s' * (len(own) > 1)} "
                    f"({', '.join(own)}), got {len(args) - len(places) + len(own)}; {hint}"
                )
            return call(*args, **kwargs)

        return explained

    return decorate


def has_arguments_of(source: Callable[..., Any]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator for a function that passes keyword arguments on to another one.

    Its signature then has those of the other one in place of ``**``.

    Example:
        >>> def fit(data, *, epochs=1): ...
        >>> @has_arguments_of(fit)
        ... def fit_file(path, **settings): ...
        >>> inspect.signature(fit_file)
        <Signature (path, *, epochs=1)>
    """

    def decorate(call: Callable[_P, _R]) -> Callable[_P, _R]:
        own, others = (inspect.signature(each).parameters.values() for each in (call, source))
        kept = [each for each in own if each.kind is not each.VAR_KEYWORD]
        kept += [each for each in others if each.kind is each.KEYWORD_ONLY]
        signature = inspect.signature(call).replace(parameters=kept)

        @functools.wraps(call)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return call(*bound.args, **bound.kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def _plain(name: Any) -> str:
    return re.sub(r"[_\-\s]", "", str(name)).lower()
