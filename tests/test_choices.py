"""Which elements Gather, Slice and Split choose: those that numpy chooses."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
from violations import all_violations

from ortops.graph.choices import chosen_axes, chosen_indices

CASES: dict[str, tuple[str, list[int], list[int] | None]] = {
    "Gather": ("y = Gather <axis = 1> (x, i)", [5, 0, -1], [5, 0, 5]),
    "Gather of no such index": ("y = Gather <axis = 1> (x, i)", [6], None),
    "Gather of no such index from the end": ("y = Gather <axis = -1> (x, i)", [-7], None),
    "Slice": ("y = Slice (x, a, b, one)", [], [1, 2, 3]),
    "Slice to the end": ("y = Slice (x, a, far, one)", [], [1, 2, 3, 4, 5]),
    "Slice backwards": ("y = Slice (x, last, low, one, back)", [], [5, 3, 1]),
    "Split": ("z, y = Split <axis = 1, num_outputs = 2> (x)", [], [3, 4, 5]),
    "Split of sizes": ("z, y = Split <axis = 1> (x, s)", [], [2, 3, 4, 5]),
    "unknown sizes": ("z, y = Split <axis = 1> (x, n)", [], None),
}
CONSTANTS = {
    "a": [1],
    "b": [4],
    "far": [2**62],
    "one": [1],
    "last": [-1],
    "low": [-7],
    "back": [-2],
}


def test_chosen_indices_are_those_of_numpy() -> None:
    with all_violations() as check:
        for name, (body, indices, wanted) in CASES.items():
            model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
                g (int64[4, 6] x, int64[2] n) => (y) {{ {body} }}""")
            for key, numbers in {**CONSTANTS, "i": indices, "s": [2, 4]}.items():
                tensor = onnx.numpy_helper.from_array(np.array(numbers, np.int64), key)
                model.graph.initializer.append(tensor)
            graph = ir.from_proto(model).graph
            (node,) = graph
            with check(name):
                found = chosen_indices(node, node.outputs[-1], 1)
                assert (None if found is None else list(found)) == wanted
                assert chosen_axes(node) == [1]
                assert chosen_indices(node, node.outputs[-1], 0) is None
