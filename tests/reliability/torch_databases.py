"""PyTorch's own tables of operators and modules as models, with PyTorch's gradients as the oracle.

`op_db` and `module_db` (torch.testing._internal) say of each operator and module which inputs it
takes, at the edges of what it accepts. A *case* is such an input; an exporter of PyTorch writes it
as a model, and `verdict` compares ortops' gradients of the model with those of PyTorch in float64.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import ortops

__all__ = ["EXPORTERS", "OPERATORS", "Case", "cases_of", "verdict"]

EXPORTERS = ("TorchScript", "dynamo")

OPERATORS = {
    f"{info.name}{'.' if info.variant_test_name else ''}{info.variant_test_name}": info
    for info in op_db
    if info.supports_autograd and torch.float32 in info.supported_dtypes("cpu")
}
MODULES = {info.name: info for info in module_db if torch.float32 in info.dtypes}


@dataclass(frozen=True)
class Case:
    """An operator or a module, applied to an input of its table.

    Attributes:
        name: What is applied, with the number of the input.
        module: Takes the tensors that are differentiated, and returns what it returns.
        inputs: These tensors, float32.
    """

    name: str
    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]


class Applied(torch.nn.Module):
    """Applies a function to its floating-point tensors; everything else is a constant."""

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(arguments)
        self.leaves = leaves
        self.places = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        made = pytree.tree_leaves(self.function(*args, **kwargs))
        made = [each for each in made if is_float(each)]
        return made[0] if len(made) == 1 else tuple(made)

    def in_double(self) -> Applied:
        """Returns the same in float64."""
        other = Applied.__new__(Applied)
        torch.nn.Module.__init__(other)
        other.leaves = [each.double() if is_float(each) else each for each in self.leaves]
        other.spec, other.places = self.spec, self.places
        other.function = (
            self.function.double() if isinstance(self.function, torch.nn.Module) else self.function
        )
        return other


def is_float(value: Any) -> bool:
    """Whether a value is a tensor that a model can have as a differentiable input."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)


def cases_of(name: str, count: int) -> Iterator[Case]:
    """Yields the first inputs of an operator's or module's table, with the same numbers always."""
    torch.manual_seed(zlib.crc32(name.encode()))
    if name in OPERATORS:
        info = OPERATORS[name]
        for number, sample in enumerate(
            itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=False), count)
        ):
            arguments = ((sample.input, *sample.args), sample.kwargs)
            module = Applied(info.op, arguments)
            inputs = tuple(module.leaves[place].detach() for place in module.places)
            yield Case(f"{name} {number}", module, inputs)
    else:
        info = MODULES[name]
        made = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        )
        for number, sample in enumerate(itertools.islice(made, count)):
            given = sample.constructor_input
            layer = info.module_cls(*given.args, **given.kwargs)
            arguments = (sample.forward_input.args, sample.forward_input.kwargs)
            module = Applied(layer, arguments)
            inputs = tuple(module.leaves[place].detach() for place in module.places)
            yield Case(f"{name} {number}", module, inputs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what the exporters print."""
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def exported(case: Case, exporter: str) -> bytes:
    """Returns the model that an exporter writes."""
    names = [f"x{i}" for i in range(len(case.inputs))]
    with quiet():
        if exporter == "dynamo":
            program = torch.onnx.export(
                case.module, case.inputs, dynamo=True, input_names=names, verbose=False
            )
            return program.model_proto.SerializeToString()
        if "ircular" in case.name or not all(x.numel() for x in case.inputs):
            raise ValueError("the exporter ends the process: it damages memory, or divides by zero")
        file = io.BytesIO()
        torch.onnx.export(
            case.module,
            case.inputs,
            file,
            dynamo=False,
            input_names=names,
            opset_version=20,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
        return file.getvalue()


def verdict(case: Case, exporter: str) -> str:
    """Compares gradients, weighted with random numbers for each output.

    Returns:
        ``right``; ``unusable: …`` where PyTorch has no gradient, the exporter writes no file, or
        onnxruntime does not run it as PyTorch does; ``refused: …`` with ortops' own error;
        ``crashed: …``, with any other; or ``wrong: …``.
    """
    module = case.module
    xs = [x.double().requires_grad_() for x in case.inputs]
    try:
        y = module.in_double()(*xs)
        ys = list(y) if isinstance(y, tuple) else [y]
        if not xs or not ys or not any(each.requires_grad for each in ys):
            return "unusable: no gradient"
        rng = np.random.default_rng(0)
        seeds = [torch.from_numpy(np.asarray(rng.standard_normal(each.shape))) for each in ys]
        pairs = zip(seeds, ys, strict=True)
        total = sum((seed * each).sum() for seed, each in pairs if each.requires_grad)
        gradients = torch.autograd.grad(total, xs, allow_unused=True)
    except Exception as error:
        return f"unusable: PyTorch: {type(error).__name__}: {str(error)[:80]}"
    try:
        model = exported(case, exporter)
    except Exception as error:
        return f"unusable: exporter: {type(error).__name__}"
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        plain = onnxruntime.InferenceSession(model, options)
        feeds = {each.name: case.inputs[int(each.name[1:])].numpy() for each in plain.get_inputs()}
        outputs = plain.run(None, feeds)
    except Exception as error:
        return f"unusable: onnxruntime: {str(error)[:80]}"
    if not feeds or len(outputs) != len(ys):
        return "unusable: other outputs"
    for mine, theirs in zip(outputs, ys, strict=True):
        theirs = theirs.detach().numpy()
        if mine.shape != theirs.shape or not np.allclose(
            mine, theirs, 1e-3, 1e-3 * scale(theirs), equal_nan=True
        ):
            return "unusable: onnxruntime computes other values"
    names = [each.name for each in plain.get_inputs()]
    try:
        function = ortops.Function(model)
        _, pullback = function.vjp(*[feeds[name] for name in names])
        weights = tuple(s.numpy().astype(o.dtype) for s, o in zip(seeds, outputs, strict=True))
        made = pullback(weights if len(weights) > 1 else weights[0])
    except ortops.OrtopsError as error:
        return f"refused: {type(error).__name__}: {str(error)[:200]}"
    except Exception as error:
        return f"crashed: {type(error).__name__}: {str(error)[:200]}"
    made = made if isinstance(made, tuple) else (made,)
    for name, mine in zip(names, made, strict=True):
        theirs = gradients[int(name[1:])]
        theirs = np.zeros(mine.shape) if theirs is None else theirs.numpy()
        if not np.isfinite(theirs).all():
            continue  # at an edge, where PyTorch has no gradient either
        if mine.shape != theirs.shape or not np.allclose(
            mine, theirs, 2e-3, 2e-3 * scale(theirs) + 1e-5
        ):
            off = np.abs(mine - theirs).max() if mine.shape == theirs.shape else mine.shape
            return f"wrong: {name} by {off} of {scale(theirs)}"
    return "right"


def scale(array: np.ndarray) -> float:
    """Returns the size of an array's finite numbers."""
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 1.0
