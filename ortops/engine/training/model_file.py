"""The model of a training session as a file, with its state or without anything of training."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops._common.uninterrupted import finished_at_exit
from ortops.engine.lowering import TRAINING_DOMAIN
from ortops.engine.trainable.metadata import METADATA_KEY
from ortops.engine.trainable.training_mode import write_inference_mode
from ortops.engine.trainable.write_back import (
    keep_names,
    with_twins,
    write_back,
    write_inference_mode_to,
    write_values,
)
from ortops.engine.training.loaded_model import LoadedModel, reads
from ortops.engine.training.position import POSITION_KEY
from ortops.engine.training.properties import PROPERTIES_KEY, write_properties
from ortops.errors import OrtopsError
from ortops.graph import convert
from ortops.graph.adapters import adapter_of
from ortops.graph.files import saving
from ortops.graph.files.external import LightModel
from ortops.graph.files.json_metadata import remove_metadata, write_metadata
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import has_domain, initializers
from ortops.graph.files.serialization import to_proto
from ortops.graph.limits import LIMITS
from ortops.graph.magnitudes import with_computed_scales
from ortops.surgery.output import keep_outputs

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger("ortops")


class ModelFile:
    """Writes the model of a session: the trainable model with its state, or the trained model.

    Args:
        loaded: The model.

    Attributes:
        writes: Whether `save` writes, and not another process.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.writes = True
        self._saved: tuple[str, tuple[int, int], Mapping[str, Any] | None] = ("", (0, 0), None)
        self._warned = False

    def model(self) -> onnx.ModelProto:
        """Returns the trainable model with the current state.

        Example:
            >>> import ortops
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> first = session.step(examples.BATCH)
            >>> other = ortops.TrainingSession(session.model())
            >>> other.steps_done, other.state["w"].item()
            (1, 0.5)
        """
        with finished_at_exit, self._loaded.lock:
            return self.light_model().attach()

    def light_model(self) -> LightModel:
        """Returns the trainable model with the current state, as a light model.

        The data are the memory of the variables, so the lock has to be held while they are read.
        """
        result = self._loaded.light.copy()
        write_values(result, self._loaded.arrays())
        self._write_position(result.proto)
        write_properties(result.proto, self._loaded)
        return result

    def _write_position(self, model: onnx.ModelProto) -> None:
        """Writes the position of `fit`, if it was called."""
        position = self._loaded.resume_state.position
        remove_metadata(model, POSITION_KEY)
        if position is None:
            return
        text = position.text(self._loaded.execution.steps_made)
        if len(text) > LIMITS.metadata_bytes:
            logger.warning(
                "save: the position of fit, with its history and callbacks, has %d characters, but "
                "at most %d can be read (ortops.graph.limits.LIMITS.metadata_bytes); it is left "
                "out, so fit cannot resume from the file",
                *(len(text), LIMITS.metadata_bytes),
            )
        else:
            write_metadata(model, POSITION_KEY, text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trainable model with the current state; a session on it resumes exactly.

        The file is standard ONNX, and stock onnxruntime runs it as the trained model. If the model
        itself has Gradient nodes, it has to be lowered first (`ortops.lower`), as a warning says.

        Args:
            path: The file. At any time it contains either the old model or the new one, complete. A
                model of 2 GB or more has a data file next to it (see `ortops.save_model`).

        Example:
            >>> import ortops
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> import tempfile
            >>> first = session.step(examples.BATCH)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     session.save(f"{folder}/line.onnx")
            ...     ortops.TrainingSession(f"{folder}/line.onnx").step(examples.BATCH)["loss"]
            array(0.25, dtype=float32)
        """
        self._check_writable(path)
        if self.writes:
            self._write(path)

    def _check_writable(self, path: str | os.PathLike[str]) -> None:
        """Warns once if stock onnxruntime will not run the file.

        Raises:
            OrtopsError: If the interpreter exits.
        """
        if sys.is_finalizing():
            raise OrtopsError(
                f"save '{path}': the interpreter is shutting down, and no file can be written "
                "safely; save earlier, for example in a function registered with atexit"
            )
        if has_domain(self._loaded.proto) and not self._warned:
            self._warned = True
            logger.warning(
                "save '%s': the model itself has Gradient nodes, which stock onnxruntime does not "
                "run; ortops.InferenceSession runs the file, and ortops.lower('%s') returns a "
                "model for stock onnxruntime",
                *(path, path),
            )

    @reads("save")
    def _write(self, path: str | os.PathLike[str]) -> None:
        """Writes the trainable model with the current state."""
        changes = self._changes()
        saving.write_model(path, self.light_model())
        self._saved = os.fspath(path), changes, self._fit_arguments()

    @property
    def saved_in(self) -> str:
        """The file that the current state was last saved in; "" if it was not saved.

        A step, setting a variable and a new `fit` each change the state.

        Example:
            >>> import tempfile
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     session.save(f"{folder}/line.onnx")
            ...     session.saved_in == f"{folder}/line.onnx"
            True
            >>> first = session.step(examples.BATCH)
            >>> session.saved_in
            ''
        """
        path, changes, call = self._saved
        return path if changes == self._changes() and call is self._fit_arguments() else ""

    def _changes(self) -> tuple[int, int]:
        """Returns how often variables were set, and the number of steps."""
        return self._loaded.usage.assigned, self._loaded.execution.steps_made

    def _fit_arguments(self) -> Mapping[str, Any] | None:
        """Returns the arguments of the last `fit`, if there was one."""
        position = self._loaded.resume_state.position
        return None if position is None else position.epoch_state.call

    def inference_model(
        self, original: ModelLike | None, *, ema: bool, outputs: str | Sequence[str] | None = None
    ) -> onnx.ModelProto:
        """Returns the trained model, without anything that belongs to training.

        Args:
            original: The model that training began with. The trained weights are written to a copy
                of it, which keeps its opset and everything else. By default, the inference graph of
                the trainable model is returned. BatchNormalization and Dropout are in inference
                mode in both.
            ema: Whether to use the averages of parameters (``ema_decay=`` of
                `ortops.build_training_model`).
            outputs: The names of the tensors to return, outputs of the model or not; by default its
                outputs. The nodes, weights, inputs and functions that they do not need are left
                out.

        Raises:
            ModelError: If a trained variable is not in the original, there are no averages, or
                there is no such tensor.
            UnsupportedError: If a tensor of ``outputs`` is inside a subgraph or a function.

        Example:
            >>> import numpy as np
            >>> import onnxruntime
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> first = session.step(examples.BATCH)
            >>> plain = onnxruntime.InferenceSession(session.inference_model().SerializeToString())
            >>> plain.run(None, {"x": np.array([[4]], np.float32)})
            [array([[2.]], dtype=float32)]
            >>> [len(session.inference_model(outputs=n).graph.initializer) for n in ("y", "x")]
            [1, 0]
        """
        with finished_at_exit, self._loaded.lock:
            result = self.light_inference_model(original, ema=ema)
            return (result if outputs is None else keep_outputs(result, outputs)).attach()

    def light_inference_model(
        self, original: ModelLike | None = None, *, ema: bool = False
    ) -> LightModel:
        """Returns the result of `inference_model`, whose data are those of the session.

        The lock has to be held while they are read.
        """
        loaded, proto = self._loaded, self._loaded.proto
        own = {tensor.name for tensor in proto.graph.initializer}
        with finished_at_exit, loaded.lock:
            arrays = loaded.shared_metadata.averaged(loaded.arrays()) if ema else loaded.arrays()
            trained = {name: array for name, array in arrays.items() if name in own}
            if original is not None:
                result = convert.load_light(original)
                adapter = adapter_of(result.proto.metadata_props)
                result = with_computed_scales(result, adapter)
                write_back(result, with_twins(proto, trained))
                keep_names(proto, result.proto)
                write_inference_mode_to(result.proto)
            else:
                model = convert.to_ir(proto)  # without training_info and data
                for key in (METADATA_KEY, POSITION_KEY):
                    model.metadata_props.pop(key, None)
                if not has_domain(proto):
                    model.graph.opset_imports.pop(TRAINING_DOMAIN, None)
                write_inference_mode(model)
                result = LightModel(to_proto(model), dict(loaded.light.data))
                write_values(result, trained)
            write_properties(result.proto, loaded)
            return result

    def digest(self) -> bytes:
        """Returns a digest of the model and the executed entries, without values of variables."""
        proto, variables = self._loaded.proto, self._loaded.execution.variables
        found = hashlib.sha256(repr(self._loaded.entries).encode())
        for name in self._loaded.usage.constants:
            found.update(bytes_digest(self._loaded.execution.present(name)))
        for name in sorted(variables):
            array = variables[name].buffers[0]
            found.update(repr((name, array.dtype.str, array.shape)).encode())
        copy = self._loaded.light.copy()
        light = copy.proto
        for tensor in initializers(light):
            if tensor.data_type == tensor.STRING:
                continue
            if tensor.name not in variables:
                found.update(bytes_digest(copy.array_of(tensor)))
            plain = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type)
            plain.dims.extend(tensor.dims)
            tensor.CopyFrom(plain)
        del light.metadata_props[:]
        for entry in sorted(proto.metadata_props, key=lambda entry: entry.key):
            if entry.key not in (POSITION_KEY, PROPERTIES_KEY):
                light.metadata_props.add().CopyFrom(entry)
        found.update(light.SerializeToString(deterministic=True))
        return found.digest()


def bytes_digest(array: Array) -> bytes:
    """Returns the SHA-256 of the bytes of an array."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return hashlib.sha256(data).digest()
