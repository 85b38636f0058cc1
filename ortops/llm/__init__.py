"""Fine-tuning of language models, from the folder that serves them.

The folder is one of onnxruntime-genai, Optimum or transformers.js. See `FineTuning`.
"""

from ortops.llm.tuning import FineTuning

__all__ = ["FineTuning"]
