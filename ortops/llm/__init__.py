"""Fine-tuning of language models, from the folder that serves them.

The folder is one of onnxruntime-genai, Optimum or transformers.js. See `FineTuning`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortops.llm.tuning import FineTuning

__all__ = ["FineTuning"]


def __getattr__(name: str) -> Any:
    if name != "FineTuning":  # imported on use, as `ortops --help` reads `options`
        raise AttributeError(f"module 'ortops.llm' has no attribute {name!r}")
    return importlib.import_module("ortops.llm.tuning").FineTuning
