"""QK-clip on any number of ranks is QK-clip on whole weights in one process, bit by bit, in every layout.

Gradients are exact and logits are handed over as numbers, so whatever differs is a bug. Modules come in every arrangement: separate projections, fused in
blocks and in groups, multi-head latent attention, stored transposed, with and without biases.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise
from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.engine.qk_clip import NOTHING_CLIPPED, Clipper
from layerwise.routing.heads import HeadRows
from layerwise.routing.split import transposed
from tests import seams
from tests.ranks import raised, run_ranks
from tests.reference.oracle import Hyper, Oracle
from tests.reference.qk_clip import Heads, clip
from tests.worlds import accumulated, anywhere, deliver, differences, gradient, hash_of, rules

LAYOUTS = ("flat", "padded", "compact", "replicated")
BF16, FP32 = torch.bfloat16, torch.float32
THRESHOLD = 20.0


class Separate(nn.Module):
    """Three heads of width 4 over 10 inputs, queries, keys and values apart, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(10, 12) for _ in range(3))

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.grouped(query="q_proj", key="k_proj", n_heads=3, head_dim=4, records=True)


class Blocks(nn.Module):
    """Four query heads on two key heads of width 3: all queries, all keys, all values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(7, 24, bias=False)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (12, 6, 6)}

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.fused("qkv", n_heads=4, n_kv_heads=2, head_dim=3, records=True)


class Interleaved(nn.Module):
    """The same group by group: two query heads, their key, their value."""

    def __init__(self) -> None:
        super().__init__()
        self.joint = nn.Linear(5, 24)

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.fused(
            "joint.weight", n_heads=4, n_kv_heads=2, head_dim=3, order="groups", records=True
        )


class Latent(nn.Module):
    """Multi-head latent attention: two heads with 3 plain and 2 rotary dims, values of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b = nn.Linear(6, 2 * 5, bias=False)
        self.kv_a = nn.Linear(9, 8, bias=False)
        self.kv_b = nn.Linear(6, 2 * 7, bias=False)

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.mla(
            query="q_b", key_value="kv_b", n_heads=2, nope_dim=3, rope_dim=2, value_dim=4, records=True
        )


class Transposed(nn.Module):
    """Two heads of width 4, stored (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(9, 24))
        self.bias = nn.Parameter(torch.empty(24))

    def matrix_splits(self) -> dict[str, Any]:
        return {"weight": transposed((9, 24), (8, 8, 8))}

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.fused("weight", n_heads=2, head_dim=4, records=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.separate, self.blocks, self.interleaved = Separate(), Blocks(), Interleaved()
        self.latent, self.turned = Latent(), Transposed()
        self.mlp = nn.Linear(11, 13)


MATRICES: dict[str, list[tuple[int, int]] | None] = {
    "separate.q_proj.weight": [(0, 12)],
    "separate.k_proj.weight": [(0, 12)],
    "separate.v_proj.weight": [(0, 12)],
    "blocks.qkv.weight": [(0, 12), (12, 18), (18, 24)],
    "interleaved.joint.weight": [(0, 24)],
    "latent.q_b.weight": [(0, 10)],
    "latent.kv_a.weight": [(0, 8)],
    "latent.kv_b.weight": [(0, 14)],
    "mlp.weight": [(0, 13)],
}


def _both(masters: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> list[Tensor]:
    """A weight with its rows taken apart, and its bias likewise."""
    return [masters[f"{name}.weight"].view(*shape, -1), masters[f"{name}.bias"].view(*shape)]


HEADS: dict[str, Heads] = {
    "separate": Heads(
        groups=[[0], [1], [2]],
        queries=lambda m, group: [whole[group] for whole in _both(m, "separate.q_proj", (3, 4))],
        keys=lambda m, group: [whole[group] for whole in _both(m, "separate.k_proj", (3, 4))],
    ),
    "blocks": Heads(
        groups=[[0, 1], [2, 3]],
        queries=lambda m, group: [m["blocks.qkv.weight"].view(8, 3, 7)[2 * group : 2 * group + 2]],
        keys=lambda m, group: [m["blocks.qkv.weight"].view(8, 3, 7)[4 + group]],
    ),
    "interleaved": Heads(
        groups=[[0, 1], [2, 3]],
        queries=lambda m, group: [whole[group, :2] for whole in _both(m, "interleaved.joint", (2, 4, 3))],
        keys=lambda m, group: [whole[group, 2] for whole in _both(m, "interleaved.joint", (2, 4, 3))],
    ),
    "latent": Heads(
        groups=[[0], [1]],
        queries=lambda m, group: [m["latent.q_b.weight"].view(2, 5, 6)[group, :3]],
        keys=lambda m, group: [m["latent.kv_b.weight"].view(2, 7, 6)[group, :3]],
        lonely=lambda m, group: [m["latent.q_b.weight"].view(2, 5, 6)[group, 3:]],
    ),
    "turned": Heads(
        groups=[[0], [1]],
        queries=lambda m, group: [
            m["turned.weight"].view(9, 3, 2, 4)[:, 0, group],
            m["turned.bias"].view(3, 2, 4)[0, group],
        ],
        keys=lambda m, group: [
            m["turned.weight"].view(9, 3, 2, 4)[:, 1, group],
            m["turned.bias"].view(3, 2, 4)[1, group],
        ],
    ),
}


@dataclass
class Case:
    dtype: torch.dtype = FP32
    balance: float = 0.5
    steps: int = 5
    micros: int = 2
    options: tuple[tuple[str, Any], ...] = ()
    sabotage: str = ""


def logits_of(name: str, rank: int, step: int, micro: int, world: int) -> Tensor | None:
    """Between 0 and 40, so that half of them are too large; None where the module does not run."""
    if name == "latent" and step == 4 and rank > 0:
        return None
    if name == "blocks" and step == 2:
        return None
    n_heads = sum(map(len, HEADS[name].groups))
    generator = torch.Generator().manual_seed(hash_of(f"{name} {rank} {step} {micro}"))
    found = torch.rand(n_heads, generator=generator) * 40
    if name == "interleaved" and step == 1 and rank == world - 1 and micro == 0:
        found[1] = math.nan
    return found


def gradients(shapes: dict[str, torch.Size], rank: int, step: int, micro: int, world: int) -> dict[str, Tensor]:
    found = {}
    for fqn, shape in shapes.items():
        module = fqn.split(".")[0]
        if module != "mlp" and logits_of(module, rank, step, micro, world) is None:
            continue
        found[fqn] = gradient(fqn, shape, rank, step, micro)
        if step == 3 and rank == world - 1 and fqn == "mlp.weight":
            found[fqn] = found[fqn] * math.inf
    return found


def build(dtype: torch.dtype) -> Model:
    torch.manual_seed(5)
    module = Model()
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape) * 0.1)
    return module.to(dtype)


def start(case: Case, layout: str) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    model = seams.data_parallel(
        build(case.dtype),
        layout=layout,
        bucket_mib=0.0005,
        rules=[layerwise.RouteRule(pattern="turned.weight", to="other")],
        **dict(case.options),
    )
    optimizer = layerwise.Optimizer(
        model,
        **rules(Hyper(weight_decay=0.1)),
        count_zeros=True,
        qk_clip=layerwise.QKClip(threshold=THRESHOLD, balance=case.balance),
    )
    return model, optimizer


def sabotaged(what: str) -> Any:
    """A mistake that the comparison must see."""
    all_reduce, apply, power = Communicator.all_reduce, Clipper.apply, HeadRows.power

    def alone(self: Any, op: Any, tensor: Tensor) -> Handle:
        return Handle("alone", tensor) if op.phase == "logits" else all_reduce(self, op, tensor)

    def like_others(self: Any, balance: float) -> float:
        return 0.5 if self.role == "query_alone" else power(self, balance)

    def twice(self: Any) -> Any:
        return (apply(self), apply(self))[0]

    match what:
        case "local maxima":
            return mock.patch.object(Communicator, "all_reduce", alone)
        case "after publishing":
            return mock.patch.object(Clipper, "apply", return_value=NOTHING_CLIPPED)
        case "rotary queries like others":
            return mock.patch.object(HeadRows, "power", like_others)
        case "not forgotten":
            return mock.patch.object(Clipper, "reset")
        case "only the last microbatch":
            return mock.patch("torch.maximum", lambda before, now: now)
        case "twice":
            return mock.patch.object(Clipper, "apply", twice)
    return nullcontext()


def train(rank: int, world: int, case: Case, layouts: tuple[str, ...] = LAYOUTS) -> list[str]:
    """Train in all layouts side by side, next to one oracle of all ranks; returns what differs."""
    reference = build(case.dtype)
    oracle = Oracle(
        {fqn: p.detach().clone() for fqn, p in reference.named_parameters()}, MATRICES, Hyper(weight_decay=0.1)
    )
    shapes = {fqn: param.shape for fqn, param in oracle.params.items()}
    runs = []
    apply = Clipper.apply
    with sabotaged(case.sabotage):
        runs = [(layout, *start(case, layout)) for layout in layouts]
        for step in range(case.steps):
            everyone = [
                [gradients(shapes, other, step, micro, world) for micro in range(case.micros)] for other in range(world)
            ]
            calls: dict[str, list[list[float]]] = {
                name: [
                    found.tolist()
                    for other in range(world)
                    for micro in range(case.micros)
                    if (found := logits_of(name, other, step, micro, world)) is not None
                ]
                for name in HEADS
            }
            stepped = oracle.step([accumulated(micros) for micros in everyone])
            count = clip(oracle.masters, HEADS, calls, THRESHOLD, case.balance) if stepped else 0
            seen = [logit for each in calls.values() for call in each for logit in call]
            largest = None if not stepped else math.inf if any(map(math.isnan, seen)) else max(seen)
            found = []
            for layout, model, optimizer in runs:
                for micro in range(case.micros):
                    for name in HEADS:
                        logits = logits_of(name, rank, step, micro, world)
                        if logits is not None:
                            layerwise.record_logits(model.module.get_submodule(name), logits)
                    deliver(model, everyone[rank][micro], sync=micro == case.micros - 1)
                optimizer.step()
                if case.sabotage == "after publishing":
                    apply(optimizer.stepper._clipper)
                texts = differences(model, optimizer, oracle) if stepped else weights_differ(model, oracle)
                stats = optimizer.stats
                facts = (
                    stats.max_logit,
                    stats.clipped_heads,
                    stats.skipped,
                    stats.nonfinite_logits,
                    stats.unseen_logits,
                )
                expected = (
                    largest,
                    count,
                    not stepped,
                    ("interleaved head 1",) if step == 1 else (),
                    ("blocks",) if step == 2 else (),
                )
                if facts != expected:
                    texts.append(f"stats {facts} against {expected}")
                found += [f"rank {rank} step {step} {layout}: {text}" for text in texts]
            if anywhere(found):
                return found
    return []


def weights_differ(model: layerwise.DataParallel, oracle: Oracle) -> list[str]:
    weights = oracle.weights()
    return [fqn for fqn, param in model.module.named_parameters() if not torch.equal(param.detach(), weights[fqn])]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), id="fp32", marks=pytest.mark.slow),
        pytest.param(Case(dtype=BF16, balance=0.25), id="bf16, queries take a quarter"),
        pytest.param(
            Case(options=(("reducer", "ordered"), ("check_collectives", True)), steps=3),
            id="ordered and compared",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(dtype=BF16, options=(("prefetch", 1),), steps=3),
            id="bf16, one ahead",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Case(options=(("overlap_param_gather", False),), steps=3), id="no overlap", marks=pytest.mark.slow
        ),
    ],
)
def test_clipped_weights_are_those_of_one_process_in_every_layout(world: int, case: Case) -> None:
    layouts = tuple(layout for layout in LAYOUTS if not (layout == "replicated" and dict(case.options).get("reducer")))
    assert [text for found in run_ranks(world, train, case, layouts) for text in found] == []


@pytest.mark.parametrize(
    "sabotage",
    [
        "local maxima",
        "after publishing",
        "rotary queries like others",
        "not forgotten",
        "only the last microbatch",
        "twice",
    ],
)
def test_a_mistake_in_clipping_is_seen(sabotage: str) -> None:
    """The control: each of these gives other weights on some rank."""
    case = Case(
        sabotage=sabotage, options=(("overlap_param_gather", False),)
    )  # nothing in flight: what differs, differs always
    found = run_ranks(2, train, case, ("flat", "padded"))
    assert any("replica of" in text or "master of" in text for texts in found for text in texts)


# -- what is refused -------------------------------------------------------------------------------


def forget_on_one_rank(rank: int, world: int) -> list[str]:
    model, optimizer = start(Case(), "flat")
    shapes = {fqn: param.shape for fqn, param in model.module.named_parameters()}
    for name in HEADS:
        if rank == 0 or name != "latent":
            layerwise.record_logits(model.module.get_submodule(name), torch.ones(sum(map(len, HEADS[name].groups))))
    before = {fqn: param.detach().clone() for fqn, param in model.module.named_parameters()}
    deliver(model, gradients(shapes, rank, 0, 0, world), sync=True)
    text = raised(optimizer.step)
    changed = [fqn for fqn, param in model.module.named_parameters() if not torch.equal(param, before[fqn])]
    return [text, *changed]


def test_gradients_without_logits_on_one_rank_are_an_error_on_all_and_change_nothing() -> None:
    first, second = run_ranks(2, forget_on_one_rank)
    assert first[0].startswith(
        "PlanMismatchError: rank 1 failed where others did not: StateError: qk_clip saw gradients"
    )
    assert second[0].startswith("StateError: qk_clip saw gradients and no attention logits of 'latent'")
    assert first[1:] == second[1:] == []


def build_differently(rank: int, world: int, what: str) -> str:
    module = Model()
    if what == "heads on one rank" and rank == 0:
        module.separate.attention_heads = lambda: layerwise.AttentionHeads.grouped(  # type: ignore[method-assign]
            query="q_proj", key="k_proj", n_heads=6, head_dim=2
        )
    model = layerwise.DataParallel(nn.Linear(4, 4) if what == "no heads" else module)
    thresholds = {"threshold": 50.0 + rank if what == "thresholds" else 50.0}
    clipping: Any = "yes" if what == "not a value" else layerwise.QKClip(**thresholds)
    return raised(lambda: layerwise.Optimizer(model, **rules(Hyper()), qk_clip=clipping))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("no heads", "ValueError: qk_clip was asked for, but no module has a method attention_heads()"),
        ("thresholds", "PlanMismatchError: ranks 0 and 1 derived different optimizer arguments: "),
        ("heads on one rank", "PlanMismatchError: ranks 0 and 1 derived different optimizer arguments: "),
        ("not a value", "TypeError: qk_clip must be a layerwise.QKClip or None, got str."),
    ],
)
def test_what_cannot_be_clipped_is_refused_on_every_rank(what: str, expected: str) -> None:
    assert all(text.startswith(expected) for text in run_ranks(2, build_differently, what))


# -- pipeline stages -------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        if number > 0:
            self.attention = Separate()
        self.mlp = nn.Linear(5, 6)


def train_stages(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(1)
    model = seams.data_parallel(Stage(rank), mesh=mesh, check_collectives=True)
    optimizer = layerwise.Optimizer(model, **rules(Hyper()), qk_clip=layerwise.QKClip(threshold=10.0))
    logits = torch.tensor([[0.0, 0.0, 0.0], [9.0, 20.0, 8.0], [7.0, 15.0, math.inf]])[rank]
    shapes = {fqn: param.shape for fqn, param in model.module.named_parameters()}
    if rank > 0:
        layerwise.record_logits(model.module.attention, logits)
    deliver(model, {fqn: gradient(fqn, shape, rank, 0, 0) for fqn, shape in shapes.items()}, sync=True)
    optimizer.step()
    stats = replace(optimizer.stats, bytes_by_collective={}, norms={}, clip_coefficients={})
    planned = optimizer.schedule.bytes_by_collective(model.engine.storage.ranks)
    return stats, dict(optimizer.stats.bytes_by_collective) == planned


def test_all_pipeline_stages_know_what_was_clipped_on_any() -> None:
    found = run_ranks(3, train_stages)
    assert all(stats == found[0][0] and fits for stats, fits in found)
    stats = found[0][0]
    assert (stats.max_logit, stats.clipped_heads) == (math.inf, 2)
    assert stats.nonfinite_logits == ("attention of stage 2 head 2",)


class Attending(nn.Module):
    """One stage: attention of two heads that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.grouped(query="q_proj", key="k_proj", n_heads=2, head_dim=4)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return x + nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def on_torchs_schedule(rank: int, world: int, are_shapes_said: bool) -> list[tuple[float | None, int]]:
    """What steps of a pipeline of torch's saw and clipped."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (world, 1, 1), mesh_dim_names=("pp", "dp", "ep"))
    chunk, shape = Attending(), (2, 3, 8)
    model = layerwise.DataParallel(chunk, mesh=mesh)
    optimizer = layerwise.Optimizer(
        model,
        matrix=layerwise.Muon(lr=0.02),
        other=layerwise.AdamW(lr=0.01),
        qk_clip=layerwise.QKClip(threshold=0.05),
    )
    shapes: dict[str, Any] = {}
    if are_shapes_said:
        ends = [torch.empty(shape, device="meta").requires_grad_(needs) for needs in (rank > 0, True)]
        shapes = {"input_args": (ends[0],), "output_args": (ends[1],)}
    stage = PipelineStage(chunk, rank, world, torch.device("cpu"), group=mesh.get_group("pp"), **shapes)
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, _: out.square().mean() / 2, scale_grads=False)
    found = []
    # What nobody wrote holds NaN here, which would be seen.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    for step in range(3):
        x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(step))
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == world - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        found.append((optimizer.stats.max_logit, optimizer.stats.clipped_heads))
    return found


def test_a_forward_in_which_a_pipeline_finds_out_shapes_is_none_of_training() -> None:
    said, inferred = run_ranks(2, on_torchs_schedule, True), run_ranks(2, on_torchs_schedule, False)
    assert said == inferred
    assert all(logit is not None and math.isfinite(logit) for logit, _ in said[0])
    assert said[0][0][1] > 0
