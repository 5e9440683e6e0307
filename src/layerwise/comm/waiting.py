"""Ranks that wait for each other, and say so before anybody has to wonder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from layerwise.errors import users_line, warn

PATIENCE_S = 10.0
"""After how long a rank says what it is waiting for."""


@contextmanager
def impatient(hint: str) -> Iterator[None]:
    """Warn, once, if what is done in here takes long, and say where the user called it."""
    timer = threading.Timer(PATIENCE_S, warn, (f"{hint} ({users_line()})",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
