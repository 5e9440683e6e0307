"""Memory and process groups: state of every rank, buffers of many dtypes, groups of the library's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerwise
from layerwise.comm import collectives
from layerwise.comm.collectives import Communicator
from layerwise.comm.facts import gather_facts
from layerwise.config.rules import AdamW, Muon
from layerwise.dtypes import DType
from layerwise.engine.stats import StatsPass
from layerwise.engine.update import Update
from layerwise.layout import storage
from layerwise.layout.buckets import BufferGroup
from tests import arrangements, worlds
from tests.arrangements import Arrangement
from tests.mesh_zoo import Scene, Stage
from tests.regressions.cases import Case, Mistake, arranged, compared, in_place_of, key_of

# ------------------------------------------------------------------------------------------------ state

STATE_OF = {"matrix": ["master", "momentum"], "other": ["exp_avg", "exp_avg_sq", "master"]}


def state_of_every_rank(rank: int, world: int) -> list[str]:
    """Beside params with whole owners, the optimizer of the others made state for all params; and a rank whose shard
    was nothing but padding contributed nothing, so that what was saved had holes.

    Here state is made by bucket, of the rule that updates its params. Every rank has every key, an empty tensor where
    it holds nothing, and all spans together are every element once. (Checkpoints will be written from this.)
    """

    def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        saved: Any = optimizer.state_dict(part=True)
        spans = saved["layerwise"]["spans"]
        found = []
        for group in saved["param_groups"]:
            for fqn, key in zip(group["fqns"], group["params"], strict=True):
                tensors: dict[str, Tensor] = saved["state"].get(key, {})
                expected = STATE_OF[model.plan.route(fqn).family]
                if sorted(tensors) != expected:
                    found.append(f"{fqn} has state {sorted(tensors)}: expected {expected}")
                start, stop = spans.get(fqn, (0, 0))
                found += [
                    f"{name} of {fqn} has {t.numel()} elements"
                    for name, t in tensors.items()
                    if t.numel() != stop - start
                ]
        for replica in model.engine.storage.replicas:
            names = ["master", *replica.shard.state]
            if sorted(names) != STATE_OF[key_of(model.plan, replica.plan).family]:
                found.append(f"{replica.plan.label} has state {sorted(names)}")
        held = gather_facts(spans)
        for fqn, param in model.engine.storage.params.items():
            pieces = sorted(theirs[fqn] for theirs in held if fqn in theirs)
            ends = [0, *(stop for _, stop in pieces)]
            if [start for start, _ in pieces] != ends[:-1] or ends[-1] != param.numel():
                found.append(f"spans {pieces} are not all of {fqn}")
        idle = any(not bucket.spans(other) for bucket in model.plan.buckets for other in range(world))
        return found if idle else ["in the scene no shard is all padding"]

    return compared(rank, world, worlds.Case(layout="compact", dtype=torch.bfloat16, steps=2), also)


def state_of_owners_only(rank: int) -> Any:
    def held(real: Callable[..., Any]) -> Callable[..., Any]:
        def state_by_fqn(self: Update) -> Any:
            found = real(self)
            return {fqn: tensors for fqn, tensors in found.items() if any(t.numel() for t in tensors.values())}

        return state_by_fqn

    return in_place_of(Update, "state_by_fqn", held)


def state_of_both_rules(rank: int) -> Any:
    with ExitStack() as changed:
        for rule in (Muon, AdamW):
            changed.enter_context(mock.patch.object(rule, "state_names", ("momentum", "exp_avg", "exp_avg_sq")))
        return changed.pop_all()


# ------------------------------------------------------------------------------------------------ dtypes


@dataclass
class _ManyDtypes(worlds.Case):
    """A model with matrices and others in fp32, bf16 and fp16."""

    def build(self) -> nn.Module:
        module: Any = super().build()
        for name, dtype in (
            ("qkv", torch.bfloat16),
            ("embed", torch.bfloat16),
            ("tall", torch.float16),
            ("head", torch.float16),
        ):
            getattr(module, name).to(dtype)
        module.experts.data = module.experts.data.half()
        return module


def many_buffers(rank: int, world: int) -> list[str]:
    """At most one buffer of a narrow dtype was expected: a model that had two, because a narrow matrix was excluded
    from Muon, could not be built.

    Here a buffer is whatever shares domain, chunk, family, dtype and layout; there may be any number of them, in any
    mixture.
    """

    def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        kinds = {(buffer.key.family, str(buffer.key.dtype)) for buffer in model.plan.buffers}
        expected = {(family, dtype) for family in ("matrix", "other") for dtype in ("fp32", "bf16", "fp16")}
        return [] if kinds == expected else [f"buffers are {sorted(kinds)}, expected {sorted(expected)}"]

    for layout in ("flat", "compact"):
        if found := compared(rank, world, _ManyDtypes(layout=layout, steps=2), also):
            return found
    return []


def one_narrow_buffer(rank: int) -> Any:
    def merged(real: Callable[..., Any]) -> Callable[..., Any]:
        def members_of(*given: Any) -> Any:
            members: dict[BufferGroup, list[Any]] = {}
            for group, params in real(*given).items():
                dtype = DType.BF16 if group.dtype is DType.FP16 else group.dtype
                members.setdefault(group._replace(dtype=dtype), []).extend(params)
            return members

        return members_of

    return in_place_of(storage, "members_of", merged)


# ------------------------------------------------------------------------------------------------ process groups

_COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "all_to_all_single", "barrier")


@contextmanager
def _default_group_noted() -> Iterator[list[str]]:
    """Names of the collectives that go over the default process group."""
    names: list[str] = []

    def noted(name: str) -> Callable[[Any], Any]:
        def note(real: Any) -> Any:
            def call(*given: Any, group: Any = None, **more: Any) -> Any:
                if group is None or group is dist.group.WORLD:
                    names.append(name)
                return real(*given, group=group, **more)

            return call

        return note

    with ExitStack() as stack:
        for name in _COLLECTIVES:
            stack.enter_context(in_place_of(dist, name, noted(name)))
        for name in ("_all_gather", "_reduce_scatter"):
            stack.enter_context(in_place_of(collectives, name, noted(name)))
        yield names


def own_groups(rank: int, world: int) -> list[str]:
    """Part of the optimizer asked a global registry for the group of its statistics: with process groups of one's own,
    and no registry, it failed.

    Here there is no registry. Groups come from the mesh and are handed down, and nothing ever goes over the default
    group, which is the user's.
    """
    # The comparison itself asks all ranks whether to go on, over the default group; that is not the library.
    with _default_group_noted() as names, mock.patch.object(arrangements, "anywhere", bool):
        found = arranged(rank, world, Arrangement(pp=2, tied="embedding", steps=2))
        stage = Stage(rank, Scene("ep x fsdp 2x2 dim 1", "mixture"))
        for step in range(2):
            stage.oracle.step([stage.deliver(step)])
            stage.optimizer.step()
        found += [f"rank {rank}: weight of {fqn} of a sharded model" for fqn in stage.differs()]
    return found + [f"a collective over the default group: {name}" for name in sorted(set(names))]


def stats_over_default_group(rank: int) -> Any:
    def registered(real: Callable[..., None]) -> Callable[..., None]:
        def init(self: StatsPass, *given: Any, **more: Any) -> None:
            real(self, *given, **more)
            self._communicator = Communicator(dist.group.WORLD, sent_nbytes=self._communicator.sent_nbytes)

        return init

    return in_place_of(StatsPass, "__init__", registered)


CASES = (
    Case(
        name="R32",
        title="state of the right params, on every rank",
        world=4,
        check=state_of_every_rank,
        mistakes=(
            Mistake(
                what="a rank has no state for params of which it holds nothing",
                put_in=state_of_owners_only,
                seen_as=r"gain has state \[\]",
            ),
            Mistake(
                what="state of both rules is made for all params",
                put_in=state_of_both_rules,
                seen_as=r"tall.weight has state \['exp_avg'",
            ),
        ),
    ),
    Case(
        name="D9",
        title="buffers of many dtypes in one model",
        world=3,
        check=many_buffers,
        mistakes=(
            Mistake(
                what="params of all narrow dtypes share one buffer",
                put_in=one_narrow_buffer,
                seen_as="replica of tall.weight",
            ),
        ),
    ),
    Case(
        name="D12",
        title="nothing goes over the default process group",
        world=4,
        check=own_groups,
        mistakes=(
            Mistake(
                what="statistics go over the default process group",
                put_in=stats_over_default_group,
                seen_as="a collective over the default group: all_reduce",
            ),
        ),
    ),
)
