"""Changes to a model before it is trained: another head, a free batch, a tensor put out.

Each function takes a model and returns a new one. What it did is said by the logger ``ortops``.
"""

from ortops.surgery.batch import free_batch
from ortops.surgery.head import replace_head
from ortops.surgery.output import name_output

__all__ = ["free_batch", "name_output", "replace_head"]
