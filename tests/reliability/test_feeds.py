"""What a session is fed: what has one obvious meaning is taken, the rest refused in a sentence.

The same in `step`, `run_steps`, `fit` and `evaluate`. The models show what they were fed: a step
puts its batch into the weights, and the loss is one of its values.
"""

from __future__ import annotations

import array
import functools
import itertools
import math
import re
import struct
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from training_models import affine, affine_batch, assert_same_arrays, foreign, labelled
from violations import all_violations

from ortops import FeedError, OrtopsError, Tape, TrainingSession, build_training_model, op
from ortops.engine.training.input_values import Input
from ortops.optimizers import SGD


def mirror() -> TrainingSession:
    """A step makes w, of shape (2, 1), the batch's x, of shape (1, 2); the loss is x[0, 0]."""
    session = shared_mirror()
    session.state["w"] = np.array([[1], [0]], np.float32)
    return session


@functools.cache
def shared_mirror() -> TrainingSession:
    w_next = helper.make_tensor_value_info("w_next", TensorProto.FLOAT, [2, 1])
    return TrainingSession(
        foreign(
            [
                helper.make_node("Transpose", ["x"], ["w_next"]),
                helper.make_node("ReduceMean", ["y"], ["cost"], keepdims=0),
            ],
            outputs=[helper.make_tensor_value_info("cost", TensorProto.FLOAT, []), w_next],
            updates={"w": "w_next"},
        )
    )


def by_step(session: TrainingSession, feeds: Any) -> float:
    return float(session.step(feeds)["cost"])


def by_run_steps(session: TrainingSession, feeds: Any) -> float:
    return float(session.run_steps([feeds])[0])


def by_fit_of_batches(session: TrainingSession, feeds: Any) -> float:
    return session.fit([feeds], progress=False, stop_on_nan=False)[0]["loss"]


def by_fit(session: TrainingSession, feeds: Any) -> float:
    return session.fit(feeds, progress=False, stop_on_nan=False)[0]["loss"]


def by_evaluate_of_batches(session: TrainingSession, feeds: Any) -> float:
    return session.evaluate([feeds])["loss"]


def by_evaluate(session: TrainingSession, feeds: Any) -> float:
    return session.evaluate(feeds)["loss"]


WAYS: list[Callable[[TrainingSession, Any], float]] = [
    by_step,
    by_run_steps,
    by_fit_of_batches,
    by_fit,
    by_evaluate_of_batches,
    by_evaluate,
]

every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


class Column:
    """Like a data frame's: no array, but something that has one."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values if dtype is None else self.values.astype(dtype)


class Broken:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise KeyError("no values")


class Exchanged:
    """An array of another library that has the exchange protocol only."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **settings: Any) -> Any:
        return self.values.__dlpack__(**settings)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


def unaligned(values: np.ndarray) -> np.ndarray:
    memory = b"\0" + values.tobytes()
    return np.frombuffer(memory, values.dtype, offset=1).reshape(values.shape)


def read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


X = np.array([[1.5, -2.25]], np.float32)

ACCEPTED: dict[str, tuple[Callable[[], Any], Any]] = {
    "float32": (lambda: X, X),
    "float64 that survives": (lambda: X.astype(np.float64), X),
    "longdouble that survives": (lambda: X.astype(np.longdouble), X),
    "float16": (lambda: X.astype(np.float16), X),
    "bfloat16 of ml_dtypes": (lambda: X.astype(ml_dtypes.bfloat16), X),
    "int64": (lambda: np.array([[2**24, -(2**40)]]), [[2.0**24, -(2.0**40)]]),
    "uint8": (lambda: np.array([[255, 0]], np.uint8), [[255, 0]]),
    "bool": (lambda: np.array([[True, False]]), [[1, 0]]),
    "list": (lambda: [[0.1, -3]], np.array([[0.1, -3]], np.float32)),
    "tuple": (lambda: ((0.1, 1e30),), np.array([[0.1, 1e30]], np.float32)),
    "list of integers": (lambda: [[3, -4]], [[3, -4]]),
    "list of arrays": (lambda: [X[0]], X),
    "list of scalars": (lambda: [[np.float32(0.1), 0.5]], np.array([[0.1, 0.5]], np.float32)),
    "range": (lambda: [range(2)], [[0, 1]]),
    "big-endian": (lambda: X.astype(">f4"), X),
    "big-endian integers": (lambda: np.array([[7, 9]], ">i8"), [[7, 9]]),
    "negative strides": (lambda: X[::-1, ::-1], X[:, [1, 0]]),
    "Fortran's order": (lambda: np.asfortranarray(np.repeat(X, 2, axis=0))[:1], X),
    "a view with gaps": (lambda: np.repeat(X, 3, axis=1)[:, ::3], X),
    "broadcast": (lambda: np.broadcast_to(np.float32(2), (1, 2)), [[2, 2]]),
    "read-only": (lambda: read_only(X.copy()), X),
    "not aligned": (lambda: unaligned(X), X),
    "memoryview": (lambda: memoryview(X), X),
    "array.array in a list": (lambda: [array.array("f", [1.5, -2.25])], X),
    "masked array without a mask": (lambda: np.ma.array(X), X),
    "masked array with nothing masked": (lambda: np.ma.array(X, mask=[[0, 0]]), X),
    "matrix": (lambda: X.view(np.matrix), X),
    "something with __array__": (lambda: Column(X), X),
    "something with __dlpack__": (lambda: Exchanged(X), X),
    "OrtValue": (lambda: onnxruntime.OrtValue.ortvalue_from_numpy(X), X),
    "OrtValue of float64": (lambda: onnxruntime.OrtValue.ortvalue_from_numpy(X.astype("d")), X),
    "NaN": (lambda: np.array([[np.nan, 1]], np.float32), [[np.nan, 1]]),
    "NaN in float64": (lambda: np.array([[np.nan, -np.inf]]), [[np.nan, -np.inf]]),
    "NaN in a list": (lambda: [[math.nan, math.inf]], [[np.nan, np.inf]]),
    "-0.0": (lambda: np.array([[-0.0, 1]]), [[-0.0, 1]]),
    "subnormal": (lambda: np.array([[2.0**-149, 1]]), [[2.0**-149, 1]]),
}


def check_taken(way: Callable[[TrainingSession, Any], float], given: Any, expected: Any) -> None:
    session = mirror()
    wanted = np.asarray(expected, np.float32)
    loss = way(session, {"x": given})
    if np.isfinite(wanted).all():
        assert loss == wanted[0, 0]
    if way not in (by_evaluate, by_evaluate_of_batches):
        found = session.state["w"].T
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@every_way
def test_what_has_one_meaning_is_taken(way: Any) -> None:
    with all_violations() as check:
        for name, (make, expected) in ACCEPTED.items():
            with check(name):
                check_taken(way, make(), expected)


itself: list[Any] = []
itself.append(itself)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "float64 that does not survive": (
        lambda: np.array([[0.5, 0.1]]),
        "0.1, which float32 cannot represent (convert it with .astype(np.float32))",
    ),
    "float64 that overflows": (lambda: np.array([[1e39, 0]]), "with the value 1e+39, which"),
    "float64 that vanishes": (lambda: np.array([[1e-60, 0]]), "with the value 1e-60, which"),
    "int64 that does not survive": (
        lambda: np.array([[2**24 + 1, 0]]),
        "'x' must be float32, got int64 with the value 16777217, which float32 cannot represent",
    ),
    "the largest int64": (lambda: np.array([[2**63 - 1, 0]]), "the value 9223372036854775807"),
    "the largest uint64": (lambda: np.array([[2**64 - 1, 0]], "u8"), "value 18446744073709551615"),
    "list that overflows": (
        lambda: [[1e39, 0.1]],
        "'x' has the value 1e+39, which float32 cannot represent; give values of type float32",
    ),
    "list that vanishes": (lambda: [[1e-60, 0.1]], "'x' has the value 1e-60, which float32 cann"),
    "list with an integer too large": (lambda: [[16777217, 0.5]], "'x' has the value 16777217,"),
    "list with float64": (lambda: [[np.float64(0.1), 1.0]], "'x' has the value 0.1, which"),
    "list of float64 only": (
        lambda: [[np.float64(0.1)] * 2],
        "'x' must be float32, got float64 with the value 0.1",
    ),
    "huge integers": (lambda: [[2**70, 1]], "feeds: 'x' must be float32, got object"),
    "ragged": (
        lambda: [[1.0, 2.0], [3.0]],
        "feeds: 'x' cannot be converted to an array: setting an array element",
    ),
    "in itself": (
        lambda: itself,
        "feeds: 'x' cannot be converted to an array: maximum recursion depth",
    ),
    "masked": (
        lambda: np.ma.array(X, mask=[[0, 1]]),
        "'x' cannot be converted to an array: 1 of its 2 values are masked; give a numpy array",
    ),
    "masked in a list": (lambda: [np.ma.array(X[0], mask=[1, 0])], "1 of its 2 values are masked"),
    "the masked constant": (lambda: [[np.ma.masked, 1.0]], "1 of its 1 values are masked"),
    "complex": (lambda: X.astype(complex), "feeds: 'x' must be float32, got complex128"),
    "object": (lambda: X.astype(object), "feeds: 'x' must be float32, got object"),
    "strings": (lambda: np.array([["1", "2"]]), "feeds: 'x' must be float32, got <U1"),
    "bytes": (lambda: [[b"1", b"2"]], "feeds: 'x' must be float32, got |S1"),
    "dates": (
        lambda: np.array([["2020", "2021"]], "M8[Y]"),
        "feeds: 'x' must be float32, got datetime64[Y]",
    ),
    "records": (
        lambda: np.zeros((1, 2), "f4,f4"),
        "'x' must be float32, got [('f0', '<f4'), ('f1'",
    ),
    "None inside": (lambda: [[None, 1.0]], "feeds: 'x' must be float32, got object"),
    "OrtValue of bfloat16": (
        lambda: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ones((1, 2), "u2"), 16),
        "'x' cannot be converted to an array: No corresponding Numpy type for Tensor Type. bfloat1",
    ),
    "broken": (
        lambda: Broken(),
        "feeds: 'x' cannot be converted to an array: 'no values'; give a numpy array",
    ),
    "another shape": (
        lambda: np.zeros((1, 3), "f"),
        "feeds: 'x' must have shape [N, 2], got [1, 3]",
    ),
}

SINGLE: dict[str, tuple[Any, str, str]] = {
    "None": (None, "be float32, got object", "NoneType"),
    "0-d": (np.float32(3), "have shape [N, 2], got []", "float"),
    "dict": ({"x": X}, "be float32, got object", "dict"),
    "set": ({1.0}, "be float32, got object", "set"),
    "iterator": (iter([X]), "be float32, got object", "list_iterator"),
    "bytes": (b"abcd", "be float32, got |S4", "bytes"),
}
"""What is not even a list, how messages about a batch name it, and those about whole data."""


@every_way
def test_the_rest_is_refused(way: Any) -> None:
    with all_violations() as check:
        for name, (make, message) in REFUSED.items():
            with check(name):
                session = mirror()
                before = dict(session.state)
                with pytest.raises(FeedError) as raised:
                    way(session, {"x": make()})
                assert message in str(raised.value)
                assert "\n" not in str(raised.value)
                assert_same_arrays(dict(session.state), before)
                check_taken(way, X, X)


@every_way
def test_what_is_not_even_a_list(way: Any) -> None:
    with all_violations() as check:
        for name, (given, of_batch, of_data) in SINGLE.items():
            with check(name):
                with pytest.raises(FeedError) as raised:
                    way(mirror(), {"x": given})
                if way in (by_fit, by_evaluate):
                    expected = f"an array with a row for each sample, got a single {of_data}"
                    assert str(raised.value) == f"data: 'x' must be {expected}"
                else:
                    assert str(raised.value) == f"feeds: 'x' must {of_batch}"


# ------------------------------------------------------------------------------------- keys


@every_way
def test_mappings(way: Any) -> None:
    for kind in (OrderedDict, UserDict, MappingProxyType):
        assert way(mirror(), kind({"x": X})) == 1.5, kind


@every_way
def test_a_mapping_that_reads_late(way: Any, tmp_path: Any) -> None:
    np.savez(tmp_path / "x.npz", x=X)
    np.savez(tmp_path / "bad.npz", x=X.astype(object))
    with np.load(tmp_path / "x.npz") as file:
        assert way(mirror(), file) == 1.5
    with np.load(tmp_path / "bad.npz") as file, pytest.raises(FeedError, match="cannot be read"):
        way(mirror(), file)


@every_way
def test_keys_that_are_no_names(way: Any) -> None:
    with all_violations() as check:
        for key in (0, None, b"x", ("x",), 1.5):
            said = f"feeds: keys must be names of inputs, got {key!r}; the inputs are 'x'"
            for feeds in ({key: X}, {"x": X, key: X}):
                with check(feeds.keys()):
                    with pytest.raises(FeedError) as raised:
                        way(mirror(), feeds)
                    assert str(raised.value) == said


@pytest.mark.parametrize("given", [3, None, {"x": X}])
def test_run_steps_of_no_batches(given: Any) -> None:
    with pytest.raises(FeedError, match=f"^batches: {type(given).__name__} was given; give an"):
        mirror().run_steps(given)


# ------------------------------------------------------------------------- every type to every

TYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", ">f4", ">i8"]

VALUES = [
    *(0, 1, 2, -1, 127, 128, 255, 256, -129, 2048, 2049, 32767, 65504, 65505, 2**24, 2**24 + 1),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.5, -0.0, 0.1, 1e-7, 65520.0, 1e39, 2.0**-149, 2.0**-150, 2.0**-1074, 1e300),
    *(math.nan, math.inf, -math.inf),
]


def holds(dtype: str, value: Any) -> bool:
    """Whether a type has a value, told by Python's struct."""
    code = dtype[-2:].lstrip("<>=")
    if code == "?":
        return value in (0, 1)
    if code[0] == "f":
        if isinstance(value, float) and not math.isfinite(value):
            return True
        form = {"f2": "<e", "f4": "<f", "f8": "<d"}[code]
        try:
            (back,) = struct.unpack(form, struct.pack(form, float(value)))
        except OverflowError:
            return False
        return math.isfinite(back) and Fraction(back) == Fraction(value)
    bits = 8 * int(code[1])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if code[0] == "i" else (0, 2**bits)
    return math.isfinite(value) and value == int(value) and low <= value < high


def kind(dtype: str) -> int:
    return {"?": 0, "i": 1, "u": 1, "f": 2}[dtype.lstrip("<>=")[0]]


@pytest.mark.slow
def test_a_value_survives_or_is_refused() -> None:
    wanted_types = ["?", "i1", "u1", "i4", "i8", "u8", "f2", "f4", "f8"]
    with all_violations() as check:
        for given, wanted in itertools.product(TYPES, wanted_types):
            for value in VALUES:
                if holds(given, value):
                    with check(f"{value!r} from {given} to {wanted}"):
                        survives_or_is_refused(value, given, wanted)


def survives_or_is_refused(value: Any, given: str, wanted: str) -> None:
    kinds = f"{np.dtype(wanted)}, got {re.escape(str(np.dtype(given)))}"
    lost = rf"( with the value .*, which {np.dtype(wanted)} cannot represent)?"
    message = rf"^feeds: 'x' must be {kinds}{lost} \(convert it with \.astype\(np\.\w+\)\)$"
    tried = Input("x", np.dtype(wanted), None)
    for fed in (np.array([value], given), np.array([0, value], given)[::-1]):
        if kind(given) <= kind(wanted) and holds(wanted, value):
            found = tried.fit(fed, {})
            assert found.dtype == np.dtype(wanted)
            assert found.dtype.isnative
            assert found[0].item() == value or (value != value and np.isnan(found[0]))
            assert math.copysign(1, found[0].item()) == math.copysign(1, fed[0].item())
        else:
            with pytest.raises(FeedError, match=message):
                tried.fit(fed, {})


def test_single_values() -> None:
    tried = Input("x", np.dtype(np.float32), ())
    for given, expected in (
        (0.1, np.float32(0.1)),
        (3, 3),
        (True, 1),
        (np.float64(0.5), 0.5),
        (np.int64(2**24), 2**24),
        (np.array(-0.5, ">f8"), -0.5),
        (np.ma.array(2.0), 2),
    ):
        found = tried.fit(given, {})
        assert (found.dtype, found.shape, found.item()) == (np.dtype("f4"), (), expected)
    for given in (np.float64(0.1), 1e39, 2**24 + 1, np.int64(2**24 + 1), np.array(0.1)):
        with pytest.raises(FeedError, match="which float32 cannot represent"):
            tried.fit(given, {})


@pytest.mark.parametrize("wanted", ["?", "i1", "u1", "i8", "f4", "f8"])
def test_lists_of_no_numbers_have_no_type(wanted: str) -> None:
    found = Input("x", np.dtype(wanted), None).fit([[], []], {})
    assert (found.dtype, found.shape) == (np.dtype(wanted), (2, 0))


def test_an_integer_in_a_list_of_floats_survives() -> None:
    tried = Input("x", np.dtype(np.float64), None)
    assert tried.fit([2**53, 0.5], {}).tolist() == [2**53, 0.5]
    for number in (2**53 + 1, np.int64(2**53 + 1), np.array(2**53 + 1)):
        with pytest.raises(FeedError, match="'x' has the value 9007199254740993, which float64 ca"):
            tried.fit([number, 0.5], {})


# ------------------------------------------------------------------------ other libraries


@pytest.mark.torch
@every_way
def test_tensors_of_torch(way: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(X)
    for given in (
        tensor,
        tensor.clone().requires_grad_(),
        torch.nn.Parameter(tensor.clone()) * 1,
        tensor.to(torch.bfloat16),
        tensor.to(torch.float16),
        tensor.to(torch.float64),
        tensor.T.contiguous().T,
        [tensor[0].clone().requires_grad_()],
        [[one.clone().requires_grad_() for one in tensor[0]]],
    ):
        check_taken(way, given, X)
    for given, message in (
        (tensor.to_sparse(), "cannot be converted to an array: can't convert Sparse layout"),
        (tensor.to("meta"), "cannot be converted to an array: Cannot copy out of meta tensor"),
        (tensor.to(torch.complex64), "must be float32, got complex64$"),
    ):
        with pytest.raises(FeedError, match=f"^feeds: 'x' {message}"):
            way(mirror(), {"x": given})


@pytest.mark.quick(3)
@pytest.mark.torch
@every_way
def test_arrays_of_jax(way: Any) -> None:
    jax = pytest.importorskip("jax")
    for given in (jax.numpy.asarray(X), jax.numpy.asarray(X, jax.numpy.bfloat16)):
        check_taken(way, given, X)


@pytest.mark.torch
def test_a_loader_of_torch() -> None:
    torch = pytest.importorskip("torch")

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
        def __iter__(self) -> Iterator[Any]:
            yield from ({"x": torch.tensor(row)} for row in affine_batch(8)["x"])

    with Tape() as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        tape.output(x @ tape.initializer("w", np.ones((3, 2), np.float32)), "y")
    session = TrainingSession(
        build_training_model(
            tape.model(), loss=lambda y: op.ReduceMean(y * y, keepdims=0), optimizer="SGD"
        )
    )
    session.fit(torch.utils.data.DataLoader(Stream(), batch_size=2), progress=True)
    assert session.steps_done == 4


# --------------------------------------------------------------------------- strings, labels


def reading(declared: str, read: str) -> TrainingSession:
    """Returns a session whose model reads numbers, and something that cannot be bound to memory."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        m (float[batch, 3] x, {declared}) => (float[batch, 2] y)
        <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}, int64 zero = {{0}}>
        {{
          {read}
          numbers = Cast<to = 1>(found)
          share = ReduceMean<keepdims = 0>(numbers)
          product = MatMul(x, w)
          y = Mul(product, share)
        }}"""
    )
    return TrainingSession(build_training_model(proto, loss="MeanSquaredError", optimizer="SGD"))


def test_what_cannot_be_bound() -> None:
    session = reading("seq(float[batch]) s", "found = SequenceAt(s, zero)")
    batch = {**affine_batch(1), "s": [[1.0]]}
    for use in (session.step, session.evaluate, session.fit, lambda b: session.run_steps([b])):
        for feeds in (batch, {**batch, "s": np.ones(1, np.float32)}):
            with pytest.raises(
                FeedError, match="'s' is an input of type a sequence, which onnxruntime cannot"
            ):
                use([feeds] if use in (session.evaluate, session.fit) else feeds)


@pytest.mark.quick(1)
@pytest.mark.parametrize("given", [np.ones(1, np.float32), np.array([7]), [1.0], np.array([b"a"])])
def test_strings_are_no_numbers(given: Any) -> None:
    session = reading("string[batch] s", 'found = RegexFullMatch<pattern = "a.*">(s)')
    batch = affine_batch(1)
    expected = float(session.evaluate([{**batch, "s": np.array(["a"])}])["loss"])
    for use in (session.step, session.evaluate, session.fit, lambda b: session.run_steps([b])):
        feeds = {**batch, "s": given}
        with pytest.raises(FeedError, match=r"^feeds: 's'"):
            use([feeds] if use in (session.evaluate, session.fit) else feeds)
    assert float(session.step({**batch, "s": np.array(["a"])})["loss"]) == pytest.approx(expected)


def test_an_input_of_bfloat16_takes_what_it_holds() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        m (float[batch, 3] x, bfloat16[batch, 1] s) => (float[batch, 2] y)
        <float[3, 2] w = {1, 2, 3, 4, 5, 6}>
        {
          factor = Cast<to = 1>(s)
          product = MatMul(x, w)
          y = Mul(product, factor)
        }"""
    )
    losses = []
    for dtype in (np.float32, ml_dtypes.bfloat16):
        session = TrainingSession(
            build_training_model(proto, loss="MeanSquaredError", optimizer="SGD")
        )
        feeds = {**affine_batch(1), "s": np.full((1, 1), 1.5, dtype)}
        losses.append(float(session.step(feeds)["loss"]))
    assert losses[0] == losses[1]


def test_labels_of_any_integers() -> None:
    model = build_training_model(small_classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    expected = TrainingSession(model)
    batch = labelled((6,))
    expected.step(batch)
    labels = batch["labels"]
    for given in (labels.tolist(), labels.astype(np.uint64), labels.astype(">i2"), tuple(labels)):
        session = TrainingSession(model)
        session.fit({**batch, "labels": given}, progress=False, shuffle=False)
        assert_same_arrays(dict(session.state), dict(expected.state))
    with pytest.raises(FeedError, match="'labels' must be int64, got float64"):
        session.step({**batch, "labels": labels.astype(float)})
    with pytest.raises(FeedError, match="the value 18446744073709551615, which int64 cannot"):
        session.step({**batch, "labels": np.full(8, 2**64 - 1, np.uint64)})


def test_an_input_that_no_step_reads_may_be_anything() -> None:
    model = affine()
    model.graph.input.append(helper.make_tensor_value_info("unread", TensorProto.FLOAT, ["N"]))
    session = TrainingSession(build_training_model(model, loss="MeanSquaredError", optimizer="SGD"))
    for unread in (None, 3.0, np.ones(7), [[1], [2, 3]], "text"):
        feeds = {"unread": unread, **affine_batch()}
        session.step(feeds)
        session.run_steps([feeds])
        session.fit(feeds, progress=False)
        session.evaluate(feeds)


def small_classifier() -> onnx.ModelProto:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["batch", 6])
        tape.output(x @ tape.initializer("w", np.ones((6, 3), np.float32)), "logits")
    return tape.model()


# ------------------------------------------------------------------------- memory used again


def refilled(batches: list[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches in the same memory, as a loader does that reads a file."""
    memory = {name: np.empty_like(array) for name, array in batches[0].items()}
    for batch in batches:
        for name, values in batch.items():
            memory[name][...] = values
        yield memory


def test_batches_in_the_same_memory() -> None:
    model = build_training_model(affine(), loss="MeanSquaredError", optimizer=SGD(0.1))
    batches = [affine_batch(seed=seed) for seed in range(5)]
    expected = TrainingSession(model)
    losses = [float(expected.step(batch)["loss"]) for batch in batches]
    session = TrainingSession(model)
    np.testing.assert_allclose(session.run_steps(refilled(batches)), losses, rtol=1e-6)
    session = TrainingSession(model)
    assert session.fit(refilled(batches), progress=False)[0]["loss"] == np.mean(losses)
    metrics = ["mean_absolute_error"]
    assert session.evaluate(refilled(batches), metrics=metrics) == session.evaluate(
        batches, metrics=metrics
    )


# ------------------------------------------------------------------------------------ no rows


def test_a_batch_without_rows_is_no_batch() -> None:
    session = TrainingSession(
        build_training_model(affine(), loss="MeanSquaredError", optimizer="SGD")
    )
    before = dict(session.state)
    batches = [affine_batch(0), affine_batch(4)]
    expected = r"'x' must have at least one row, got shape \[0, 3\]"
    with pytest.raises(FeedError, match=expected):
        session.fit(batches, progress=False, stop_on_nan=False)
    with pytest.raises(FeedError, match=expected):
        session.evaluate(batches)
    assert_same_arrays(dict(session.state), before)


# ------------------------------------------------------------------- losses of several shapes


def with_cost(*shape: int) -> TrainingSession:
    made = helper.make_tensor_value_info("cost", TensorProto.FLOAT, list(shape))
    axes = helper.make_node("Constant", [], ["axes"], value_ints=[0])
    reduced = helper.make_node("ReduceMean", ["y", "axes"], ["cost"], keepdims=len(shape) - 1)
    nodes = [axes, reduced]
    if shape == (2,):
        nodes = [
            helper.make_node("Constant", [], ["size"], value_ints=[2]),
            helper.make_node("Identity", ["y"], ["same"]),
            helper.make_node("ReduceMean", ["same"], ["one"], keepdims=0),
            helper.make_node("Expand", ["one", "size"], ["cost"]),
        ]
    return TrainingSession(foreign(nodes, outputs=[made], updates={}))


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_number_in_any_shape_is_a_loss(
    shape: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    x = np.array([[1, 2], [3, 5]], np.float32)
    expected = pytest.approx(float(np.mean(x @ [0.5, -0.5])))
    assert with_cost(*shape).fit({"x": x}, progress=False)[0]["loss"] == expected
    assert with_cost(*shape).evaluate({"x": x})["loss"] == expected
    assert with_cost(*shape).run_steps([{"x": x}]).tolist() == [expected]
    assert with_cost(*shape).run_steps([{"x": x}] * 3).tolist() == [expected] * 3
    assert capfd.readouterr() == ("", "")


def test_several_numbers_are_no_loss() -> None:
    feeds = {"x": np.ones((3, 2), np.float32)}
    for use in (
        lambda session: session.fit(feeds, progress=False),
        lambda session: session.evaluate(feeds),
        lambda session: session.run_steps([feeds]),
        lambda session: session.run_steps([feeds] * 2),
    ):
        with pytest.raises(
            OrtopsError, match=r"^loss: it must be a single number, got 2 numbers; reduce it with"
        ):
            use(with_cost(2))


def test_data_is_not_kept() -> None:
    session = mirror()
    x = X.copy()
    session.step({"x": x})
    x[...] = 7
    np.testing.assert_array_equal(session.state["w"], X.T)
