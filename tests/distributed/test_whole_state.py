"""`consolidate_state_dict()`: one rank writes the whole optimizer state, and any number of ranks goes on from it, in any layout, bit for bit.

Gradients are the same on every rank and depend on the step alone, so a run on other ranks is the same run.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.layout.packing import PackedBucket, PackItem, pack
from tests.marks import sampled
from tests.ranks import raised, run_ranks
from tests.worlds import Case, Net, gradient

BF16, FP32 = torch.bfloat16, torch.float32
RULES: dict[str, dict[str, Any]] = {
    "muon": {"matrix": layerwise.Muon(lr=0.02), "other": layerwise.AdamW(lr=0.003)},
    "normuon": {"matrix": layerwise.NorMuon(lr=0.02), "other": layerwise.Lion(lr=0.003)},
}


def steps(module: nn.Module, optimizer: layerwise.Optimizer, numbers: range) -> None:
    for step in numbers:
        for fqn, param in module.named_parameters():
            if param.requires_grad:
                param.grad = gradient(fqn, param.shape, 0, step, 0).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


def build(layout: str, rule: str, dtype: torch.dtype) -> tuple[nn.Module, layerwise.Optimizer]:
    module = Case(dtype=dtype).build()
    return module, layerwise.Optimizer(module, gradients="reduced", layout=layout, **RULES[rule])


def first_half(rank: int, world: int, layout: str, rule: str, dtype: torch.dtype) -> tuple[bytes, list[Tensor], bool]:
    module, optimizer = build(layout, rule, dtype)
    steps(module, optimizer, range(3))
    optimizer.consolidate_state_dict()
    is_whole = "whole" in optimizer.state_dict()["layerwise"]  # type: ignore[operator]
    written = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, written)
    steps(module, optimizer, range(3, 6))
    return written.getvalue(), [param.detach().clone() for param in module.parameters()], is_whole


def second_half(rank: int, world: int, layout: str, rule: str, dtype: torch.dtype, saved: bytes) -> list[Tensor]:
    module, optimizer = build(layout, rule, dtype)
    found = torch.load(io.BytesIO(saved), weights_only=True)
    optimizer.load_state_dict(found["optimizer"])
    module.load_state_dict(found["model"])
    assert optimizer.engine.count.steps == 3
    steps(module, optimizer, range(3, 6))
    return [param.detach().clone() for param in module.parameters()]


WAYS = {
    "3 ranks compact to 2 flat": (3, "compact", "normuon", FP32, 2, "flat"),
    "2 flat to 4 padded, bf16": (2, "flat", "normuon", BF16, 4, "padded"),
    "4 padded to 1": (4, "padded", "muon", BF16, 1, "compact"),
    "2 replicated to 3 compact": (2, "replicated", "normuon", FP32, 3, "compact"),
    "3 replicated to 2 replicated": (3, "replicated", "normuon", BF16, 2, "replicated"),
    "1 to 3 flat": (1, "flat", "muon", FP32, 3, "flat"),
}


@pytest.mark.parametrize("name", sampled(WAYS, "3 ranks compact to 2 flat", "3 replicated to 2 replicated"))
def test_any_number_of_ranks_goes_on_from_what_one_wrote_bitwise(name: str) -> None:
    world, layout, rule, dtype, other, to = WAYS[name]
    (saved, straight, is_whole), *others = run_ranks(world, first_half, layout, rule, dtype)
    assert is_whole
    assert not any(was_whole for *_, was_whole in others)
    for weights in run_ranks(other, second_half, to, rule, dtype, saved):
        assert all(map(torch.equal, weights, straight))


def test_a_single_process_with_a_plain_module_goes_on_too() -> None:
    (saved, straight, _), _ = run_ranks(2, first_half, "compact", "normuon", FP32)
    module = Case().build()
    optimizer = layerwise.Optimizer(module, **RULES["normuon"])
    found = torch.load(io.BytesIO(saved), weights_only=True)
    module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    steps(module, optimizer, range(3, 6))
    assert all(map(torch.equal, straight, module.parameters()))


def written_since(rank: int, world: int) -> list[str]:
    """Somebody writes into weights between putting state together and asking for it."""
    module, optimizer = build("flat", "muon", BF16)
    optimizer.consolidate_state_dict()
    whole = raised(optimizer.state_dict)
    with torch.no_grad():
        next(module.parameters()).fill_(3.0)
    stale = raised(optimizer.state_dict)
    optimizer.consolidate_state_dict()
    state: Any = optimizer.state_dict()
    masters = [kept["master"] for kept in state["state"].values()] if rank == 0 else []
    return [whole, stale, str(any(bool((master == 3.0).all()) for master in masters))]


def test_what_was_put_together_before_weights_were_written_is_not_taken_for_the_state() -> None:
    first, second = run_ranks(2, written_since)
    for whole, stale, _ in (first, second):
        assert whole == "nothing was raised"
        assert "StateError: weights were written since consolidate_state_dict()" in stale
    assert first[2] == "True"


def asked_of_all(rank: int, world: int, to: int) -> tuple[list[int], list[str], bool]:
    """Trainers ask every rank and write what one of them gave."""
    module, optimizer = build("flat", "muon", FP32)
    steps(module, optimizer, range(1))
    optimizer.consolidate_state_dict(to=to)
    given: Any = optimizer.state_dict()
    own: Any = optimizer.state_dict(part=True)
    steps(module, optimizer, range(1, 2))
    said = [raised(lambda: optimizer.load_state_dict(given)), raised(optimizer.state_dict)]
    optimizer.load_state_dict(own)
    numel = sum(kept["momentum"].numel() for kept in given["state"].values() if "momentum" in kept)
    own_numel = sum(kept["momentum"].numel() for kept in own["state"].values() if "momentum" in kept)
    return [numel, own_numel], said, optimizer.engine.count.steps == 1


@pytest.mark.parametrize("to", [0, 1])
def test_one_rank_gives_the_whole_until_the_next_step_and_others_nothing_that_could_be_taken_for_it(to: int) -> None:
    found = run_ranks(2, asked_of_all, to)
    whole, of_whole = found[to][0]
    nothing, of_other = found[1 - to][0]
    assert whole == of_whole + of_other
    assert nothing == 0
    for _, (loaded, after), went_back in found:
        assert "StateError: state_dict() was called on an optimizer whose state is in parts" in after
        assert f"put the whole together on rank {to}. Load the one of that rank" in loaded
        assert went_back


class Branches(nn.Module):
    """Ranks may take other branches, and then have reduced other buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor, branches: tuple[str, ...]) -> Tensor:
        x = self.first(x)
        return x + sum(getattr(self, name)(x) for name in branches)


def in_between(rank: int, world: int, layout: str, consolidates: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Weights after some steps, with state put together between a backward and its step; and that state."""
    module = Branches()
    model = layerwise.DataParallel(module, layout=layout, bucket_mib=64 * 4 / 2**20)
    optimizer = layerwise.Optimizer(model, **RULES["muon"])
    found: list[Tensor] = []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        both = ("one", "other")  # until ranks know which buckets to expect
        model(x, both if step < 3 else both[rank : rank + 1]).square().mean().backward()
        if step == 3:
            if consolidates:
                optimizer.consolidate_state_dict()
            state: Any = optimizer.state_dict(part=not consolidates)["state"]
            found = [state[number]["momentum"].clone() for number in sorted(state)]
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()], found


@pytest.mark.parametrize("layout", ["flat", "padded", "compact", "replicated"])
def test_state_is_put_together_between_a_backward_and_its_step(layout: str) -> None:
    straight, looked_at = run_ranks(2, in_between, layout, False), run_ranks(2, in_between, layout, True)
    for (weights, momenta), (same_weights, _) in zip(straight, looked_at, strict=True):
        assert all(map(torch.equal, weights, same_weights))
        if layout == "replicated":  # there every rank has all of it
            assert all(map(torch.equal, map(torch.flatten, momenta), map(torch.flatten, looked_at[0][1])))
    assert all(momentum.isfinite().all() and momentum.any() for momentum in looked_at[0][1])


def on_one_rank(rank: int, world: int) -> list[str]:
    """A file that one rank has read is loaded by all, and by none."""
    module, optimizer = build("flat", "muon", FP32)
    steps(module, optimizer, range(1))
    state: Any = optimizer.state_dict(part=True) if rank == 0 else None
    said = raised(lambda: optimizer.load_state_dict(state))
    hook = optimizer.register_load_state_dict_pre_hook(lambda _, given: given if rank == 0 else given["nothing"])
    said_of_hook = raised(lambda: optimizer.load_state_dict(optimizer.state_dict(part=True)))
    hook.remove()
    optimizer.load_state_dict(optimizer.state_dict(part=True))
    return [said, said_of_hook, str(optimizer.engine.count.steps)]


def test_a_state_dict_that_one_rank_lacks_is_refused_on_all() -> None:
    first, second = run_ranks(2, on_one_rank)
    assert "rank 1 failed where others did not" in first[0]
    assert "state dict is a NoneType: expected what layerwise.Optimizer.state_dict() gave" in second[0]
    assert "rank 1 failed where others did not" in first[1]
    assert "KeyError" in second[1]
    assert first[2] == second[2] == "1"


def refused(rank: int, world: int) -> list[str]:
    _, optimizer = build("compact", "muon", FP32)
    optimizer.consolidate_state_dict()
    shared: Any = [optimizer.state_dict()]
    torch.distributed.broadcast_object_list(shared)
    whole = shared[0]
    other = layerwise.Optimizer(Net(), gradients="reduced", **RULES["muon"])
    key = next(key for key, entry in whole["state"].items() if "momentum" in entry)
    longer = {**whole["state"][key], "momentum": torch.zeros(3)}
    shape = {**whole, "state": {**whole["state"], key: longer}}
    return [raised(lambda: other.load_state_dict(whole)), raised(lambda: optimizer.load_state_dict(shape))]


def test_the_state_of_another_model_is_refused_by_name() -> None:
    for model, shape in run_ranks(2, refused):
        assert "ValueError: state dict has 'exp_avg' of param 'norm.weight' as (12,): expected (8,)" in model
        assert "ValueError: state dict has 'momentum' of param 'experts' as (3,): expected (3, 6, 10)" in shape


def pack_otherwise(items: Sequence[PackItem], *, num_shards: int, bucket_numel: int) -> tuple[PackedBucket, ...]:
    """Another packing: that of today with the shards of every bucket in reverse order."""
    return tuple(
        replace(bucket, places=tuple(replace(place, shard=num_shards - 1 - place.shard) for place in bucket.places))
        for bucket in pack(items, num_shards=num_shards, bucket_numel=bucket_numel)
    )


def packed_by_an_earlier_version(rank: int, world: int) -> list[str]:
    """A part that was saved under another packing of `padded`, loaded under the packing of today."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("layerwise.layout.storage.pack", pack_otherwise)
        module, optimizer = build("padded", "muon", BF16)
    steps(module, optimizer, range(3))
    _, other = build("padded", "muon", BF16)
    return [raised(lambda: other.load_state_dict(optimizer.state_dict(part=True))), str(other.engine.count.steps)]


def test_a_part_that_an_earlier_version_packed_in_another_way_is_refused_by_name() -> None:
    for text, count in run_ranks(2, packed_by_an_earlier_version):
        assert "state dict belongs to another layout: it was written under plan" in text
        assert "Earlier versions packed layout='padded' in another way" in text
        assert "layerwise.save(), whose checkpoints load here" in text
        assert count == "0"


def test_a_part_of_a_layout_that_packs_nothing_is_refused_without_that_advice() -> None:
    for text in run_ranks(2, part_of_another_layout):
        assert "state dict belongs to another layout" in text
        assert "packed" not in text


def part_of_another_layout(rank: int, world: int) -> str:
    saved, loading = (build(layout, "muon", BF16)[1] for layout in ("compact", "flat"))
    return raised(lambda: loading.load_state_dict(saved.state_dict(part=True)))
