"""Settings of the execution of steps, and the report of what a session chose.

The defaults were the fastest in measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ortops._common.cores import usable_cores
from ortops.engine.execution.memory import Device
from ortops.errors import ArgumentError, did_you_mean
from ortops.graph.passes import passes_for
from ortops.graph.passes.draft import Pass

_SHOWN = 6
"""How many names a line of a report has."""


@dataclass(frozen=True)
class Settings:
    """Settings of the execution of steps. They do not change results, up to rounding.

    Attributes:
        passes: The graph rewrites for onnxruntime's CPU provider.
        joined: The maximum number of packed elements for which updates are part of the gradient
            graph, which saves a run.
        chunk: The number of elements that a separate update processes at a time, so that they stay
            in the cache of a core.
        passed: The minimum number of packed elements for which gradients are passed from step to
            update in onnxruntime's memory, which the forward pass has used before. Below it, they
            are written to memory of their own, which is faster.
        early: The minimum number of elements of a variable that is updated in the backward pass,
            if this is wanted. Many smaller ones are updated faster together, and their gradients
            take little memory.
        shapes: How many shapes of batches get graphs of their own. A data set of equal samples has
            two: that of a full batch and that of the last batch.
        threads: The number of threads that share the chunks, unless the session options set it.
        spin: How many microseconds a thread of onnxruntime waits actively for work before it
            sleeps, unless the session options set it. The default is about the time that waking a
            thread takes, so that waiting costs at most about twice the optimum, and cores remain
            free for others. None means onnxruntime's own default, a million pauses (3 to 50 ms); so
            does any number if onnxruntime does not know this setting.
        compiled_after: How many steps, and how many seconds in them, precede the compilation of
            updates with ``kernels="auto"``. It takes a few tenths of a second.
        compiled_share: What share of a step compiled updates must promise to save with
            ``kernels="auto"`` before LLVM is loaded. Below zero, they are compiled in any case.
        scaled_sums: Whether sums y + c · x of long tensors may be computed in one pass over memory.
        copied: The number of bytes of frozen weights up to which onnxruntime may copy them into the
            order of its kernels. Above it, they are inputs, which it reads where they are.
        looked_up: The number of bytes from which a frozen table stays in its file if batches only
            look up rows of it, on the CPU.
        device: The device for variables; by default, that of the providers.
    """

    passes: Sequence[Pass] = field(default_factory=lambda: passes_for("session"))
    joined: int = 2**18
    chunk: int = 2**17
    passed: int = 2**21
    early: int = 2**15
    shapes: int = 2
    threads: int = field(default_factory=usable_cores)
    spin: int | None = 20
    compiled_after: tuple[int, float] = (10, 2.0)
    compiled_share: float = 0.05
    scaled_sums: bool = True
    copied: int = 2**28
    looked_up: int = 2**27
    device: Device | None = None

    def without(self, *names: str) -> Settings:
        """Returns settings without some passes.

        Raises:
            ArgumentError: If a pass is unknown.

        Example:
            >>> settings = Settings().without("max_pool", "recurrent", "blocked", "scales")
            >>> [each.name for each in settings.passes][:5]
            ['normal_form', 'numbers', 'gated_sums', 'computed_sizes', 'padding']
        """
        known = [each.name for each in self.passes]
        for name in names:
            if name not in known:
                raise ArgumentError(f"unknown pass '{name}'; {did_you_mean(name, known)}")
        return replace(self, passes=[each for each in self.passes if each.name not in names])


@dataclass(frozen=True)
class PackedUpdate:
    """Variables that are contiguous in memory, and that one formula updates together.

    Attributes:
        variables: Their names, for each role (parameter, running mean of its gradients …), for
            example ``(("w", "b"), ("w.V", "b.V"))``.
        shapes: The shapes of these tensors, the same in each role.
        chunks: The number of chunks that are updated one after the other, or by several threads.
        in_graph: Whether the update is part of the graph that computes the gradients.
        compiled: Whether the update is compiled code.
        fed: The gradients that it takes from the batch.
        operators: How often the formula has each operator. ``ScaledSum`` is a sum y + c · x that is
            computed in one pass over memory.

    Example:
        >>> from ortops.docs import examples
        >>> (update,) = examples.session(optimizer="Momentum").report().packed
        >>> update.variables, update.shapes, update.chunks, update.in_graph
        ((('w',), ('w.V',)), ((1, 1),), 1, True)
    """

    variables: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    chunks: int
    in_graph: bool
    compiled: bool
    fed: tuple[str, ...]
    operators: Mapping[str, int]

    def __str__(self) -> str:
        """Describes the update in a line."""
        size = sum(map(math.prod, self.shapes))
        parts = [f"{size:,} element{'s' * (size != 1)}"]
        parts += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        parts += ["in the graph"] if self.in_graph else []
        parts += ["compiled"] if self.compiled else []
        names = [name for role in self.variables for name in role]
        return f"updated together: {_listed(names)} ({', '.join(parts)})"


@dataclass(frozen=True)
class SessionReport:
    """What a session chose for its steps, as they run now; `dataclasses.asdict` makes plain data.

    Attributes:
        kernels: How updates are computed: ``"onnx"``, ``"python"``, or ``"compiled"`` if some are.
        choice: Why ``kernels="auto"`` has compiled updates or has not; empty before it has decided.
        compiled: The variables with compiled updates.
        packed: The groups of variables that are updated together. Other updates are nodes of the
            graph.
        in_place: The variables whose next values overwrite the current ones.
        in_turn: The variables with two copies, which are read and written in turn.
        device: Where variables are: ``"cpu"``, or the kind of a device with memory of its own.
        on_device: The variables in the memory of that device.
        optimizer_in_backward: Whether large variables are updated in the backward pass.
        repeatable: Whether `TrainingSession.run_steps` makes several steps in one run.
        variants: The shapes of batches that have graphs of their own, by input.
        operators: How often the graph that was made last has each operator, with subgraphs; empty
            while there is none. None if onnxruntime is too old to tell (see
            `TrainingSession.placement`).
        placement: The provider that runs each node of that graph; None as for ``operators``.

    Example:
        >>> from ortops.docs import examples
        >>> report = examples.session().report()
        >>> report.kernels, report.device, report.in_turn, report.repeatable
        ('onnx', 'cpu', ('w', 'step'), True)
    """

    kernels: str
    choice: str
    compiled: tuple[str, ...]
    packed: tuple[PackedUpdate, ...]
    in_place: tuple[str, ...]
    in_turn: tuple[str, ...]
    device: str
    on_device: tuple[str, ...]
    optimizer_in_backward: bool
    repeatable: bool
    variants: tuple[Mapping[str, tuple[int, ...]], ...]
    operators: Mapping[str, int] | None
    placement: Mapping[str, str] | None

    def __str__(self) -> str:
        """Describes the session in a few lines."""
        backward = ", in the backward pass" if self.optimizer_in_backward else ""
        choice = f" ({self.choice})" if self.choice else ""
        lines = [f"kernels: {self.kernels}{backward}{choice}", *map(str, self.packed)]
        named = (
            ("compiled", self.compiled),
            ("in place", self.in_place),
            ("two copies", self.in_turn),
            (f"on {self.device}", self.on_device),
        )
        lines += [f"{label}: {_listed(names)}" for label, names in named if names]
        lines += [f"a graph of its own: {_sizes(shapes)}" for shapes in self.variants]
        if self.operators:
            counts = Counter(self.operators).most_common()
            shown = _listed([f"{name} × {count}" for name, count in counts])
            lines.append(f"{sum(self.operators.values())} nodes: {shown}")
        for provider, count in Counter((self.placement or {}).values()).most_common():
            lines.append(f"{provider} runs {count}")
        return "\n".join(lines)


def _listed(texts: Sequence[str]) -> str:
    """Returns the first texts of a list, and how many there are besides."""
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
