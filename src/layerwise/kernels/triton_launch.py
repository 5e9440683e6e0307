"""Launching Triton kernels with little of the host's time."""

from __future__ import annotations

from typing import Any

_compiled: dict[tuple[object, ...], Any] = {}
"""What Triton compiled, by all that it may depend on."""


def launch(
    kernel: Any,
    key: tuple[object, ...],
    programs: int | tuple[int, int, int],
    arguments: tuple[object, ...],
    *,
    warps: int,
    stages: int = 3,
    registers: int | None = None,
) -> None:
    """Launch a kernel; from the second time on without Triton's look at every argument, which takes as long as a small
    product does. `registers` bounds those of a thread, so that more programs run beside each other."""
    grid = (programs, 1, 1) if isinstance(programs, int) else programs
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments)
        return
    bound = {} if registers is None else {"maxnreg": registers}
    compiled = kernel[grid](*arguments, num_warps=warps, num_stages=stages, **bound)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled
