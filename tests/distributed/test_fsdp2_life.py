"""A model of torch's fully_shard as its users treat it: whatever they do around a step, the step is that of one process that saw
all samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import layerwise
from tests.distributed.fsdp2 import (
    Model,
    assert_close,
    batch,
    built,
    cut,
    expected,
    fill,
    freeze,
    loss_of,
    mine,
    optimizer_of,
    whole,
)
from tests.marks import sampled
from tests.ranks import run_ranks


def plain(model: Model, rank: int, world: int) -> Model:
    return cut(model, world)


def kept_after_forward(model: Model, rank: int, world: int) -> Model:
    return cut(model, world, reshard_after_forward=False)


def kept_after_backward(model: Model, rank: int, world: int) -> Model:
    cut(model, world).set_reshard_after_backward(False)
    return model


def resharded_to_one(model: Model, rank: int, world: int) -> Model:
    return cut(model, world, reshard_after_forward=world)


def only_the_root(model: Model, rank: int, world: int) -> Model:
    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def wrapped_to_recompute(model: Model, rank: int, world: int) -> Model:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    return cut(model, world)


def made_to_recompute(model: Model, rank: int, world: int) -> Model:
    for block in model.blocks:
        checkpoint(block)
    return cut(model, world)


def compiled_before(model: Model, rank: int, world: int) -> Model:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager")
    return cut(model, world)


def compiled_after(model: Model, rank: int, world: int) -> Model:
    cut(model, world)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def compiled_whole(model: Model, rank: int, world: int) -> Model:
    return torch.compile(cut(model, world), backend="aot_eager")


def offloaded(model: Model, rank: int, world: int) -> Model:
    return cut(model, world, offload_policy=CPUOffloadPolicy(pin_memory=False))


def from_meta(model: Model, rank: int, world: int) -> Model:
    """Cut without values, given memory, then values."""
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.device("meta"):
        fresh = Model()
    cut(fresh, world).to_empty(device="cpu")
    fill(fresh, values)
    return fresh


SHARDINGS: dict[str, Callable[[Model, int, int], nn.Module]] = {
    "plain": plain,
    "kept after forward": kept_after_forward,
    "kept after backward": kept_after_backward,
    "resharded to an int": resharded_to_one,
    "only the root": only_the_root,
    "checkpoint_wrapper": wrapped_to_recompute,
    "composable checkpoint": made_to_recompute,
    "compiled before": compiled_before,
    "compiled after": compiled_after,
    "compiled whole": compiled_whole,
    "offloaded": offloaded,
    "from meta": from_meta,
}


def trained(rank: int, world: int, sharding: str) -> tuple[dict[str, Tensor], list[str]]:
    model = SHARDINGS[sharding](built(), rank, world)
    optimizer = optimizer_of(model)
    for step in range(3):
        loss_of(model, *mine(rank, world, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model), [fqn for group in optimizer.param_groups for fqn in group["fqns"]]


QUICK = ("plain", "checkpoint_wrapper", "kept after backward")


@pytest.mark.parametrize(
    ("sharding", "world"),
    sampled(
        [(sharding, world) for sharding in SHARDINGS for world in (2, 3)],
        *((sharding, 2 + number % 2) for number, sharding in enumerate(QUICK)),
    ),
)
def test_training_is_that_of_one_process(sharding: str, world: int) -> None:
    for weights, fqns in run_ranks(world, trained, sharding):
        assert_close(weights, expected())
        assert sorted(fqns) == sorted(dict(Model().named_parameters()))


def accumulated(rank: int, world: int, way: str) -> tuple[dict[str, Tensor], list[float]]:
    """Each rank's samples one by one."""
    model = cut(built(), world)
    optimizer = optimizer_of(model)
    norms = []
    for step in range(3):
        tokens, targets = mine(rank, world, step)
        for micro in range(len(tokens)):
            if way == "sync at the end":
                model.set_requires_gradient_sync(micro == len(tokens) - 1)
            (loss_of(model, tokens[micro : micro + 1], targets[micro : micro + 1]) / len(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.stats.grad_norm)
    return whole(model), norms


@pytest.mark.parametrize("way", sampled(("sync at the end", "sync every time"), "sync at the end"))
def test_microbatches_add_up_to_one_batch(way: str) -> None:
    for weights, norms in run_ranks(3, accumulated, way):
        assert_close(weights, expected())
        assert len(set(norms)) == len(norms)


def norms_by_factor(rank: int, world: int) -> list[float]:
    """The norm of one backward's gradients, averaged by torch as it does by itself, and divided by nothing."""
    found = []
    for factor in (None, 1.0):
        model = cut(built(), world)
        if factor is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(factor)
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no factors
        optimizer = optimizer_of(model)
        loss_of(model, *mine(rank, world, 0)).backward()
        optimizer.step()
        found.append(optimizer.stats.grad_norm)
    return found


def test_gradients_are_taken_as_they_come_and_divided_by_nothing() -> None:
    # Whoever asks torch for sums gets the step of sums: nobody here divides a second time, or the first.
    for averaged, summed in run_ranks(2, norms_by_factor):
        assert summed == pytest.approx(2 * averaged, rel=1e-5)


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def read_between(rank: int, world: int, ours: bool, how: str) -> tuple[dict[str, Tensor], float, float]:
    """Steps with a forward without backward between backward and step. Beside the weights: the loss that the model has
    after the last step as it stands, and that of the same weights when nothing gathered is left."""
    model = cut(built(), world, reshard_after_forward=False if how == "all" else None)
    optimizer = optimizer_of(model) if ours else torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(3):
        loss_of(model, *mine(rank, world, step)).backward()
        with torch.no_grad():
            model(batch(7)[0])
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        stands = float(loss_of(model, *batch(8)))
        reshard(model)
        fresh = float(loss_of(model, *batch(8)))
        reshard(model)
    return whole(model), stands, fresh


@pytest.mark.parametrize("how", sampled(["all", "root"], "root"))
def test_a_forward_before_the_step_leaves_no_stale_weights(how: str) -> None:
    for weights, stands, fresh in run_ranks(2, read_between, True, how):
        assert stands == fresh
        assert_close(weights, expected())


def test_a_forward_before_the_step_of_torchs_own_optimizer_does() -> None:
    """What the test above would not see if there were nothing to see."""
    for _, stands, fresh in run_ranks(2, read_between, False, "root"):
        assert stands != fresh


def zeroed(rank: int, world: int, way: str) -> tuple[dict[str, Tensor], bool]:
    model = cut(built(), world)
    optimizer = optimizer_of(model)
    kept = []
    for step in range(3):
        loss_of(model, *mine(rank, world, step)).backward()
        kept.append(model.head.weight.grad)  # a new object every time
        optimizer.step()
        if way == "to zeros":
            optimizer.zero_grad(set_to_none=False)
        elif way == "to none":
            optimizer.zero_grad()
        elif way == "by the model, to zeros":
            model.zero_grad(set_to_none=False)
    return whole(model), all(one is not other for one, other in itertools.pairwise(kept))


WAYS = ("to none", "to zeros", "by the model, to zeros", "never")


@pytest.mark.parametrize("way", sampled(WAYS, "to zeros"))
def test_gradients_start_anew_however_they_are_zeroed(way: str) -> None:
    for weights, are_new in run_ranks(2, zeroed, way):
        assert are_new
        assert_close(weights, expected())


def dropped(rank: int, world: int) -> dict[str, Tensor]:
    """A backward whose gradients nobody wants, before every one that counts."""
    model = cut(built(), world)
    optimizer = optimizer_of(model)
    for step in range(3):
        for dropped_first, set_to_none in ((True, bool(step % 2)), (False, True)):
            loss_of(model, *mine(rank, world, 50 if dropped_first else step)).backward()
            if dropped_first:
                optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.step()
    return whole(model)


@pytest.mark.slow
def test_a_backward_that_was_zeroed_away_does_not_count() -> None:
    for weights in run_ranks(2, dropped):
        assert_close(weights, expected())


def frozen_or_tied(rank: int, world: int, tied: bool, frozen: str) -> tuple[dict[str, Tensor], bool]:
    model = built(tied=tied)
    freeze(model, frozen)
    cut(model, world)
    before = whole(model)
    optimizer = optimizer_of(model)
    for step in range(3):
        loss_of(model, *mine(rank, world, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = whole(model)
    stayed = {name for name in before if torch.equal(before[name], after[name])}
    return after, stayed == {name for name in before if frozen and name.startswith(frozen)}


@pytest.mark.parametrize(
    ("tied", "frozen"),
    sampled(
        [(True, ""), (False, "embedding"), (False, "blocks.0"), (True, "blocks.1.up")], (True, ""), (False, "blocks.0")
    ),
)
def test_tied_and_frozen_params(tied: bool, frozen: str) -> None:
    for weights, is_right in run_ranks(3, frozen_or_tied, tied, frozen):
        assert is_right
        assert_close(weights, expected(tied=tied, frozen=frozen))


def in_precision(rank: int, world: int, case: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[str]]:
    """Weights, the gradients that led to them, and the dtypes of params, gradients and state."""
    shard_dtype = torch.bfloat16 if case == "bf16 shards" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = cut(built(dtype=shard_dtype), world, mp_policy=policy)
    optimizer = optimizer_of(model)
    grads = []
    for step in range(3):
        loss_of(model, *mine(rank, world, step)).backward()
        grads.append({name: param.grad.full_tensor() for name, param in model.named_parameters()})
        dtypes = [str(tensor.dtype) for tensor in (model.head.weight, model.head.weight.grad)]
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[model.blocks[0].up.weight]
    return whole(model), grads, [*dtypes, str(state["momentum"].dtype), *sorted(state)]


def with_gradients(rank: int, world: int, dtype: torch.dtype, grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One process, given the gradients."""
    model = built(dtype=dtype)
    optimizer = optimizer_of(model)
    for step in grads:
        for name, param in model.named_parameters():
            param.grad = step[name].clone()
        optimizer.step()
    return whole(model)


@pytest.mark.parametrize("case", sampled(["fp32 shards", "bf16 shards"], "bf16 shards"))
def test_mixed_precision_keeps_fp32_masters(case: str) -> None:
    dtype = torch.bfloat16 if case == "bf16 shards" else torch.float32
    found = run_ranks(2, in_precision, case)
    (wanted,) = run_ranks(1, with_gradients, dtype, found[0][1])
    for weights, _, facts in found:
        for name, tensor in wanted.items():
            assert torch.equal(weights[name], tensor), name
        assert facts[:3] == [str(dtype), str(dtype), "torch.float32"]
        assert ("master" in facts) is (case == "bf16 shards")


def clipped(rank: int, world: int, way: str) -> tuple[dict[str, Tensor], list[float]]:
    model = cut(built(), world)
    optimizer = optimizer_of(model, clip_grad_norm=0.1 if way == "ours" else None)
    norms = []
    for step in range(3):
        loss_of(model, *mine(rank, world, step)).backward()
        if way == "torch":
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()))
        optimizer.step()
        if way == "ours":
            norms.append(optimizer.stats.grad_norm)
    return whole(model), norms


def test_torchs_clipping_and_ours_clip_the_same() -> None:
    for ours, theirs in zip(run_ranks(2, clipped, "ours"), run_ranks(2, clipped, "torch"), strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
        assert min(ours[1]) > 0.1  # or nothing was clipped
        assert_close(ours[0], theirs[0])
        assert_close(ours[0], expected(clip_grad_norm=0.1))


def scheduled(rank: int, world: int, sharded: bool) -> dict[str, Tensor]:
    model = cut(built(), world) if sharded else built()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(3):
        loss_of(model, *(mine(rank, world, step) if sharded else batch(step))).backward()
        optimizer.step()
        scheduler.step()
    return whole(model)


@pytest.mark.slow
def test_schedulers_set_the_learning_rate() -> None:
    (wanted,) = run_ranks(1, scheduled, False)
    for weights in run_ranks(2, scheduled, True):
        assert_close(weights, wanted)


def loss_scaled(rank: int, world: int, poison: int | None) -> tuple[dict[str, Tensor], list[bool], float]:
    """Loss scaling of ours. In step `poison` one rank's loss is infinite."""
    model = cut(built(), world)
    optimizer = optimizer_of(model, loss_scale=layerwise.LossScale(initial=1024.0, hysteresis=1))
    skipped = []
    for step in range(3):
        loss = loss_of(model, *mine(rank, world, step))
        if step == poison and rank == world - 1:
            loss = loss * torch.inf
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        skipped.append(optimizer.stats.skipped)
    return whole(model), skipped, optimizer.stats.loss_scale


def test_loss_scaling_skips_on_every_rank() -> None:
    for weights, skipped, _ in run_ranks(2, loss_scaled, None):
        assert skipped == [False] * 3
        assert_close(weights, expected())
    for weights, skipped, scale in run_ranks(2, loss_scaled, 2):
        assert skipped == [False, False, True]
        assert scale == 1024.0  # of that step; the next has half
        assert_close(weights, expected(2))


def grad_scaled(rank: int, world: int, poison: str) -> tuple[dict[str, Tensor], list[float]]:
    model = cut(built(), world)
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step in range(3):
        loss = loss_of(model, *mine(rank, world, step))
        is_bad = step == 2 and rank == world - 1
        scaler.scale(loss * torch.inf if poison == "loss" and is_bad else loss).backward()
        if poison == "one shard" and is_bad:
            model.head.weight.grad.to_local()[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return whole(model), scales


@pytest.mark.parametrize("poison", sampled(["nothing", "loss", "one shard"], "one shard"))
def test_torchs_grad_scaler(poison: str) -> None:
    for weights, scales in run_ranks(2, grad_scaled, poison):
        assert_close(weights, expected(3 if poison == "nothing" else 2))
        assert scales[-1] == (1024.0 if poison == "nothing" else 512.0)
