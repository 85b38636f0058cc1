"""Looks up numbers by patterns of layer names, for PEFT's ``rank_pattern`` and ``alpha_pattern``.

Patterns come from untrusted files, and Python's `re` can take exponential time on a few characters.
The automaton here follows all paths through a pattern in parallel, so a match takes time
proportional to the lengths of the pattern and the name.

Source: K. Thompson, "Regular Expression Search Algorithm", Communications of the ACM 11 (1968).
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from ortops.errors import ModelError
from ortops.graph.limits import LIMITS

_MOST_STATES = 10_000
_DEEPEST = 50  # nested groups; each takes a few levels of Python's stack

_PLAIN = re.compile(r"\^?(?:[^\\^$.|?*+()\[\]{}]|\.|\\[^\w\s])*\$?")
"""Patterns without alternatives and repetitions, which `re` matches in linear time."""

_TOKEN = re.compile(
    r"""(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])  # such as [0-9]
      | (?P<class>\\[dDsSwW])
      | \\(?P<escaped>[^\w\s])               # not letters, which may be special
      | (?P<open>\((?:\?:)?)(?!\?)
      | (?P<repeat>[*+?]|\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]*)\})
      | (?P<special>[|)^$.])
      | (?P<literal>[^\\\[(])""",
    re.VERBOSE | re.DOTALL,
)

_Build: TypeAlias = Callable[[int], int]
"""Creates the states of a part of a pattern, given the state after it; returns the first one."""


class Patterns:
    r"""Numbers by regular expressions of layer names, as in PEFT.

    A pattern matches a full name, or the part of it after one of its dots. The first pattern that
    matches is used.

    The syntax has literal characters, ``.``, sets, ``\d``, ``\w``, ``\s`` and their complements,
    groups, alternatives, repetitions, ``^`` and ``$``, but not back-references, lookaround or
    flags.

    Args:
        numbers: The numbers by pattern.
        where: The name of the patterns in messages.

    Raises:
        ModelError: If a pattern is invalid.
    """

    def __init__(self, numbers: Mapping[str, float], where: str) -> None:
        self._where, self._numbers, self._steps = where, dict(numbers), 0
        self._matchers = {pattern: self._compiled(pattern) for pattern in numbers}

    def value_for(self, layer: str, default: float) -> float:
        """Returns the number of a layer.

        Args:
            layer: Its name.
            default: The number if no pattern matches.

        Raises:
            ModelError: If the search exceeds the step limit of `ortops.graph.limits`.
        """
        for pattern, number in self._numbers.items():
            if self._matchers[pattern](layer):
                return number
        return default

    def without_layer(self, layers: Iterable[str]) -> str | None:
        """Returns the first pattern that matches none of the layers; None if there is none."""
        known = list(layers)
        for pattern in self._numbers:
            if not any(self._matchers[pattern](layer) for layer in known):
                return pattern
        return None

    def _compiled(self, pattern: str) -> Callable[[str], bool]:
        if not _PLAIN.fullmatch(pattern):
            automaton = _Automaton(pattern, self._where)
            self._spend(automaton.size)
            return lambda name: automaton.match(name, self._spend)
        self._spend(100)  # compiling takes about as long as 100 steps
        search = re.compile(rf"(?:.*\.)?(?:{pattern})$").match

        def match(name: str) -> bool:
            self._spend(1 + len(name) * len(pattern) // 64)  # `re` is about 64 times as fast
            return search(name) is not None

        return match

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > LIMITS.pattern_steps:
            raise ModelError(
                f"{self._where}: matching its {len(self._numbers):,} patterns takes more than "
                f"{LIMITS.pattern_steps:,} steps; use fewer or simpler patterns, or raise "
                "ortops.graph.limits.LIMITS.pattern_steps"
            )


class _Automaton:
    """A nondeterministic automaton: each state has a test and a list of next states.

    A test is of one character, or of the position.

    Args:
        pattern: The pattern.
        where: The name of the pattern in messages.
    """

    def __init__(self, pattern: str, where: str) -> None:
        self._pattern, self._where = pattern, where
        self._at = self._depth = 0
        self._tests: list[str | Callable[[str], object]] = []
        self._next: list[list[int]] = []
        build = self._alternatives()
        if self._at < len(pattern):
            raise self._error(f"{pattern[self._at]!r} does not close a group")
        self._accepting = self._state("", [])
        inner = build(self._state("$", [self._accepting]))
        dot = self._state(_character(r"\."), [inner])
        before = self._state("", [dot])
        self._next[before].append(self._state(_character("."), [before]))
        self._start = self._state("", [inner, before])

    @property
    def size(self) -> int:
        """The number of states."""
        return len(self._tests)

    def match(self, name: str, spend: Callable[[int], None]) -> bool:
        """Returns whether the pattern matches a name.

        Args:
            name: The name.
            spend: Called with the number of visited states.
        """
        current = [self._start]
        for place in range(len(name) + 1):
            states = self._closure(current, name, place)
            spend(len(states))
            if self._accepting in states or not states:
                return self._accepting in states
            if place < len(name):
                character = name[place]
                following = (
                    target
                    for state in states
                    if callable(test := self._tests[state]) and test(character)
                    for target in self._next[state]
                )
                current = list(dict.fromkeys(following))
        return False

    def _closure(self, states: Iterable[int], name: str, place: int) -> set[int]:
        """Returns states and all that are reachable from them without reading a character."""
        found, pending = set[int](), list(states)
        while pending:
            state = pending.pop()
            if state in found:
                continue
            found.add(state)
            test = self._tests[state]
            if callable(test) or (test == "^" and place > 0):
                continue
            if test == "$" and place < len(name) and (place + 1, name[-1]) != (len(name), "\n"):
                continue
            pending += self._next[state]
        return found

    # ----------------------------------------------------------------------------------- parsing

    def _error(self, what: str) -> ModelError:
        return ModelError(
            f"{self._where}: invalid pattern {self._pattern!r:.80}: {what}; use literal "
            "characters, '.', sets, groups, alternatives and repetitions"
        )

    def _peek(self) -> re.Match[str] | None:
        if self._at == len(self._pattern):
            return None
        token = _TOKEN.match(self._pattern, self._at)
        if token is None:
            raise self._error(f"{self._pattern[self._at : self._at + 10]!r} is not supported")
        return token

    def _alternatives(self) -> _Build:
        branches = [self._sequence()]
        while self._pattern[self._at : self._at + 1] == "|":
            self._at += 1
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        return lambda after: self._state("", [branch(after) for branch in branches])

    def _sequence(self) -> _Build:
        parts: list[_Build] = []
        while (token := self._peek()) is not None and token[0] not in ("|", ")"):
            self._at = token.end()
            part = self._part(token)
            following = self._peek()
            if following is not None and following["repeat"]:
                if token[0] in ("^", "$"):
                    raise self._error(f"'{token[0]}' is repeated")
                part = self._repeated(part, following)
            parts.append(part)

        def build(after: int) -> int:
            first = self._state("", [after])  # so that each part has a state
            for part in reversed(parts):
                first = part(first)
            return first

        return build

    def _part(self, token: re.Match[str]) -> _Build:
        text = token[0]
        if token["repeat"]:
            raise self._error(f"there is nothing before '{text}' to repeat")
        if token["open"]:
            return self._group()
        if text in ("^", "$"):
            return lambda after: self._state(text, [after])
        expression = re.escape(token["escaped"] or token["literal"] or "") or text
        try:
            test = _character(expression)
        except re.error as error:
            raise self._error(str(error)) from error
        return lambda after: self._state(test, [after])

    def _group(self) -> _Build:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(f"more than {_DEEPEST} nested groups")
        inner = self._alternatives()
        if self._at == len(self._pattern):
            raise self._error("a group is not closed")
        self._at += 1
        self._depth -= 1
        return inner

    def _repeated(self, part: _Build, token: re.Match[str]) -> _Build:
        self._at = token.end()
        if self._pattern[self._at : self._at + 1] == "?":  # laziness does not affect a full match
            self._at += 1
        following = self._peek()
        if following is not None and following["repeat"]:
            raise self._error(f"'{following[0]}' follows a repetition")
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(token[0]) or (
            self._counts(token[0])
        )

        def build(after: int) -> int:
            if most is None:
                first = self._state("", [after])
                self._next[first].append(part(first))
            else:
                first = after
                for _ in range(most - least):
                    first = self._state("", [part(first), after])
            for _ in range(least):
                first = part(first)
            return first

        return build

    def _counts(self, text: str) -> tuple[int, int | None]:
        least, comma, most = text[1:-1].partition(",")
        if max(len(least), len(most)) > len(str(_MOST_STATES)):
            raise self._error(f"'{text:.20}' has more than {_MOST_STATES:,} repetitions")
        numbers = int(least or 0), int(most) if most else (None if comma else int(least))
        if numbers[1] is not None and numbers[0] > numbers[1]:
            raise self._error(f"the minimum in '{text}' is greater than the maximum")
        return numbers

    def _state(self, test: str | Callable[[str], object], following: list[int]) -> int:
        if len(self._tests) == _MOST_STATES:
            raise self._error(f"it needs more than {_MOST_STATES:,} states")
        self._tests.append(test)
        self._next.append(following)
        return len(self._tests) - 1


@functools.lru_cache
def _character(expression: str) -> Callable[[str], object]:
    """Returns the test of one character."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # '[[' in a set, which now means '['
        return re.compile(expression).fullmatch
