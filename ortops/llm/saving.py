"""Writes the folder of a tuned language model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from ortops.errors import ArgumentError
from ortops.graph.convert import load_light
from ortops.graph.files import external
from ortops.graph.files.atomic import write_atomically
from ortops.graph.files.messages import size_of
from ortops.graph.files.saving import save_model, write_model
from ortops.llm.checkpoint import FolderCheckpoint
from ortops.llm.folder import GENAI_CONFIG, Folder, copy_others, genai_config
from ortops.llm.merging import merged_model
from ortops.llm.pruning import prune
from ortops.llm.several_files import SeveralFiles
from ortops.lora.files import write_adapter
from ortops.numbers import Array
from ortops.training.session import TrainingSession

__all__ = ["ADAPTER", "TRAINING", "FolderWriter"]

ADAPTER, TRAINING = "adapter.onnx_adapter", "training.state"

_ONE_FILE = 2**26
"""Weights of more bytes are saved in a file of their own, next to the model."""

_SMALL = 1024  # bytes


class FolderWriter:
    """Writes the folder of a tuned language model.

    Args:
        session: The session that trains the adapter.
        folder: The folder that was read.
        files: The files of a model in several files.
        names: The names of the adapter's matrices.
        initial: Their values in the file of the model.
        is_loaded: Whether the folder was written by this class.
    """

    def __init__(
        self,
        session: TrainingSession,
        folder: Folder,
        files: SeveralFiles | None,
        names: Sequence[str],
        initial: Mapping[str, Array],
        *,
        is_loaded: bool,
    ) -> None:
        self.session, self._folder, self._files = session, folder, files
        self._names, self.initial, self._is_loaded = names, initial, is_loaded

    def check(self, target: Path) -> None:
        """Rejects the folder of the original model.

        Raises:
            ArgumentError: If it is that folder.
        """
        if target.resolve() == self._folder.path.resolve() and not self._is_loaded:
            raise ArgumentError(
                f"folder must not be that of the original model, got '{target}'; give another one"
            )

    def _save_others(self, target: Path) -> Path:
        """Writes the other files of the folder; returns where the model belongs."""
        file = target / self._folder.model.relative_to(self._folder.path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if target.resolve() != self._folder.path.resolve():
            copy_others(self._folder, target, without=TRAINING)
            if settings := genai_config(self._folder):
                (target / GENAI_CONFIG).write_text(settings, encoding="utf-8")
        return file

    def save_merged(self, target: Path) -> None:
        """Writes the model with the adapter merged into its weights.

        Raises:
            ArgumentError: If the folder has an adapter.
        """
        if self._files is not None:
            self._save_files(self._files, target)
            return
        if (target / ADAPTER).exists():
            raise ArgumentError(
                f"folder must not have an adapter if merged=True, got '{target}'; give another one"
            )
        model = external.detach(merged_model(self.session.inference_model()))
        model = prune(model, load_light(self._folder.model))
        save_model(model.attach(), self._save_others(target))

    def checkpoints(
        self, folder: str | os.PathLike[str] | None, steps: int | None
    ) -> list[FolderCheckpoint]:
        """Returns the callbacks that save a folder during training.

        Args:
            folder: The folder; None for no saves.
            steps: The number of steps between saves; by default, an epoch.
        """
        if folder is None:
            if steps is not None:
                raise ArgumentError(f"save_steps needs save, the folder; got save_steps={steps}")
            return []
        self.check(Path(folder))
        return [FolderCheckpoint(folder, steps, self.save_model_file, self.save_progress)]

    def save_model_file(self, target: Path) -> None:
        """Writes what training does not change."""
        if self._files is not None:
            return
        file = self._save_others(target)
        with self.session._locked_file() as held:
            model = held.light_inference_model()
            for tensor in model.proto.graph.initializer:
                if tensor.name in self.initial:
                    array = self.initial[tensor.name]
                    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
            write_model(file, prune(model, load_light(self._folder.model)), limit=_ONE_FILE)

    def save_progress(self, target: Path) -> None:
        """Writes the adapter, and the state of the training."""
        if self._files is not None:
            self._save_files(self._files, target)
            self.session.save(target / TRAINING)
            return
        with self.session._locked_file() as held:
            model = held.light_inference_model()
            write_adapter(model, target / ADAPTER)
            state = held.light_model()
            known = {tensor.name for tensor in model.proto.graph.initializer} - set(self._names)
            for tensor in state.proto.graph.initializer:
                if tensor.name in known and size_of(tensor) > _SMALL:
                    tensor.CopyFrom(onnx.TensorProto(name=tensor.name))  # it is in the model's file
            write_atomically(target / TRAINING, state.attach().SerializeToString())

    def _save_files(self, files: SeveralFiles, target: Path) -> None:
        """Writes the files of a model with the adapter merged into them; see `save`."""
        for file in files.parts.values():
            (target / file.relative_to(self._folder.path)).parent.mkdir(parents=True, exist_ok=True)
        if target.resolve() != self._folder.path.resolve():
            copy_others(self._folder, target, without=TRAINING)
        for part, model in files.written(self.session.inference_model()).items():
            save_model(model, target / files.parts[part].relative_to(self._folder.path))
