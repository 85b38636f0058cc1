"""Low-rank adapters, LoRA: a few numbers to train beside weights that stay as they are.

Each function takes a model and returns a new one, or writes files. `ortops.build_training_model`
trains the adapter of a model that has one. What was chosen is said by the logger ``ortops``.
"""

from ortops.lora.addition import add
from ortops.lora.files import load_adapter, save_adapter
from ortops.lora.merging import merge
from ortops.lora.peft import from_peft, to_peft

__all__ = ["add", "from_peft", "load_adapter", "merge", "save_adapter", "to_peft"]
