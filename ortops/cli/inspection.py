"""``ortops inspect``."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections import Counter
from typing import Any

import onnx

from ortops.cli.standard_streams import print_text
from ortops.cli.streams import print_json, read_model
from ortops.engine.execution.providers import CPU
from ortops.engine.lowering import TRAINING_DOMAIN
from ortops.engine.summary import text_of
from ortops.engine.trainable.metadata import entry_names, training_metadata
from ortops.engine.training.properties import read_properties
from ortops.engine.training.session import TrainingSession
from ortops.errors import OrtopsError


def inspect(options: argparse.Namespace) -> int:
    """Prints a description of a model or trainable file."""
    found = _found(read_model(options.model), options.providers)
    if options.json:
        print_json(found)
    else:
        print_text(text_of(_lines(found)))
    return 0


def _found(model: onnx.ModelProto, providers: list[str] | None) -> dict[str, Any]:
    """Returns a JSON-serializable description of a model."""
    graph = model.graph
    given = {tensor.name for tensor in graph.initializer}
    found: dict[str, Any] = {
        "opset": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "inputs": {v.name: _typed(v) for v in graph.input if v.name not in given},
        "outputs": {v.name: _typed(v) for v in graph.output},
        "nodes": len(graph.node),
        "weights": sum(math.prod(tensor.dims) for tensor in graph.initializer),
        "trainable": bool(model.training_info),
    }
    if properties := read_properties(model.metadata_props):
        found["properties"] = properties
    if not model.training_info:
        return found
    algorithms = [info.algorithm for info in model.training_info]
    metadata = training_metadata(model)
    session = TrainingSession(model, providers=providers)
    nodes = (node for algorithm in algorithms for node in algorithm.node)
    updates = Counter(n.op_type for n in nodes if n.domain == TRAINING_DOMAIN)
    updates.pop("Gradient", None)
    parameters = {name: list(array.shape) for name, array in session.parameters.items()}
    found |= {
        "loss_inputs": {v.name: _typed(v) for each in algorithms for v in each.input},
        "losses": [part.label for part in metadata.losses],
        "updates": dict(updates),
        "parameters": parameters,
        "parameter_count": sum(math.prod(shape) for shape in parameters.values()),
        "state": sorted(set(session.state) - set(parameters)),
        "step": session.steps_done,
        "compilable": len(session.compilable),
        "learning_rate": _learning_rate(session),
        "schedule": metadata.schedule,
        "averages": bool(metadata.averages),
        "history": list(session.history),
        "position": _position(session),
    }
    if providers:
        found["placement"] = _placement(session)
    if len(algorithms) > 1:
        found["entries"] = _entries(model, session)
    return found


def _placement(session: TrainingSession) -> dict[str, list[str]]:
    """Returns the nodes of a step by the provider that runs them."""
    found: dict[str, list[str]] = {name: [] for name, _ in session.providers}
    for node, provider in session.placement.items():
        found.setdefault(provider, []).append(node)
    return found


def _entries(model: onnx.ModelProto, session: TrainingSession) -> dict[str, dict[str, Any]]:
    """Returns a description of each training_info entry by name."""
    found: dict[str, dict[str, Any]] = {}
    rates = _learning_rates(session)
    for number, (name, info) in enumerate(
        zip(entry_names(model), model.training_info, strict=True)
    ):
        metadata = training_metadata(model, number)
        keys = [binding.key for binding in info.update_binding]
        found[name] = {
            "losses": [part.label for part in metadata.losses],
            "learning_rate": rates.get(name),
            "step": int(session.state[metadata.step]) if metadata.step in keys else None,
            "parameters": [key for key in keys if key in session.parameters],
        }
    return found


def _learning_rates(session: TrainingSession) -> dict[str, float]:
    """Returns the learning rates that the file names."""
    found: dict[str, float] = {}
    for name in session.learning_rates:
        with contextlib.suppress(OrtopsError):
            found[name] = session.learning_rates[name]
    return found


def _learning_rate(session: TrainingSession) -> float | None:
    """Returns the peak learning rate, or None if a file from another tool does not name it."""
    try:
        return session.peak_learning_rate
    except OrtopsError:
        return None


def _position(session: TrainingSession) -> str:
    """Returns a sentence on how far the last `fit` got."""
    position = session.resume_state.position
    if position is None:
        return ""
    epochs, epoch = position.epoch_state.call["epochs"], position.epoch_state.epoch
    if epoch > epochs:
        return f"the last training finished its {epochs} epochs"
    batches = position.epoch_state.call["batches"]
    done = f"{position.batch} of {batches if batches else '?'} batches"
    return f"the last training stopped in epoch {epoch} of {epochs} ({done}); --resume continues it"


def _typed(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    name = str(onnx.TensorProto.DataType.Name(tensor.elem_type)).lower()
    if not tensor.HasField("shape"):
        return name
    dims = [
        dim.dim_param or (str(dim.dim_value) if dim.HasField("dim_value") else "?")
        for dim in tensor.shape.dim
    ]
    return f"{name}[{', '.join(dims)}]"


def _lines(found: dict[str, Any]) -> list[str]:
    opset = ", ".join(f"{domain} {version}" for domain, version in found["opset"].items())
    lines = [f"opset {opset}; {found['nodes']} nodes, {found['weights']:,} weights"]
    lines += [f"input {name}: {kind}" for name, kind in found["inputs"].items()]
    lines += [f"output {name}: {kind}" for name, kind in found["outputs"].items()]
    lines += [f"property {n}: {value}" for n, value in found.get("properties", {}).items()]
    if not found["trainable"]:
        return [*lines, "not trainable; ortops build writes a trainable file"]
    lines += [f"loss input {name}: {kind}" for name, kind in found["loss_inputs"].items()]
    lines.append(f"loss: {' + '.join(found['losses']) or 'custom'}")
    if found["updates"]:
        updates = ", ".join(f"{name} × {count}" for name, count in found["updates"].items())
        lines.append(f"updates: {updates}")
    if count := found["compilable"]:
        lines.append(f"updates of {count} variables can be compiled")
    if found["learning_rate"] is not None:
        rate = f"learning rate {found['learning_rate']:g}"
        lines.append(rate + (f", times {found['schedule']}" if found["schedule"] else ""))
    lines.append(f"{found['parameter_count']:,} trainable parameters:")
    lines += [f"  {name} {shape}" for name, shape in found["parameters"].items()]
    lines.append(f"{found['step']} steps done")
    for name, entry in found.get("entries", {}).items():
        rate, step = entry["learning_rate"], entry["step"]
        described = [f"loss {' + '.join(entry['losses']) or 'custom'}"]
        described += [f"learning rate {rate:g}"] if rate is not None else []
        described += [f"{step} steps done"] if step is not None else []
        trained = entry["parameters"]
        described.append(
            f"trains {len(trained)} weights" + (f", such as {trained[0]}" if trained else "")
        )
        lines.append(f"entry {name}: {'; '.join(described)}")
    placement = found.get("placement", {})
    total = sum(map(len, placement.values()))
    for provider, nodes in placement.items():
        line = f"{provider} runs {len(nodes)} of {total} nodes of a step"
        fallen = provider == CPU and len(placement) > 1 and nodes
        lines += [f"{line}:", *(f"  {node}" for node in nodes)] if fallen else [line]
    if found["position"]:
        lines.append(found["position"])
    for number, epoch in enumerate(found["history"], start=1):
        shown = "  ".join(f"{name} {value:.4g}" for name, value in epoch.items())
        lines.append(f"epoch {number}: {shown}")
    return lines
