"""Models that somebody else has cut: what reviewers asked of a first Muon for FSDP, and what goes wrong where the answer is no.

Q and a number is the question as docs/sharded.md has it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate

import layerwise
from layerwise.comm import sharded
from layerwise.engine import engine, stats
from layerwise.engine.exchanger import Cohort, Passage
from layerwise.engine.factors import Factors
from layerwise.engine.gradients import OwnGradients
from layerwise.engine.measure import Measure
from layerwise.engine.stats import StatsPass
from layerwise.engine.update import Update
from layerwise.kernels.lists import Cuts
from layerwise.layout.meshes import Cut
from layerwise.optim import engines
from layerwise.routing.spec import DENSE
from tests.distributed import test_sharded_refused, test_sharded_state
from tests.mesh_zoo import Scene, Stage, play, problems
from tests.meshes import local
from tests.ranks import raised
from tests.regressions.cases import Case, Mistake, in_place_of


def beside_oracle(rank: int, world: int, *scenes: Scene) -> list[str]:
    """What is wrong with models of the mesh zoo: what this rank saw, and on rank 0 what shows when all ranks are seen together."""
    found: list[str] = []
    for scene in scenes:
        (seen,) = play(rank, world, [scene])
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, seen)
        if any(other.found for other in everyone):
            return seen.found
        found += problems(scene, everyone) if rank == 0 else []
    return found


# ------------------------------------------------------------------------------------------------ no objects, no second shards


def nothing_but_numbers(rank: int, world: int) -> list[str]:
    """Ranks told each other in every step, in pickled objects and matrix by matrix, what they hold of it.

    Here that is derived from meshes and placements, once, and what goes over the wire in a step is the plan's to the byte.
    """
    return beside_oracle(rank, world, Scene("fsdp 2", "grouped"))


def boxes_told_in_every_step(rank: int) -> Any:
    def telling(real: Callable[..., Any]) -> Callable[..., Any]:
        def begin(self: Measure, *given: Any) -> Any:
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, [shard.spans for shard in self._engine.storage.shards])
            return real(self, *given)

        return begin

    return in_place_of(Measure, "begin", telling)


def sharded_once(rank: int, world: int) -> list[str]:
    """A layer-wise optimizer on top of FSDP gave whole params to ranks that held nothing of them: those were never updated.

    Here shards are those of `fully_shard`, and a wrapper that would make others of them refuses.
    """
    found = []
    for how, (cut, fqn) in test_sharded_refused.CUTS.items():
        model = test_sharded_refused.Model()
        cut(model, world)
        said = raised(lambda model=model: layerwise.DataParallel(model))
        if f"param {fqn!r} is a DTensor" not in said:
            found.append(f"a DataParallel around {how}: {said[:200]}")
    return found


def anything_is_wrapped(rank: int) -> Any:
    return mock.patch.object(engine, "refuse_sharded", return_value=None)


# ------------------------------------------------------------------------------------------------ experts


def experts_on_their_own_ranks(rank: int, world: int) -> list[str]:
    """Experts were gathered over the ranks of dense params, or went to Adam without a word.

    Here domain and boxes of a param come from its own mesh, and a stack is one matrix per expert.
    """
    return beside_oracle(
        rank,
        world,
        Scene("ep x fsdp 2x2 dim 1", "mixture"),
        Scene("apart ep x fsdp 2x2 dim 1", "quartet"),
        Scene("ep beside fsdp 4", "mixture"),
    )


def experts_are_copies(rank: int) -> Any:
    return mock.patch.object(engines, "domains_by_prefix", return_value=lambda fqn: DENSE)


# ------------------------------------------------------------------------------------------------ missing gradients


def missing_gradients(rank: int, world: int) -> list[str]:
    """A rank with an empty shard has no gradient of it and left a collective that others waited in; and a gradient that is
    missing was an error on one rank and nothing on another.

    Here one rule is applied to reduced counts, by all ranks alike: who holds nothing misses nothing, a part that none of
    its holders has a gradient of counts as zero, and copies that disagree are an error.
    """
    return [
        *_without_gradients(
            rank, "fsdp 4", "odd", lambda stage, fqn: local(stage.params[fqn]).numel() == 0, strict=True
        ),
        *_without_gradients(
            rank, "ep beside fsdp 4", "mixture", lambda _, fqn: rank == 2 and fqn.endswith("experts.up")
        ),
        *_disagreeing(rank),
    ]


def _without_gradients(
    rank: int, mesh: str, model: str, lacks: Callable[[Stage, str], bool], *, strict: bool = False
) -> list[str]:
    stage = Stage(rank, Scene(mesh, model), gradient_policy=layerwise.GradientPolicy(strict_grads=strict))
    for step in range(2):
        grads = stage.deliver(step)
        lacking: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(lacking, [fqn for fqn in stage.params if lacks(stage, fqn)])
        for other, fqns in enumerate(lacking):
            for fqn in fqns:
                grads[fqn][stage.mesh.box(stage.model, fqn, stage.whole[fqn].shape, other)] = 0.0
        for fqn in lacking[rank]:
            stage.params[fqn].grad = None
        stage.oracle.step([grads])
        stage.optimizer.step()
    return [f"rank {rank} on {mesh}: weight of {fqn}" for fqn in stage.differs()]


def _disagreeing(rank: int) -> list[str]:
    stage = Stage(rank, Scene("hsdp 2x2", "dense"))
    stage.deliver(0)
    if rank in (0, 3):  # 0 and 2 have copies, and 1 and 3
        stage.params["blocks.0.up.weight"].grad = None
    said = raised(stage.optimizer.step)
    return [] if "(missing on 2 of 4 ranks)" in said else [f"one copy has a gradient and one has none: {said}"]


def empty_shards_miss_gradients(rank: int) -> Any:
    def all_missing(real: Callable[..., frozenset[str]]) -> Callable[..., frozenset[str]]:
        def finish(self: OwnGradients) -> frozenset[str]:
            return real(self) | (self._params.keys() - self.arrived)

        return finish

    return in_place_of(OwnGradients, "finish", all_missing)


def parts_must_agree(rank: int) -> Any:
    def any_partial(self: StatsPass, found: Any, joint: Collection[str]) -> list[int]:
        counts = zip(found.missing, self._everywhere, strict=True)
        return [index for index, (missing, everywhere) in enumerate(counts) if 0 < missing < everywhere]

    return mock.patch.object(StatsPass, "_disagreeing", any_partial)


def nobody_has_to_agree(rank: int) -> Any:
    return mock.patch.object(StatsPass, "_disagreeing", return_value=[])


def parts_make_up_for_each_other(rank: int) -> Any:
    def unweighted(real: Callable[..., int]) -> Callable[..., int]:
        def vote(*given: Any) -> int:
            found = real(*given)
            return (found > 0) - (found < 0)

        return vote

    return in_place_of(stats, "_vote", unweighted)


# ------------------------------------------------------------------------------------------------ replicas


def replicas_share(rank: int, world: int) -> list[str]:
    """The ranks that held a matrix were looked up along one dim of the mesh: HSDP was refused, or its replicas each did all
    of the work.

    Here boxes are those of the whole mesh, and ranks with the same one are copies: each matrix has one home, and what comes
    back goes to all of them.
    """
    return beside_oracle(rank, world, Scene("hsdp 2x2", "dense"), Scene("fsdp+tp 2x2", "fours"))


def copies_are_cuts(rank: int) -> Any:
    def cutting(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda fqn, placement, ndim: Cut(0, 1) if placement.is_replicate() else real(fqn, placement, ndim)

    return in_place_of(sharded, "_cut", cutting)


def outer_cuts_are_missed(rank: int) -> Any:
    def missing(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*given: Any, **more: Any) -> Any:
            placed = real(*given, **more)
            return placed._replace(cuts=(None, *placed.cuts[1:])) if len(placed.cuts) > 1 else placed

        return read

    return in_place_of(sharded, "_read", missing)


# ------------------------------------------------------------------------------------------------ state and placements


def state_lies_as_params_do(rank: int, world: int) -> list[str]:
    """State came into being with the first step, and on no rank with an empty shard: a checkpoint before it, or of such a
    rank, had none. A whole update that was added to a sharded weight made a whole weight of it.

    Here state is made at construction, on every rank, as DTensors with the param's placements, and updates are written into
    local tensors.
    """
    return [f"rank {rank}: {text}" for text in test_sharded_state.placements(rank, world)]


def state_with_the_first_step(rank: int) -> Any:
    def late(real: Callable[..., None]) -> Callable[..., None]:
        def step(self: layerwise.Optimizer, *given: Any) -> None:
            for entries in self.state.values():
                entries.update({name: tensor.clone() for name, tensor in entries.items() if name != "step"})
            real(self, *given)

        return step

    return in_place_of(layerwise.Optimizer, "step", late)


def whole_state(rank: int) -> Any:
    def gathered(real: Callable[..., None]) -> Callable[..., None]:
        def step(self: layerwise.Optimizer, *given: Any) -> None:
            real(self, *given)
            for entries in self.state.values():
                if "momentum" in entries:
                    entries["momentum"] = entries["momentum"].redistribute(placements=[Replicate()])

        return step

    return in_place_of(layerwise.Optimizer, "step", gathered)


# ------------------------------------------------------------------------------------------------ whole matrices


def whole_matrices(rank: int, world: int) -> list[str]:
    """Newton-Schulz saw rows of padding, or the rows of one shard: the update has another scale, or is another one.

    Here a matrix is put together from its regions, without any padding, and its scale is that of its whole shape.
    """
    return beside_oracle(rank, world, Scene("fsdp 3", "odd"), Scene("tp 3", "odd"))


def scale_of_the_own_rows(rank: int) -> Any:
    def by_region(self: Update, regions: Any) -> Factors:
        shapes = [(region.matrix.fqn, tuple(region.master.shape)) for region in regions]
        return Factors((self._group_of[fqn], (shape[0], shape[-1])) for fqn, shape in shapes)

    return mock.patch.object(Update, "_factors_of", by_region)


def own_rows_only(rank: int) -> Any:
    def alone(real: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        def unpack(self: Cohort, passage: Passage) -> list[Tensor]:
            with mock.patch.object(self, "_arriving", Cuts([])), mock.patch.object(torch, "empty", torch.zeros):
                return real(self, passage)

        return unpack

    return in_place_of(Cohort, "unpack", alone)


# ------------------------------------------------------------------------------------------------ norms


def counted_once_on_any_mesh(rank: int, world: int) -> list[str]:
    """Norms were summed over the replicas of HSDP as over its shards, and over tensor-parallel ranks that held copies.

    Here an element counts where it is first held, whatever the mesh.
    """
    return beside_oracle(
        rank,
        world,
        Scene("hsdp 2x2", "dense", clip=0.75),
        Scene("fsdp+tp 2x2", "dense", clip=0.75),
        Scene("ep x fsdp 2x2 dim 0", "mixture", clip=0.75),
    )


def every_copy_counts(rank: int) -> Any:
    return mock.patch.object(stats, "speaks_for", return_value=True)


CASES = (
    Case(
        name="Q6",
        title="no objects travel in a step",
        world=2,
        check=nothing_but_numbers,
        mistakes=(
            Mistake(
                what="ranks tell each other what they hold in every step",
                put_in=boxes_told_in_every_step,
                seen_as="an object travelled after construction",
            ),
        ),
    ),
    Case(
        name="Q1",
        title="a model is sharded once",
        world=2,
        check=sharded_once,
        mistakes=(
            Mistake(
                what="a wrapper takes what is sharded already",
                put_in=anything_is_wrapped,
                seen_as="a DataParallel around fully_shard",
            ),
        ),
    ),
    Case(
        name="Q2",
        title="experts are updated over their own ranks, as matrices",
        world=4,
        check=experts_on_their_own_ranks,
        mistakes=(
            Mistake(
                what="experts of different meshes are taken for copies",
                put_in=experts_are_copies,
                seen_as=r"param 'blocks\.0\.experts\.\w+' has other values on rank",
            ),
        ),
    ),
    Case(
        name="Q5",
        title="one rule for missing gradients",
        world=4,
        check=missing_gradients,
        mistakes=(
            Mistake(
                what="a rank that holds nothing of a param misses its gradient",
                put_in=empty_shards_miss_gradients,
                seen_as="strict_grads=True expects one",
            ),
            Mistake(
                what="experts without tokens are taken for a gradient that somebody lacks",
                put_in=parts_must_agree,
                seen_as="some ranks have a gradient and some have none: 'blocks.0.experts.up",
            ),
            Mistake(
                what="copies are not compared",
                put_in=nobody_has_to_agree,
                seen_as="one copy has a gradient and one has none: nothing was raised",
            ),
            Mistake(
                what="what one copy lacks makes up for what another one does",
                put_in=parts_make_up_for_each_other,
                seen_as="one copy has a gradient and one has none: nothing was raised",
            ),
        ),
    ),
    Case(
        name="Q7",
        title="replicas share the work",
        world=4,
        check=replicas_share,
        mistakes=(
            Mistake(
                what="a dim of the mesh that copies is taken for one that cuts",
                put_in=copies_are_cuts,
                seen_as="has a local tensor of shape",
            ),
            Mistake(
                what="a cut along the outer dim of the mesh is missed",
                put_in=outer_cuts_are_missed,
                seen_as="has a local tensor of shape",
            ),
        ),
    ),
    Case(
        name="Q8",
        title="state lies as params do, from the start and for good",
        world=4,
        check=state_lies_as_params_do,
        mistakes=(
            Mistake(
                what="state comes into being with the first step",
                put_in=state_with_the_first_step,
                seen_as="state 'momentum' of param '0.weight' was replaced or removed",
            ),
            Mistake(
                what="an update leaves whole tensors behind",
                put_in=whole_state,
                seen_as="state 'momentum' of param '0.weight' was replaced or removed",
            ),
        ),
    ),
    Case(
        name="Q11",
        title="matrices are whole, and nothing is padded",
        world=3,
        check=whole_matrices,
        mistakes=(
            Mistake(
                what="the scale is that of the rows that a rank has",
                put_in=scale_of_the_own_rows,
                seen_as="weight of",
            ),
            Mistake(
                what="each home orthogonalises the rows that it has",
                put_in=own_rows_only,
                seen_as="weight of",
            ),
        ),
    ),
    Case(
        name="Q12",
        title="norms count every element once on any mesh",
        world=4,
        check=counted_once_on_any_mesh,
        mistakes=(
            Mistake(
                what="every replica counts",
                put_in=every_copy_counts,
                seen_as="grad norm .* against",
            ),
        ),
    ),
)
