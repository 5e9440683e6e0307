"""Loops as users write them: clipping between backward and step(), steps that are skipped, saving on one rank, another wrapper on top."""

from __future__ import annotations

import gc
import math
import os
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerwise
from layerwise.errors import StateError
from tests import seams
from tests.ranks import raised, run_ranks
from tests.worlds import Net, hash_whole, net_loss

LAYOUTS = ("flat", "padded", "compact", "replicated")


def build(layout: str = "flat", **more: Any) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    torch.manual_seed(3)
    model = layerwise.DataParallel(Net(), layout=layout, bucket_mib=0.0001)
    matrix, other = layerwise.Muon(lr=0.05, ns_dtype="fp32"), layerwise.AdamW(lr=0.01)
    return model, layerwise.Optimizer(model, matrix=matrix, other=other, **more)


def clipped_run(rank: int, layout: str, max_norm: float, *, by_call: bool, steps: int = 3, **more: Any) -> list[Any]:
    """Norms and the whole state after a few steps that are clipped to `max_norm`, with an accumulated microbatch each."""
    model, optimizer = build(layout, **({} if by_call else {"clip_grad_norm": max_norm}), **more)
    norms = []
    for step in range(steps):
        with model.no_sync():
            net_loss(model, rank, step, 0).backward()
        net_loss(model, rank, step, 1).backward()
        if by_call:
            norms.append(model.clip_grad_norm_(max_norm).item())
        optimizer.step()
        norms.append(optimizer.stats.grad_norm)
        norms.append(optimizer.stats.clip_coefficients["other"])
        optimizer.zero_grad()
    return [norms, hash_whole(model)]


def clip_both_ways(rank: int, world: int) -> dict[str, Any]:
    return {
        layout: [clipped_run(rank, layout, 0.05, by_call=True), clipped_run(rank, layout, 0.05, by_call=False)]
        for layout in LAYOUTS
    } | {"loose": [clipped_run(rank, "flat", math.inf, by_call=True), clipped_run(rank, "flat", 1e9, by_call=False)]}


@pytest.mark.broad
@pytest.mark.parametrize("world", [1, 2, 3])
def test_clip_grad_norm_gives_the_bits_of_the_optimizers_own_clipping_and_returns_the_norm(world: int) -> None:
    for found in run_ranks(world, clip_both_ways):
        for layout, ((by_call, called), (built_in, expected)) in found.items():
            assert called == expected, layout
            returned, norms, factors = by_call[0::3], by_call[1::3], by_call[2::3]
            assert (norms, factors) == (built_in[0::2], built_in[1::2])
            assert returned == pytest.approx(norms, rel=1e-6)
            assert all(factor < 0.5 for factor in factors) == (layout != "loose")


def norm_by_hand(rank: int, world: int) -> list[float]:
    """The norm of the averaged gradient, from a plain copy of the model on every rank, and what the call returns."""
    model, _optimizer = build()
    plain = Net()
    plain.load_state_dict(model.module.state_dict())
    for each in range(world):
        (net_loss(plain, each, 0) / world).backward()
    expected = torch.cat([param.grad.flatten().double() for param in plain.parameters()]).norm()  # type: ignore[union-attr]
    net_loss(model, rank, 0).backward()
    first = model.clip_grad_norm_(1.0)
    return [expected.item(), first.item(), model.clip_grad_norm_(math.inf).item()]


def test_the_norm_is_that_of_the_averaged_gradient_and_asking_twice_changes_nothing() -> None:
    for expected, first, second in run_ranks(3, norm_by_hand):
        assert first == pytest.approx(expected, rel=1e-5)
        assert second == first


def backward_after_clipping(rank: int, world: int) -> list[float]:
    """The norms of steps with a backward after the norm was asked for, in a block without reductions."""
    found = []
    for shard_grads in (False, True):
        torch.manual_seed(0)
        model = layerwise.DataParallel(Net(), layout="flat", shard_grads=shard_grads)
        optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.01))
        net_loss(model, rank, 0).backward()
        model.clip_grad_norm_(math.inf)
        with model.no_sync():
            net_loss(model, rank, 1).backward()
        optimizer.step()
        found.append(optimizer.stats.grad_norm)
    return found


def test_gradients_that_come_after_the_norm_was_asked_for_count() -> None:
    for whole, sharded in run_ranks(2, backward_after_clipping):
        assert sharded == pytest.approx(whole, rel=1e-5)


def misuse_clipping(rank: int, world: int) -> list[str]:
    model, optimizer = build()
    net_loss(model, rank, 0).backward()
    found = [
        raised(lambda: model.clip_grad_norm_(-1.0)),
        raised(lambda: model.clip_grad_norm_(1.0, norm_type=1.0)),
        raised(lambda: model.clip_grad_norm_(1.0 + rank)),
    ]
    optimizer.zero_grad()
    net_loss(model, rank, 1).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    lone = layerwise.DataParallel(nn.Linear(4, 4))
    return [*found, raised(lambda: lone.clip_grad_norm_(1.0))]


def test_what_cannot_be_clipped_is_refused_on_every_rank() -> None:
    for negative, one, different, lone in run_ranks(2, misuse_clipping):
        assert "clip_grad_norm must be a positive number, got -1.0" in negative
        assert "norm_type must be 2, got 1.0" in one
        assert "derived different optimizer settings" in different
        assert "clip_grad_norm: 1.0 against 2.0" in different
        assert "without an optimizer" in lone


# -- steps that are skipped --------------------------------------------------------------------------


def skip(rank: int, world: int, steps: int, more: dict[str, Any], bad: bool = True) -> list[Any]:
    """What is said and raised in so many steps, all of them with a gradient of NaN on the last rank."""
    model, optimizer = build(**more)
    said = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(steps):
            loss = net_loss(model, rank, step)
            (loss * math.nan if bad and rank == world - 1 else loss).backward()
            problem = raised(optimizer.step)
            said += [(step, problem)] if problem != "nothing was raised" else []
            optimizer.zero_grad()
    return [[(str(one.message), one.filename) for one in seen], said, optimizer.stats.step]


def test_the_first_skipped_step_and_the_tenth_in_a_row_are_told_of_once_by_the_first_rank() -> None:
    (warned, raised_, steps), (other, *_) = run_ranks(2, skip, 12, {})
    assert (raised_, steps, other) == ([], 0, [])
    assert [text.split(":")[0] for text, _ in warned] == ["step 1 was skipped", "10 steps in a row were skipped"]
    for text, filename in warned:
        assert "gradients of 'first.bias', 'first.weight'" in text
        assert "max_skipped=" in text
        assert filename.endswith(("test_user_loops.py", "ranks.py"))


def test_good_steps_say_nothing() -> None:
    assert [warned for warned, *_ in run_ranks(2, skip, 3, {}, False)] == [[], []]


def test_more_skipped_steps_in_a_row_than_allowed_are_an_error_on_every_rank() -> None:
    for _, said, steps in run_ranks(2, skip, 4, {"gradient_policy": layerwise.GradientPolicy(max_skipped=2)}):
        assert steps == 0
        assert [step for step, _ in said] == [2, 3]
        assert "StateError: 3 steps in a row were skipped, max_skipped=2: gradients of" in said[0][1]


def test_a_good_step_starts_the_count_anew() -> None:
    model, optimizer = build(gradient_policy=layerwise.GradientPolicy(max_skipped=1))
    for factor in (math.nan, 1.0, math.nan, 1.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (net_loss(model, 0, 0) * factor).backward()
            optimizer.step()
    assert optimizer.stats.step == 2


def test_an_overflow_under_loss_scaling_is_no_news_until_it_does_not_end() -> None:
    model, optimizer = build(loss_scale=layerwise.LossScale())

    def overflow() -> None:
        (optimizer.scale_loss(net_loss(model, 0, 0)) * math.inf).backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            overflow()
    with pytest.warns(UserWarning, match="10 steps in a row were skipped"):
        overflow()


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_max_skipped_is_a_number_of_steps(wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_skipped must be a number of steps"):
        build(gradient_policy=layerwise.GradientPolicy(max_skipped=wrong))


def raise_warnings(rank: int, world: int) -> str:
    """All ranks take warnings for errors, and go on together."""
    model, optimizer = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (net_loss(model, rank, 0) * math.nan).backward()
        first = raised(optimizer.step)
    net_loss(model, rank, 1).backward()
    optimizer.step()
    return first


def test_where_warnings_are_errors_that_of_a_skipped_step_is_one_on_every_rank() -> None:
    for text in run_ranks(2, raise_warnings):
        assert text.startswith("UserWarning: step 1 was skipped")


# -- saving, and other wrappers ------------------------------------------------------------------------


def save_on_one_rank(rank: int, world: int, layout: str) -> list[Any]:
    model, optimizer = build(layout)
    fresh = raised(optimizer.state_dict)
    net_loss(model, rank, 0).backward()
    optimizer.step()
    said = [fresh, raised(optimizer.state_dict)]
    holder = [optimizer.state_dict(part=True)]
    dist.broadcast_object_list(holder, src=0)
    return [said, raised(lambda: optimizer.load_state_dict(holder[0]))]


def test_a_part_of_the_state_is_given_on_demand_alone_and_another_ranks_part_says_whose_it_is() -> None:
    (first, _), (second, refused) = run_ranks(2, save_on_one_rank, "flat")
    for rank, said in enumerate((first, second)):
        for text in said:  # before the first step too
            assert "StateError: state_dict() was called on an optimizer whose state is in parts" in text
            assert f"rank {rank} of 2 has its own alone" in text
            assert "call consolidate_state_dict(to=0) on every rank before" in text
            assert "layerwise.save(folder, model, optimizer)" in text
            assert "state_dict(part=True)" in text
    assert "state dict is the part of rank 0, this is rank 1" in refused


def test_state_that_every_rank_has_whole_is_no_part() -> None:
    for said, refused in run_ranks(2, save_on_one_rank, "replicated"):
        assert (said, refused) == (["nothing was raised"] * 2, "nothing was raised")


def wrap_twice(rank: int, world: int) -> list[str]:
    parallel = nn.parallel.DistributedDataParallel
    model, _ = build()
    return [
        raised(lambda: layerwise.DataParallel(parallel(Net()))),
        raised(lambda: layerwise.DataParallel([parallel(Net()), Net()])),
        raised(lambda: parallel(model)),
    ]


def test_each_way_to_put_two_wrappers_around_a_model_is_refused_by_name() -> None:
    for inside, chunk, around in run_ranks(2, wrap_twice):
        assert "TypeError: module is a DistributedDataParallel" in inside
        assert "Pass the module that it wraps (.module)" in inside
        assert "chunk 0 is a DistributedDataParallel" in chunk
        assert "a layerwise.DataParallel was passed to DistributedDataParallel" in around


def unwrap_on_ranks(rank: int, world: int) -> list[Any]:
    """Right after a step, while new weights are still on their way."""
    found = []
    for options in ({}, {"prefetch": 0}, {"overlap_param_gather": False}):
        torch.manual_seed(3)
        model = seams.data_parallel(Net(), layout="flat", bucket_mib=0.0001, **options)
        optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.05), other=layerwise.AdamW(lr=0.01))
        for step in range(2):
            net_loss(model, rank, step).backward()
            optimizer.step()
        module = model.unwrap()
        found.append([param.detach().clone() for param in module.parameters()])
    return found


def test_an_unwrapped_module_has_the_new_weights_on_every_rank() -> None:
    ranks = run_ranks(3, unwrap_on_ranks)
    expected = ranks[0][-1]
    for found in (found for rank in ranks for found in rank):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def end_after_the_last_step(rank: int, world: int) -> list[bool]:
    """The first rank evaluates after the last step, the others have nothing more to do and end."""
    torch.manual_seed(3)
    model = layerwise.DataParallel(nn.Linear(4096, 4096, bias=False), layout="flat")
    optimizer = layerwise.Optimizer(model, matrix=layerwise.AdamW(lr=0.5), other=layerwise.AdamW(lr=0.01))
    model(torch.ones(1, 4096)).sum().backward()
    before = model.module.weight.detach().clone() if rank == 0 else None
    optimizer.step()
    if before is None:
        return []
    time.sleep(0.5)
    return (model.module.weight.detach() != before).all(dim=1)[:: 4096 // 8].tolist()


def test_a_rank_that_ends_after_its_last_step_takes_no_weights_along() -> None:
    assert run_ranks(3, end_after_the_last_step)[0] == [True] * 8


def wrap_again_and_again(rank: int, world: int) -> list[int]:
    """Open files after each of a few rounds: a group keeps connections."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "ep"))
    module, found = Net(), []
    for options in ({}, {"mesh": mesh, "check_collectives": True}) * 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no module names its experts
            model = seams.data_parallel(module, **options)
        optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.05), other=layerwise.AdamW(lr=0.01))
        net_loss(model, rank, 0).backward()
        optimizer.step()
        model.unwrap()
        del model, optimizer
        gc.collect()
        found.append(len(os.listdir("/proc/self/fd")))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs Linux")
def test_a_model_that_is_wrapped_again_and_again_leaves_no_connections_behind() -> None:
    for found in run_ranks(2, wrap_again_and_again):
        assert found[2:] == found[:2], found


def test_a_step_after_unwrap_is_refused() -> None:
    model, optimizer = build()
    model.unwrap()
    with pytest.raises(StateError, match="was unwrapped"):
        optimizer.step()


def step_once_more(rank: int, world: int, zeroed: str, overlap: bool) -> list[Any]:
    """Rank 1 takes a step too many after the third; what each rank raised, in which step, and whether its weights stayed."""
    model = layerwise.DataParallel(Net(), overlap_param_gather=overlap)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.05), other=layerwise.AdamW(lr=0.01))

    def steps() -> None:
        for step in range(6):
            net_loss(model, rank, step, 0).backward()
            optimizer.step()
            done.append(hash_whole(model) if step < 2 else "")
            if zeroed == "after":
                optimizer.zero_grad()
            if rank == 1 and step == 2:
                optimizer.step()
            if zeroed == "before":
                optimizer.zero_grad()

    done: list[str] = []
    return [raised(steps), len(done), optimizer.stats.step]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_too_many_on_one_rank_is_an_error_on_all_before_anything_changes(overlap: bool) -> None:
    said = "StateError: step() was called once too often on rank 1: it came twice without the zero_grad()"
    for rank, (text, done, steps) in enumerate(run_ranks(3, step_once_more, "before", overlap)):
        assert text.startswith(said if rank == 1 else f"PlanMismatchError: rank 1 failed where others did not: {said}")
        assert (done, steps) == (3, 3)


def test_a_step_too_many_after_zero_grad_is_an_error_at_the_step_that_follows() -> None:
    """A rank without a batch makes the same calls up to there."""
    for text, _, steps in run_ranks(2, step_once_more, "after", True):
        assert "step() was called once too often on rank 1" in text
        assert steps == 4


def step_without_a_batch(rank: int, world: int, way: str) -> list[Any]:
    """Rank 1 has no batch in every other step, and leaves out what a loop of this kind leaves out then."""
    model, optimizer = build()
    for step in range(6):
        has_batch = rank == 0 or step % 2 == 0
        if way == "zero_grad first":
            optimizer.zero_grad()
        if has_batch or way == "forward alone":
            loss = net_loss(model, rank, step, 0)
            if has_batch:
                loss.backward()
        optimizer.step()
        if way in ("zero_grad last", "forward alone"):
            optimizer.zero_grad()
        elif way == "zero_grad by the model":
            model.zero_grad()
    return [optimizer.stats.step, hash_whole(model)]


@pytest.mark.parametrize(
    "way", ["zero_grad first", "zero_grad last", "zero_grad by the model", "no zero_grad", "forward alone"]
)
def test_a_rank_without_a_batch_takes_part_in_steps(way: str) -> None:
    first, second = run_ranks(2, step_without_a_batch, way)
    assert first == second
    assert first[0] == 6


# -- state_dict() waits for nobody ---------------------------------------------------------------------


def numels_of(state_dict: Any) -> list[int]:
    """How many elements of each param a state dict covers, in order of its numbers."""
    return [max(tensor.numel() for tensor in entry.values()) for _, entry in sorted(state_dict["state"].items())]


def ask_alone(rank: int, world: int, wrapper: str, ask: bool) -> list[Any]:
    """Rank 0 calls state_dict() twice while rank 1 waits for a key in the store: a collective in the call would hang."""
    torch.manual_seed(3)
    net = Net()
    matrix, other = layerwise.Muon(lr=0.05, ns_dtype="fp32"), layerwise.AdamW(lr=0.01)
    model: nn.Module
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = layerwise.Optimizer(model, matrix=matrix, other=other, layout="flat")
    else:
        model = layerwise.DataParallel(net, layout="flat")
        optimizer = layerwise.Optimizer(model, matrix=matrix, other=other)
    store, found = dist.distributed_c10d._get_default_store(), []

    def step(number: int) -> None:
        net_loss(model, rank, number).backward()
        optimizer.step()
        optimizer.zero_grad()

    def first_rank_alone(word: str) -> None:
        if rank == 0 and ask:
            said = raised(optimizer.state_dict)
            numels = [] if said != "nothing was raised" else numels_of(optimizer.state_dict())
            found.append((said, numels))
        if rank == 0:
            store.set(word, "done")
        store.wait([word], timedelta(seconds=60))

    step(0)
    first_rank_alone("in parts")
    step(1)
    if ask:
        optimizer.consolidate_state_dict(to=0)
    first_rank_alone("whole")
    step(2)
    return [
        found,
        [param.numel() for param in net.parameters()],
        [param.detach().clone() for param in net.parameters()],
    ]


def test_state_dict_on_one_rank_alone_waits_for_no_other() -> None:
    """state_dict() raises while state is in parts and is whole after consolidate_state_dict(); later steps give the bits of a run without it."""
    for wrapper in ("ddp", "ours"):
        (found, numels, weights), (others, _, same) = run_ranks(2, ask_alone, wrapper, True)
        (in_parts, nothing), (whole, given) = found
        assert "StateError: state_dict() was called on an optimizer whose state is in parts" in in_parts
        assert "call consolidate_state_dict(to=0) on every rank before" in in_parts
        assert (nothing, whole, others) == ([], "nothing was raised", [])
        assert sorted(given) == sorted(numels)
        straight = run_ranks(2, ask_alone, wrapper, False)[0][-1]
        assert all(map(torch.equal, weights, same))
        assert all(map(torch.equal, weights, straight))
