"""Writes the folder of a tuned language model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from ortops._common.numbers import Array
from ortops.callbacks.checkpoint import Checkpoint
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, ModelError
from ortops.graph.adapters import adapter_of
from ortops.graph.convert import load_light
from ortops.graph.files import external
from ortops.graph.files.atomic import folder_within, remove_litter, write_atomically, write_together
from ortops.graph.files.external import LightModel
from ortops.graph.files.json_metadata import write_metadata
from ortops.graph.files.messages import size_of
from ortops.graph.files.opening import file_in_folder
from ortops.graph.files.saving import write_model
from ortops.graph.magnitudes import with_given_scales
from ortops.llm.encoders import OF_EMBEDDINGS, folders_of_modules, settings_with_labels
from ortops.llm.folder import GENAI_CONFIG, Folder, copy_others, genai_config
from ortops.llm.graphs import prune
from ortops.llm.merging import merged_model
from ortops.llm.several_files import NAMES, SeveralFiles
from ortops.llm.tokenization import TEMPLATES
from ortops.lora.files import written_adapter

ADAPTER, TRAINING = "adapter.onnx_adapter", "training.state"

UNFINISHED = "training.unfinished"
"""The file that a folder has from the beginning of its first save to the end."""

_NOTE = b"ortops has not finished the first save of this folder, so files are missing or too old.\n"

_ONE_FILE = 2**26
"""Weights of more bytes are saved in a file of their own, next to the model."""

_SMALL = 1024  # bytes


def is_unfinished(folder: Path) -> bool:
    """Whether the first save of a folder was interrupted, so that its files may not fit."""
    return os.path.lexists(folder / UNFINISHED)


def refuse_unfinished(folder: Path) -> None:
    """Rejects a folder whose first save was interrupted.

    Raises:
        ModelError: If it is one.
    """
    if is_unfinished(folder):
        raise ModelError(
            f"folder '{folder}': its first save was interrupted ('{UNFINISHED}'), so its files may "
            "be missing or not belong together; repeat the training that writes it"
        )


class FolderCheckpoint(Checkpoint):
    """Saves the folder of a language model: the model once, and then what training changes.

    Args:
        folder: The folder.
        every: The number of steps between saves; after each epoch by default.
        save_model: Writes the model into the folder.
        save_progress: Writes the adapter and the state of the training.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None,
        save_model: Callable[[Path], None],
        save_progress: Callable[[Path], None],
    ) -> None:
        super().__init__(os.fspath(folder).replace("{", "{{").replace("}", "}}"), every=every)
        self._save_model, self._save_progress = save_model, save_progress
        self._has_model = False

    def check(self, file: Path) -> None:
        """See `Checkpoint`; the folder is created when it is written."""

    def write(self, session: TrainingSession, file: Path) -> None:
        """See `Checkpoint`."""
        if not self._has_model:
            self._save_model(file)
            self._has_model = True
        self._save_progress(file)


class FolderWriter:
    """Writes the folder of a tuned language model.

    Args:
        session: The session that trains the adapter.
        folder: The folder that was read.
        files: The files of a model in several files.
        names: The names of the adapter's matrices; none if all weights are trained.
        initial: Their values in the file of the model.
        is_loaded: Whether the folder was written by this class.
        labels: The names of the classes of a text encoder.
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
        labels: Sequence[str] = (),
    ) -> None:
        self.session, self._folder, self._files = session, folder, files
        self._names, self.initial, self._is_loaded = names, initial, is_loaded
        self._labels = labels
        # Folders whose files belong together at any time, whichever of them is written next.
        self._finished = {folder.path.resolve()} if is_loaded else set()

    def check(self, target: Path) -> None:
        """Rejects the folder of the original model.

        Raises:
            ArgumentError: If it is that folder.
        """
        if target.resolve() == self._folder.path.resolve() and not self._is_loaded:
            raise ArgumentError(
                f"folder must not be that of the original model, got '{target}'; give another one"
            )
        if not self._names and (target / ADAPTER).exists():
            raise ArgumentError(
                f"folder must not have an adapter if rank=None, got '{target}'; give another one"
            )

    def _save_others(self, target: Path) -> None:
        """Writes what is neither the model nor the training, after a mark for the first save."""
        target.mkdir(parents=True, exist_ok=True)
        if target.resolve() not in self._finished:
            write_atomically(target / UNFINISHED, _NOTE, follow=False)
        if target.resolve() != self._folder.path.resolve():
            left = {TRAINING, *(OF_EMBEDDINGS if self._labels else ())}
            copy_others(self._folder, target, without=left)
            if settings := genai_config(self._folder):
                write_atomically(target / GENAI_CONFIG, settings.encode(), follow=False)
            names = [] if self._labels else folders_of_modules(self._folder)
            names += [TEMPLATES] * (self._folder.path / TEMPLATES).is_dir()
            for name in names:
                place = file_in_folder(self._folder.path, name, what="a folder to copy")
                module = replace(self._folder, path=place)
                copy_others(module, folder_within(target, Path(name)))
            for name, content in settings_with_labels(self._folder, self._labels).items():
                write_atomically(target / name, content, follow=False)

    def _finish(self, target: Path) -> None:
        """Takes the mark of the first save away."""
        (target / UNFINISHED).unlink(missing_ok=True)
        if (target / TRAINING).is_file():  # a merged folder has none
            self._finished.add(target.resolve())

    def _place(self, file: Path, target: Path) -> Path:
        """Returns where a file of the folder belongs in another one, in a folder that exists."""
        relative = file.relative_to(self._folder.path)
        return folder_within(target, relative.parent) / relative.name

    def save_merged(self, target: Path) -> None:
        """Writes the model with the adapter merged into its weights.

        Raises:
            ArgumentError: If the folder has an adapter.
        """
        if self._files is not None:
            self._save_others(target)
            self._save_files(self._files, target)
            self._finish(target)
            return
        if (target / ADAPTER).exists():
            raise ArgumentError(
                f"folder must not have an adapter if merged=True, got '{target}'; give another one"
            )
        model = prune(self._merged(), load_light(self._folder.model))
        self._save_others(target)
        write_model(self._place(self._folder.model, target), model, follow=False)
        self._finish(target)

    def _merged(self) -> LightModel:
        """Returns the model with its adapter, if it has one, merged into the weights."""
        trained = self.session.inference_model()
        is_adapted = adapter_of(trained.metadata_props) is not None
        return external.detach(merged_model(trained) if is_adapted else trained)

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
        if Path(folder, TRAINING).is_file():  # a training that is finished saves nothing more
            remove_litter(Path(folder))
        return [FolderCheckpoint(folder, steps, self.save_model_file, self.save_progress)]

    def save_model_file(self, target: Path) -> None:
        """Writes what training does not change."""
        self._save_others(target)
        if self._files is None and self._names:  # otherwise, training changes all of it
            self._write_model(target)

    def _write_model(self, target: Path) -> None:
        """Writes the model, with the first values of the adapter."""
        file = self._place(self._folder.model, target)
        with self.session._locked_file() as held:
            model = held.light_inference_model()
            if not self._names and adapter_of(model.proto.metadata_props) is not None:
                model = self._merged()
            for tensor in model.proto.graph.initializer:
                if self._names and tensor.name in self.initial:
                    array = self.initial[tensor.name]
                    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
            model = with_given_scales(model, adapter_of(model.proto.metadata_props))
            pruned = prune(model, load_light(self._folder.model))
            write_model(file, pruned, limit=_ONE_FILE, follow=False)

    def save_progress(self, target: Path) -> None:
        """Writes the adapter, and the state of the training."""
        if self._files is not None or not self._names:
            if self._files is None:
                self._write_model(target)
            else:
                self._save_files(self._files, target)
            with self.session._locked_file() as held:
                state = held.light_model()
                if self._files is not None:
                    write_metadata(state.proto, NAMES, json.dumps(self._files.names))
                write_model(target / TRAINING, state, follow=False)
            self._finish(target)
            return
        with self.session._locked_file() as held:
            model = held.light_inference_model()
            adapter = written_adapter(model)
            state = held.light_model()
            known = {tensor.name for tensor in model.proto.graph.initializer} - set(self._names)
            for tensor in state.proto.graph.initializer:
                if tensor.name in known and size_of(tensor) > _SMALL:
                    tensor.CopyFrom(onnx.TensorProto(name=tensor.name))  # it is in the model's file
            training = state.attach().SerializeToString()
        write_together(target, {ADAPTER: adapter, TRAINING: training})
        self._finish(target)

    def _save_files(self, files: SeveralFiles, target: Path) -> None:
        """Writes the files of a model with the adapter merged into them; see `save`."""
        for part, model in files.written(self.session.inference_model()).items():
            write_model(self._place(files.parts[part], target), model, follow=False)
