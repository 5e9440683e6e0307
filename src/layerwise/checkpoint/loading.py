"""Loading: the checkpoint is checked whole, then held against the model, and only then is anything written. Every rank reads what it
owns, whoever wrote it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.checkpoint.bare import BareModule
from layerwise.checkpoint.contents import Contents, engine_of
from layerwise.checkpoint.disk import damage_of, read_manifest
from layerwise.checkpoint.files import Reader
from layerwise.checkpoint.fitting import Policy, Read, fit
from layerwise.checkpoint.manifest import Manifest
from layerwise.checkpoint.plain import from_plain
from layerwise.checkpoint.saving import EXTRA, GIVEN_LR, RNG
from layerwise.comm.groups import Groups, derive_together, share
from layerwise.engine.engine import Engine
from layerwise.errors import CheckpointError, listed
from layerwise.kernels.hashing import hash_bits
from layerwise.models.tracing import never_traced
from layerwise.optim.optimizer import Optimizer


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

    All files are checked before anything is written, and everything that does not fit the model is named at once. Options (lr,
    decay ...) of the optimizer as it is count, not those that it was saved with; where a scheduler of torch is at work the place
    that it had reached is taken over.

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
        contents = Contents(engine_of(model, optimizer), optimizer)
    groups, folder = contents.groups, Path(path)
    policy = Policy(rename=rename or {}, missing=missing, unused=unused, reset=reset)
    manifest = derive_together(
        groups, "checkpoints", lambda: read_manifest(folder), lambda found: {"digest": _digest(found)}
    )
    if verify:
        check_files(groups, folder, manifest)
    if isinstance(contents, Contents):
        contents.make_ready()
    elsewhere = _names_elsewhere(contents)
    reads, values, states = derive_together(
        groups,
        "checkpoints",
        lambda: (fit(contents, manifest, policy, elsewhere), *_beside(folder, manifest, extra)),
        lambda _: {},
    )
    with Reader(folder, manifest) as reader, _replacing(contents, manifest):
        _write(groups, reader, reads)
    if isinstance(contents, Contents):
        check_published(contents.engine)
    is_same = True
    if optimizer is not None:
        _take_schedule(optimizer, manifest)
        is_same = _take_generators(optimizer.engine, folder, manifest)
    for name, state in states.items():
        (extra or {})[name].load_state_dict(state)
    return Loaded(manifest.step, values, is_same)


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(manifest.to_bytes()).hexdigest()


def check_files(groups: Groups, folder: Path, manifest: Manifest) -> None:
    """Raise, on every rank, if a file is not as it was written. Ranks share the reading."""
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].nbytes, name))
    mine = names[groups.rank :: groups.world]
    found: list[Any] = share(
        groups,
        lambda: {
            "damage": [text for name in mine if (text := damage_of(folder, name, manifest.files[name])) is not None]
        },
    )
    damage = [text for theirs in found for text in theirs["damage"]]
    if damage:
        raise CheckpointError(f"{folder} is damaged: {listed(damage)}. Nothing was loaded.")


def _names_elsewhere(contents: Contents | BareModule) -> set[str]:
    """What the other pipeline stages have, for who wants to know what nobody has."""
    groups = contents.groups
    if len(groups.stages) == 1:
        return set()
    told: list[Any] = share(groups, lambda: {"names": sorted({**contents.facts(), **contents.constant_shapes()})})
    return {name for theirs in told for name in theirs["names"]}


def _beside(folder: Path, manifest: Manifest, extra: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `extra` was, as values, and as states of the objects that go on from it."""
    with Reader(folder, manifest) as reader:

        def tensor_of(key: str) -> Tensor:
            if key not in manifest.entries:
                raise CheckpointError(f"the checkpoint has no tensor {key[:80]!r}, which its extra values name.")
            return reader.whole(key)

        try:
            values = from_plain(manifest.about.get(EXTRA, {}), tensor_of)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the extra values of {folder} are malformed: {error}.") from None
    lacking = sorted(set(extra or {}) - set(values))
    if lacking:
        raise CheckpointError(f"the checkpoint has no extra {listed(lacking)}: it has {listed(sorted(values))}.")
    for name, taker in (extra or {}).items():
        if not callable(getattr(taker, "load_state_dict", None)):
            raise TypeError(
                f"extra[{name!r}] is a {type(taker).__name__}: expected an object with load_state_dict(). Plain values are in what "
                "load() returns."
            )
    states = {name: values[name] for name in extra or {}}
    return {name: value for name, value in values.items() if name not in states}, states


@contextmanager
def _replacing(contents: Contents | BareModule, manifest: Manifest) -> Iterator[None]:
    """In here weights, masters and state are written; then what forward reads follows."""
    if contents.optimizer is not None:
        with contents.optimizer.replacing_state(manifest.step, manifest.about.get("loss_scale")):
            yield
        return
    if isinstance(contents, Contents):
        contents.engine.publisher.ensure_all()
    yield
    if isinstance(contents, Contents):
        contents.engine.publisher.begin()


def _write(groups: Groups, reader: Reader, reads: Sequence[Read]) -> None:
    def read_all() -> None:
        for key, part in reads:
            if key is None:
                part.tensor.zero_()
            else:
                reader.read(key, part.box, part.tensor)

    derive_together(groups, "checkpoints", read_all, lambda _: {})


def check_published(engine: Engine) -> None:
    """Raise, on every rank, unless what every rank reads in forward is what the masters of its owners round to."""
    engine.publisher.ensure_all()
    place = engine.groups.place

    def mine() -> dict[str, object]:
        for shard in engine.storage.shards:
            rounded = shard.master.to(shard.weight.dtype) if shard.is_apart else shard.weight
            if hash_bits(rounded).tolist() != hash_bits(shard.weight).tolist():
                raise CheckpointError(
                    f"{shard.plan.label} has weights that its masters do not round to, after loading."
                )
        found: dict[str, list[int]] = {}
        replicas = engine.storage.replicas
        held = (
            [(f"{replica.plan.domain} {replica.plan.label}", replica.weights) for replica in replicas]
            if replicas
            else [(f"{shard.plan.label} {shard.spans}", shard.weight) for shard in engine.storage.shards]
        )
        for label, weights in held:
            found[f"{place} {label}"] = hash_bits(weights).tolist()
        # As one number for each set of params: ranks that have the same have the same number.
        names = hashlib.sha256(repr(sorted(found)).encode()).hexdigest()
        return {names: hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()}

    told: dict[str, tuple[int, object]] = {}
    for rank, theirs in enumerate(share(engine.groups, mine)):
        for names, digest in theirs.items():
            first, other = told.setdefault(names, (rank, digest))
            if other != digest:
                raise CheckpointError(f"ranks {first} and {rank} have different weights after loading.")


def _take_schedule(optimizer: Optimizer, manifest: Manifest) -> None:
    """A schedule's place is state, its base rate an option: rates that a scheduler (or the user) has changed since are taken
    over, in proportion where the base rate is another now. With a scheduler on one side alone there is nothing to go on."""
    saved = {group.get("name"): group for group in from_plain(manifest.about.get("options", []), _no_tensor)}
    for group in optimizer.param_groups:
        theirs = saved.get(group["name"], {})
        if ("initial_lr" in theirs) == ("initial_lr" in group):
            base = theirs.get("initial_lr", theirs.get(GIVEN_LR))
            now = group.get("initial_lr", optimizer.given_rates[group["name"]])
            if base:
                group["lr"] = theirs["lr"] if base == now else theirs["lr"] * now / base


def _no_tensor(key: str) -> Tensor:
    raise CheckpointError(f"an option of the checkpoint is the tensor {key[:80]!r}: expected a number.")


def _take_generators(engine: Engine, folder: Path, manifest: Manifest) -> bool:
    """Have this rank's generators go on where they were, if there were as many ranks."""
    groups, device = engine.groups, engine.storage.device
    if manifest.about.get("world") != groups.world:
        return False
    with Reader(folder, manifest) as reader:
        key = f"{RNG}.{groups.rank}"
        if f"{key}.cpu" in manifest.entries:
            torch.set_rng_state(reader.whole(f"{key}.cpu"))
        if device.type == "cuda" and f"{key}.cuda" in manifest.entries:
            torch.cuda.set_rng_state(reader.whole(f"{key}.cuda"), device)
    return True
