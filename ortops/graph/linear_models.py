"""The linear models of ``ai.onnx.ml``, written as standard operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ortops._common.numbers import Array
from ortops.errors import ModelError, UnsupportedError
from ortops.graph.files.messages import describe_node
from ortops.graph.names import Names

_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
_AXES_OF_SUMS_ARE_INPUTS = 13  # the first opset in which axes are an input of ReduceSum
_AXES_ARE_INPUTS = 18  # the first opset in which axes are an input of ReduceMax


class LinearModel:
    """A LinearRegressor or LinearClassifier node, with onnxruntime's semantics.

    Args:
        node: The node.

    Attributes:
        node: The node.
        parts: The attributes with weights, coefficients first, and the shapes of the weights.

    Raises:
        ModelError: If the node is invalid.
        UnsupportedError: If onnxruntime leaves one of its outputs undefined.
    """

    def __init__(self, node: onnx.NodeProto) -> None:
        self.node = node
        self._attributes = {a.name: a for a in node.attribute}
        self._transform = onnx.helper.get_attribute_value(
            self._attributes.get("post_transform", onnx.helper.make_attribute("", "NONE"))
        ).decode()
        if self._transform not in _TRANSFORMS:
            raise ModelError(
                f"{describe_node(node)}: post_transform must be one of {', '.join(_TRANSFORMS)}, "
                f"got '{self._transform}'"
            )
        coefficients, intercepts = self._floats("coefficients"), self._floats("intercepts")
        self._labels: list[int] | list[str] = []
        if node.op_type == "LinearClassifier":
            self._scores = len(intercepts)
            self._labels = self._read_labels()
        else:
            targets = self._attributes.get("targets")
            self._scores = 1 if targets is None else targets.i
            if len(intercepts) != self._scores:  # onnxruntime ignores them in this case
                intercepts = []
        if self._scores < 1 or not coefficients or len(coefficients) % self._scores:
            given = "intercepts" if self._labels else "targets"
            raise ModelError(
                f"{describe_node(node)}: the number of coefficients must be a multiple of the "
                f"number of {given}, got {len(coefficients)} coefficients and {self._scores} "
                f"{given}"
            )
        shape = (self._scores, len(coefficients) // self._scores)
        self.parts: list[tuple[onnx.AttributeProto, tuple[int, ...]]] = [
            (self._attributes["coefficients"], shape)
        ]
        if intercepts:
            self.parts.append((self._attributes["intercepts"], (self._scores,)))

    def _floats(self, name: str) -> list[float]:
        attribute = self._attributes.get(name)
        return [] if attribute is None else list(attribute.floats)

    def _read_labels(self) -> list[int] | list[str]:
        """Returns the class labels: one for each score, or two if there is a single score."""
        numbers, texts = (
            list(onnx.helper.get_attribute_value(self._attributes[name]))
            if name in self._attributes
            else []
            for name in ("classlabels_ints", "classlabels_strings")
        )
        labels = numbers or [text.decode() for text in texts]
        enough = len(labels) == 2 if self._scores == 1 else len(labels) >= self._scores
        if not enough or (numbers and texts):
            raise ModelError(
                f"{describe_node(self.node)}: expected labels of one kind, one for each intercept, "
                f"or two if there is a single intercept; got {len(numbers)} classlabels_ints, "
                f"{len(texts)} classlabels_strings and {self._scores} intercepts"
            )
        if self._scores == 1 and self._transform == "PROBIT":
            raise UnsupportedError(
                f"{describe_node(self.node)}: onnxruntime leaves the second score undefined if "
                "post_transform is 'PROBIT' and there is a single intercept; give each class an "
                "intercept"
            )
        return labels

    def nodes(
        self,
        weights: Sequence[str],
        input_type: onnx.TypeProto.Tensor | None,
        names: Names,
        opset: int,
    ) -> list[onnx.NodeProto]:
        """Returns standard nodes with the same outputs.

        Args:
            weights: The names of the coefficients [outputs, features] and, if the node has them, of
                the intercepts [outputs].
            input_type: The type of the input; None if it is unknown.
            names: The names used in the model.
            opset: The version of the standard operators.
        """
        emit = _Emitter(names, opset, weights[0])
        x = self.node.input[0]
        if input_type is None or input_type.elem_type != onnx.TensorProto.FLOAT:
            x = emit("Cast", x, to=onnx.TensorProto.FLOAT)
        is_matrix = (
            input_type is not None
            and input_type.HasField("shape")
            and len(input_type.shape.dim) == 2
        )
        if is_matrix and len(weights) == 2:
            y = emit("Gemm", x, *weights, transB=1)
        else:
            y = emit("MatMul", x, emit("Transpose", weights[0], perm=[1, 0]))
            y = emit("Add", y, weights[1]) if len(weights) == 2 else y
        if not is_matrix:  # a vector is a single row
            y = emit("Reshape", y, np.array([-1, self._scores]))
        if not self._labels:
            return emit.finished({self._transformed(emit, y): self.node.output[0]})
        label, scores = self.node.output
        return emit.finished({self._label(emit, y): label, self._transformed(emit, y): scores})

    def _label(self, emit: _Emitter, y: str) -> str:
        if self._scores == 1:
            is_second = emit("Greater", y, np.array(0, np.float32))
            index = emit("Cast", emit("Reshape", is_second, np.array([-1])), to=7)
        else:
            index = emit("ArgMax", y, axis=1, keepdims=0)
        kind = object if isinstance(self._labels[0], str) else np.int64
        return emit("Gather", np.array(self._labels, kind), index)

    def _transformed(self, emit: _Emitter, y: str) -> str:
        """Returns the scores that the node outputs."""
        if self._labels and self._scores == 1:
            if self._transform == "LOGISTIC":
                return emit("Sigmoid", emit("Concat", emit("Neg", y), y, axis=1))
            return emit("Concat", emit("Sub", _ONE, y), y, axis=1)  # for all other transforms
        if self._transform == "PROBIT":
            return _probit(emit, y)
        if self._scores == 1 or self._transform == "NONE":
            return y
        if self._transform == "SOFTMAX_ZERO":
            return _softmax_of_nonzero(emit, y)
        if self._transform == "SOFTMAX":
            return emit("Softmax", y, axis=1)
        return emit("Sigmoid", y)


_ONE = np.array(1, np.float32)


def _probit(emit: _Emitter, y: str) -> str:
    """Returns √2 · erf⁻¹(2y − 1), by Winitzki's approximation with a = 0.147 as in onnxruntime."""
    two, a, π = np.float32(2), np.float32(0.147), np.float32(3.14159)
    x = emit("Sub", emit("Mul", y, np.array(two)), _ONE)
    log = emit("Log", emit("Mul", emit("Sub", _ONE, x), emit("Add", _ONE, x)))
    v = emit("Add", np.array(two / (π * a)), emit("Mul", np.array(_ONE / two), log))
    root = emit("Sqrt", emit("Sub", emit("Mul", v, v), emit("Mul", np.array(_ONE / a), log)))
    size = emit("Sqrt", emit("Mul", np.array(two), emit("Sub", root, v)))
    is_negative = emit("Less", x, np.array(0, np.float32))
    return emit("Where", is_negative, emit("Neg", size), size)


def _softmax_of_nonzero(emit: _Emitter, y: str) -> str:
    """Returns the softmax of the nonzero scores; scores of zero stay zero."""
    is_nonzero = emit("Greater", emit("Abs", y), np.array(1e-7, np.float32))
    top = emit.reduced("ReduceMax", y, _AXES_ARE_INPUTS)
    powers = emit("Exp", emit("Sub", y, top))
    total = emit("Where", is_nonzero, powers, np.array(0, np.float32))
    total = emit.reduced("ReduceSum", total, _AXES_OF_SUMS_ARE_INPUTS)
    # Avoids overflow; a row with a near-zero score has a maximum of about 0 or more.
    at_least = emit("Max", top, np.array(-1, np.float32))
    near_zero = emit("Mul", y, emit("Exp", emit("Neg", at_least)))
    return emit("Div", emit("Where", is_nonzero, powers, near_zero), total)


class _Emitter:
    """Creates standard nodes whose outputs have unique names."""

    def __init__(self, names: Names, opset: int, prefix: str) -> None:
        self._names, self._opset, self._prefix = names, opset, prefix
        self._nodes: list[onnx.NodeProto] = []

    def __call__(self, op_type: str, *inputs: str | Array, **attributes: Any) -> str:
        """Creates a node and returns its output's name; inputs are names or constant arrays."""
        read = [self._constant(x) if isinstance(x, np.ndarray) else x for x in inputs]
        return self._add(op_type, read, attributes)

    def reduced(self, op_type: str, x: str, axes_are_inputs: int) -> str:
        """Creates a node that reduces axis 1; older opsets have the axes as an attribute."""
        if self._opset < axes_are_inputs:
            return self(op_type, x, axes=[1], keepdims=1)
        return self(op_type, x, np.array([1]), keepdims=1)

    def _constant(self, array: Array) -> str:
        return self._add("Constant", [], {"value": onnx.numpy_helper.from_array(array)})

    def _add(self, op_type: str, inputs: list[str], attributes: dict[str, Any]) -> str:
        output = self._names.unique(f"{self._prefix}/{op_type}")
        self._nodes.append(onnx.helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def finished(self, outputs: Mapping[str, str]) -> list[onnx.NodeProto]:
        """Returns the nodes, with outputs renamed."""
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [outputs.get(name, name) for name in names]
        return self._nodes
