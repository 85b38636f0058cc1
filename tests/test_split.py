"""Splitting a step into gradients and packed updates."""

from __future__ import annotations

import numpy as np
import pytest

import ortops
from models.mlp import mlp
from ortops.engine import lowering
from ortops.engine.execution.update_groups import Group, split
from ortops.engine.lowering import lower_optimizers
from ortops.engine.trainable.step_graph import flatten
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import remove_defaults
from ortops.graph.files.external import detach
from ortops.graph.names import Names
from ortops.graph.tensor import op, shape_of


def _split(optimizer: object) -> tuple[list[Group], dict[str, str]]:
    model = ortops.build_training_model(
        mlp((4, 8, 8, 2)), loss="SoftmaxCrossEntropy", optimizer=optimizer
    )
    step = flatten(detach(model))
    graph = step.model.graph
    remove_defaults(graph, step.variables)
    lower_optimizers(graph, Names(graph), lambda node: True)
    return split(graph, step.updates, step.feeds, step.outputs)


def test_one_formula_serves_all_parameters_and_scalars_are_computed_outside() -> None:
    (group,), left = _split(ortops.optimizers.Adam())
    assert [role.updated for role in group.roles].count(True) == 3
    assert len(group.shapes) == 6
    assert set(left) == {"step"}
    assert len(group.scalars) == 1  # the corrected learning rate
    for node in group.formula:
        read = [value for value in node.inputs if value is not None]
        assert node.op_type == "Constant" or any(value.shape != () for value in read), node.op_type
        assert not node.domain
    assert len(group.formula.inputs) == len(group.roles) + len(group.scalars)


def test_a_scalar_that_a_formula_reads_as_it_is_stays_one() -> None:
    (group,), _ = _split(ortops.optimizers.SGD(0.5))
    assert len(group.scalars) == 1
    constants = [constant_tensor(value) for node in group.formula for value in node.outputs]
    assert not any(c is not None and c.numpy() == np.float32(0.5) for c in constants)


def test_a_formula_with_a_reshape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result may be in the memory of a state, which the update in place overwrites."""
    model = ortops.build_training_model(
        mlp((4, 8, 2)), loss="SoftmaxCrossEntropy", optimizer=ortops.optimizers.Momentum()
    )
    monkeypatch.setattr(lowering, "_of_shape", lambda x, like: op.Reshape(x, shape_of(like)))
    with pytest.raises(AssertionError, match=r"the formula of .* is not elementwise: .*'Reshape'"):
        ortops.TrainingSession(model)
