"""Gradient rules (vector-Jacobian products), by family.

Importing this package registers them all in one table.
"""

from ortops.graph.autodiff.registry import USER, Rules
from ortops.graph.autodiff.rules import attention as attention
from ortops.graph.autodiff.rules import control_flow as control_flow
from ortops.graph.autodiff.rules import convolution as convolution
from ortops.graph.autodiff.rules import determinant as determinant
from ortops.graph.autodiff.rules import elementwise as elementwise
from ortops.graph.autodiff.rules import group_query as group_query
from ortops.graph.autodiff.rules import indexing as indexing
from ortops.graph.autodiff.rules import linalg as linalg
from ortops.graph.autodiff.rules import loss as loss
from ortops.graph.autodiff.rules import machine_learning as machine_learning
from ortops.graph.autodiff.rules import microsoft as microsoft
from ortops.graph.autodiff.rules import normalization as normalization
from ortops.graph.autodiff.rules import pooling as pooling
from ortops.graph.autodiff.rules import quantization as quantization
from ortops.graph.autodiff.rules import quantized as quantized
from ortops.graph.autodiff.rules import random as random
from ortops.graph.autodiff.rules import range_one_hot as range_one_hot
from ortops.graph.autodiff.rules import recurrent as recurrent
from ortops.graph.autodiff.rules import reduce as reduce
from ortops.graph.autodiff.rules import resize as resize
from ortops.graph.autodiff.rules import sampling as sampling
from ortops.graph.autodiff.rules import sequence as sequence
from ortops.graph.autodiff.rules import shape as shape
from ortops.graph.autodiff.rules import signal as signal
from ortops.graph.autodiff.rules import zero as zero
from ortops.graph.autodiff.rules.table import BUILT_IN

RULES = Rules(USER, BUILT_IN)
"""The rules of operators; the user's rules take precedence over the built-in ones."""
