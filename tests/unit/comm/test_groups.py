from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import layerwise
from layerwise.comm.device_mesh import check_mesh
from layerwise.comm.groups import (
    NO_GROUPS,
    Groups,
    agree,
    all_ranks,
    arranged,
    derive_together,
    share,
    tie_groups,
)
from tests import seams
from tests.ranks import raised, run_ranks


def test_a_process_without_a_group_is_one_rank_in_every_domain() -> None:
    assert all_ranks() is NO_GROUPS
    assert {(name, domain.rank, domain.world) for name, domain in NO_GROUPS.domains.items()} == {
        ("dense", 0, 1),
        ("expert", 0, 1),
    }
    assert (NO_GROUPS.rank, NO_GROUPS.world, NO_GROUPS.stage, NO_GROUPS.stage_of) == (0, 1, 0, (0,))
    assert arranged(NO_GROUPS, None) is NO_GROUPS


def test_a_mesh_that_is_none_is_refused_by_type() -> None:
    check_mesh(None)
    with pytest.raises(TypeError, match=r"mesh must be a torch DeviceMesh, got tuple\. Leave it out"):
        check_mesh((2, 2))


def refusals(rank: int, world: int) -> list[str]:
    meshes = [
        init_device_mesh("cpu", (2, 1)),
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")),
        DeviceMesh("cpu", torch.tensor([0]), mesh_dim_names=("dp",)),
        init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)),
    ]
    dist.barrier()  # a rank that leaves while others still connect would take them down
    return [raised(lambda mesh=mesh: check_mesh(mesh)) for mesh in meshes]  # type: ignore[misc]


def test_a_mesh_of_other_dims_or_not_of_all_ranks_is_refused_in_words() -> None:
    (nameless, unknown, partial, fine), other = run_ranks(2, refusals)
    assert other == [nameless, unknown, partial, fine]
    assert nameless.startswith(
        "ValueError: mesh has the dims None: expected names out of 'pp', 'dp', 'ep'. Dense params are"
    )
    assert unknown.startswith("ValueError: mesh has the dims ('dp', 'tp'): expected names out of")
    assert "give mesh_dim_names to init_device_mesh()" in unknown
    assert partial.startswith(
        "ValueError: mesh has the ranks [0], the process group 2 ranks: expected every rank once."
    )
    assert fine == "nothing was raised"


def wrap_on_some(rank: int, world: int) -> str:
    """The ranks of a mesh wrap a model; the others never come."""
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("dp",))
    found = raised(lambda: layerwise.DataParallel(torch.nn.Linear(2, 2), mesh=mesh)) if rank < 2 else "elsewhere"
    dist.barrier()
    return found


def test_a_mesh_of_some_ranks_is_refused_before_others_are_waited_for() -> None:
    first, second, other = run_ranks(3, wrap_on_some, pg_timeout_s=20)
    assert first == second
    assert first.startswith(
        "ValueError: mesh has the ranks [0, 1], the process group 3 ranks: expected every rank once."
    )
    assert other == "elsewhere"


def members(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else sorted(dist.get_process_group_ranks(group))


def arrange(rank: int, world: int, shape: tuple[int, ...], dims: tuple[str, ...], ranks: Any = None) -> dict[str, Any]:
    """Who sits where, as this rank sees it."""
    if ranks is None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
    else:
        mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=dims)
    with seams.compare_collectives():
        groups = arranged(all_ranks(), mesh)
    found: dict[str, Any] = {"stages": groups.stages, "stage": groups.stage, "stage_of": groups.stage_of}
    for name, domain in groups.domains.items():
        found[name] = (domain.rank, domain.world, members(domain.group))
        assert members(domain.control) == members(domain.group)
    ties = tie_groups(groups, {"all": range(len(groups.stages))}) if len(groups.stages) > 1 else {}
    found["ties"] = {name: (tie.rank, members(tie.group)) for name, tie in ties.items()}
    dist.barrier()
    return found


def test_stages_domains_and_ties_of_a_mesh_of_three_dims() -> None:
    everyone = run_ranks(8, arrange, (2, 2, 2), ("pp", "dp", "ep"))
    for rank, found in enumerate(everyone):
        stage, place = divmod(rank, 4)
        here = [4 * stage + other for other in range(4)]
        copies = [4 * stage + place % 2, 4 * stage + place % 2 + 2]  # the same experts: every other rank of the stage
        assert found["stages"] == ((0, 1, 2, 3), (4, 5, 6, 7))
        assert (found["stage"], found["stage_of"]) == (stage, (0, 0, 0, 0, 1, 1, 1, 1))
        assert found["dense"] == (place, 4, here)
        assert found["expert"] == (place // 2, 2, copies)
        assert found["ties"] == {"all": (stage, [place, place + 4])}


def test_dims_may_come_in_any_order_and_be_left_out() -> None:
    for rank, found in enumerate(run_ranks(4, arrange, (2, 2), ("ep", "dp"))):
        assert found["stages"] == ((0, 1, 2, 3),)
        assert found["dense"] == (rank, 4, [0, 1, 2, 3])
        assert found["expert"] == (rank % 2, 2, [0, 1] if rank < 2 else [2, 3])
    for rank, found in enumerate(run_ranks(3, arrange, (3,), ("pp",))):
        assert found["stages"] == ((0,), (1,), (2,))
        assert found["dense"] == found["expert"] == (0, 1, [])
        assert found["ties"] == {"all": (rank, [0, 1, 2])}


def test_ranks_may_lie_in_the_mesh_in_any_order() -> None:
    everyone = run_ranks(4, arrange, (), ("pp", "dp"), [[3, 1], [0, 2]])
    assert {found["stages"] for found in everyone} == {((1, 3), (0, 2))}
    assert [found["dense"][:2] for found in everyone] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [found["ties"]["all"][1] for found in everyone] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def compare(rank: int, world: int, facts: list[dict[str, object]], across: bool) -> str:
    """Two stages of two ranks: which differences between ranks are told?"""
    groups = arranged(all_ranks(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))
    return raised(lambda: agree(groups, "plans", facts[rank], across_stages=across))


@pytest.mark.parametrize(
    ("values", "across", "told"),
    [
        ([1, 1, 1, 1], True, ""),
        ([1, 1, 2, 2], False, ""),
        ([1, 1, 2, 2], True, "ranks 0 and 2 derived different plans: plan, x: 1 against 2."),
        ([1, 1, 2, 3], False, "ranks 2 and 3 derived different plans: plan, x: 2 against 3."),
        ([1, 4, 2, 3], False, "ranks 0 and 1 derived different plans: plan, x: 1 against 4."),
    ],
)
def test_ranks_agree_within_their_stage_or_across_all(values: list[int], across: bool, told: str) -> None:
    for answer in run_ranks(4, compare, [{"x": value} for value in values], across):
        assert answer.startswith(f"PlanMismatchError: {told}" if told else "nothing was raised")


def fail_on(rank: int, world: int, failing: list[int]) -> tuple[str, str]:
    groups = arranged(all_ranks(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))

    def derive() -> dict[str, object]:
        if rank in failing:
            raise FloatingPointError(f"on {rank}")
        return {"rank": rank // 2}

    together = raised(lambda: derive_together(groups, "plans", derive, lambda found: found))
    return together, raised(lambda: share(groups, derive))


@pytest.mark.parametrize("failing", [[1], [2, 3], [0, 1, 2, 3]])
def test_an_error_on_some_ranks_of_one_stage_is_an_error_on_all_ranks_of_all_stages(failing: list[int]) -> None:
    for rank, answers in enumerate(run_ranks(4, fail_on, failing)):
        for answer in answers:
            if rank in failing:
                assert answer == f"FloatingPointError: on {rank}"
            else:
                assert answer.startswith(
                    f"PlanMismatchError: rank {failing[0]} failed where others did not: FloatingPointError: on {failing[0]}"
                )


def share_all(rank: int, world: int) -> list[Any]:
    return list(share(all_ranks(), lambda: {"rank": rank}))


def test_shared_facts_come_in_order_of_rank() -> None:
    assert run_ranks(3, share_all) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3
    assert share(NO_GROUPS, lambda: {"alone": True}) == [{"alone": True}]
    with pytest.raises(ZeroDivisionError):
        share(NO_GROUPS, lambda: {"x": 1 // 0})


def test_every_rank_has_exactly_one_stage() -> None:
    groups = Groups(training=None, control=None, domains={}, stages=((0,),))
    assert groups.stage == 0


def names_of_a_pair(rank: int, world: int) -> list[str]:
    """Names of the process groups of a model on ranks 0 and 1, where rank 0 is in one group more than rank 1."""
    pair = dist.new_group([0, 1])
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    if rank == 2:
        return []
    model = layerwise.DataParallel(torch.nn.Linear(2, 2), process_group=pair)
    return [group.group_name for group in model.engine.groups.made._groups]


def test_groups_of_some_ranks_have_names_of_our_own_which_all_members_know() -> None:
    first, second, _ = run_ranks(3, names_of_a_pair, pg_timeout_s=60)
    assert first == second
    assert len(set(first)) == len(first) > 0
    assert all(name.startswith("layerwise ") for name in first)
