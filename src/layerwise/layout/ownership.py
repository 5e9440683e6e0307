"""Who owns which param in the `compact` layout: ping-pong by size, under an order that every rank finds alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from layerwise.routing.spec import ParamSpec


def owners_of(params: Sequence[ParamSpec], world: int) -> dict[str, int]:
    """The owner of every param: sorted by size, dealt 0, 1 ... N-1, N-1 ... 1, 0, 0, 1 ...

    The order ends in the fqn, so neither insertion order nor equal sizes decide anything. A weight tied across pipeline
    stages is dealt by the name of its tie: its copies must have the same owner on stages that hold different params.

    >>> owners_of([ParamSpec(fqn=name, shape=(size, 1)) for size, name in enumerate("abcde", 1)], 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0, 'e': 0}
    """
    free = sorted((param for param in params if not param.tie), key=lambda param: (param.numel, param.fqn))
    owners = {}
    for position, param in enumerate(free):
        turn, step = divmod(position, world)
        owners[param.fqn] = step if turn % 2 == 0 else world - 1 - step
    for param in params:
        if param.tie:
            owners[param.fqn] = int.from_bytes(hashlib.sha256(param.tie.encode()).digest()[:8], "big") % world
    return owners
