"""Operators whose derivative is zero wherever it exists: what the table of operators says."""

from ortops.graph.autodiff.rules.table import zero
from ortops.graph.operators import having

zero(*sorted(having("zero")))
