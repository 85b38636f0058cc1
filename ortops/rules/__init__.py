"""Gradient rules (vector-Jacobian products), by family.

Importing this package registers them all.
"""

from ortops.rules import attention as attention
from ortops.rules import control_flow as control_flow
from ortops.rules import convolution as convolution
from ortops.rules import determinant as determinant
from ortops.rules import elementwise as elementwise
from ortops.rules import generate as generate
from ortops.rules import indexing as indexing
from ortops.rules import linalg as linalg
from ortops.rules import loss as loss
from ortops.rules import microsoft as microsoft
from ortops.rules import normalization as normalization
from ortops.rules import pooling as pooling
from ortops.rules import quantization as quantization
from ortops.rules import quantized as quantized
from ortops.rules import random as random
from ortops.rules import recurrent as recurrent
from ortops.rules import reduce as reduce
from ortops.rules import resize as resize
from ortops.rules import sampling as sampling
from ortops.rules import sequence as sequence
from ortops.rules import shape as shape
from ortops.rules import signal as signal
