"""Definitions of the operators of ai.onnx.ml, which converters of scikit-learn models write.

The forward pass keeps the operators. If the standard leaves a case open, the definition follows
onnxruntime's kernels. Operators that return labels, categories or bins are step functions, whose
derivative is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ortops.errors import ModelError, UnsupportedError
from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.table import definition, refuses, zero
from ortops.graph.edit import is_float
from ortops.graph.faults import pad_axes
from ortops.graph.tensor import Tensor, op

ML = "ai.onnx.ml"

zero(
    "Binarizer",
    "CastMap",
    "CategoryMapper",
    "DictVectorizer",
    "LabelEncoder",
    "OneHotEncoder",
    "ZipMap",
    domain=ML,
)

refuses(
    "TreeEnsemble",
    "TreeEnsembleClassifier",
    "TreeEnsembleRegressor",
    domain=ML,
    reason="trees are piecewise constant, so their gradient is zero wherever it exists and carries "
    "no information; take the gradient of a smooth model, or cut the graph after the node by "
    "listing its output in xs",
)

refuses(
    "SVMClassifier",
    domain=ML,
    reason="there is no gradient rule for an SVM's votes between pairs of classes; use another "
    "kind of model (SVMRegressor has a gradient), cut the graph after the node by listing its "
    "output in xs, or add a rule with @ortops.vjp",
)


# Features


@definition("Scaler", domain=ML, keep=True)
def scaler(x: Tensor, *, offset: Sequence[float] = (), scale: Sequence[float] = ()) -> Cotangents:
    y = _real(x)
    if offset:
        y = y - np.array(offset, y.dtype)
    if scale:
        y = y * np.array(scale, y.dtype)
    return y.astype(np.float32)


@definition("Normalizer", domain=ML, keep=True)
def normalizer(x: Tensor, *, norm: str = "MAX") -> Cotangents:
    x = _real(x)
    if norm == "MAX":
        size = op.ReduceMax(x, [-1])
    elif norm == "L1":
        size = op.ReduceSum(abs(x), [-1])
    elif norm == "L2":
        size = op.ReduceSum(x * x, [-1])
    else:
        raise ModelError(f"norm must be MAX, L1 or L2, got '{norm}'")
    size = op.Where(op.Equal(size, 0), 1, size)  # rows of zeros are not scaled
    return (x / (op.Sqrt(size) if norm == "L2" else size)).astype(np.float32)


@definition("ArrayFeatureExtractor", domain=ML, keep=True)
def array_feature_extractor(x: Tensor, indices: Tensor) -> Cotangents:
    columns = op.Gather(x, op.Reshape(indices, [-1]), axis=-1)
    return op.Unsqueeze(columns, [0]) if x.ndim == 1 else columns


@definition("Imputer", domain=ML, keep=True)
def imputer(
    x: Tensor,
    *,
    imputed_value_floats: Sequence[float] = (),
    imputed_value_int64s: Sequence[int] = (),
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Cotangents:
    if is_float(x.value):
        values, replaced = np.array(imputed_value_floats), replaced_value_float
    else:
        values, replaced = np.array(imputed_value_int64s), replaced_value_int64
    features = x.shape[-1] if x.shape else None
    if isinstance(features, int) and features != len(values):
        values = values[:1]
    missing = op.IsNaN(x) if math.isnan(replaced) else op.Equal(x, np.array(replaced, x.dtype))
    return op.Where(missing, values.astype(x.dtype), x)


@definition("FeatureVectorizer", domain=ML, keep=True)
def feature_vectorizer(*xs: Tensor, inputdimensions: Sequence[int] = ()) -> Cotangents:
    rows = [op.Unsqueeze(x, [0]) if x.ndim == 1 else op.Flatten(x, axis=1) for x in xs]
    if inputdimensions:
        if len(inputdimensions) != len(rows):
            raise ModelError(
                f"inputdimensions must have one size for each of the {len(rows)} inputs, got "
                f"{len(inputdimensions)} sizes"
            )
        rows = [_columns(row, count) for row, count in zip(rows, inputdimensions, strict=True)]
    return op.Concat(*(row.astype(np.float32) for row in rows), axis=1)


def _columns(x: Tensor, count: int) -> Tensor:
    """Returns the first columns of a matrix, padded with zeros if there are fewer."""
    known = x.shape[1] if x.shape is not None else None
    if known == count:
        return x
    if not isinstance(known, int) or known < count:
        x = pad_axes(x, [0, 0, 0, count - known if isinstance(known, int) else count])
    return x[:, :count]


def _real(x: Tensor) -> Tensor:
    """Converts integers to float32."""
    return x if is_float(x.value) else x.astype(np.float32)


# Models


@definition("LinearRegressor", domain=ML, keep=True)
def linear_regressor(
    x: Tensor,
    *,
    coefficients: Sequence[float] = (),
    intercepts: Sequence[float] = (),
    post_transform: str = "NONE",
    targets: int = 1,
) -> Cotangents:
    scores = _linear(x, coefficients, intercepts, targets)
    # onnxruntime applies only PROBIT to a single score.
    return _transformed(scores, post_transform, single=targets == 1)


BINARY = "no PROBIT with one score for two classes"


@definition("LinearClassifier", domain=ML, keep=True, limits=BINARY)
def linear_classifier(
    x: Tensor,
    *,
    classlabels_ints: Sequence[int] = (),
    classlabels_strings: Sequence[str] = (),
    coefficients: Sequence[float],
    intercepts: Sequence[float] = (),
    multi_class: int = 0,
    post_transform: str = "NONE",
) -> Cotangents:
    classes = len(classlabels_ints) or len(classlabels_strings)
    rows = len(intercepts) or classes or 1
    scores = _linear(x, coefficients, intercepts, rows)
    if rows == 1 and classes == 2:
        if post_transform == "PROBIT":  # onnxruntime reads the scores that it has overwritten
            raise UnsupportedError(
                "no gradient for post_transform 'PROBIT' with one score for two classes; use "
                "LOGISTIC, or PROBIT with one score per class"
            )
        logistic = post_transform == "LOGISTIC"
        other = -scores if logistic else 1 - scores
        return None, _transformed(
            op.Concat(other, scores, axis=1), post_transform, single=not logistic
        )
    return None, _transformed(scores, post_transform)


@definition(
    "SVMRegressor", domain=ML, keep=True, limits="one_class is not supported (its output is a sign)"
)
def svm_regressor(
    x: Tensor,
    *,
    coefficients: Sequence[float] = (),
    kernel_params: Sequence[float] = (),
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",  # onnxruntime ignores it
    rho: Sequence[float] = (),
    support_vectors: Sequence[float] = (),
) -> Cotangents:
    if one_class:
        raise UnsupportedError(
            "no gradient for one_class=1, whose output is a sign and piecewise constant; use "
            "one_class=0"
        )
    x = _matrix(x)
    if not n_supports:
        return _linear(x, coefficients, rho[:1], 1)
    vectors = np.array(support_vectors, np.float32).reshape(n_supports, -1)
    gamma, offset, degree = kernel_params or (0.0, 0.0, 0.0)
    products = op.MatMul(x, vectors.T)
    if kernel_type == "LINEAR":
        kernel = products
    elif kernel_type == "POLY":
        kernel = op.Pow(products * gamma + offset, degree)
    elif kernel_type == "RBF":
        between = op.Unsqueeze(x, [1]) - vectors
        kernel = op.Exp(op.ReduceSum(between * between, [2], keepdims=0) * -gamma)
    elif kernel_type == "SIGMOID":
        kernel = op.Tanh(products * gamma + offset)
    else:
        raise ModelError(f"kernel_type must be LINEAR, POLY, RBF or SIGMOID, got '{kernel_type}'")
    return _linear(kernel, coefficients, rho[:1], 1)


def _matrix(x: Tensor) -> Tensor:
    """Returns the input of a model as float32 rows."""
    return (op.Unsqueeze(x, [0]) if x.ndim == 1 else x).astype(np.float32)


def _linear(
    x: Tensor, coefficients: Sequence[float], intercepts: Sequence[float], rows: int
) -> Tensor:
    """Returns the scores, one for each row of coefficients."""
    if not coefficients or len(coefficients) % rows:
        raise ModelError(
            f"the number of coefficients must be a multiple of the {rows} scores, got "
            f"{len(coefficients)}; each score needs one coefficient per feature"
        )
    weights = np.array(coefficients, np.float32).reshape(rows, -1)
    bias = np.array(intercepts, np.float32) if intercepts else None
    return op.Gemm(_matrix(x), weights, bias, transB=1)


def _transformed(scores: Tensor, post_transform: str, *, single: bool = False) -> Tensor:
    """Applies a post_transform to rows of scores.

    Args:
        scores: The scores.
        post_transform: Its name.
        single: Whether each row contains one score, which only PROBIT transforms.
    """
    if post_transform == "PROBIT":
        return _probit(scores)
    if post_transform not in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"):
        raise ModelError(
            "post_transform must be NONE, LOGISTIC, SOFTMAX, SOFTMAX_ZERO or PROBIT, got "
            f"'{post_transform}'"
        )
    if single or post_transform == "NONE":
        return scores
    if post_transform == "LOGISTIC":
        return op.Sigmoid(scores)
    if post_transform == "SOFTMAX":
        return op.Softmax(scores, axis=-1)
    # SOFTMAX_ZERO excludes scores of zero, which stay zero.
    present = op.Greater(abs(scores), 1e-7)
    part = op.Where(present, op.Exp(scores - op.ReduceMax(scores, [-1])), 0)
    return part / op.ReduceSum(part, [-1])


_SHAPE = 0.147
"""The constant of Winitzki's approximation of the error function that onnxruntime uses."""


def _probit(p: Tensor) -> Tensor:
    """Returns the normal quantiles √2 · erf⁻¹(2p − 1), with the approximation of onnxruntime.

    They are computed in float64, because 1 − t² is inaccurate if p is close to ½.
    """
    t = p.astype(np.float64) * 2 - 1
    near = op.Less(abs(t), 1e-4)  # there, use erf⁻¹(t) ≈ t · √π / 2: the root has no slope at 0
    far = op.Where(near, 0.5, t)
    logarithm = op.Log((1 - far) * (1 + far))
    half = 2 / (math.pi * _SHAPE) + logarithm / 2
    root = op.Sqrt(op.Sqrt(half * half - logarithm / _SHAPE) - half)
    inverse = op.Where(near, t * (math.sqrt(math.pi) / 2), op.Sign(far) * root)
    return (inverse * math.sqrt(2)).astype(np.float32)
