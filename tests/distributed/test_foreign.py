"""Weights that torchao has quantised: they train to the bits of bf16 ones of which torchao makes codes whenever they are used."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import layerwise
from layerwise.kernels.torchao_mx import MXStorage
from tests.foreign import MXWay, build, faults, prepare, take_step, train
from tests.marks import sampled
from tests.quantizing import Seen, difference
from tests.ranks import raised, run_ranks
from tests.worlds import hash_tensors, put_together

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install 'layerwise[dev]'"
)

STEPS = 5
WAYS = {
    "flat": MXWay(),
    "padded": MXWay("padded"),
    "compact, waited for": MXWay("compact", overlap=False),
    "replicated": MXWay("replicated"),
    "gradients released": MXWay(options=(("shard_grads", True),)),
    "scales as torchao's own config has them": MXWay(mode="rceil", swizzled=True),
    "everything checked": MXWay(options=(("check_collectives", True), ("check_replicas", True))),
}


def on_and_off(rank: int, world: int, name: str) -> list[str]:
    """Codes kept against codes made at use, and whether gathers were put off where they were to be."""
    way = WAYS[name]
    on, off = train(rank, way, STEPS), train(rank, way, STEPS, at_use=True)
    text = difference(on, off)
    if not text and way.overlap and on.deferred == 0 and way.layout != "replicated":
        text = "no gather was put off"
    return [f"rank {rank} {name}: {text}"] if text else []


def all_found(found: list[list[str]]) -> list[str]:
    return [text for texts in found for text in texts]


CASES = [(world, name) for world in (3, 1, 2) for name in WAYS]


@pytest.mark.parametrize(
    ("world", "name"),
    sampled(CASES, (1, "flat"), (2, "scales as torchao's own config has them"), (3, "flat")),
)
def test_weights_of_torchao_train_to_the_bits_of_bf16_ones_that_it_quantises_at_use(world: int, name: str) -> None:
    assert all_found(run_ranks(world, on_and_off, name)) == []


def made_wrong(rank: int, world: int) -> list[str]:
    """Weights take over slightly other values than what is gathered, the same on all ranks."""
    model, optimizer = prepare(MXWay())
    take_step(model, rank, 0, Seen())
    real = MXStorage.settle

    def settle(self: MXStorage, values: Tensor) -> None:
        wrong = values.clone()
        wrong.view(-1)[0] = wrong.view(-1)[0] * 1.25 + 0.01
        real(self, wrong)

    with mock.patch.object(MXStorage, "settle", settle):
        optimizer.step()
        return faults(model, MXWay())


@pytest.mark.slow
def test_control_a_code_that_is_off_is_seen() -> None:
    found = all_found(run_ranks(2, made_wrong))
    assert found
    assert all("are not those of its master" in text or "does not read as its codes" in text for text in found)


def unlike(rank: int, world: int) -> str:
    """One rank takes over other values than the rest."""
    model, optimizer = prepare(MXWay(overlap=False, options=(("check_replicas", True),)))
    real = MXStorage.settle
    with mock.patch.object(MXStorage, "settle", lambda self, values: real(self, values * (1 + rank))):
        take_step(model, rank, 0, Seen())
        optimizer.step()
    optimizer.zero_grad()
    take_step(model, rank, 1, Seen())
    return raised(optimizer.step)


@pytest.mark.slow
def test_control_ranks_with_other_codes_are_found_by_check_replicas() -> None:
    assert all("has other values on rank" in text for text in run_ranks(2, unlike))


# ------------------------------------------------------------------------------------------------ to files and back


def save_one(rank: int, world: int, folder: str) -> str:
    model, optimizer = prepare(MXWay())
    for step in range(2):
        take_step(model, rank, step, Seen())
        optimizer.step()
        optimizer.zero_grad()
    layerwise.save(folder, model, optimizer)
    return masters_of(model)


def load_one(rank: int, world: int, folder: str, at_use: bool) -> tuple[str, list[str]]:
    model, optimizer = prepare(MXWay("compact"), at_use=at_use)
    take_step(model, rank + 5, 0, Seen())  # somewhere else
    optimizer.step()
    optimizer.zero_grad()
    layerwise.load(folder, model, optimizer)
    return masters_of(model), [] if at_use else faults(model, MXWay())


def masters_of(model: layerwise.DataParallel) -> str:
    return hash_tensors(tensor for name, tensor in put_together(model).items() if not name.startswith("gradient"))


@pytest.mark.slow
def test_checkpoints_hold_masters_and_no_codes(tmp_path: Path) -> None:
    folder = str(tmp_path / "step")
    expected = run_ranks(2, save_one, folder)[0]
    for world, at_use in ((1, False), (3, False), (2, True)):
        for masters, found in run_ranks(world, load_one, folder, at_use):
            assert found == []
            assert masters == expected


def unwraps(rank: int, world: int) -> list[str]:
    """A module is taken back and wrapped again, and weights are written by load_state_dict() in between."""
    model, optimizer = prepare(MXWay())
    take_step(model, rank, 0, Seen())
    optimizer.step()
    before = put_together(model)
    again = layerwise.DataParallel(model.unwrap(), bucket_mib=0.012)
    found = faults(again, MXWay())
    for name, tensor in put_together(again).items():
        if name.startswith("master") and not torch.equal(tensor, before[name].bfloat16().float()):
            found.append(f"{name} is another one after unwrap()")
    written = {name: values * 2 for name, values in build().state_dict().items()}
    again.module.load_state_dict(written)
    again.engine.pull_from_replicas()
    for name, tensor in put_together(again).items():
        kind, _, fqn = name.partition(" of ")
        if kind == "master" and not torch.equal(tensor, written[fqn].float().view(-1)):
            found.append(f"{name} is not what was written")
    return found


@pytest.mark.slow
def test_a_module_is_unwrapped_written_and_wrapped_again() -> None:
    assert all_found(run_ranks(2, unwraps)) == []
