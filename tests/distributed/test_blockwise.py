"""Blocks of tensor parallelism across checkpoints: momenta belong to elements and go anywhere, what homes keep of a block belongs to
the block."""

from __future__ import annotations

from pathlib import Path

import pytest

import layerwise
from tests.marks import sampled
from tests.mesh_zoo import Scene, Stage
from tests.ranks import raised, run_ranks

Save = tuple[str, str]
"""A mesh, and what becomes of matrices that tensor parallelism has cut."""
FOUR: Save = ("tp 4", "blockwise")
TWO: Save = ("fsdp+tp 2x2", "blockwise")
WHOLE: Save = ("fsdp+tp 2x2", "auto")


def goes_on(rank: int, world: int, path: str, rule: str, saved: Save, loaded: Save) -> tuple[str, list[str]]:
    """A run is saved after two steps; another one, that has taken a step of its own, loads it and takes a third. What loading
    said, and what is not as with an oracle that has taken all steps, block by block as each run has them."""
    one = Stage(rank, Scene(saved[0], "grouped", rule, tp_mode=saved[1]))
    for step in range(2):
        one.oracle.step([one.deliver(step)])
        one.optimizer.step()
    layerwise.save(path, one.model, one.optimizer)
    wrong = one.differs()
    two = Stage(rank, Scene(loaded[0], "grouped", rule, tp_mode=loaded[1]))
    two.deliver(7)
    two.optimizer.step()
    before = two.hash()
    said = raised(lambda: layerwise.load(path, two.model, two.optimizer))
    if said != "nothing was raised":
        return said, wrong + ([] if two.hash() == before else ["a load that failed changed something"])
    two.oracle.masters, two.oracle.state = one.oracle.masters, one.oracle.state
    two.oracle.step_count = one.oracle.step_count
    two.oracle.step([two.deliver(2)])
    two.optimizer.step()
    return said, wrong + two.differs()


@pytest.mark.parametrize(
    ("rule", "saved", "loaded"),
    sampled(
        [
            ("muon", FOUR, TWO),
            ("muon", TWO, FOUR),
            ("muon", FOUR, WHOLE),
            ("muon", WHOLE, TWO),
            ("normuon", TWO, TWO),
            ("adamuon", FOUR, FOUR),
        ],
        ("muon", FOUR, TWO),
        ("normuon", TWO, TWO),
    ),
)
def test_a_run_goes_on_where_nothing_is_kept_of_blocks_or_they_are_the_same(
    tmp_path: Path, rule: str, saved: Save, loaded: Save
) -> None:
    assert run_ranks(4, goes_on, str(tmp_path / "saved"), rule, saved, loaded) == [("nothing was raised", [])] * 4


@pytest.mark.parametrize(
    ("rule", "saved", "loaded"),
    sampled(
        [("normuon", FOUR, TWO), ("adamuon", TWO, WHOLE), ("normuon", WHOLE, FOUR)],
        ("normuon", FOUR, TWO),
    ),
)
def test_what_homes_keep_of_other_blocks_is_refused_by_name(
    tmp_path: Path, rule: str, saved: Save, loaded: Save
) -> None:
    for said, wrong in run_ranks(4, goes_on, str(tmp_path / "saved"), rule, saved, loaded):
        assert "'blocks.0.out.weight' was split into" in said
        assert "homes keep state of others" in said
        assert wrong == []
