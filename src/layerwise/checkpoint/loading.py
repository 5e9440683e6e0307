"""Loading: the checkpoint is checked whole, then held against the model, and only then is anything written. Every rank reads what it
owns, whoever wrote it."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.checkpoint.bare import BareModule
from layerwise.checkpoint.contents import Contents
from layerwise.checkpoint.disk import damages_of, pieces_of, read_manifest
from layerwise.checkpoint.files import Reader, Wanted, bytes_of
from layerwise.checkpoint.fitting import Names, Policy, Read, fit
from layerwise.checkpoint.manifest import Manifest, expect
from layerwise.checkpoint.own import has_own_here
from layerwise.checkpoint.plain import check_extra, from_plain, number
from layerwise.checkpoint.rates import rates_of, take_place
from layerwise.checkpoint.saving import EXTRA, RNG
from layerwise.comm.groups import Groups, derive_together, share
from layerwise.engine.engine import Engine
from layerwise.errors import CheckpointError, listed
from layerwise.kernels.hashing import hash_bits
from layerwise.models.tracing import never_traced
from layerwise.optim.optimizer import Optimizer

_AT_A_TIME = 4 << 20
"""Elements of which masters and weights are compared at once."""
_ROW = 64
"""Words of eight bytes that are added up."""


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint brought beside tensors."""

    step: int
    """Steps that were taken when it was saved."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What was put beside it."""
    same_generators: bool = True
    """Whether random number generators go on where they were: on another number of ranks they do not."""


@never_traced
@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Sequence[str] = (),
    unused: Sequence[str] = (),
    reset: Sequence[str] = (),
    verify: bool = True,
) -> Loaded:
    """Go on from a checkpoint, on any number of ranks, in any layout, however the model is cut. Call it on every rank.

    All files are checked before anything is written, and everything that does not fit the model is named at once. Options (decay,
    momentum ...) of the optimizer as it is count, not those that it was saved with. `lr` goes on where a schedule had come to,
    of torch or by hand, in proportion to the base rate that it has now: set `group["lr"]` after this to begin another.

    Args:
        path: the folder that `save` made.
        model: as for `save`.
        optimizer: as for `save`. None loads weights alone, and then the model may be any module, also one that torch has cut.
        extra: objects with a `load_state_dict()` that go on from what `save` was given under the same name.
        rename: from names of params in the checkpoint, or what they begin with, to names in the model.
        missing: globs of params and buffers that the checkpoint may not have, or not in their shape; they stay as they are.
        unused: globs of params and buffers that only the checkpoint has.
        reset: globs of params whose optimizer state starts anew; "loss_scale" where only one side has one.
        verify: read every file once more to see that it is as it was written.
    """
    contents: Contents | BareModule
    if optimizer is None and model is not None and not isinstance(getattr(model, "engine", None), Engine):
        contents = BareModule.of(model)
    else:
        contents = Contents.of(model, optimizer)
        optimizer = contents.optimizer
        contents.engine.finish_errands()  # it may be what is asked for
    groups, folder = contents.groups, Path(path)
    policy = Policy(rename=rename or {}, missing=missing, unused=unused, reset=reset)
    arguments = {**policy.facts(), "verify": verify, "extra": sorted(map(str, extra or ()))}
    manifest = derive_together(
        groups, "checkpoints", lambda: read_manifest(folder), lambda found: {"digest": found.digest, **arguments}
    )
    if isinstance(contents, Contents):
        contents.make_ready()
    elsewhere, has_own = _names_elsewhere(contents), has_own_here(contents, manifest)
    # What does not fit is known from the manifest, before all files are read.
    reads = derive_together(
        groups, "checkpoints", lambda: fit(contents, manifest, policy, elsewhere, has_own), lambda _: {}
    )
    if verify:
        check_files(groups, folder, manifest)
    names = Names(manifest, policy)
    beside = derive_together(
        groups, "checkpoints", lambda: _beside(contents, folder, manifest, names, extra), lambda _: {}
    )
    with Reader(folder, manifest) as reader, _replacing(contents, manifest.step, beside.scale, reads.begun) as follow:
        _write(groups, reader, reads.model)
        follow()
        _write(groups, reader, reads.state)  # while weights are on their way
        if isinstance(contents, Contents):
            check_published(contents.engine)
    beside.take(optimizer, extra or {})
    return Loaded(manifest.step, beside.values, beside.generators is not None)


def check_files(groups: Groups, folder: Path, manifest: Manifest) -> None:
    """Raise, on every rank, if a file is not as it was written. Ranks share the reading: as many as have written read nearly
    what they wrote, which they are about to read again."""
    pieces, rank, world = pieces_of(manifest.files), groups.rank, groups.world
    mine = pieces[rank * len(pieces) // world : (rank + 1) * len(pieces) // world]
    found: list[Any] = share(groups, lambda: {"damage": damages_of(folder, manifest.files, mine)})
    damage = list(dict.fromkeys(text for theirs in found for text in theirs["damage"]))
    if damage:
        raise CheckpointError(f"{folder} is damaged: {listed(damage)}. Nothing was loaded.")


def _names_elsewhere(contents: Contents | BareModule) -> set[str]:
    """What the other pipeline stages have, for who wants to know what nobody has."""
    groups = contents.groups
    if len(groups.stages) == 1:
        return set()
    told: list[Any] = share(groups, lambda: {"names": sorted(contents.names())})
    return {name for theirs in told for name in theirs["names"]}


@dataclass(frozen=True)
class _Beside:
    """What is taken over beside masters and state. All of it is looked at before anything is written."""

    values: dict[str, Any]
    """What `extra` was."""
    states: dict[str, Any]
    """Those of objects that go on from it."""
    scale: dict[str, float] | None
    """The loss scale."""
    rates: dict[str, float]
    """Where a schedule was, by param group."""
    generators: dict[str, Tensor] | None
    """Where this rank's random number generators were, by device; None on another number of ranks."""

    def take(self, optimizer: Optimizer | None, extra: Mapping[str, Any]) -> None:
        """Have everything go on from it."""
        if optimizer is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.rates.get(group["name"], group["lr"])
            for kind, state in (self.generators or {}).items():
                if kind == "cpu":
                    torch.set_rng_state(state)
                else:
                    torch.cuda.set_rng_state(state, optimizer.engine.storage.device)
        for name, state in self.states.items():
            take_place(extra[name], state, optimizer)


def _beside(
    contents: Contents | BareModule, folder: Path, manifest: Manifest, names: Names, extra: Mapping[str, Any] | None
) -> _Beside:
    about = manifest.about
    check_extra(extra)
    with Reader(folder, manifest) as reader:
        named: set[str] = set()

        def tensor_of(key: str) -> Tensor:
            # Once each: who names one a million times means to fill the memory.
            if key not in manifest.entries or key in named:
                raise ValueError(f"tensor {key[:80]!r} is not there, or named twice")
            named.add(key)
            return reader.whole(key)

        try:
            values = expect(from_plain(about.get(EXTRA, {}), tensor_of), dict)
            scale = _scale_of(about.get("loss_scale"))
            options = expect(from_plain(about.get("options", []), _no_tensor), list)
            rates: dict[str, float] = {}
            generators: dict[str, Tensor] | None = {}
            if isinstance(contents, Contents) and contents.optimizer is not None:
                rates = rates_of(contents, options, names)
                generators = _generators_of(contents.engine, reader, manifest)
        except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointError(f"{folder}: what it has beside tensors of the model is malformed: {what}.") from None
    lacking = sorted(set(extra or {}) - set(values))
    if lacking:
        has = listed(sorted(values)) if values else "none at all"
        raise CheckpointError(f"the checkpoint has no extra {listed(lacking)}: it has {has}.")
    for name, taker in (extra or {}).items():
        if not callable(getattr(taker, "load_state_dict", None)):
            raise TypeError(
                f"extra[{name!r}] is a {type(taker).__name__}: expected an object with load_state_dict(). Plain values are in what "
                "load() returns."
            )
    states = {name: values.pop(name) for name in extra or {}}
    return _Beside(values, states, scale, rates, generators)


def _scale_of(saved: object) -> dict[str, float] | None:
    if saved is None:
        return None
    scale = {name: number(value) for name, value in expect(saved, dict).items()}
    if set(scale) != {"scale", "good_steps", "bad_steps"} or min(scale.values()) < 0 or not scale["scale"]:
        raise ValueError("it has another loss scale than there is")
    return scale


def _no_tensor(key: str) -> Tensor:
    raise ValueError(f"an option is the tensor {key[:80]!r}")


def _generators_of(engine: Engine, reader: Reader, manifest: Manifest) -> dict[str, Tensor] | None:
    """Where the generators of this rank were, if there were as many ranks."""
    groups, device = engine.groups, engine.storage.device
    if manifest.about.get("world") != groups.world:
        return None
    found = {}
    for kind in dict.fromkeys(("cpu", device.type)):
        key = f"{RNG}.{groups.rank}.{kind}"
        if key in manifest.entries:
            found[kind] = reader.whole(key)
            torch.Generator(kind).set_state(found[kind])  # raises, unless it is one
    return found


@contextmanager
def _replacing(
    contents: Contents | BareModule, step: int, scale: Mapping[str, float] | None, begun: Mapping[str, int]
) -> Iterator[Callable[[], None]]:
    """In here weights, masters and state are written. What forward reads follows when this is called."""
    if contents.optimizer is not None:
        with contents.optimizer.replacing_state(step, scale, begun) as follow:
            yield follow
    elif isinstance(contents, Contents):
        contents.engine.publisher.ensure_all()
        yield contents.engine.publisher.begin
    else:
        yield lambda: None  # what is written is what forward reads


def _write(groups: Groups, reader: Reader, reads: Sequence[Read]) -> None:
    def read_all() -> None:
        for key, part in reads:
            if key is None:
                part.tensor.zero_()
        reader.read_all(Wanted(key, part.box, part.tensor) for key, part in reads if key is not None)

    derive_together(groups, "checkpoints", read_all, lambda _: {})


def _rounds_to(master: Tensor, weight: Tensor) -> bool:
    """Whether weights have the bits that masters round to; a part at a time, since a whole shard would take as much memory."""
    return all(
        torch.equal(truth.to(read.dtype).view(torch.uint8), read.view(torch.uint8))
        for truth, read in zip(torch.split(master, _AT_A_TIME), torch.split(weight, _AT_A_TIME), strict=True)
    )


def _sum(flat: Tensor) -> object:
    """A number that tells tensors apart. On the host rows of words are added up, as fast as memory is read, and their sums are
    summed up in turn; the order of words within a row does not count."""
    if flat.device.type != "cpu":
        return hash_bits(flat).tolist()
    memory = bytes_of(flat)
    rows = len(memory) // (8 * _ROW)
    if not rows:
        return zlib.crc32(memory)
    words = torch.frombuffer(memory, dtype=torch.int64, count=rows * _ROW)
    return zlib.crc32(memory[words.nbytes :], zlib.crc32(bytes_of(words.view(rows, _ROW).sum(1))))


def check_published(engine: Engine) -> None:
    """Raise, on every rank, unless what every rank reads in forward is what the masters of its owners round to."""
    place, publisher, storage = engine.groups.place, engine.publisher, engine.storage
    publisher.launch_all()

    def held() -> Iterator[tuple[str, Tensor]]:
        """What forward reads, each when it has arrived: others arrive while it is summed up."""
        for replica in storage.replicas:
            publisher.ensure(replica)
            for tensor in replica.held:
                yield f"{replica.plan.domain} {replica.plan.label}", tensor.reshape(-1)
        for shard in () if storage.replicas else storage.shards:
            yield f"{shard.plan.label} {shard.spans}", shard.rounded()

    def mine() -> dict[str, object]:
        found = [(label, _sum(weights) if engine.groups.world > 1 else None) for label, weights in held()]
        for shard in storage.shards:
            if shard.weight is not None and shard.is_apart and not _rounds_to(shard.master, shard.weight):
                raise CheckpointError(
                    f"{shard.plan.label} has weights that its masters do not round to, after loading."
                )
        # As one number for each set of params: ranks that have the same have the same number.
        names = hashlib.sha256(repr([place, *(label for label, _ in found)]).encode()).hexdigest()
        return {names: repr([digest for _, digest in found])}

    told: dict[str, tuple[int, object]] = {}
    for rank, theirs in enumerate(share(engine.groups, mine)):
        for names, digest in theirs.items():
            first, other = told.setdefault(names, (rank, digest))
            if other != digest:
                raise CheckpointError(f"ranks {first} and {rank} have different weights after loading.")
