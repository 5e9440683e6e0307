"""Process groups of models that are dropped: as many as there are models, however many there were. And what a model says whose
groups the user left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import layerwise
from tests import seams
from tests.marks import sampled
from tests.ranks import raised, run_ranks
from tests.reference.oracle import Hyper
from tests.worlds import Net, net_loss, rules

PER_MODEL = 2
TIMES = 10


def known() -> int:
    """How many process groups this rank is in."""
    return len(distributed_c10d._world.pg_names)


class Trained:
    """A model that has made some steps, and whose weights are on their way."""

    def __init__(self, rank: int, steps: int = 2, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = seams.data_parallel(Net(), bucket_mib=1e-4, **options)
        self.optimizer = layerwise.Optimizer(self.model, **rules(Hyper()))
        for step in range(steps):
            self.step(rank, step)

    def step(self, rank: int, step: int) -> None:
        net_loss(self.model, rank, step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.module.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def options_of(kind: str, world: int) -> dict[str, Any]:
    match kind:
        case "process_group":
            return {"process_group": dist.new_group(list(range(world)))}
        case "mesh":
            return {"mesh": init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "ep"))}
        case "stages":
            return {"mesh": init_device_mesh("cpu", (1, world), mesh_dim_names=("pp", "dp")), "check_collectives": True}
        case "sync":
            return {"overlap_param_gather": False}
        case "few ahead":
            return {"prefetch": 1}
    return {}


def build_and_drop(rank: int, world: int, kind: str) -> list[int]:
    options = options_of(kind, world)
    first = Trained(rank, **options)
    expected, counts = first.weights(), [known()]
    for _ in range(TIMES // 2):
        first = Trained(rank, **options)
        counts.append(known())
        assert same(first.weights(), expected)
    return counts


@pytest.mark.parametrize(
    "kind", sampled(["all", "sync", "few ahead", "process_group", "mesh", "stages"], "all", "process_group")
)
def test_a_model_in_a_loop_has_the_groups_of_two(kind: str) -> None:
    for counts in run_ranks(2, build_and_drop, kind):
        own = counts[0] - 1
        # The one before is there until the new one is, since the name still has it.
        assert counts[1] <= 1 + 2 * own, counts
        assert counts[1:] == [counts[1]] * (TIMES // 2), counts


def drop_first(rank: int, world: int) -> list[int]:
    """The old model goes before the new one is built, also with reductions under way."""
    counts = []
    for number in range(TIMES):
        dropped = Trained(rank)
        counts.append(known())
        if number % 2:
            net_loss(dropped.model, rank, 2).backward()
        del dropped
    return counts


def test_what_was_dropped_before_is_gone_when_the_next_is_built() -> None:
    assert run_ranks(2, drop_first) == [[1 + PER_MODEL] * TIMES] * 2


def hold_on(rank: int, world: int) -> tuple[list[int], bool]:
    """Rank 1 keeps its first model for a while, rank 0 drops it at once."""
    kept: Trained | None = Trained(rank)
    expected = kept.weights() if kept is not None else []
    if rank == 0:
        kept = None
    counts, alike = [], True
    for number in range(6):
        if number == 3:
            kept = None
        alike &= same(Trained(rank).weights(), expected)
        counts.append(known())
    return counts, alike


def test_a_rank_that_still_has_its_model_keeps_the_groups_for_all() -> None:
    for counts, alike in run_ranks(2, hold_on):
        assert counts == [1 + 2 * PER_MODEL] * 3 + [1 + PER_MODEL] * 3
        assert alike


def two_live(rank: int, world: int) -> tuple[list[int], bool]:
    """Two models that are trained in turn, while others come and go."""
    one, other, counts = Trained(rank, 0), Trained(rank, 0), []
    for step in range(4):
        Trained(rank, 1)
        one.step(rank, step)
        other.step(rank, step)
        counts.append(known())
    return counts, same(one.weights(), other.weights()) and same(one.weights(), Trained(rank, 4).weights())


def test_models_that_live_are_left_alone() -> None:
    assert run_ranks(2, two_live) == [([1 + 3 * PER_MODEL] * 4, True)] * 2


def one_launched_more(rank: int, world: int) -> list[int]:
    """Ranks that dropped a model at different points of a step. Only the count is put on: a real one would wait."""
    first = Trained(rank)
    first.model.ensure()
    if rank == 0:
        group = first.model.engine.groups.training
        assert group is not None
        first.model.engine.groups.made.issued[group.group_name] += 1
    del first
    counts = []
    for _ in range(3):
        Trained(rank)
        counts.append(known())
    return counts


def test_a_group_over_which_one_rank_launched_more_is_left_as_it_is() -> None:
    assert run_ranks(2, one_launched_more) == [[2 + PER_MODEL] * 3] * 2


def refused(rank: int, world: int) -> list[int]:
    counts = []
    for _ in range(4):
        assert "bucket_mib must be" in raised(lambda: layerwise.DataParallel(Net(), bucket_mib=-1))
        counts.append(known())
    Trained(rank)
    return [*counts, known()]


def test_a_model_that_was_refused_leaves_no_groups() -> None:
    for counts in run_ranks(2, refused):
        assert max(counts) <= 1 + 2 * PER_MODEL, counts
        assert counts[-1] == 1 + PER_MODEL


def parts_of_the_world(rank: int, world: int) -> list[int]:
    """Models on some ranks, dropped; then one on all of them, and one on some again."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    before, counts = known(), []
    if rank < 2:
        Trained(rank, process_group=pairs[0])
    if rank > 0:
        Trained(rank, process_group=pairs[1])
    counts.append(known() - before)
    Trained(rank)
    counts.append(known() - before)
    if rank > 0:
        Trained(rank, process_group=pairs[1])
    counts.append(known() - before)
    return counts


def test_groups_of_some_ranks_go_when_all_of_them_are_there() -> None:
    found = run_ranks(3, parts_of_the_world)
    assert [counts[0] for counts in found] == [PER_MODEL, 2 * PER_MODEL, PER_MODEL]
    assert [counts[1] for counts in found] == [PER_MODEL] * 3, "those of pairs are gone"
    # The one of all ranks stays: rank 0 is not there to say that it has put it aside.
    assert [counts[2] for counts in found] == [PER_MODEL, 2 * PER_MODEL, 2 * PER_MODEL]


def unwrap_in_a_group(rank: int, world: int) -> list[int]:
    pair, counts = dist.new_group([0, 1]), []
    for _ in range(4):
        Trained(rank, process_group=pair).model.unwrap()
        counts.append(known())
    return counts


def test_groups_that_are_known_for_their_names_alone_go_at_once() -> None:
    assert run_ranks(2, unwrap_in_a_group) == [[2] * 4] * 2


# ------------------------------------------------------------------------------------------------ groups that the user left


def sharded_model() -> tuple[torch.nn.Module, layerwise.Optimizer]:
    module = Net()
    fully_shard(module)
    return module, layerwise.Optimizer(module, **rules(Hyper()))


def after_the_group(rank: int, world: int, folder: str, again: bool) -> tuple[dict[str, str], bool]:
    """What each use of a model says after its groups were destroyed, and whether weights stayed as they were."""
    models = {name: Trained(rank) for name in ("step", "clip", "load", "save", "consolidate", "unwrap")}
    lazy, alone = (
        Trained(rank, prefetch=1),
        Trained(rank, process_group=dist.new_group([rank], use_local_synchronization=True)),
    )
    sharded, its_optimizer = sharded_model()
    for param in sharded.parameters():
        param.grad = torch.ones_like(param)
    layerwise.save(f"{folder}/saved", models["load"].model, models["load"].optimizer)
    before = {name: trained.weights() for name, trained in models.items()}
    dist.barrier()
    dist.destroy_process_group()
    if again:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    found = {
        "step": raised(lambda: models["step"].step(rank, 9)),
        "optimizer.step": raised(models["step"].optimizer.step),
        "clip": raised(lambda: models["clip"].model.clip_grad_norm_(1.0)),
        "load": raised(lambda: layerwise.load(f"{folder}/saved", models["load"].model, models["load"].optimizer)),
        "save": raised(
            lambda: layerwise.save(f"{folder}/new", models["save"].model, models["save"].optimizer, background=True)
        ),
        "consolidate": raised(models["consolidate"].optimizer.consolidate_state_dict),
        "forward": raised(lambda: net_loss(lazy.model, rank, 9)),
        "sharded": raised(its_optimizer.step),
        # What sends nothing goes on.
        "evaluate": raised(lambda: net_loss(models["unwrap"].model, rank, 9)),
        "state_dict": raised(lambda: models["unwrap"].optimizer.state_dict(part=True)),
        "unwrap": raised(models["unwrap"].model.unwrap),
        "alone": raised(lambda: alone.step(rank, 9)),
    }
    stayed = all(same(before[name], trained.weights()) for name, trained in models.items())
    if again:
        del models, lazy, alone
        found["anew"] = raised(lambda: Trained(rank))
    return found, stayed


@pytest.mark.parametrize("again", [True, False])
def test_a_model_whose_group_the_user_left_says_so_before_anything_is_sent(tmp_path: Path, again: bool) -> None:
    for found, stayed in run_ranks(2, after_the_group, str(tmp_path), again):
        assert stayed
        goes_on = {"evaluate", "state_dict", "unwrap", "alone", *(["anew"] if again else [])}
        assert {name for name, said in found.items() if said == "nothing was raised"} == goes_on, found
        for name in found.keys() - goes_on:
            assert found[name].startswith("StateError: the model belongs to a process group that is gone, and "), found[
                name
            ]
            assert "Build the module and these anew" in found[name]


# ------------------------------------------------------------------------------------------------ groups that overlap


def overlapping(rank: int, world: int) -> list[list[str]]:
    """Groups of models on pairs of ranks, where the ranks are in different numbers of groups; then on all of them."""
    pairs, spare = [dist.new_group([0, 1]), dist.new_group([1, 2])], dist.new_group()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)  # torch counts this one on rank 0 alone
    trained = [
        Trained(rank, process_group=pair) for ranks, pair in zip(((0, 1), (1, 2)), pairs, strict=True) if rank in ranks
    ]
    dist.destroy_process_group(spare)
    for number, ranks in enumerate(((0, 1), (1, 2))):
        if rank in ranks:
            trained.append(Trained(rank, process_group=pairs[number]))
    return [[group.group_name for group in one.model.engine.groups.made._groups] for one in trained]


def test_ranks_in_different_numbers_of_groups_find_each_other() -> None:
    (first, again), (mine, other, mine_again, other_again), (last, last_again) = run_ranks(
        3, overlapping, timeout_s=120, pg_timeout_s=60
    )
    assert (first, again, last, last_again) == (mine, mine_again, other, other_again), "one name on all members"
    names = [*mine, *other, *mine_again, *other_again]
    assert len(set(names)) == len(names) == 4 * PER_MODEL, "and no two of one name"
    assert all(name.startswith("layerwise ") for name in names), (
        "torch's own names count groups, each version otherwise"
    )
