"""Facts about operators: one row for each operator, one column for each fact.

Whatever asks what kind of operator a node has reads this table. Operators with the same facts share
a row. A test compares what is elementwise with what onnx's reference computes, and another one
fails for a gradient rule whose operator has no row.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ortops.graph.files.messages import MICROSOFT


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What is known about an operator.

    Attributes:
        elementwise: Each element of the output is computed from the same element of the inputs.
        broadcasts: Its inputs, two or more, are broadcast against each other.
        zero: Its derivative is zero wherever it exists.
        finite: Its gradient keeps finite cotangents finite, unlike that of a root at zero.
        singular: The input at whose 0 the derivative is infinite or undefined.
        keeps: The numbers of its first input stay the same, up to their type.
        rounds: It quantizes or dequantizes its first input.
        moves: It only gives the elements of its first input other places, each one.
        copies: Slices of its output are slices of its inputs, or a constant.
        rearranges: The elements of its output are elements of its inputs in some other way.
        linear: Its time is proportional to the size of its inputs and outputs. This need not be
            said of elementwise operators and those that move elements.
        product: It multiplies by a weight: a matrix, the kernels of a convolution, or any.
        weight: The input that is its weight, if it is a layer.
        quantized: Its weight is quantized.
        recurrent: It is a recurrent layer.
        normalizes: It is a normalization, with weights from input 1 on.
        pools: It combines the elements in windows of each channel.
        keeps_rank: Its output has the rank of an input, which onnx does not know.
        settings: Inputs that configure it, as opposed to learned weights.
    """

    elementwise: bool = False
    broadcasts: bool = False
    zero: bool = False
    finite: bool = False
    singular: int | None = None
    keeps: bool = False
    rounds: bool = False
    moves: bool = False
    copies: bool = False
    rearranges: bool = False
    linear: bool = False
    product: Literal["matrix", "convolution", "any", ""] = ""
    weight: int | None = None
    quantized: bool = False
    recurrent: bool = False
    normalizes: bool = False
    pools: bool = False
    keeps_rank: bool = False
    settings: Collection[int] = ()


_OPERATORS: dict[tuple[str, str], Operator] = {}
OPERATORS: Mapping[tuple[str, str], Operator] = _OPERATORS
"""The facts by domain and operator."""


def having(fact: str, *domains: str) -> frozenset[str]:
    """Returns the names of the operators of some domains, by default all, that a fact is true of.

    Example:
        >>> sorted(having("moves"))
        ['Flatten', 'Reshape', 'Squeeze', 'Transpose', 'Unsqueeze']
    """
    rows = ((key, row) for key, row in OPERATORS.items() if not domains or key[0] in domains)
    return frozenset(name for (_, name), row in rows if getattr(row, fact))


@functools.cache
def is_random(op_type: str) -> bool:
    """Whether an operator draws random numbers, also one of another domain, such as RandomCrop."""
    return any(part in op_type for part in ("Bernoulli", "Dropout", "Multinomial", "Random"))


def _row(*op_types: str, domain: str = "", **facts: Any) -> None:
    row = Operator(**facts)
    for op_type in op_types:
        assert (domain, op_type) not in OPERATORS, op_type
        _OPERATORS[domain, op_type] = row


# ------------------------------------------------------------------------------- element by element

_row(
    *("Abs", "Asinh", "Atan", "Celu", "Cos", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid"),
    *("HardSwish", "LeakyRelu", "Mish", "Neg", "PRelu", "Relu", "Selu", "Shrink", "Sigmoid", "Sin"),
    *("Softplus", "Softsign", "SwiGLU", "Swish", "Tanh", "ThresholdedRelu"),
    elementwise=True,
    finite=True,
)
_row("Acos", "Acosh", "Asin", "Atanh", "Cosh", "Sinh", "Tan", elementwise=True)
_row("Log", "Reciprocal", "Sqrt", elementwise=True, singular=0)
_row("Cast", "CastLike", "Identity", elementwise=True, finite=True, keeps=True)
_row("Clip", elementwise=True, finite=True, settings=(1, 2))
_row(
    *("BitCast", "BitwiseNot", "Ceil", "Floor", "IsInf", "IsNaN", "Not", "Round", "Sign"),
    elementwise=True,
    zero=True,
)
_row("Add", "Mean", "Mul", "Sub", "Sum", elementwise=True, broadcasts=True, finite=True)
_row("Max", "Min", elementwise=True, broadcasts=True, finite=True, settings=range(100))
_row("Where", elementwise=True, broadcasts=True, finite=True, rearranges=True)
_row("Div", elementwise=True, broadcasts=True, singular=1)
_row("Pow", elementwise=True, broadcasts=True, singular=0, settings=(1,))
_row("Mod", elementwise=True, broadcasts=True, settings=(0, 1))
_row(
    *("And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Equal", "Greater"),
    *("GreaterOrEqual", "Less", "LessOrEqual", "Or", "Xor"),
    elementwise=True,
    broadcasts=True,
    zero=True,
)
_row(
    *("BiasGelu", "FastGelu", "Gelu", "QuickGelu"),
    domain=MICROSOFT,
    elementwise=True,
    keeps_rank=True,
)
_row("BiasAdd", domain=MICROSOFT, elementwise=True)

# ---------------------------------------------------------------------------------- moving elements

_row("Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze", moves=True, finite=True)
_row("Concat", "Expand", "Slice", copies=True, finite=True, linear=True)
_row("Split", "Tile", copies=True, finite=True)
_row("Pad", copies=True, finite=True, settings=(2,))
_row("DepthToSpace", "Gather", "SpaceToDepth", rearranges=True, finite=True)
_row("Resize", rearranges=True, finite=True, settings=(1, 2))
_row("MaxPool", rearranges=True, finite=True, pools=True)
_row("AveragePool", "GlobalAveragePool", "GlobalMaxPool", finite=True, pools=True)
_row("GlobalLpPool", "LpPool", pools=True)

# ------------------------------------------------------------------------------ random and constant

_row(
    *("Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    zero=True,
    linear=True,
)
_row("Multinomial", zero=True)
_row("Dropout", finite=True, settings=(1,))
_row("Constant", "ConstantOfShape", "EyeLike", "Shape", "Size", zero=True, linear=True)
_row("Range", linear=True, settings=(0, 1, 2))
_row(
    *("ArgMax", "ArgMin", "BlackmanWindow", "HammingWindow", "HannWindow", "ImageDecoder"),
    *("MelWeightMatrix", "NonMaxSuppression", "NonZero", "OptionalHasElement", "RegexFullMatch"),
    *("SequenceEmpty", "SequenceLength", "StringConcat", "StringNormalizer", "StringSplit"),
    "TfIdfVectorizer",
    zero=True,
)

# ------------------------------------------------------------------------------------------- layers

_row("Conv", "ConvTranspose", "DeformConv", product="convolution", weight=1, finite=True)
_row("Gemm", "MatMul", product="matrix", weight=1, finite=True)
_row("Einsum", product="any", finite=True)
_row("FusedConv", domain=MICROSOFT, product="convolution", weight=1, keeps_rank=True)
_row("FusedGemm", "FusedMatMul", domain=MICROSOFT, product="matrix", weight=1, keeps_rank=True)
_row("GRU", "RNN", recurrent=True, weight=1, finite=True, settings=(5,))
_row("LSTM", recurrent=True, weight=1, finite=True, settings=(5, 6))
_row("BatchNormalization", normalizes=True, finite=True, settings=(3, 4))
_row(
    *("GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"),
    "SimplifiedLayerNormalization",
    normalizes=True,
    finite=True,
)
_row(
    *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    domain=MICROSOFT,
    normalizes=True,
    keeps_rank=True,
)
_row("Attention", domain=MICROSOFT, weight=1, settings=(3, 4))
_row("GroupQueryAttention", domain=MICROSOFT, settings=(7, 8))
_row("BiasSplitGelu", "CausalConvWithState", "Trilu", domain=MICROSOFT, keeps_rank=True)

# ------------------------------------------------------------------------------------- quantization

_row("DequantizeLinear", "QuantizeLinear", rounds=True, settings=(1, 2))
_row("DequantizeLinear", "QuantizeLinear", domain=MICROSOFT, rounds=True, settings=(1, 2))
_MATRIX: dict[str, Any] = {"product": "matrix", "quantized": True}
_KERNELS: dict[str, Any] = {"product": "convolution", "quantized": True}
_row("ConvInteger", **_KERNELS, weight=1)
_row("QLinearConv", **_KERNELS, weight=3, settings=(1, 4, 6))
_row("QLinearConv", domain=MICROSOFT, **_KERNELS, weight=3, settings=(1, 4, 6))
_row("MatMulInteger", **_MATRIX, weight=1)
_row("QLinearMatMul", **_MATRIX, weight=3, settings=(1, 4, 6))
_row("DynamicQuantizeMatMul", domain=MICROSOFT, **_MATRIX, weight=1, settings=(2,))
_row("MatMulBnb4", domain=MICROSOFT, **_MATRIX, weight=1)
_row("MatMulIntegerToFloat", domain=MICROSOFT, **_MATRIX, weight=1, settings=(2, 3))
_row("MatMulNBits", domain=MICROSOFT, **_MATRIX, weight=1, settings=(2, 3))
_row("QGemm", domain=MICROSOFT, **_MATRIX, weight=3, settings=(1, 4, 7))
_row("GatherBlockQuantized", domain=MICROSOFT, weight=0, quantized=True, settings=(2, 3))
_row("QLinearConcat", domain=MICROSOFT, settings=range(100))
_row(
    *("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearReduceMean"),
    *("QLinearSigmoid", "QLinearSoftmax"),
    domain=MICROSOFT,
    settings=(1, 3),
)
_row("QLinearAdd", "QLinearMul", domain=MICROSOFT, settings=(1, 4, 6))
_row("QLinearWhere", domain=MICROSOFT, settings=(2, 5, 7))
_row("QAttention", domain=MICROSOFT, settings=(3, 4))
_row("DynamicQuantizeLSTM", domain=MICROSOFT, settings=(5, 6, 8, 10))

# ------------------------------------------------------------------------------------------- others

_row("ReduceL1", "ReduceLogSumExp", "ReduceMax", "ReduceMean", finite=True, linear=True)
_row("ReduceMin", "ReduceSum", "ReduceSumSquare", finite=True, linear=True)
_row("ReduceL2", "ReduceLogSum", "ReduceProd", linear=True)
_row("LogSoftmax", "NegativeLogLikelihoodLoss", "Softmax", "SoftmaxCrossEntropyLoss", finite=True)
_row("CumSum", "GatherElements", "GatherND", "Trilu", finite=True)
_row("GridSample", "MaxRoiPool", "RoiAlign", "Upsample", settings=(1,))
_row("RotaryEmbedding", settings=(1, 2))
_row("RotaryEmbedding", domain=MICROSOFT, settings=(2, 3))
_row("OneHot", "STFT", settings=(2,))
_row(  # differentiable, and nothing of the above
    *("AffineGrid", "Attention", "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence"),
    *("CumProd", "DFT", "Det", "DynamicQuantizeLinear", "Hardmax", "If", "LRN", "Loop"),
    *("LpNormalization", "MaxUnpool", "MeanVarianceNormalization", "Optional"),
    *("OptionalGetElement", "ReverseSequence", "Scan", "ScatterElements", "ScatterND"),
    *("SequenceAt", "SequenceConstruct", "SequenceErase", "SequenceInsert", "SequenceMap"),
    *("SplitToSequence", "TensorScatter", "TopK", "Unique"),
)

ELEMENTWISE = having("elementwise", "")
"""Operators that compute each element of their output from the same element of their inputs."""

MOVES = having("moves")
"""Operators that only move the elements of their first input."""

REARRANGES = MOVES | having("copies") | having("rearranges") | {"Identity"}
"""Operators the elements of whose output are elements of their inputs."""

PRODUCTS = having("product")
"""Operators that multiply by weights."""

CONVOLUTIONS = frozenset(n for (_, n), row in OPERATORS.items() if row.product == "convolution")
"""Convolutions, also of quantized numbers."""

MATRIX_PRODUCTS = frozenset(n for (_, n), row in OPERATORS.items() if row.product == "matrix")
"""Products of matrices, also of quantized numbers."""

WEIGHTS = {name: row.weight for (_, name), row in OPERATORS.items() if row.weight is not None}
"""The index of the weight among the inputs of a layer."""
