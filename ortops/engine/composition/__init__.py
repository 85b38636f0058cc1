"""Several models as one: composed for training, and split again.

See `ortops.compose` and `ortops.split`.
"""

from ortops.engine.composition.composing import compose
from ortops.engine.composition.splitting import split

__all__ = ["compose", "split"]
