"""Ways into the inside of the library for tests, named after what they do to the system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import layerwise
from layerwise.engine.settings import Settings
from layerwise.parallel import data_parallel as _data_parallel


@contextmanager
def launch_gathers_ahead(count: int | None) -> Iterator[None]:
    """Have every DataParallel that is built in here launch gathers as forward reads, `count` buckets ahead, and not all of them in step()."""
    with mock.patch.object(_data_parallel, "Settings", partial(Settings, prefetch=count)):
        yield


@contextmanager
def compare_collectives() -> Iterator[None]:
    """Have every model that is built in here compare each collective across ranks before it is issued."""
    with mock.patch.dict(os.environ, LAYERWISE_DEBUG="collectives"):
        yield


def data_parallel(
    *args: Any, prefetch: int | None = None, check_collectives: bool = False, **options: Any
) -> layerwise.DataParallel:
    """A DataParallel with lazy gathers or compared collectives, which its arguments cannot ask for."""
    with launch_gathers_ahead(prefetch):
        if not check_collectives:
            return layerwise.DataParallel(*args, **options)
        with compare_collectives():
            return layerwise.DataParallel(*args, **options)
