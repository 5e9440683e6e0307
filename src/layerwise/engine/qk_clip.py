"""QK-clip: after an update, bring the query and key rows of heads whose logits were too large back to the threshold.

Masters are scaled, in whatever shards this rank holds, before anything is published: replicas never hold an unclipped
weight, in no layout. Factors are functions of reduced values, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from layerwise.comm.groups import share
from layerwise.config.clipping import QKClip
from layerwise.engine.engine import Engine
from layerwise.errors import StateError, listed
from layerwise.layout.schedule import logits_op
from layerwise.layout.spans import regions_of
from layerwise.memory.shards import region_of
from layerwise.memory.storage import Storage
from layerwise.models.logits import MaxLogits, unwatch, watch
from layerwise.models.table import declarations
from layerwise.routing.heads import AttentionHeads, ClippedModule, ClippedRows, clipped_modules
from layerwise.routing.spec import ParamSpec


class Watched(NamedTuple):
    """What is clipped on this rank, before anything is built; the same on every rank of a stage."""

    clip: QKClip
    modules: tuple[ClippedModule, ...]

    def facts(self) -> dict[str, object]:
        return {"clip": repr(self.clip), "modules": [module.to_json() for module in self.modules]}


class Clipped(NamedTuple):
    """What QK-clip saw and did in a step."""

    max_logit: float | None = None
    """Largest logit of all heads that ran; None where none did."""
    heads: int = 0
    """Query heads that were scaled."""
    nonfinite: tuple[str, ...] = ()
    """Heads whose largest logit is inf or NaN, which nothing was scaled for."""
    unseen: tuple[str, ...] = ()
    """Modules that ran on no rank."""


NOTHING_CLIPPED = Clipped()


def plan_clipping(engine: Engine, clip: object) -> Watched | None:
    """Which rows of the engine's modules are clipped; every mistake in what modules say of themselves is an error here."""
    if clip is None:
        return None
    if not isinstance(clip, QKClip):
        raise TypeError(f"qk_clip must be a layerwise.QKClip or None, got {type(clip).__name__}.")
    plan = engine.plan

    def is_transposed(param: ParamSpec) -> bool:
        matrices = plan.routes[param.fqn].matrices
        return matrices[0].transposed if matrices else param.split is not None and param.split.transposed

    heads = {name: found for name, (_, found) in _declared(engine.chunks).items()}
    return Watched(clip, clipped_modules(heads, plan.table, is_transposed))


def _declared(chunks: Sequence[nn.Module]) -> dict[str, tuple[nn.Module, AttentionHeads]]:
    """What modules say in `attention_heads()`, by name."""
    found: dict[str, tuple[nn.Module, AttentionHeads]] = {}
    for name, module, heads in declarations(*chunks, method="attention_heads"):
        if not isinstance(heads, AttentionHeads):
            raise TypeError(
                f"{type(module).__name__}.attention_heads() returned {type(heads).__name__}: expected a "
                "layerwise.AttentionHeads."
            )
        found[name] = module, heads
    for name, (module, heads) in found.items():
        inner = {id(child) for child in module.modules() if child is not module}
        for other, (child, _) in found.items():
            if id(child) in inner and not heads.records:
                raise ValueError(
                    f"module {other!r} lies in module {name!r} and both have attention_heads(): the same attention would "
                    "count for both. Keep one, or give the outer one records=True."
                )
    return found


class Clipper:
    """QK-clip of one model on this rank."""

    def __init__(self, engine: Engine, watched: Watched) -> None:
        self._clip = watched.clip
        self._communicator = engine.everyone
        self._device = engine.storage.device
        modules = _modules_of_all_stages(engine, watched)
        if not modules:
            raise ValueError(
                "qk_clip was asked for, but no module has a method attention_heads() with trainable params: nothing says "
                "which rows belong to which head. Add the method, or leave qk_clip out."
            )
        # Places of all heads of all stages in one vector: every rank ends with the same statistics.
        self._heads = [(module, head) for module in modules for head in range(module.n_heads)]
        place = {entry: index for index, entry in enumerate(self._heads)}
        self._groups = [
            (module, tuple(place[module, head] for head in group)) for module in modules for group in module.groups
        ]
        mine = {module.name: module for module in modules if module.stage == engine.groups.stage}
        self._logits: list[MaxLogits] = []
        self._fqns: list[frozenset[str]] = []
        self._parts: list[_Part] = []
        declared = _declared(engine.chunks)
        places: list[int] = []
        for module in watched.modules:
            owner, heads = declared[module.name]
            logits = watch(owner, module.name, module.n_heads, self._device, hooked=not heads.records)
            engine.when_released(partial(unwatch, owner, logits))
            self._logits.append(logits)
            places += [place[mine[module.name], head] for head in range(module.n_heads)]
            self._fqns.append(frozenset(part.fqn for part in module.parts))
            for part in module.parts:
                decisive = tuple(place[mine[module.name], head] for head in part.rows.heads)
                power = part.rows.power(watched.clip.balance)
                self._parts += [_Part(decisive, power, view) for view in _views(part, engine.storage)]
        self._places = torch.tensor(places, dtype=torch.long, device=self._device)

    @property
    def numel(self) -> int:
        """Length of the vector: heads of all modules of all stages."""
        return len(self._heads)

    def check(self, arrived: Collection[str]) -> None:
        """Raise if a module got gradients without its logits being seen: it would never be clipped, and nobody would
        know."""
        silent = [
            logits.name
            for logits, fqns in zip(self._logits, self._fqns, strict=True)
            if not logits.is_seen and not fqns.isdisjoint(arrived)
        ]
        if silent:
            raise StateError(
                f"qk_clip saw gradients and no attention logits of {listed(silent)} since the last step: expected a forward "
                "in training mode that calls F.scaled_dot_product_attention, after the Optimizer was built, compiled or "
                "not. Call layerwise.record_logits() in a forward that computes its attention otherwise."
            )

    @torch.no_grad()
    def apply(self) -> Clipped:
        """Reduce the maxima over all ranks and scale what this rank holds of the masters: one collective, one
        read-back."""
        vector = torch.full((self.numel,), -math.inf, dtype=torch.float32, device=self._device)
        if self._logits:
            here = torch.cat([logits.values for logits in self._logits])
            # Collectives may drop a NaN from a maximum. There is as little to go by as with inf.
            vector[self._places] = torch.where(here.isnan(), math.inf, here)
        op = logits_op(self.numel, self._communicator.world)
        maxima: list[float] = self._communicator.all_reduce(op, vector).wait().tolist()
        eta_of = {places: self._clip.eta(max(maxima[place] for place in places)) for _, places in self._groups}
        scaled = [
            (part.master, eta_of[part.decisive] ** part.power) for part in self._parts if eta_of[part.decisive] < 1
        ]
        if scaled:
            torch._foreach_mul_([master for master, _ in scaled], [factor for _, factor in scaled])
        return Clipped(
            max_logit=max(maxima) if max(maxima) > -math.inf else None,
            heads=sum(len(places) for places, eta in eta_of.items() if eta < 1),
            nonfinite=tuple(
                f"{module.label} head {head}"
                for (module, head), logit in zip(self._heads, maxima, strict=True)
                if logit == math.inf
            ),
            unseen=tuple(
                dict.fromkeys(
                    module.label
                    for module, places in self._groups
                    if all(maxima[place] == -math.inf for place in places)
                )
            ),
        )

    def reset(self) -> None:
        """Forget all logits: the weights they came from are no more."""
        for logits in self._logits:
            logits.reset()


class _Module(NamedTuple):
    """A clipped module of any stage."""

    stage: int
    name: str
    label: str
    groups: tuple[tuple[int, ...], ...]
    """Heads that are scaled together."""

    @property
    def n_heads(self) -> int:
        return sum(map(len, self.groups))


class _Part(NamedTuple):
    """A region of a master that this rank holds."""

    decisive: tuple[int, ...]
    """Places of the heads whose largest logit decides."""
    power: float
    """Of eta."""
    master: Tensor


def _modules_of_all_stages(engine: Engine, watched: Watched) -> list[_Module]:
    def mine() -> dict[str, object]:
        groups = [
            [module.name, list(dict.fromkeys(part.rows.heads for part in module.parts))] for module in watched.modules
        ]
        return {"modules": groups}

    gathered: list[Any] = share(engine.groups, mine)
    ranks_of = engine.groups.stages
    return [
        _Module(
            stage,
            name,
            f"{name} of stage {stage}" if len(ranks_of) > 1 else name,
            tuple(tuple(group) for group in groups),
        )
        for stage, ranks in enumerate(ranks_of)
        for name, groups in gathered[min(ranks)]["modules"]
    ]


def _views(part: ClippedRows, storage: Storage) -> Iterator[Tensor]:
    """What this rank's masters have of these rows."""
    for shard in storage.shards:
        for span in shard.spans_by_fqn.get(part.fqn, ()):
            for region in regions_of(part, span):
                yield region_of(shard.master, region)
