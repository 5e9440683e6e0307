"""What the ranks of the distributed tests do. Apart from the tests, so that a forked rank need not import pytest."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerwise
from tests.reference.oracle import Hyper
from tests.worlds import (
    Case,
    Net,
    deliver,
    differences,
    gradient,
    hash_by_param,
    hash_everything,
    hash_tensors,
    hash_whole,
    held,
    net_loss,
    oracle_for,
    rules,
    wrap,
)

Action = tuple[str, *tuple[int, ...]]
"""What happens next, with the step and microbatch whose data it uses."""


@dataclass(frozen=True)
class Setting:
    """How `follow` builds its model."""

    layout: str = "flat"
    overlap: bool = True
    checkpointing: str = "none"
    dtype: torch.dtype = torch.float32
    bucket_mib: float | None = 0.0001
    options: tuple[tuple[str, Any], ...] = ()
    """More arguments of the optimizer."""
    wrapping: tuple[tuple[str, Any], ...] = ()
    """More arguments of DataParallel."""
    whole: bool = False
    """Hash what all ranks hold together, which no layout changes, and not what this one holds."""


def net_and_optimizer(setting: Setting) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    torch.manual_seed(3)
    model = layerwise.DataParallel(
        Net(setting.checkpointing).to(setting.dtype),
        layout=setting.layout,
        overlap_grad_reduce=setting.overlap,
        bucket_mib=setting.bucket_mib,
        **dict(setting.wrapping),
    )
    hyper = Hyper(ns_dtype=torch.float32, weight_decay=0.1, clip=1.0)
    return model, layerwise.Optimizer(model, **{**rules(hyper), **dict(setting.options)})


def follow(rank: int, world: int, actions: Sequence[Action], setting: Setting) -> list[str]:
    """Carry out actions on a small real network; returns a hash of everything after each step, and what else was seen."""
    model, optimizer = net_and_optimizer(setting)
    for param in model.parameters():
        # Multiples of 2^-6: sums are exact in any order, so bits tell which gradients were added, and nothing else.
        param.register_hook(lambda grad: (grad * 64).round() / 64)
    seen: list[str] = []
    for name, *data in actions:
        match name:
            case "backward":
                net_loss(model, rank, *data).backward()
            case "accumulate":
                with model.no_sync():
                    net_loss(model, rank, *data).backward()
            case "partial":  # `last` and `norm` get no gradient, but on rank 0
                _partial_loss(model, rank, data).backward()
            case "partial accumulate":
                with model.no_sync():
                    _partial_loss(model, rank, data).backward()
            case "idle":  # only rank 0 has data
                if rank == 0:
                    net_loss(model, rank, *data).backward()
            case "idle accumulate":
                with model.no_sync():
                    if rank == 0:
                        net_loss(model, rank, *data).backward()
            case "failing forward":
                _fail_once(model.module.norm, backward=False)
                seen.append(_fails(model, rank, data))
            case "failing backward":
                _fail_once(model.module.first, backward=True)
                seen.append(_fails(model, rank, data))
            case "failing accumulate":
                _fail_once(model.module.first, backward=True)
                seen.append(_fails(model, rank, data, sync=False))
            case "zero_grad":
                optimizer.zero_grad()
            case "model.zero_grad":
                model.zero_grad()
            case "metric":
                total = torch.full((64,), float(rank + 1))
                dist.all_reduce(total)
                if total.unique().tolist() != [world * (world + 1) / 2]:
                    seen.append(f"the user's all-reduce came out as {total.unique().tolist()}")
            case "eval":
                model.eval()
                with torch.no_grad():
                    net_loss(model, rank, 1000)
                seen += _stale_replicas(model)
                model.train()
            case "step":
                optimizer.step()
                state = hash_whole(model, gradients=False) if setting.whole else hash_everything(optimizer)
                seen.append(f"{'skipped' if optimizer.stats.skipped else 'stepped'} {state}")
    return seen


def _fail_once(module: nn.Module, *, backward: bool) -> None:
    """Make the next forward through a module raise, or the backward through its output."""

    def burst(_: Any) -> None:
        raise FloatingPointError("injected")

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        handle.remove()
        if backward:
            output.register_hook(burst)
        else:
            burst(None)

    handle = module.register_forward_hook(hook)


def _partial_loss(model: layerwise.DataParallel, rank: int, data: list[int]) -> Tensor:
    return net_loss(model, rank, *data) if rank == 0 else model.module.first(torch.ones(2, 6)).square().mean()


def _fails(model: layerwise.DataParallel, rank: int, data: list[int], *, sync: bool = True) -> str:
    try:
        with nullcontext() if sync else model.no_sync():
            net_loss(model, rank, *data).backward()
    except FloatingPointError:
        return "failed"
    return "did not fail"


def _stale_replicas(model: layerwise.DataParallel) -> list[str]:
    return [
        f"{shard.plan.label} is stale"
        for shard in model.engine.storage.shards
        if not torch.equal(shard.weight, shard.master.to(shard.weight.dtype))
    ]


def real_network_against_oracle(
    rank: int, world: int, setting: Setting, accumulation: int = 1, steps: int = 4
) -> list[str]:
    """Real gradients on two ranks: a sum of two numbers has one order, so the oracle gets the same bits as any layout."""
    torch.manual_seed(3)
    hyper = Hyper(weight_decay=0.1, clip=1.0)
    oracle = oracle_for(Net(), hyper)
    model, optimizer = net_and_optimizer(replace(setting, options=(*rules(hyper).items(), ("count_zeros", True))))
    for step in range(steps):
        everyone = []
        for other in range(world):
            copy = Net(setting.checkpointing)
            copy.load_state_dict(oracle.weights())
            for micro in range(accumulation):
                net_loss(copy, other, step, micro).backward()
            everyone.append({fqn: param.grad for fqn, param in copy.named_parameters()})
        oracle.step(everyone)
        for micro in range(accumulation - 1):
            with model.no_sync():
                net_loss(model, rank, step, micro).backward()
        net_loss(model, rank, step, accumulation - 1).backward()
        optimizer.step()
        found = differences(model, optimizer, oracle)
        # Real gradients have no exact sum of squares: its last bits in fp64 depend on the order, and vanish in the fp32 clip coefficient.
        if math.isclose(optimizer.stats.grad_norm, oracle.grad_norm, rel_tol=1e-14):
            found = [text for text in found if not text.startswith("grad norm")]
        if found:
            return [f"rank {rank} step {step}: {text}" for text in found]
    return []


def owned(rank: int, world: int, case: Case) -> tuple[int, int]:
    """How many elements this rank owns and how many matrices it is home to."""
    model = wrap(case, case.build())
    homed = sum(rank in item.homes for work in model.plan.works for item in work.items)
    return sum(span.numel for shard in model.engine.storage.shards for span in shard.spans), homed


def resume(rank: int, world: int, setting: dict[str, Any]) -> tuple[str, str, str]:
    """Train four steps at once, and two and two with a state dict in between: the hash of both, and whether loading gave what was saved.

    `weights` says when the model's weights are loaded: before it is wrapped, before the optimizer's state or after it.
    """
    scaled, dtype = setting.get("scaled", False), setting["dtype"]
    exact = setting.get("exact", True)
    case = Case(dtype=dtype, layout=setting["layout"], bucket_mib=0.002, options=setting.get("options", {}))
    hyper = Hyper(matrix=setting["matrix"], weight_decay=0.1)

    def start(weights: dict[str, Tensor] | None = None) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
        module = case.build()
        if weights is not None:
            module.load_state_dict(weights)
        model = wrap(case, module)
        scale = layerwise.LossScale(initial=2.0**8, growth_interval=3) if scaled else None
        return model, layerwise.Optimizer(model, **rules(hyper), loss_scale=scale)

    def train(model: layerwise.DataParallel, optimizer: layerwise.Optimizer, steps: range) -> None:
        for step in steps:
            params = model.engine.storage.params
            grads = {fqn: gradient(fqn, p.shape, rank, step, 0, exact=exact) for fqn, p in params.items()}
            if scaled:
                scale = float(optimizer.scale_loss(torch.ones(())))
                grads = {fqn: grad * scale for fqn, grad in grads.items()}
            for group in optimizer.param_groups:
                group["lr"] *= 0.5  # as a scheduler would: part of what must be restored
            deliver(model, grads, sync=True)
            optimizer.step()

    model, optimizer = start()
    train(model, optimizer, range(2))
    weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    file = io.BytesIO()
    torch.save(optimizer.state_dict(part=True), file)
    saved = hash_everything(optimizer)
    train(model, optimizer, range(2, 4))
    file.seek(0)
    when = setting.get("weights", "before wrapping")
    fresh, fresh_optimizer = start(weights if when == "before wrapping" else None)
    if when == "before the optimizer":
        fresh.module.load_state_dict(weights)
    fresh_optimizer.load_state_dict(torch.load(file, weights_only=True))
    if when == "after the optimizer":
        fresh.module.load_state_dict(weights)
    restored = "as saved" if hash_everything(fresh_optimizer) == saved else "other than saved"
    train(fresh, fresh_optimizer, range(2, 4))
    return hash_everything(optimizer), hash_everything(fresh_optimizer), restored


def nested_blocks(rank: int, world: int, setting: Setting, nested: bool) -> list[str]:
    """Microbatches in a `no_sync()` block within another, or all in one: what is wrong on the way, and a hash after each step."""
    model, optimizer = net_and_optimizer(setting)
    for param in model.parameters():
        param.register_hook(lambda grad: (grad * 64).round() / 64)
    seen = []
    for step in range(3):
        with model.no_sync():
            net_loss(model, rank, step, 0).backward()
            # Not in the first step: what it sees of a backward is what the next ones are taken to be like.
            with model.no_sync() if nested and step > 0 else nullcontext():
                net_loss(model, rank, step, 1).backward()
            net_loss(model, rank, step, 2).backward()
        net_loss(model, rank, step, 3).backward()
        optimizer.step()
        planned = optimizer.schedule.bytes_by_collective(
            model.engine.storage.ranks, 2 if model.plan.options.shard_grads else 1
        )
        if dict(optimizer.stats.bytes_by_collective) != planned:
            seen.append(f"step {step}: bytes {dict(optimizer.stats.bytes_by_collective)} against {planned}")
        seen.append(hash_everything(optimizer))
    return seen


def plain_against_wrapped(rank: int, world: int) -> list[str]:
    """Hashes of weights and state after a few steps of a plain module and of a wrapped one."""
    hashes = []
    for wrapped in (False, True):
        torch.manual_seed(3)
        module = Net()
        model = layerwise.DataParallel(module) if wrapped else module
        optimizer = layerwise.Optimizer(model, **rules(Hyper(weight_decay=0.1, clip=1.0)))
        for step in range(4):
            net_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        hashes.append(hash_by_param(optimizer))
    return hashes


def losses_of_scaling(rank: int, world: int) -> tuple[str, str]:
    """Hashes of everything but the loss scale after a few steps without and with it."""
    hashes = []
    for scaled in (False, True):
        case = Case(dtype=torch.float16, bucket_mib=0.002)
        model = wrap(case, case.build())
        scale = layerwise.LossScale(initial=2.0**8, growth_interval=2) if scaled else None
        optimizer = layerwise.Optimizer(model, **rules(Hyper(clip=1.0)), loss_scale=scale)
        for step in range(5):
            factor = float(optimizer.scale_loss(torch.ones(()))) if scaled else 1.0
            params = model.engine.storage.params
            deliver(
                model, {fqn: gradient(fqn, p.shape, rank, step, 0) * factor for fqn, p in params.items()}, sync=True
            )
            optimizer.step()
        model.ensure()
        hashes.append(hash_tensors(held(model.engine.storage)))
    return hashes[0], hashes[1]
