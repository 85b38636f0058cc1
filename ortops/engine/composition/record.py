"""What a composed model says about its parts, in its ``metadata_props``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

import onnx

from ortops.errors import ModelError
from ortops.graph.files.json_metadata import Entry, read_metadata, where

METADATA_KEY = "ortops.composition"
_REMEDY = "compose the models again with ortops.compose"


@dataclass(frozen=True)
class Record:
    """A model that is part of a composed one.

    Attributes:
        inputs: The names that its inputs have in the composed model, by their own names.
        outputs: Those of its outputs.
        weights: Those of its weights.
        types: The types of its inputs and outputs: serialized TypeProtos in hexadecimal digits.
        metadata: Its ``metadata_props``.
    """

    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def value_info(self, name: str) -> onnx.ValueInfoProto:
        """Returns the declaration of an input or output, under its own name."""
        kind = onnx.TypeProto.FromString(bytes.fromhex(self.types[name]))
        return onnx.ValueInfoProto(name=name, type=kind)


def records_text(records: Mapping[str, Record]) -> str:
    """Returns the text of the metadata entry."""
    return json.dumps({name: asdict(record) for name, record in records.items()})


def read_records(metadata: Iterable[Entry]) -> dict[str, Record]:
    """Returns what a composed model says about its parts, by their names.

    Raises:
        ModelError: If the model was not composed, or the entry is not valid.
    """
    found = read_metadata(metadata, METADATA_KEY, _REMEDY)
    if found is None:
        raise ModelError("model: it was not written by ortops.compose, so it cannot be split")
    result = {}
    for name, fields in found.items():
        try:
            record = Record(**fields)
            kinds = (record.inputs, record.outputs, record.weights, record.types, record.metadata)
            if not all(isinstance(v, str) for each in kinds for v in each.values()):
                raise TypeError("names must be strings")
            json.dumps([name, fields], ensure_ascii=False).encode()  # as messages hold them
            for each in (*record.inputs, *record.outputs):
                record.value_info(each)
        except Exception as error:  # protobuf's, too
            raise ModelError(
                f"{where(METADATA_KEY)}: '{name!s:.80}': {error}; {_REMEDY}"
            ) from error
        result[name] = record
    return result
