"""Names of values and nodes."""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.nesting import subgraphs


class Names:
    """Generates unique names for values and nodes.

    Args:
        graph: A graph whose names, including those in its subgraphs, are already used.
    """

    def __init__(self, graph: ir.Graph | None = None) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}
        if graph is not None:
            for inner in (graph, *subgraphs(graph)):
                self._taken.update(inner.initializers)
                self._taken.update(value.name for value in inner.inputs if value.name)
                for node in inner:
                    self._taken.update(value.name for value in node.outputs if value.name)
                    self._taken.add(node.name or "")

    def take(self, name: str) -> None:
        """Marks a name as used."""
        self._taken.add(name)

    def is_free(self, name: str) -> bool:
        """Whether a name is unused."""
        return name not in self._taken

    def unique(self, name: str) -> str:
        """Returns ``name``, with a numeric suffix if it is already used, and marks it as used."""
        candidate = name
        while candidate in self._taken:
            number = self._next.get(name, 1)
            self._next[name] = number + 1
            candidate = f"{name}_{number}"
        self._taken.add(candidate)
        return candidate
