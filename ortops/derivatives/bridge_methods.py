"""What makes functions and modules of other libraries from a Function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ortops._common.arguments import boolean
from ortops._common.optional import optional_module


class Bridges:
    """The methods of `ortops.Function` for other libraries."""

    def jax(self) -> Callable[..., Any]:
        """Returns the Function for JAX (requires jax: ``pip install ortops[jax]``).

        Returns:
            A function ``g(*xs, parameters=None)`` of an array for each input. ``parameters`` is a
            dict of weights by name that replaces some or all values, such as
            ``dict(f.parameters)``. It works under ``jit``, ``grad``, ``vmap``, ``jacfwd``,
            ``jacrev`` and ``hessian``, and can be differentiated by inputs and parameters any
            number of times. Models with float64 need ``jax_enable_x64``.

        Raises:
            OrtopsError: If jax is not installed.
            UnsupportedError: If the model draws random numbers, because functions of JAX must be
                pure; or if an input has a type that JAX does not have.
        """
        return _bridge("jax").jax_function(self)  # type: ignore[no-any-return]

    def pytensor(self) -> Any:
        """Returns the Function as an Op of PyTensor (``pip install ortops[pytensor]``).

        The Op has derivatives of any order (``pullback``, ``L_op``, ``R_op``), so that a
        log-likelihood with it can be sampled by its gradient. Static shapes are those that the
        model states.

        Raises:
            OrtopsError: If pytensor is not installed.
            UnsupportedError: If the model draws random numbers, because an Op must be pure; or if
                an input or output has a type that PyTensor does not have, or an unknown rank.
        """
        return _bridge("pytensor").pytensor_op(self)

    def scipy(self, /, shape: Any = None, **fixed: Any) -> Any:
        """Returns functions of flat float64 vectors for ``scipy.optimize.minimize``.

        A vector is the concatenation of all inputs that are not fixed, each flattened, in the order
        of `inputs`. Its parts are cast to the types of the inputs, float32 for example, and results
        are cast to float64. float32 limits how small a gradient can become.

        Args:
            shape: The shape of the input that is not fixed; a tuple of shapes for several inputs,
                or a dict of shapes by name. By default, and for None in a dict, the static shape in
                the model.
            **fixed: Arrays for inputs that are not optimized.

        Returns:
            A named tuple ``(fun, jac, hessp)``: the output, its gradient, and the product of its
            Hessian with a vector. ``fun`` and ``jac`` of one vector share a forward pass.

        Raises:
            ArgumentError: If the output is not a scalar, a name is unknown, a shape is missing, or
                an input that is not fixed is not floating-point.
            FeedError: If a shape does not fit the model.

        Example:
            >>> import numpy as np
            >>> import ortops
            >>> with ortops.Tape(name="energy") as tape:
            ...     x = tape.input("x", np.float32, [2])
            ...     y = tape.output((x * x * x).sum(), "y")
            >>> fun, jac, hessp = ortops.Function(tape.model()).scipy()
            >>> fun([1, 2]), jac([1, 2]), hessp([1, 2], [1, 0])
            (9.0, array([ 3., 12.]), array([6., 0.]))
        """
        bridge = importlib.import_module("ortops.derivatives.bridges.scipy")  # needs no scipy
        return bridge.scipy_functions(self, shape, fixed)

    def torch(self, *, trainable: bool = True) -> Any:
        """Returns a torch.nn.Module that computes this Function (``pip install ortops[torch]``).

        Its outputs carry gradients of any order to its inputs and parameters, which are the weights
        in `parameters`, by their ONNX names. It may stand between other layers, and be trained by
        an optimizer of PyTorch. It computes on the CPU, without copies of tensors.

        Args:
            trainable: Whether the weights are parameters of the module. Otherwise, they are
                constants, which lets onnxruntime optimize the model further.

        Raises:
            ArgumentError: If ``trainable`` is not a boolean.
            OrtopsError: If torch is not installed.
            UnsupportedError: If an output cannot be a tensor.
        """
        boolean("trainable", trainable)
        return _bridge("torch").OnnxModule(self, trainable)


def _bridge(package: str) -> Any:
    """Returns the module of a bridge to a package.

    Raises:
        OrtopsError: If the package is not installed; the message names what to install.
    """
    optional_module(f"Function.{package}", package, group=package)
    return importlib.import_module(f"ortops.derivatives.bridges.{package}")
