"""A training step as a folder of files, for programs in any language."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortops.engine.execution.step import Step
from ortops.engine.lowering import Target, lower
from ortops.engine.trainable.metadata import TrainingMetadata, entry_number, training_metadata
from ortops.engine.trainable.step_graph import (
    EvaluationModel,
    evaluation_model,
    flatten,
    step_graph,
)
from ortops.engine.trainable.write_back import write_values
from ortops.engine.training.batch_labels import accepted_labels
from ortops.engine.training.position import POSITION_KEY
from ortops.errors import ArgumentError, ModelError, OrtopsError
from ortops.graph import convert
from ortops.graph.edit import merge_equal_nodes
from ortops.graph.files import external, loading
from ortops.graph.files.atomic import TEMPORARY, siblings, write_together
from ortops.graph.files.json_metadata import remove_metadata
from ortops.graph.files.json_text import read_json
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.opening import read_regular
from ortops.graph.files.serialization import to_proto
from ortops.graph.files.wire_format import byte_spans
from ortops.graph.safetensors import dump_safetensors

Array: TypeAlias = npt.NDArray[Any]

FORMAT, VERSION = "ortops.step", 1
"""The format and version in ``step.json``."""

_DESCRIPTION = "step.json"
_WEB_FILES = (
    *("ortops.mjs", "ortops.d.mts", "worker.mjs", "runtime.mjs", "images.mjs", "common.mjs"),
    *("index.html", "index.mjs", "classifier.html", "classifier.mjs", "result.mjs"),
    *("start.js", "style.css"),
)
_PLACE = re.compile(r"(?:(https?://[\w.-]+(?::\d+)?)/|\.{0,2}/)?(?:[\w.~%@+-]+/)*", re.ASCII)
"""An address of a folder, without what could end a string or a directive of the pages."""


@loading.blame_model
def export_step(
    model: ModelLike,
    folder: str | os.PathLike[str],
    web: bool = False,
    *,
    entry: int | str = 0,
    target: Target | None = None,
    overwrite: bool = False,
    runtime: str = "./ort/",
) -> None:
    """Writes a training step for a program in any language that has onnxruntime.

    The files are:

    - ``step.onnx``: a step, lowered to standard operators. All its inputs have to be fed, so it has
      no state.
    - ``evaluate.onnx``: the loss and the outputs of the model in inference mode. Its inputs are the
      variables that they depend on, and feeds.
    - ``state.safetensors``: the current value of each variable, by name.
    - ``model.onnx``: the trainable model. A driver writes the state back into it: only the bytes of
      the variables change, and their offsets are known.
    - ``step.json``: what a driver needs to know. It is written last, and has the lengths and the
      checksums of the others.

    To make a step, a driver feeds a batch and all variables to ``step.onnx``; the outputs that
    belong to variables are their next values. A learning rate and a seed have no output, so they
    keep their values. ``step.json`` is an object of:

    - ``format`` (``"ortops.step"``), ``version`` (1), ``target``
    - ``files``: file → ``{"bytes": its length, "crc32": CRC-32 of IEEE 802.3, as in zlib}``
    - ``step``: ``{"feeds": […], "outputs": [names], "loss": name or null}``. A feed is ``{"name",
      "type", "shape"}``; types are numpy's names, and a dimension is a number, a symbol or null.
    - A feed with class numbers also has ``labels``: ``[{"classes", "ignored"}]``. Kernels of
      onnxruntime do not check them, so a driver has to: each number is at least 0 and less than
      ``classes`` (null if unknown), or equal to ``ignored`` (null if there is none).
    - ``evaluate``: ``{"feeds": […], "predict": [names of the feeds that the outputs depend on],
      "variables": [names], "outputs": {name: output}, "losses": [{"name", "weight", "count",
      "sum"}]}``. The loss of a batch is the sum of weight × value of
      the outputs ``name``. For several batches, each value is averaged with the output ``count`` as
      weight (the rows of the batch if that is null), or added if ``sum`` is true.
    - ``web``: as ``files``, for those of ``web=True``; drivers do not need it
    - ``learning_rates``: the variables with a learning rate; ``counter``: the one that counts
      steps, or null
    - ``variables``: name → ``{"type", "shape", "next": output or null, "role", "places"}``. Roles
      are ``parameter learning_rate step seed loss_scale good_steps master average statistic
      optimizer``; a ``master`` (the float32 value of a 16-bit parameter) and an ``average`` have
      the parameter's name under ``of``. ``places`` are ``[offset, length]`` of their data in
      ``model.onnx``, little-endian and in C order.

    Args:
        model: A trainable model.
        folder: The folder, which is created if necessary. Files of an earlier export are replaced.
        web: Whether to write also a driver in JavaScript and pages that train.
        entry: The training_info entry, its index or its name; each is exported to its own folder.
            Its step has the variables of all entries, but updates its own.
        target: What the step is lowered for (see `ortops.step_graph`).
        overwrite: Whether to replace also files with these names that no export wrote, or that were
            changed since.
        runtime: The folder from which the pages load onnxruntime-web: its address relative to
            theirs, or one of another server (``https://…``), which the pages then trust.

    Raises:
        ArgumentError: If ``runtime`` is no such address.
        ModelError: If the model is not trainable, not legal, or of 2 GB or more.
        OrtopsError: If the folder has such a file, and ``overwrite`` is False.
        OSError: If a file cannot be written.
        UnsupportedError: If safetensors does not support the type of a variable.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> import ortops
        >>> from ortops import Tape
        >>> with Tape(name="linear") as tape:
        ...     x = tape.input("x", np.float32, ["batch", 1])
        ...     y = tape.output(x @ tape.initializer("w", np.zeros((1, 1), np.float32)), "y")
        >>> model = ortops.build_training_model(
        ...     tape.model(), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.25))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_step(model, folder)
        ...     step = json.loads(Path(folder, "step.json").read_text())
        >>> [feed["name"] for feed in step["step"]["feeds"]], step["variables"]["w"]["next"]
        (['x', 'targets'], 'w_new')
    """
    source = resources.files("ortops") / "web"
    page = {name: (source / name).read_bytes() for name in (_WEB_FILES if web else ())}
    _name_runtime(page, runtime)
    light = convert.load_light(model)
    proto = light.proto
    entry = entry_number(proto, entry)
    step = flatten(light, entry)
    metadata = training_metadata(proto, entry)
    arrays = light.arrays(step.variables)
    write_values(light, arrays)  # as raw data, whose positions in the file are known
    remove_metadata(proto, POSITION_KEY)
    whole = light.attached()
    outputs = [value.name for value in proto.graph.output]
    evaluation = evaluation_model(light, entry, step, outputs, loss=bool(step.loss))
    prediction = evaluation_model(light, entry, step, outputs, loss=False)
    files = {
        "model.onnx": external.serialize(whole),
        "step.onnx": _step_message(whole, entry, target),
        "evaluate.onnx": to_proto(evaluation.step.model).SerializeToString(),
        "state.safetensors": dump_safetensors(arrays),
    }
    spans = byte_spans(files["model.onnx"])
    graph_names = {tensor.name for tensor in proto.graph.initializer}
    described = {
        "format": FORMAT,
        "version": VERSION,
        "target": target,
        "files": {name: _describe_file(content) for name, content in files.items()},
        "step": {"feeds": _feeds(step), "outputs": [*step.outputs], "loss": step.loss or None},
        "evaluate": _describe_evaluation(evaluation, prediction),
        "learning_rates": list(step.learning_rates),
        "counter": metadata.step if metadata.step in step.variables else None,
        "variables": {
            name: {
                "type": array.dtype.name,
                "shape": list(array.shape),
                "next": step.updates.get(name),
                **_role(name, step, metadata, graph_names),
                "places": [[span.begin, span.length] for span in spans.get(name, ())],
            }
            for name, array in arrays.items()
        },
    }
    if page:
        described["web"] = {name: _describe_file(content) for name, content in page.items()}
    files |= page
    files[_DESCRIPTION] = json.dumps(described, indent=1).encode()  # written last
    if not overwrite:
        _refuse_others(Path(folder), files)
    write_together(Path(folder), files)


def _name_runtime(page: dict[str, bytes], place: str) -> None:
    """Writes where onnxruntime-web is into the pages, which load code from nowhere else."""
    folder = place if str(place).endswith("/") else f"{place}/"
    found = _PLACE.fullmatch(folder) if isinstance(place, str) and place else None
    if found is None:
        raise ArgumentError(
            "runtime must be the address of a folder, relative or with http(s) and without query, "
            f"such as 'https://cdn.jsdelivr.net/npm/onnxruntime-web@1.30.0/dist/', got {place!r}"
        )
    for name, content in page.items():
        page[name] = content.replace(b'PLACE = "./ort/"', f'PLACE = "{folder}"'.encode())
        if found[1] and name.endswith(".html"):
            trusted = rb"\g<0> " + found[1].encode()
            page[name] = re.sub(rb"(?:script|worker|connect)-src 'self'", trusted, content)


def _refuse_others(folder: Path, files: Mapping[str, bytes]) -> None:
    """Raises an error if other files would be replaced."""
    description = folder / _DESCRIPTION
    # A killed process leaves files of two exports, and the description of one as a temporary file.
    known = [_written(each) for each in (description, *siblings(description, TEMPORARY))]
    for name, content in files.items():
        path = folder / name
        if not path.exists():
            continue
        with contextlib.suppress(ModelError):  # not a regular file
            present = read_regular(path)
            if present == content or any(e.get(name) == _describe_file(present) for e in known):
                continue
        raise OrtopsError(
            f"export_step: '{path}' was not written by an export to this folder, or was changed "
            "since; give another folder, or overwrite=True (--force on the command line) to "
            "replace it"
        )


def _written(description: Path) -> dict[str, Any]:
    """Returns the files that an earlier export wrote, with their lengths and checksums."""
    try:
        content = read_regular(description)
        found = read_json(content)
        if found["format"] == FORMAT:
            return {
                **found["files"],
                **found.get("web", {}),
                _DESCRIPTION: _describe_file(content),
            }
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    return {}


def _describe_file(content: bytes) -> dict[str, int]:
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def _step_message(whole: onnx.ModelProto, entry: int, target: Target | None) -> bytes:
    """Returns a step as a file, made small for drivers that download it."""
    step = step_graph(whole, entry=entry, defaults=False, target=target)
    model = convert.to_ir(lower(step) if target is None else step)
    merge_equal_nodes(model.graph)
    small = to_proto(model)
    del small.graph.value_info[:]  # what shapes tensors have can be inferred
    return external.serialize(small)


def _role(name: str, step: Step, metadata: TrainingMetadata, own: set[str]) -> dict[str, str]:
    """Returns the role of a variable, and its parameter."""
    scalars = {metadata.step: "step", metadata.seed: "seed", metadata.loss_scale: "loss_scale"}
    scalars |= {metadata.good_steps: "good_steps"}
    for role, names in (("master", metadata.masters), ("average", metadata.averages)):
        for parameter, variable in names.items():
            if name == variable:
                return {"role": role, "of": parameter}
    if name in step.learning_rates:
        return {"role": "learning_rate"}
    if name in scalars:
        return {"role": scalars[name]}
    if name in step.parameters:
        return {"role": "parameter"}
    return {"role": "statistic" if name in own else "optimizer"}


def _feeds(step: Step) -> list[dict[str, object]]:
    labels: dict[str, list[dict[str, int | None]]] = {}
    for name, accepted in accepted_labels(step):
        found = {"classes": accepted.classes, "ignored": accepted.ignored}
        if found not in labels.setdefault(name, []):
            labels[name].append(found)
    described = [_describe(v) for v in step.model.graph.inputs if v.name in step.feeds]
    for feed in described:
        if found_labels := labels.get(str(feed["name"])):
            feed["labels"] = found_labels
    return described


def _describe(value: ir.Value) -> dict[str, object]:
    if value.dtype is None:
        raise OrtopsError(f"input '{value.name}' has no type; declare it in the model")
    dims = None if value.shape is None else [_dimension(dim) for dim in value.shape]
    text = value.dtype == ir.DataType.STRING
    kind = "string" if text else value.dtype.numpy().name
    return {"name": value.name, "type": kind, "shape": dims}


def _dimension(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _describe_evaluation(
    evaluation: EvaluationModel, prediction: EvaluationModel
) -> dict[str, object]:
    step = evaluation.step
    return {
        "feeds": _feeds(step),
        "predict": [feed["name"] for feed in _feeds(prediction.step)],
        "variables": [v.name for v in step.model.graph.inputs if v.name in step.variables],
        "outputs": dict(evaluation.tensors),
        "losses": [
            {
                "name": part.name,
                "weight": part.weight,
                "count": part.count or None,
                "sum": part.is_sum,
            }
            for part in evaluation.parts
        ],
    }
