"""LoRA: low-rank adapters, which are trained while the weights of the base stay frozen.

Each function takes a model and returns a new one, or writes files. `ortops.build_training_model`
trains only the adapter if a model has one. Automatic choices are logged to the logger ``ortops``.
"""

from ortops.lora.addition import add
from ortops.lora.files import load_adapter, save_adapter
from ortops.lora.merging import merge
from ortops.lora.peft import from_peft, to_peft
from ortops.lora.recognition import recognize

__all__ = ["add", "from_peft", "load_adapter", "merge", "recognize", "save_adapter", "to_peft"]
