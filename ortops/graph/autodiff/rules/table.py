"""The table that the rules in this folder are registered in."""

from ortops.graph.autodiff.registry import Table

BUILT_IN = Table()

definition = BUILT_IN.definition
nested_vjp = BUILT_IN.nested_vjp
refuses = BUILT_IN.refuses
structural = BUILT_IN.structural
vjp = BUILT_IN.vjp
zero = BUILT_IN.zero
