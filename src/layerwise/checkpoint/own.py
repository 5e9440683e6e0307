"""Buffers that ranks have of their own. Averages of BatchNorm, queues and running scales are equal at the start and then each
rank's: the checkpoint has the first rank's under the model's names, and those of every other rank that has others beside them."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from layerwise.checkpoint.bare import BareModule
from layerwise.checkpoint.contents import MODEL, Contents, Part
from layerwise.checkpoint.files import bytes_of
from layerwise.checkpoint.manifest import Manifest
from layerwise.comm.groups import share
from layerwise.errors import a_few, warn
from layerwise.routing.geometry import Box

PLACES = "places"
"""Where ranks sat in what shares out the model itself, if any had buffers of its own."""
_OWN = "own"


class OwnBuffers(NamedTuple):
    """What this rank writes of them."""

    parts: tuple[Part, ...]
    places: list[Any]
    """Of all ranks; empty where no rank has any."""

    @classmethod
    def of(cls, contents: Contents) -> OwnBuffers:
        """Call it on every rank: they compare."""
        groups, here = contents.groups, dict[str, Part]()
        if groups.world == 1:
            return cls((), [])

        def mine() -> dict[str, object]:
            here.update((f"{part.key} {part.box.starts}", part) for part in contents.buffers())
            return {
                "place": contents.place,
                "all": {name: _digest(part) for name, part in here.items()},
                "written": [name for name, part in here.items() if part.is_mine],
            }

        told: list[Any] = share(groups, mine)
        written = {name: theirs["all"][name] for theirs in told for name in theirs["written"]}
        others = [{name for name, digest in theirs["all"].items() if digest != written[name]} for theirs in told]
        parts = (by_itself(here[name], groups.rank) for name in sorted(others[groups.rank]))
        return cls(tuple(parts), [theirs["place"] for theirs in told] if any(others) else [])


def by_itself(part: Part, rank: int) -> Part:
    """What a rank has of a tensor as a tensor of its own."""
    shape = part.box.shape
    return Part(own_key(part.key, rank), shape, Box.whole(shape), part.tensor, True)


def own_key(key: str, rank: int) -> str:
    return f"{_OWN}.{rank}.{key}"


def has_own_here(contents: Contents | BareModule, manifest: Manifest) -> bool:
    """Whether ranks go on with buffers of their own: where as many are arranged as they were. Call it on every rank."""
    saved = manifest.about.get(PLACES)
    if not saved:
        return False
    if isinstance(contents, Contents):
        told: list[Any] = share(contents.groups, lambda: {"place": contents.place})
        if [theirs["place"] for theirs in told] == saved:
            return True
    keys = (key for key in manifest.entries if key.startswith(f"{_OWN}."))
    names = dict.fromkeys(repr(key.partition(f".{MODEL}.")[2][:200]) for key in keys)
    warn(
        f"buffers were each rank's own when the checkpoint was saved ({a_few(list(names))}), on other ranks than there are now: "
        "all begin with those of the first.",
        aloud=contents.groups.rank == 0,
    )
    return False


def _digest(part: Part) -> str:
    return hashlib.blake2b(bytes_of(part.tensor.contiguous().cpu()), digest_size=8).hexdigest()
