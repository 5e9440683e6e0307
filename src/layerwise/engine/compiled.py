"""What compiled code reads. It runs no forward hooks, so whoever enters it brings up to date what is known of it here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from layerwise.memory.replicas import Replica


class CompiledReads:
    """The buckets that compiled code may read, as tracing found them."""

    def __init__(self) -> None:
        self._known: dict[int, Replica] = {}
        self._unguarded: dict[int, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._known.values())

    @property
    def unguarded(self) -> Iterable[Replica]:
        """What compiled code reads by ways that nobody stands in."""
        return self._unguarded.values()

    def note(self, replicas: Iterable[Replica]) -> None:
        """A module that reads these is being traced: the code that comes of it will not ask. Call it before they are
        brought up to date."""
        for replica in replicas:
            if replica.plan.index in self._known and replica.version != replica.shard.version:
                # It is entered by a way that we do not know. Tracing it anew in every step would cost more than it saves.
                self._unguarded[replica.plan.index] = replica
            self._known[replica.plan.index] = replica
