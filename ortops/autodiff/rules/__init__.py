"""Gradient rules (vector-Jacobian products), by family.

Importing this package registers them all in one table.
"""

from ortops.autodiff.registry import USER, Rules
from ortops.autodiff.rules import attention as attention
from ortops.autodiff.rules import control_flow as control_flow
from ortops.autodiff.rules import convolution as convolution
from ortops.autodiff.rules import determinant as determinant
from ortops.autodiff.rules import elementwise as elementwise
from ortops.autodiff.rules import generate as generate
from ortops.autodiff.rules import indexing as indexing
from ortops.autodiff.rules import linalg as linalg
from ortops.autodiff.rules import loss as loss
from ortops.autodiff.rules import machine_learning as machine_learning
from ortops.autodiff.rules import microsoft as microsoft
from ortops.autodiff.rules import normalization as normalization
from ortops.autodiff.rules import pooling as pooling
from ortops.autodiff.rules import quantization as quantization
from ortops.autodiff.rules import quantized as quantized
from ortops.autodiff.rules import random as random
from ortops.autodiff.rules import recurrent as recurrent
from ortops.autodiff.rules import reduce as reduce
from ortops.autodiff.rules import resize as resize
from ortops.autodiff.rules import sampling as sampling
from ortops.autodiff.rules import sequence as sequence
from ortops.autodiff.rules import shape as shape
from ortops.autodiff.rules import signal as signal
from ortops.autodiff.rules import zero as zero
from ortops.autodiff.rules.table import BUILT_IN

RULES = Rules(USER, BUILT_IN)
"""The rules of operators; the user's rules take precedence over the built-in ones."""
