"""ortops: a step graph in a plain onnxruntime session."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import onnxruntime
from onnx import numpy_helper

import ortops
from benchmarks.peers import Step
from benchmarks.peers.with_ortops import trainable
from benchmarks.task import Task, threads

__all__ = ["make"]


def make(task: Task, optimizer: str, *, target: Any) -> Step:
    """Returns the step function. Variables alternate between two sets of bound arrays.

    Args:
        task: The task.
        optimizer: The optimizer of the trainable model to load.
        target: The runtime to lower for; see `ortops.lower`.
    """
    model = ortops.lower(ortops.step_graph(trainable(task, optimizer), target=target))
    pairs = json.loads({each.key: each.value for each in model.metadata_props}["ortops.step_graph"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads()
    options.log_severity_level = 3  # hides a warning for each input with a default value
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    initial = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    arrays = [{name: np.array(initial[name]) for name in pairs} for _ in range(2)]
    shown = [each.name for each in session.get_outputs() if each.name not in pairs.values()]
    bindings = []
    for turn in range(2):
        read, written = (
            {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in each.items()}
            for each in (arrays[turn], arrays[1 - turn])
        )
        binding = session.io_binding()
        for name, output in pairs.items():
            binding.bind_ortvalue_input(name, read[name])
            binding.bind_ortvalue_output(output, written[name])
        for name in shown:
            binding.bind_output(name)
        bindings.append((binding, arrays[1 - turn]))
    turns = itertools.cycle(bindings)
    batches = itertools.cycle(task.batches())
    latest = arrays[0]

    def step() -> Any:
        nonlocal latest
        binding, latest = next(turns)
        for name, array in next(batches).items():
            binding.bind_cpu_input(name, array)
        session.run_with_iobinding(binding)
        results = binding.get_outputs()[len(pairs) :]  # in the order of binding
        return results[shown.index("loss")].numpy().item()

    def parameters() -> Any:
        return {name: latest[name] for name in task.weights()}

    return Step(step, parameters)
