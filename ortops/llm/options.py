"""The arguments of `ortops.llm.FineTuning` and of its `fit`, and what other libraries call them.

The signature of `FineTuning`, its checks, the options and the configuration of `ortops tune`, and
the explanations of foreign names follow from the declarations, as those of
`ortops.engine.training.fit_options` do. The module imports nothing heavy.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from ortops.engine.training.fit_options import Option, options_of

if TYPE_CHECKING:
    from ortops.losses import Loss
    from ortops.optimizers import Optimizer

_COUNT: Any = {"metavar": "N", "check": "whole_number", "bounds": {"minimum": 1}}
_FLOAT: Any = {"metavar": "X", "reads": "float"}
_SHARE: Any = {**_FLOAT, "check": "number", "bounds": {"minimum": 0, "below": 1}}
_FROM_0: Any = {**_FLOAT, "check": "number", "bounds": {"minimum": 0}}
_ABOVE_0: Any = {**_FLOAT, "check": "number", "bounds": {"above": 0}}
_SWITCH: Any = {"metavar": "", "check": "boolean"}
_IN_PYTHON = "nothing: it is for programs in Python"


def _one_of(*options: str) -> Any:
    return {"metavar": "NAME", "reads": "choice", "bounds": {"options": options}}


FIRST_OPTIONS: Mapping[str, Option] = {
    "rank": Option(
        8, "the adapter's rank (default: 8), or none to train all weights", "N", reads="rank"
    ),
    "alpha": Option(16, "the adapter is scaled by X / rank (default: 16)", **_FLOAT),
    "targets": Option(
        None,
        "layers to adapt, or !NAME to leave out (default: all linear ones but lm_head)",
        "NAME",
        several=True,
    ),
    "learning_rate": Option(
        2e-4, "a number, or a schedule as 'cosine(2e-4, warmup=0.1)' (default: 2e-4)", "RATE"
    ),
    "recompute": Option(
        "auto",
        "keep N activations, and compute the others again to save memory; sqrt keeps few, "
        "elementwise computes again only what takes hardly any time (default: auto, that on the "
        "CPU), none keeps all",
        "N",
        reads="number or name",
    ),
    "adapter": Option(
        None, "begin with this adapter: a folder of PEFT or an .onnx_adapter file", "PATH"
    ),
}
"""The arguments of `FineTuning` that may be given by position."""

_LOSS = Option(
    None,
    "what to learn: the next token (default), with DPO to prefer chosen answers, or for retrieval "
    "InfoNCE (default) or Triplet",
    **_one_of("NextToken", "DPO", "InfoNCE", "Triplet"),
)
TASKS = ("classification", "pairs", "retrieval")
_TASK = Option(
    None,
    "of a text encoder: classes of texts, or of pairs where the model has logits; the similarity "
    "of pairs; or the answers to texts",
    **_one_of(*TASKS),
)
_LABELS = Option(
    None,
    "the names of the classes (default: the model's, or those in the data)",
    "NAME",
    several=True,
)
_PROVIDERS = Option(None, "where to train, such as webgpu (default: the CPU)", "NAME", several=True)
_MODULES = Option(
    None, "modules to train as a whole, beside the adapter, such as lm_head", "NAME", several=True
)
_OPTIMIZER = Option(
    None, "a name, or a call as 'Lion(beta1=0.9)' (default: PyTorch's Adam)", "NAME"
)


class TuningOptions(TypedDict, total=False):
    """The other arguments of `FineTuning`, in their order."""

    loss: Annotated["Loss | str | None", _LOSS]
    dropout: Annotated[
        float, Option(0.0, "the share of the adapter's inputs to drop in each step", **_SHARE)
    ]
    rslora: Annotated[bool, Option(False, "scale the adapter by alpha / √rank", **_SWITCH)]
    dora: Annotated[bool, Option(False, "also train the magnitudes of weights (DoRA)", **_SWITCH)]
    modules_to_save: Annotated["str | Sequence[str] | None", _MODULES]
    bias: Annotated[
        str,
        Option(
            "none", "which biases to train (default: none)", **_one_of("none", "all", "lora_only")
        ),
    ]
    rank_pattern: Annotated["Mapping[str, int] | None", Option(None, _IN_PYTHON)]
    alpha_pattern: Annotated["Mapping[str, float] | None", Option(None, _IN_PYTHON)]
    seed: Annotated[int, Option(0, "nothing: the initial values are those of seed 0")]
    providers: Annotated["Sequence[Any] | None", _PROVIDERS]
    optimizer: Annotated["str | Optimizer | None", _OPTIMIZER]
    weight_decay: Annotated[
        "float | None", Option(None, "of the optimizer; without --optimizer, of AdamW", **_FROM_0)
    ]
    clip_norm: Annotated[
        "float | None", Option(None, "clip the norm of all gradients together to X", **_ABOVE_0)
    ]
    task: Annotated["str | None", _TASK]
    labels: Annotated["Sequence[str] | None", _LABELS]


TUNING: Mapping[str, Option] = {**FIRST_OPTIONS, **options_of(TuningOptions)}
"""The declarations of the arguments of `FineTuning` but for the folder."""

OF_LOSS: Mapping[str, Option] = {
    "label_smoothing": Option(
        0.0,
        "the share of a target to spread over all tokens; with DPO, of wrong preferences",
        **_FLOAT,
    ),
    "beta": Option(0.1, "with DPO: how strongly to stay at the original (default: 0.1)", **_FLOAT),
}
"""The arguments of the losses for which `ortops tune` has options."""

_PART = _one_of("assistant", "completion", "all")
_PACKING = "join rows up to --max-length tokens, if the model keeps them apart"
_HELD_OUT = "a file, or a fraction of the rows, to evaluate after each epoch"

TUNING_FIT: Mapping[str, Option] = {
    "epochs": Option(1, "passes over the data (default: 1)", **_COUNT),
    "batch_size": Option(4, "rows per batch (default: 4)", **_COUNT),
    "max_length": Option(512, "truncate rows to N tokens (default: 512)", **_COUNT),
    "train_on": Option(
        "assistant", "what to train: all replies (default), the last one, or all tokens", **_PART
    ),
    "shuffle": Option(True, "nothing: rows are shuffled"),
    "group_by_length": Option(False, "make batches of rows of similar length", **_SWITCH),
    "packing": Option(False, _PACKING, **_SWITCH),
    "padding": Option("right", "the side of padding (default: right)", **_one_of("right", "left")),
    "seed": Option(0, "the order of the rows (default: 0)", "N", reads="seed"),
    "validation": Option(None, _HELD_OUT, "DATA"),
    "save": Option(None, "--save"),
    "save_steps": Option(None, "--checkpoint-steps"),
    "columns": Option(
        None,
        "columns with other names, as prompt=question completion=answer",
        "NAME=COLUMN",
        several=True,
    ),
}
"""The declarations of the arguments of `FineTuning.fit`; those of sessions come on top."""

SHARED_FIT = ("accumulate", "max_steps")
"""What `ortops tune` also has of the arguments of `ortops.TrainingSession.fit`."""

_FOREIGN = (
    "rank=r,lora_r,lora_rank alpha=lora_alpha dropout=lora_dropout rslora=use_rslora dora=use_dora "
    "targets=target_modules,lora_target adapter=adapter_name_or_path,resume_adapter_file "
    "modules_to_save=additional_target "
    "learning_rate=lr,lr_scheduler_type,lr_scheduler,lr_schedule,warmup,warmup_ratio,warmup_steps "
    "clip_norm=max_grad_norm,gradient_clipping label_smoothing=label_smoothing_factor "
    "recompute=gradient_checkpointing,use_gradient_checkpointing,grad_checkpoint max_steps=iters "
    "epochs=num_train_epochs,num_epochs,n_epochs padding=padding_side seed=random_state "
    "batch_size=per_device_train_batch_size,micro_batch_size save=output_dir,adapter_path "
    "accumulate=gradient_accumulation_steps,grad_accumulation_steps packing=neat_packing "
    "max_length=max_seq_length,max_seq_len,cutoff_len validation=val_size,eval_dataset "
    "train_on=assistant_only_loss,completion_only_loss,mask_prompt,train_on_inputs,train_on_prompt "
    "save_steps=save_every optimizer=optim beta=pref_beta train_on=mask_history"
)
_SCHEDULE = ", a number or a schedule such as warmup_cosine(2e-4, warmup=0.03)"

FOREIGN: Mapping[str, str] = {
    name: ours
    for ours, _, names in (each.partition("=") for each in _FOREIGN.split())
    for name in names.split(",")
}
"""Our arguments by those of TRL, transformers, PEFT, mlx-lm, unsloth and LLaMA-Factory."""


def remedies(*, in_fit: bool) -> dict[str, str]:
    """Returns what to use in place of arguments that `FineTuning`, or `fit`, does not have."""
    fit = {*TUNING_FIT, *SHARED_FIT}
    ours = (fit | {*TUNING, *OF_LOSS}) - (fit if in_fit else {*TUNING})
    return {name: _remedy(FOREIGN.get(name, name), in_fit) for name in (*FOREIGN, *ours)}


def _remedy(ours: str, in_fit: bool) -> str:
    more = _SCHEDULE if ours == "learning_rate" else ""
    if ours in OF_LOSS:
        loss = "DPO" if ours == "beta" else "NextToken"
        return f"use loss=ortops.losses.{loss}({ours}=…){' of FineTuning' * in_fit}"
    if ours in TUNING and not (in_fit and ours in TUNING_FIT):
        return f"use {ours}={' of FineTuning' * in_fit}{more}"
    return f"use {ours}={' of fit' * (not in_fit)}"


def remedy_on_command_line(word: str) -> str | None:
    """Returns what to use in place of an option, if another library has it.

    Example:
        >>> remedy_on_command_line("--max_grad_norm=1")
        'use --clip-norm'
    """
    ours = FOREIGN.get(word.lstrip("-").partition("=")[0].replace("-", "_"))
    if ours is None:
        return None
    flag = {"save_steps": "checkpoint_steps"}.get(ours, ours).replace("_", "-")
    return f"use --{flag}{_SCHEDULE if ours == 'learning_rate' else ''}"
