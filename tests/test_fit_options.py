"""Each argument of `fit` is declared once; what a newcomer can forget beside that fails here."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
from violations import all_violations

from ortops import OrtopsError, TrainingSession
from ortops.cli.parser import make_parser
from ortops.engine.training import fit_options
from ortops.engine.training.fit_options import OPTIONS, SAVED, with_defaults
from ortops.engine.training.history import History
from ortops.engine.training.position import EpochState, Position, call_of

FOLDER = Path(fit_options.__file__).parent


def test_each_argument_is_explained_in_its_order() -> None:
    text = inspect.getdoc(TrainingSession.fit) or ""
    arguments = text.split("Args:\n")[1].split("\n\n")[0]
    assert re.findall(r"^    (\w+):", arguments, re.M) == ["data", *OPTIONS]


def test_each_argument_is_read() -> None:
    """By the name under which the options are kept, in a module of this package."""
    read: set[str] = set()
    for path in FOLDER.glob("*.py"):
        if path.name != "fit_options.py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.add(node.value)
    assert not OPTIONS.keys() - read


def test_the_signature_shows_each_argument_with_its_default() -> None:
    shown = inspect.signature(TrainingSession.fit).parameters
    assert [*shown] == ["self", "data", *OPTIONS]
    assert {name: shown[name].default for name in OPTIONS} == {
        name: option.default for name, option in OPTIONS.items()
    }
    assert shown["max_steps"].annotation == "int | None"
    assert shown["validation"].annotation == "Data | None"


def test_the_command_line_has_each_argument_or_says_where_else() -> None:
    subparsers = make_parser("")._subparsers
    assert subparsers is not None
    train = subparsers._group_actions[0].choices["train"]
    known = {name for action in train._actions for name in action.option_strings}

    with all_violations() as check:
        for name, option in OPTIONS.items():
            with check(name):
                said = re.findall(r"--[\w-]+", option.help)
                own = [f"--{name.replace('_', '-')}"]
                wanted = said if option.metavar is None else own
                assert wanted or option.help.startswith("nothing: "), option.help
                assert known.issuperset(wanted), f"{wanted} are not options of ortops train"


@pytest.mark.optional("sklearn", "sklearn")
@pytest.mark.parametrize("estimator", ["OnnxClassifier", "OnnxRegressor"])
def test_the_estimators_have_the_arguments_that_say_so(estimator: str) -> None:
    sklearn = importlib.import_module("ortops.sklearn")
    parameters = getattr(sklearn, estimator)._get_param_names()
    # Of a classifier, class_weight has labels in place of their numbers.
    shared = OPTIONS.keys() & set(parameters) - {"class_weight"}
    assert shared == {name for name, option in OPTIONS.items() if option.in_estimators}


def test_a_saved_argument_must_be_the_same_when_a_training_is_resumed() -> None:
    call = call_of(with_defaults({}), 20, 4, "")
    position = Position(EpochState(call, 1, 0, History(), 0, list))
    assert position.resumed(dict(call)).epoch_state.call is call
    longer = position.resumed({**call, "epochs": 3}).epoch_state.call
    assert longer == {**call, "epochs": 3}
    with all_violations() as check:
        for name in [*SAVED.keys() - {"epochs"}, "rows", "batches"]:
            with check(name), pytest.raises(OrtopsError, match="as in the training to resume"):
                position.resumed({**call, name: "another"})


def test_a_file_has_the_saved_arguments_and_in_the_form_that_is_declared() -> None:
    given = with_defaults({"group_by_length": [3, 4], "drop_last": True})
    call = call_of(given, None, None, "main: 1")
    text = Position(EpochState(call, 1, 0, History(), 0, list)).text(0)
    found = {name: json.loads(text)[name] for name in SAVED.keys() - {"validation_split"}}
    assert found == {
        "epochs": 1,
        "batch_size": 32,
        "shuffle": True,
        "seed": 0,
        "accumulate": 1,
        "entries": "main: 1",
        "group_by_length": True,
        "drop_last": True,
    }
