"""Operators whose derivative is zero wherever it exists."""

from ortops.graph.autodiff.rules.table import zero

zero(
    # Comparisons, and logic
    *("And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not"),
    *("OptionalHasElement", "Or", "Xor"),
    # Step functions, and choices of indices
    *("ArgMax", "ArgMin", "Ceil", "Floor", "NonMaxSuppression", "NonZero", "Round", "Sign"),
    # Integers, and bits
    *("BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
    *("SequenceLength", "Shape", "Size"),
    # Constants, some of which depend on shapes or numbers of elements
    *("BlackmanWindow", "Constant", "ConstantOfShape", "EyeLike", "HammingWindow", "HannWindow"),
    *("MelWeightMatrix", "SequenceEmpty"),
    # Random numbers
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"),
    "RandomUniformLike",
    # Strings, and encoded images
    *("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"),
    "TfIdfVectorizer",
)
