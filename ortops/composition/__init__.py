"""Several models as one: composed for training, and split again.

See `ortops.compose` and `ortops.split`.
"""

from ortops.composition.composing import compose
from ortops.composition.splitting import split

__all__ = ["compose", "split"]
