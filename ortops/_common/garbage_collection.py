"""Pausing Python's cyclic garbage collector while graphs are built.

Graphs consist of hundreds of thousands of long-lived objects. The collector would traverse all of
them repeatedly as their number grows, which takes a sixth of the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collection(*, stays: bool = False) -> Iterator[None]:
    """Pauses garbage collection in all threads, and restores its previous state afterwards.

    If several such blocks overlap, the first to end may re-enable collection for the others.

    Args:
        stays: Whether what is made stays, as modules do. It then counts as old at once, without a
            traversal that would find hardly any garbage.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if stays and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
