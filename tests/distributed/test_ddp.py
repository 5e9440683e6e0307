"""`Optimizer(ddp_model)`: torch's DistributedDataParallel reduces gradients, and everything after that is the engine.

Gradients are small integers over 8, times the number of ranks: averages are exact on any number of them, so a step is compared with the oracle of one
process that has these averages, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import layerwise
from layerwise.engine import engine
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.planner.memory import memory_by_rank
from layerwise.planner.rules import Rules
from layerwise.routing.spec import ParamTable
from tests.marks import sampled
from tests.ranks import raised, run_ranks
from tests.reference.oracle import Hyper
from tests.worlds import (
    Case,
    Net,
    Zoo,
    anywhere,
    differences,
    gradient,
    layout_named,
    net_loss,
    nudge_state,
    oracle_for,
    rules,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXPLICIT = ("flat", "padded", "compact", "replicated")
Grads = dict[str, Tensor]


@dataclass
class Given:
    """One parity run under DistributedDataParallel."""

    case: Case = field(default_factory=Case)
    ddp: dict[str, Any] = field(default_factory=dict)
    """Arguments of DistributedDataParallel."""
    first: str = "ddp"
    """What is made first: "ddp", or "optimizer", as trainers do."""
    hook: str = ""
    """"fp16": a communication hook."""
    unused: str = ""
    """A param that no rank uses."""
    clip: float | None = None
    """Clip with torch's own function."""
    optimizer: dict[str, Any] = field(default_factory=dict)


@contextmanager
def small_buckets(case: Case) -> Iterator[None]:
    """Models that are planned in here have buckets and cohorts of a few elements, which users of reduced gradients cannot ask for."""

    def planned(table: ParamTable, options: Options, **more: Any) -> Plan:
        few = {} if case.cohort_numel is None else {"cohort_numel": case.cohort_numel}
        return make_plan(table, replace(options, bucket_numel=256, **few), **more)

    with mock.patch.object(engine, "make_plan", planned):
        yield


def with_forward(module: nn.Module) -> nn.Module:
    """A module whose loss has the gradients that it is called with."""
    params = {fqn: param for fqn, param in module.named_parameters() if param.requires_grad}
    module.forward = lambda grads: sum((params[fqn] * grad.to(params[fqn].dtype)).sum() for fqn, grad in grads.items())  # type: ignore[method-assign]
    return module


def build(given: Given) -> tuple[DistributedDataParallel, layerwise.Optimizer]:
    case = given.case
    module = with_forward(case.build())
    extra = {**rules(Hyper(**case.hyper)), "layout": layout_named(case.layout), "count_zeros": True, **given.optimizer}
    with small_buckets(case):
        if given.first == "optimizer":
            optimizer = layerwise.Optimizer(module, gradients="reduced", **extra)
            ddp = DistributedDataParallel(module, **given.ddp)
        else:
            ddp = DistributedDataParallel(module, **given.ddp)
            optimizer = layerwise.Optimizer(ddp, **extra)
    if given.hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp, optimizer


def gradients(given: Given, shapes: dict[str, torch.Size], rank: int, world: int, step: int, micro: int) -> Grads:
    case = given.case
    return {
        fqn: (world * gradient(fqn, shape, rank, step, micro)).to(case.dtype)
        for fqn, shape in shapes.items()
        if fqn != given.unused
    }


def averaged(grads: list[list[Grads]]) -> dict[str, Tensor | None]:
    """What DistributedDataParallel is to make of the gradients of all ranks and microbatches."""
    world, found = len(grads), {}
    for fqn in grads[0][0]:
        found[fqn] = sum(micro[fqn].float() for micros in grads for micro in micros) / world
    return found


def beside_oracle(rank: int, world: int, given: Given, layouts: Sequence[str] = ()) -> list[str]:
    """Train under DistributedDataParallel beside the oracle; what differs, by name."""
    runs = [
        (layout, *build(replace(given, case=replace(given.case, layout=layout))))
        for layout in layouts or (given.case.layout,)
    ]
    case = given.case
    oracle = oracle_for(case.build(), Hyper(**case.hyper))
    shapes = {fqn: param.shape for fqn, param in oracle.params.items()}
    for step in range(case.steps):
        everyone = [
            [gradients(given, shapes, other, world, step, micro) for micro in range(case.accumulation)]
            for other in range(world)
        ]
        oracle.step([averaged(everyone)])
        found = []
        for layout, ddp, optimizer in runs:
            for micro, grads in enumerate(everyone[rank]):
                with nullcontext() if micro == case.accumulation - 1 else ddp.no_sync():
                    ddp(grads).backward()
            if case.sabotage == "gradient" and step == 1:
                nudge(ddp)
            optimizer.step()
            optimizer.zero_grad()
            model: Any = SimpleNamespace(engine=optimizer.engine, plan=optimizer.plan)
            if case.sabotage == "momentum" and step == 1:
                nudge_state(model)
            seen = differences(model, optimizer, oracle)
            if "reduce_scatter" in optimizer.stats.bytes_by_collective:
                seen.append("something was reduced")
            found += [f"rank {rank} step {step} {layout}: {text}" for text in seen]
        if anywhere(found):
            return found
    return []


def nudge(ddp: DistributedDataParallel) -> None:
    """Move one element of every rank's first gradient by one ulp."""
    grad = next(param.grad for param in ddp.parameters() if param.grad is not None).view(-1)[:1]
    grad.copy_(torch.nextafter(grad, torch.full_like(grad, float("inf"))))


def assert_bitwise(world: int, given: Given, layouts: Sequence[str] = EXPLICIT) -> None:
    found = [text for texts in run_ranks(world, beside_oracle, given, layouts) for text in texts]
    assert not found, "\n".join(found[:10])


RUNS: dict[str, tuple[int, Given]] = {
    "1 rank": (1, Given(Case(accumulation=2))),
    "2 ranks": (2, Given()),
    "2 ranks, bf16, tied": (2, Given(Case(model="tied", dtype=BF16))),
    "3 ranks, accumulation": (3, Given(Case(accumulation=3))),
    "3 ranks, bf16 and fp32": (3, Given(Case(model="mixed", dtype=BF16))),
    "4 ranks, fewer matrices than ranks": (4, Given(Case(model="few"))),
    "4 ranks, cohorts that travel": (4, Given(Case(cohort_numel=64, hyper={"matrix": "normuon"}))),
    "2 ranks, optimizer first": (2, Given(Case(dtype=BF16), first="optimizer")),
    "3 ranks, optimizer first": (3, Given(Case(accumulation=2), first="optimizer")),
    "bucket views": (2, Given(Case(accumulation=2), ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001})),
    "bucket views, optimizer first": (2, Given(ddp={"gradient_as_bucket_view": True}, first="optimizer")),
    "static graph": (2, Given(ddp={"static_graph": True, "gradient_as_bucket_view": True})),
    "static graph, a param that nobody uses": (2, Given(ddp={"static_graph": True}, unused="tall.weight")),
    "a param that nobody uses": (3, Given(ddp={"find_unused_parameters": True}, unused="qkv.weight")),
    "fp16 hook": (4, Given(hook="fp16", ddp={"gradient_as_bucket_view": True})),
    "adamuon, lion, clipped": (
        2,
        Given(Case(hyper={"matrix": "adamuon", "other": "lion", "clip": 0.25, "weight_decay": 0.1})),
    ),
    "fp32 Newton-Schulz": (4, Given(Case(hyper={"ns_dtype": FP32, "clip": 0.5}, cohort_numel=100))),
    "checked at every step": (2, Given(optimizer={"check_replicas": True})),
}


@pytest.mark.broad
@pytest.mark.parametrize(
    "name",
    sampled(
        RUNS,
        "1 rank",
        "2 ranks, bf16, tied",
        "3 ranks, accumulation",
        "4 ranks, cohorts that travel",
        "3 ranks, optimizer first",
        "bucket views",
        "static graph, a param that nobody uses",
        "a param that nobody uses",
        "fp16 hook",
    ),
)
def test_a_step_under_ddp_is_that_of_the_averages_in_one_process_bitwise(name: str) -> None:
    assert_bitwise(*RUNS[name])


def test_a_layout_of_each_buffer_is_bitwise_too() -> None:
    assert_bitwise(3, Given(Case(steps=2)), ("mixed others",))


@pytest.mark.parametrize("sabotage", ["momentum", "gradient"])
def test_one_ulp_in_a_momentum_or_a_gradient_is_seen(sabotage: str) -> None:
    found = [text for texts in run_ranks(2, beside_oracle, Given(Case(sabotage=sabotage))) for text in texts]
    assert any("step 1" in text or "step 2" in text for text in found)


RULES: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.05), "other": layerwise.AdamW(lr=0.01)}


def net(seed: int = 5) -> Net:
    torch.manual_seed(seed)
    return Net()


def ddp_net(**more: Any) -> tuple[DistributedDataParallel, layerwise.Optimizer]:
    ddp = DistributedDataParallel(net())
    return ddp, layerwise.Optimizer(ddp, **{**RULES, **more})


def whole(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


# -- what torch does with gradients ------------------------------------------------------------------


def clipped_by_torch(rank: int, world: int) -> tuple[float, float, list[Tensor], list[Tensor], bool]:
    """A step with torch's clipping on every rank, and the same in one process without any of ours but the rules."""
    ddp, optimizer = ddp_net(layout="compact")
    net_loss(ddp, rank, 0).backward()
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.125)
    kept = [param.grad.clone() for param in ddp.parameters()]
    optimizer.step()
    is_kept = all(torch.equal(before, param.grad) for before, param in zip(kept, ddp.parameters(), strict=True))
    alone = net()
    for param, grad in zip(alone.parameters(), kept, strict=True):
        param.grad = grad
    with mock.patch("layerwise.optim.engines.default_world", return_value=1):
        layerwise.Optimizer(alone, **RULES).step()
    return float(norm), optimizer.stats.grad_norm, whole(ddp), whole(alone), is_kept


def test_torchs_clipping_clips_and_gradients_stay_where_they_are() -> None:
    for norm, seen, mine, alone, is_kept in run_ranks(2, clipped_by_torch):
        assert norm > 0.125 > seen * 0.999
        assert all(map(torch.equal, mine, alone))
        assert is_kept


def scaled_by_torch(rank: int, world: int) -> list[Any]:
    ddp, optimizer = ddp_net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    found: list[Any] = []
    for step in range(3):
        before = whole(ddp)
        loss = net_loss(ddp, rank, step)
        scaler.scale(loss * (float("inf") if step == 1 and rank == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((not all(map(torch.equal, before, whole(ddp))), float(norm), scaler.get_scale()))
    return [found, optimizer.stats.step, optimizer.stats.grad_norm]


def test_grad_scaler_unscales_steps_and_skips() -> None:
    first, second = run_ranks(2, scaled_by_torch)
    assert repr(first) == repr(second)
    found, steps, norm = first
    assert [has_moved for has_moved, _, _ in found] == [True, False, True]
    assert [scale for *_, scale in found] == [16.0, 8.0, 8.0]
    assert steps == 2
    assert norm == pytest.approx(found[2][1])


def compressed(rank: int, world: int) -> list[Tensor]:
    """PowerSGD: gradients are approximations, the same ones on every rank."""
    ddp, optimizer = ddp_net(layout="flat")
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(6):
        net_loss(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(ddp)


def test_powersgd_has_the_same_weights_on_every_rank() -> None:
    first, second = run_ranks(2, compressed)
    assert all(map(torch.equal, first, second))


# -- what is refused ---------------------------------------------------------------------------------


def nobody_reduced(rank: int, world: int) -> list[str]:
    module = net()
    optimizer = layerwise.Optimizer(module, gradients="reduced", **RULES)
    net_loss(module, rank, 0).backward()
    before = whole(module)
    first = raised(optimizer.step)
    ddp, checked = ddp_net(check_replicas=True)
    net_loss(ddp, rank, 0).backward()
    checked.step()
    checked.zero_grad()
    with ddp.no_sync():
        net_loss(ddp, rank, 1).backward()
    return [first, str(all(map(torch.equal, before, whole(module)))), raised(checked.step)]


def test_gradients_that_nobody_reduced_are_refused_by_name_and_nothing_moves() -> None:
    for first, unmoved, later in run_ranks(2, nobody_reduced):
        assert "StateError: the gradient of param 'first.bias' has other values on rank 1 than on rank 0" in first
        assert unmoved == "True"
        assert "StateError: the gradient of param 'first.bias'" in later


def missing_on_one(rank: int, world: int) -> list[Any]:
    ddp, optimizer = ddp_net()
    net_loss(ddp, rank, 0).backward()
    if rank == 1:
        ddp.module.shared.bias.grad = None
    refused = raised(optimizer.step)
    optimizer.zero_grad()
    net_loss(ddp, rank, 0).backward()
    ddp.module.shared.bias.grad = None
    optimizer.step()
    return [refused, dict(optimizer.stats.missing)]


def test_a_gradient_that_some_ranks_lack_is_refused_and_one_that_all_lack_is_zero() -> None:
    for refused, missing in run_ranks(3, missing_on_one):
        assert (
            "StateError: some ranks have a gradient and some have none: 'shared.bias (missing on 1 of 3 ranks)'"
            in refused
        )
        assert missing == {"shared.bias": 3}


def other_weights(rank: int, world: int) -> str:
    module = net(seed=rank)
    optimizer = layerwise.Optimizer(module, gradients="reduced", **RULES)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    return raised(optimizer.step)


def test_other_weights_on_some_rank_are_refused_by_name() -> None:
    for refused in run_ranks(2, other_weights):
        assert (
            "StateError: param 'shared.bias' (bucket 0) has other values on rank 1 of domain 'dense' than on rank 0"
            in refused
        )


def misused(rank: int, world: int) -> dict[str, str]:
    ddp, optimizer = ddp_net()
    wrapped = layerwise.DataParallel(net())
    mixed = torch.nn.parallel.distributed._MixedPrecision(param_dtype=torch.bfloat16)

    def optimizer_of(model: Any, **more: Any) -> str:
        return raised(lambda: layerwise.Optimizer(model, **RULES, **more))

    return {
        "plain": optimizer_of(net()),
        "layout": optimizer_of(net(), gradients="reduced", layout="flatt"),
        "other layout on a rank": optimizer_of(net(), gradients="reduced", layout=("flat", "compact")[rank]),
        "gradients": optimizer_of(net(), gradients="summed"),
        "wrapped": optimizer_of(wrapped, gradients="reduced"),
        "wrapped, layout": optimizer_of(wrapped, layout="flat"),
        "twice": optimizer_of(ddp),
        "inside": optimizer_of(ddp.module, gradients="reduced"),
        "DataParallel": raised(lambda: layerwise.DataParallel(ddp.module)),
        "moved": raised(lambda: (ddp.module.double(), optimizer.step())),
        "mixed precision": optimizer_of(SimpleMixed(net(), mixed)),
    }


class SimpleMixed(DistributedDataParallel):
    """One that says it has mixed precision, which torch starts on GPUs only."""

    def __init__(self, module: nn.Module, mixed_precision: Any) -> None:
        super().__init__(module)
        self.mixed_precision = mixed_precision


def test_each_misuse_is_refused_by_name_on_every_rank() -> None:
    for found in run_ranks(2, misused):
        plain = found["plain"]
        assert "ValueError: model is a plain Net on 2 ranks: nobody would average its gradients" in plain
        assert all(way in plain for way in ("layerwise.DataParallel(module)", "DistributedDataParallel", "'reduced')"))
        assert "layout 'flatt' is unknown. Did you mean 'flat'?" in found["layout"]
        assert "PlanMismatchError: ranks 0 and 1 derived different plans" in found["other layout on a rank"]
        assert "gradients must be 'reduced' or left out, got 'summed'" in found["gradients"]
        assert "which reduces gradients itself" in found["wrapped"]
        assert (
            "layout was passed to the Optimizer of a model whose gradients nobody else reduces"
            in found["wrapped, layout"]
        )
        for name in ("twice", "inside", "DataParallel"):
            assert "lies in the buffers of a DataParallel or of an Optimizer already" in found[name]
        assert "was moved out of its buffer" in found["moved"]
        assert "has mixed_precision set" in found["mixed precision"]


def test_a_plain_module_in_one_process_takes_no_layout() -> None:
    with pytest.raises(ValueError, match="layout was passed to the Optimizer of a model whose gradients nobody else"):
        layerwise.Optimizer(net(), **RULES, layout="flat")


def test_reduced_gradients_in_a_single_process_are_simply_its_own() -> None:
    module, other = net(), net()
    optimizer = layerwise.Optimizer(module, gradients="reduced", **RULES)
    plain = layerwise.Optimizer(other, **RULES)
    for step in range(3):
        for one, own in ((module, optimizer), (other, plain)):
            net_loss(one, 0, step).backward()
            own.step()
            own.zero_grad()
    assert all(map(torch.equal, whole(module), whole(other)))


# -- what a rank holds -------------------------------------------------------------------------------


def held(rank: int, world: int, layout: str, dtype: torch.dtype) -> tuple[int, int, int, int, list[str]]:
    module = Zoo().to(dtype)
    ddp = DistributedDataParallel(module)
    with small_buckets(Case()):
        optimizer = layerwise.Optimizer(ddp, **RULES, layout=layout)
    storage, plan = optimizer.engine.storage, optimizer.plan
    replicas = sum(replica.weights.nbytes for replica in storage.replicas)
    shards = sum(shard.plan.shard_numel(rank) for shard in storage.shards)
    memory = memory_by_rank(plan, optimizer.schedule, Rules(matrix=RULES["matrix"], other=RULES["other"]))[rank]
    state = sum(tensor.nbytes for shard in storage.shards for tensor in shard.state.values())
    own = sum(param.nbytes for param in storage.params.values())
    assert (memory.grads, memory.state) == (own + 4 * shards, state)
    assert memory.params == replicas + sum(param.nbytes for param in module.parameters() if not param.requires_grad)
    names = sorted({op.phase for op in optimizer.schedule.ops})
    return storage.nbytes(), replicas, shards, state, names


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("layout", sampled(EXPLICIT, "compact", "replicated"))
def test_a_rank_holds_no_full_gradient_of_ours(layout: str, dtype: torch.dtype) -> None:
    for nbytes, replicas, shards, state, phases in run_ranks(3, held, layout, dtype):
        masters = 0 if dtype == FP32 else 4 * shards
        assert nbytes == replicas + masters + 4 * shards + state  # weights, masters, updates
        assert "reduce" not in phases


# -- state -------------------------------------------------------------------------------------------


def resumed(rank: int, world: int, layout: str) -> tuple[bool, bool, str]:
    """Six steps, or three, a state dict of this rank, everything anew, and three more."""

    def steps(ddp: nn.Module, optimizer: layerwise.Optimizer, numbers: range) -> None:
        for step in numbers:
            net_loss(ddp, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    ddp, optimizer = ddp_net(layout=layout)
    steps(ddp, optimizer, range(3))
    weights, state = {name: value.clone() for name, value in ddp.state_dict().items()}, optimizer.state_dict(part=True)
    state = {**state, "state": {key: {n: v.clone() for n, v in own.items()} for key, own in state["state"].items()}}  # type: ignore[attr-defined]
    steps(ddp, optimizer, range(3, 6))
    other = DistributedDataParallel(net(seed=8))
    another = layerwise.Optimizer(other, **RULES, layout=layout)
    other.load_state_dict(weights)
    another.load_state_dict(state)
    steps(other, another, range(3, 6))
    fresh = DistributedDataParallel(net(seed=8))
    fresh.load_state_dict(weights)
    without = layerwise.Optimizer(fresh, **RULES, layout=layout)
    steps(fresh, without, range(3, 6))
    same = all(map(torch.equal, whole(ddp), whole(other)))
    return same, all(map(torch.equal, whole(ddp), whole(fresh))), optimizer.plan.layout_label


@pytest.mark.parametrize("layout", sampled(EXPLICIT, "compact", "replicated"))
def test_a_state_dict_resumes_bitwise_and_without_one_weights_differ(layout: str) -> None:
    for same, without, _ in run_ranks(2, resumed, layout):
        assert same
        assert not without


def moved_to_where_it_is(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """For torch "cpu:0" is another place than "cpu": params get other memory."""
    ddp, optimizer = ddp_net(layout="compact")
    other, another = ddp_net(layout="compact")
    for step in range(4):
        if step % 2 == 0:
            before = other.module.first.weight.data_ptr()
            other.to("cpu:0")
            assert other.module.first.weight.data_ptr() != before
        for model, own in ((ddp, optimizer), (other, another)):
            net_loss(model, rank, step).backward()
            own.step()
            own.zero_grad()
    return whole(ddp), whole(other)


def test_a_module_may_be_moved_to_where_it_is() -> None:
    for stayed, moved in run_ranks(2, moved_to_where_it_is):
        assert all(map(torch.equal, stayed, moved))


def with_buffers(rank: int, world: int) -> tuple[list[Tensor], list[Tensor], int]:
    """Batch norm: its statistics are buffers, which DistributedDataParallel spreads."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    module[2].bias.requires_grad_(False)
    ddp = DistributedDataParallel(module)  # which also gives every rank the weights of rank 0
    frozen = module[2].bias.detach().clone()
    optimizer = layerwise.Optimizer(ddp, **RULES)
    for step in range(3):
        net_loss(ddp, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(frozen, module[2].bias)
    return whole(ddp), [module[1].running_mean], optimizer.stats.step


def test_frozen_params_and_buffers_are_left_alone() -> None:
    (first, _, steps), (second, *_) = run_ranks(2, with_buffers)
    assert all(map(torch.equal, first, second))
    assert steps == 3


def compiled(rank: int, world: int) -> list[str]:
    ddp = DistributedDataParallel(net())
    optimizer = layerwise.Optimizer(torch.compile(ddp, backend="eager"), **RULES)
    return sorted(optimizer.plan.bucket_of)


def test_a_compiled_ddp_model_has_the_modules_own_names() -> None:
    (names,) = run_ranks(1, compiled)
    assert names == sorted(fqn for fqn, _ in net().named_parameters())
