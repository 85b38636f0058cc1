"""Python's collector of cyclic garbage, which waits while graphs are made.

Graphs are hundreds of thousands of objects that stay. The collector looks at all of them again and
again as their number grows, which takes a sixth of the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collection_put_off"]


@contextlib.contextmanager
def collection_put_off() -> Iterator[None]:
    """Puts collection off, for all threads, and lets it go on as it did before.

    Of several that overlap, the first that ends may turn it on again for the others.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
