"""The arguments of `ortops.llm.FineTuning` and of its `fit`, and what other libraries call them.

The signature of `FineTuning`, its checks, the options and the configuration of `ortops tune`, and
the explanations of foreign names follow from the declarations, as those of
`ortops.engine.training.fit_options` do. The module imports nothing heavy.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from ortops.engine.training.fit_options import Option, options_of

if TYPE_CHECKING:
    from ortops.losses import NextToken
    from ortops.optimizers import Optimizer

_POSITIVE: Any = {"check": "number", "bounds": {"above": 0}}
_NOT_NEGATIVE: Any = {"check": "number", "bounds": {"minimum": 0}, "reads": "float"}
_SWITCH: Any = {"metavar": "", "check": "boolean"}
_COUNT: Any = {"metavar": "N", "check": "whole_number", "bounds": {"minimum": 1}}
_IN_PYTHON = "nothing: it is for programs in Python"

FIRST_OPTIONS: Mapping[str, Option] = {
    "rank": Option(8, "the adapter's rank (default: 8)", "N", reads="rank"),
    "alpha": Option(16, "the scaling's numerator (default: 16)", "A", reads="float"),
    "targets": Option(
        *(None, "the layers to adapt (default: all linear layers but lm_head)", "PATTERN"),
        several=True,
    ),
    "learning_rate": Option(
        *(2e-4, "a number, or a schedule such as 'cosine(2e-4, warmup=0.1)' (default: 2e-4)"),
        metavar="RATE",
    ),
    "recompute": Option(
        None,
        "save memory: keep only N activations and compute the others again, or sqrt for as few "
        "as that takes no more memory",
        "N",
        reads="number or name",
    ),
    "adapter": Option(
        None, "an adapter to begin with: a folder of PEFT or an .onnx_adapter file", "PATH"
    ),
}
"""The arguments of `FineTuning` that may be given by position."""


class TuningOptions(TypedDict, total=False):
    """The other arguments of `FineTuning`, in their order."""

    loss: Annotated[
        "NextToken | str | None",
        Option(
            None,
            "predict the next token (the default), or prefer chosen to rejected answers",
            metavar="LOSS",
            bounds={"options": ("NextToken", "DPO")},
            reads="choice",
        ),
    ]
    dropout: Annotated[
        float,
        Option(
            0.0,
            "the ratio of a layer's input that training drops before A (default: 0)",
            *("P", "number", {"minimum": 0, "below": 1}),
            reads="float",
        ),
    ]
    rslora: Annotated[bool, Option(False, "scale by alpha / √rank", **_SWITCH)]
    rank_pattern: Annotated["Mapping[str, int] | None", Option(None, _IN_PYTHON)]
    alpha_pattern: Annotated["Mapping[str, float] | None", Option(None, _IN_PYTHON)]
    seed: Annotated[int, Option(0, "nothing: the initial values are those of seed 0")]
    providers: Annotated[
        "Sequence[Any] | None",
        Option(
            *(None, "where to train, such as webgpu or CUDAExecutionProvider (default: the CPU)"),
            metavar="NAME",
            several=True,
        ),
    ]
    optimizer: Annotated[
        "str | Optimizer | None",
        Option(
            None,
            "an optimizer, optionally with arguments, such as 'AdamW(alpha=0.95)' "
            "(default: PyTorch's Adam, or its AdamW with --weight-decay)",
            "OPTIMIZER",
        ),
    ]
    weight_decay: Annotated[
        "float | None",
        Option(None, "the optimizer's weight decay", "D", **_NOT_NEGATIVE),
    ]
    clip_norm: Annotated[
        "float | None",
        Option(None, "clip the global norm of the gradients to N", "N", **_POSITIVE),
    ]


TUNING: Mapping[str, Option] = {**FIRST_OPTIONS, **options_of(TuningOptions)}
"""The declarations of the arguments of `FineTuning` but for the folder."""

OF_LOSS: Mapping[str, Option] = {
    "label_smoothing": Option(
        0.0,
        "the probability spread over all tokens, or that a preference is wrong",
        "P",
        reads="float",
    ),
    "beta": Option(
        0.1,
        "for --loss DPO: how strongly the model is held at the original (default: 0.1)",
        "B",
        reads="float",
    ),
}
"""The arguments of the losses for which `ortops tune` has options."""

TUNING_FIT: Mapping[str, Option] = {
    "epochs": Option(1, "passes over the data (default: 1)", **_COUNT),
    "batch_size": Option(4, "rows per batch (default: 4)", **_COUNT),
    "max_length": Option(512, "truncate rows to N tokens (default: 512)", **_COUNT),
    "train_on": Option(
        "assistant",
        "train all replies of a chat, the last one, or all tokens (default: assistant)",
        *("PART", "choice", {"options": ("assistant", "completion", "all")}),
        reads="choice",
    ),
    "shuffle": Option(True, "nothing: rows are shuffled"),
    "group_by_length": Option(False, "make batches of rows of similar length", **_SWITCH),
    "packing": Option(
        False,
        "join rows to rows of at most --max-length tokens, if the model keeps them apart",
        **_SWITCH,
    ),
    "padding": Option(
        "right",
        "the side on which shorter rows are padded (default: right)",
        *("SIDE", "choice", {"options": ("right", "left")}),
        reads="choice",
    ),
    "seed": Option(0, "the order of the rows (default: 0)", "N", reads="seed"),
    "validation": Option(
        None,
        "another file, or a fraction such as 0.1 of the rows, to evaluate after each epoch",
        "DATA",
    ),
    "save": Option(None, "--save"),
    "save_steps": Option(None, "--checkpoint-steps"),
}
"""The declarations of the arguments of `FineTuning.fit`; those of sessions come on top."""

SHARED_FIT = ("accumulate", "max_steps")
"""What `ortops tune` also has of the arguments of `ortops.TrainingSession.fit`."""

_FOREIGN = {
    "rank": "r lora_r lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "target_modules lora_target",
    "rslora": "use_rslora",
    "adapter": "adapter_name_or_path resume_adapter_file",
    "learning_rate": "lr lr_scheduler_type lr_scheduler lr_schedule warmup warmup_ratio "
    "warmup_steps",
    "optimizer": "optim",
    "clip_norm": "max_grad_norm gradient_clipping",
    "recompute": "gradient_checkpointing use_gradient_checkpointing grad_checkpoint",
    "label_smoothing": "label_smoothing_factor",
    "beta": "pref_beta",
    "epochs": "num_train_epochs num_epochs n_epochs",
    "batch_size": "per_device_train_batch_size micro_batch_size",
    "accumulate": "gradient_accumulation_steps grad_accumulation_steps",
    "max_steps": "iters",
    "max_length": "max_seq_length max_seq_len cutoff_len",
    "train_on": "assistant_only_loss completion_only_loss mask_prompt train_on_inputs "
    "train_on_prompt mask_history",
    "packing": "neat_packing sample_packing",
    "padding": "padding_side",
    "seed": "random_state",
    "validation": "val_size val_set_size eval_dataset",
    "save": "output_dir adapter_path",
    "save_steps": "save_every",
}
_SCHEDULE = ", a number or a schedule such as warmup_cosine(2e-4, warmup=0.03)"

FOREIGN: Mapping[str, str] = {
    name: ours for ours, names in _FOREIGN.items() for name in names.split()
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
