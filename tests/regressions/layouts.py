"""Where params lie: the same on all ranks and on all stages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise
from layerwise.engine import engine
from layerwise.engine.exchanger import Cohort, Passage
from layerwise.kernels.lists import Cuts
from layerwise.layout import storage
from layerwise.layout.intervals import Equal
from layerwise.layout.plan import Plan
from layerwise.parallel.data_parallel import DataParallel
from layerwise.routing.rules import RouteRule
from layerwise.routing.spec import DENSE, EXPERT, ParamSpec
from tests import arrangements, worlds
from tests.arrangements import VOCABULARY, WIDTH, Arrangement
from tests.reference.oracle import Hyper
from tests.regressions.cases import (
    Case,
    Mistake,
    arranged,
    compared,
    differ_between_ranks,
    in_place_of,
    key_of,
)
from tests.worlds import deliver, gradient, hash_tensors, rules

# ------------------------------------------------------------------------------------------------ owners


def owners_by_name(rank: int, world: int) -> list[str]:
    """Params of equal size were dealt to ranks in the order in which they happened to be found: a param could have two
    owners or none.

    Here the order in which params are dealt ends in their names. In the scene every rank finds its params in another
    order.
    """

    def shuffled(real: Callable[..., dict[str, int]]) -> Callable[..., dict[str, int]]:
        def owners_of(params: Sequence[ParamSpec], size: int) -> dict[str, int]:
            return real(random.Random(rank).sample(list(params), len(params)), size)

        return owners_of

    def also(model: DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        spans = [[span.fqn for b in model.plan.buckets for span in b.spans(other)] for other in range(world)]
        owned = [fqn for fqns in spans for fqn in fqns if fqn.startswith("layer")]
        return [] if sorted(owned) == sorted(f"layer{index}.weight" for index in range(7)) else [f"owned: {owned}"]

    with in_place_of(storage, "owners_of", shuffled):
        return compared(rank, world, worlds.Case(shapes=[(4, 4)] * 7, layout="compact", steps=2), also)


def owners_by_size_alone(rank: int) -> Any:
    def owners_of(params: Sequence[ParamSpec], world: int) -> dict[str, int]:
        dealt = {}
        for position, param in enumerate(sorted(params, key=lambda param: param.numel)):
            turn, step = divmod(position, world)
            dealt[param.fqn] = step if turn % 2 == 0 else world - 1 - step
        return dealt

    return mock.patch.object(storage, "owners_of", owners_of)


# ------------------------------------------------------------------------------------------------ whole params, and all


def whole_and_complete(rank: int, world: int) -> list[str]:
    """A matrix that crossed a shard border was orthogonalised in halves, and a param that the layout had forgotten was
    never updated.

    Here a matrix is whole at its home wherever it lies, since its parts travel there, and a param without a place has
    nowhere to put its gradient. That `padded` cuts no param is looked at in the plan.
    """

    def also(model: DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        placements = [(bucket, placement) for bucket in model.plan.buckets for placement in bucket.placements]
        found = [
            f"{placement.fqn} crosses a shard"
            for bucket, placement in placements
            if key_of(model.plan, bucket).layout == "padded"
            and len(
                {at // (bucket.numel // world) for at in (placement.offset, placement.offset + placement.numel - 1)}
            )
            > 1
        ]
        names = sorted(placement.fqn for _, placement in placements)
        trainable = sorted(fqn for fqn, param in model.module.named_parameters() if param.requires_grad)
        return found + ([] if names == trainable else [f"placed: {names}, trainable: {trainable}"])

    return compared(rank, world, worlds.Case(layout="padded", bucket_mib=None, steps=2), also)


def cut_anywhere(rank: int) -> Any:
    return mock.patch.object(
        storage, "_cut_packed", lambda params, size, world, *_: storage._cut_evenly(params, size, world)
    )


@contextmanager
def cut_and_left_in_parts(rank: int) -> Iterator[None]:
    """Matrices lie across shard borders, and their homes take what they have of them for all."""

    def alone(real: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def unpack(self: Cohort, passage: Passage) -> list[Tensor]:
            with mock.patch.object(self, "_arriving", Cuts([])), mock.patch.object(torch, "empty", torch.zeros):
                return real(self, passage)

        return unpack

    with cut_anywhere(rank), in_place_of(Cohort, "unpack", alone):
        yield


def forgotten(rank: int) -> Any:
    def without(real: Callable[..., Any]) -> Callable[..., Any]:
        def members_of(*given: Any) -> Any:
            members = real(*given)
            return {group: [p for p in params if p.fqn != "tall.weight"] for group, params in members.items()}

        return members_of

    return in_place_of(storage, "members_of", without)


# ------------------------------------------------------------------------------------------------ tied weights


def tied_weight_lies_alone(rank: int, world: int) -> list[str]:
    """The bucket of a tied weight was made as long as the weight instead of once per shard, so that the weight lay
    across shards: its owners had parts of a matrix, and not the same ones on both stages.

    Here a tied weight sits alone in its bucket, whole in the first shard, and all stages compare how they cut it.
    """

    def also(model: DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        buckets = [bucket for bucket in model.plan.buckets if bucket.tie]
        if [key_of(model.plan, bucket).layout for bucket in buckets] != ["padded"]:
            return ["the scene has no tied weight in a padded buffer"]
        (bucket,) = buckets
        numel = VOCABULARY * WIDTH
        place = [(placement.offset, placement.numel) for placement in bucket.placements]
        found = [] if place == [(0, numel)] else [f"the tied weight lies at {place}"]
        ranks = model.plan.world
        return found + (
            [] if bucket.numel // ranks >= numel else [f"the bucket of the tied weight has {bucket.numel} elements"]
        )

    copies = ("embed.weight", "head.weight")
    options = {"rules": [RouteRule(pattern=copies[rank // (world // 2)], to="matrix")]}
    with mock.patch.dict(arrangements._MATRICES, {copy: [(0, VOCABULARY)] for copy in copies}):
        return arranged(
            rank, world, Arrangement(pp=2, tied="embedding", layouts=("padded",), steps=2, options=options), also
        )


def bucket_as_long_as_the_weight(rank: int) -> Any:
    def short(real: Callable[..., Any]) -> Callable[..., Any]:
        def cut(params: Sequence[ParamSpec], size: int, world: int, *rest: Any) -> Any:
            tied = {param.fqn for param in params if param.tie}
            return [
                found._replace(shards=Equal(found.shards.numel // world, world))
                if found.placements[0].fqn in tied
                else found
                for found in real(params, size, world, *rest)
            ]

        return cut

    return in_place_of(storage, "_cut_packed", short)


def tied_weight_among_others(rank: int) -> Any:
    return in_place_of(storage, "PackItem", lambda real: lambda **given: real(**{**given, "alone": False}))


class _FirstStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)


class _LastStage(nn.Module):
    """Holds a copy of the embedding under a name and in a layer that do not say so, as for the prediction of further
    tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.further = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)


def copies_of_embeddings(rank: int, world: int) -> list[str]:
    """The copy of the embedding that predicts further tokens was not marked as one: it was taken for a matrix, and as a
    tied one its bucket grew to vocabulary x width on every rank.

    Here nothing is marked. Stages tell each other the shapes of their embeddings, so that a layer onto the rows of one
    is known wherever it is.
    """
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    is_first = rank < world // 2
    copy = "embed.weight" if is_first else "further.weight"
    torch.manual_seed(3)
    module = _FirstStage() if is_first else _LastStage()
    model = DataParallel(module, mesh=mesh, ties={"embedding": copy}, layout="padded", bucket_mib=0.001)
    optimizer = layerwise.Optimizer(model, **rules(Hyper()))
    params = model.engine.storage.params
    for step in range(2):
        deliver(model, {fqn: gradient(fqn, param.shape, rank, step, 0) for fqn, param in params.items()}, sync=True)
        optimizer.step()
        optimizer.zero_grad()
    found = [] if model.plan.route(copy).family == "other" else [f"{copy} is taken for a matrix"]
    numel = next(bucket.numel for bucket in model.plan.buckets if bucket.tie)
    found += [] if numel < 2 * VOCABULARY * WIDTH else [f"the bucket of {copy} has {numel} elements"]
    return found + differ_between_ranks("copies", {"embedding": hash_tensors([params[copy]])})


def stages_do_not_tell(rank: int) -> Any:
    return in_place_of(
        engine, "plan_for", lambda real: lambda *given, **more: real(*given, **{**more, "vocabularies": ()})
    )


# ------------------------------------------------------------------------------------------------ shards and ranks


def as_many_shards_as_ranks(rank: int, world: int) -> list[str]:
    """Buffers were laid out for all data-parallel ranks and reduced over fewer: the last shards had no owner, were
    never updated, and were missing in norms.

    Here the number of shards comes from the domain that reduces, and a shard that does not fit the ranks of a
    collective is refused before data moves.
    """

    def also(model: DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        sizes = {name: communicator.world for name, communicator in model.engine.communicators.items()}
        found = [] if sizes == {DENSE: 4, EXPERT: 2} else [f"the scene has domains {sizes}"]
        return found + [
            f"{bucket.label} has {bucket.world} shards for {sizes[bucket.domain]} ranks"
            for bucket in model.plan.buckets
            if bucket.world != sizes[bucket.domain]
        ]

    for layout in ("flat", "compact"):
        if found := arranged(rank, world, Arrangement(ep=2, layouts=(layout,), steps=2), also):
            return found
    return []


def laid_out_for_all(rank: int) -> Any:
    def widened(real: Callable[..., Plan]) -> Callable[..., Plan]:
        def plan(*given: Any, world: int, worlds: dict[str, int], **more: Any) -> Plan:
            return real(*given, world=world, worlds=dict.fromkeys(worlds, world), **more)

        return plan

    return in_place_of(engine, "plan_for", widened)


def dealt_to_all(rank: int) -> Any:
    def widened(real: Callable[..., Any]) -> Callable[..., Any]:
        def cut(params: Sequence[ParamSpec], size: int, world: int, owner_of: dict[str, int]) -> Any:
            return real(params, size, 4, storage.owners_of(params, 4))

        return cut

    return in_place_of(storage, "_cut_by_owner", widened)


CASES = (
    Case(
        name="R14",
        title="owners of params of equal size",
        world=3,
        check=owners_by_name,
        mistakes=(
            Mistake(
                what="params of equal size are dealt in the order in which they were found",
                put_in=owners_by_size_alone,
                seen_as="PlanMismatchError: ranks 0 and 1 derived different plans: bucket",
            ),
        ),
    ),
    Case(
        name="R16",
        title="params are whole, and all of them have a place",
        world=3,
        check=whole_and_complete,
        mistakes=(
            Mistake(
                what="a param lies across a shard border",
                put_in=cut_anywhere,
                seen_as="tall.weight crosses a shard",
            ),
            Mistake(
                what="a matrix across a shard border is orthogonalised in parts",
                put_in=cut_and_left_in_parts,
                seen_as="master of tall.weight",
            ),
            Mistake(
                what="a param is missing in the layout",
                put_in=forgotten,
                seen_as="tall.weight",
            ),
        ),
    ),
    Case(
        name="R23",
        title="a tied weight lies whole in one shard, in a bucket of its own",
        world=4,
        check=tied_weight_lies_alone,
        mistakes=(
            Mistake(
                what="the bucket of a tied weight is as long as the weight",
                put_in=bucket_as_long_as_the_weight,
                seen_as="the bucket of the tied weight has .* elements",
            ),
            Mistake(
                what="a tied weight shares its bucket with others",
                put_in=tied_weight_among_others,
                seen_as="tie 'the tie'",
            ),
        ),
    ),
    Case(
        name="R24",
        title="copies of an embedding under other names",
        world=4,
        check=copies_of_embeddings,
        mistakes=(
            Mistake(
                what="a stage does not know the embeddings of the others",
                put_in=stages_do_not_tell,
                seen_as="PlanMismatchError: tie 'embedding' is stored with layout flat on stage 0 .* and padded",
            ),
        ),
    ),
    Case(
        name="R25",
        title="as many shards as ranks that reduce",
        world=4,
        check=as_many_shards_as_ranks,
        mistakes=(
            Mistake(
                what="buffers of experts are laid out for all ranks",
                put_in=laid_out_for_all,
                seen_as="PlanMismatchError: bucket . is laid out for 4 ranks, domain 'expert' has 2",
            ),
            Mistake(
                what="params of experts are dealt to all ranks",
                put_in=dealt_to_all,
                seen_as="PlanMismatchError: bucket . is laid out for 4 ranks, domain 'expert' has 2",
            ),
        ),
    ),
)
