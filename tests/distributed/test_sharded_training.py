"""Models that torch has cut train through their own forward and backward like one process does on the whole batch; and what
becomes of gradients that are missing, of NaN in one replica, and of copies that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layerwise
from tests.marks import sampled
from tests.mesh_zoo import Scene, Stage
from tests.meshes import MESHES, local
from tests.ranks import raised, run_ranks
from tests.reference.oracle import Hyper, Oracle
from tests.worlds import hash_of, rules

WIDTH, VOCABULARY, LENGTH, BATCH = 8, 13, 7, 2
STEPS = 4


class Block(nn.Module):
    """One head of attention, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (WIDTH,) * 3}

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def matrices(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(2):
            thirds = [(first, first + WIDTH) for first in (0, WIDTH, 2 * WIDTH)]
            found[f"blocks.{number}.qkv.weight"] = thirds
            for name, rows in (("out", WIDTH), ("up", 20), ("down", WIDTH)):
                found[f"blocks.{number}.{name}.weight"] = [(0, rows)]
        return found


def transformer() -> Transformer:
    torch.manual_seed(3)
    return Transformer()


def loss_of(model: nn.Module, places: list[int], step: int) -> Tensor:
    """On the data of these data-parallel ranks in one batch."""
    rows = []
    for place in places:
        generator = torch.Generator().manual_seed(hash_of(f"tokens {place} {step}"))
        rows.append(torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator))
    tokens = torch.cat(rows)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def fsdp(model: Transformer, world: int, *, reshard: bool = True) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)


def zero_2(model: Transformer, world: int) -> None:
    fsdp(model, world, reshard=False)


def hsdp(model: Transformer, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)


def fsdp_tp(model: Transformer, world: int) -> None:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["shard"])


CUTS: dict[str, tuple[Callable[[Transformer, int], None], int]] = {
    "fsdp": (fsdp, 1),
    "zero-2": (zero_2, 1),
    "hsdp": (hsdp, 1),
    "fsdp+tp": (fsdp_tp, 2),
}
"""How it is cut, and how many ranks have the same data."""

HYPER = Hyper(ns_dtype=torch.float32, clip=0.5, weight_decay=0.1)


def train(rank: int, world: int, cut: str, peek: bool, lazy: int | None) -> dict[str, float]:
    """The largest differences of losses, norms and weights from those of one process, over some steps. With `peek` there are
    forwards without backward in between. `lazy` is a rank that trains on the data of its neighbour."""
    shard, same_data = CUTS[cut]
    model, alone = transformer(), transformer()
    oracle = Oracle({fqn: param.detach() for fqn, param in alone.named_parameters()}, alone.matrices(), HYPER)
    shard(model, world)
    optimizer = layerwise.Optimizer(model, **rules(HYPER))
    everyone = list(range(world // same_data))
    mine = rank // same_data if rank != lazy else 0
    worst = {"loss": 0.0, "norm": 0.0, "weight": 0.0}
    for step in range(STEPS):
        if peek:
            with torch.no_grad():
                loss_of(model, [mine], step)
        loss_of(model, [mine], step).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(alone, everyone, step)
        loss.backward()
        oracle.step([{fqn: param.grad for fqn, param in alone.named_parameters()}])
        alone.zero_grad()
        with torch.no_grad():
            for fqn, param in alone.named_parameters():
                param.copy_(oracle.masters[fqn])
        worst["norm"] = max(worst["norm"], abs(optimizer.stats.grad_norm / oracle.grad_norm - 1.0))
        with torch.no_grad():
            before, after = loss_of(alone, everyone, -1), loss_of(model, everyone, -1)
        worst["loss"] = max(worst["loss"], abs(float(before - after)))
    if isinstance(model, FSDPModule):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    for fqn, param in model.named_parameters():
        full = param.full_tensor() if hasattr(param, "full_tensor") else param
        worst["weight"] = max(worst["weight"], float((full - oracle.masters[fqn]).abs().max()))
    return worst


TOLERANCE = {"loss": 1e-4, "norm": 1e-5, "weight": 1e-4}
"""Batches of another size and sums in another order round gradients differently, by some 1e-7 of them. The five polynomials
multiply small singular values by up to 1000 and that rounding with them, and an update is 2 % of a weight: 1e-6 a step."""


@pytest.mark.parametrize(
    ("cut", "world", "peek"),
    sampled(
        [
            ("fsdp", 2, False),
            ("fsdp", 3, False),
            ("zero-2", 2, True),
            ("zero-2", 3, True),
            ("hsdp", 4, False),
            ("fsdp+tp", 4, False),
        ],
        ("fsdp", 3, False),
        ("zero-2", 2, True),
        ("fsdp+tp", 4, False),
    ),
)
def test_a_cut_model_trains_like_one_process(cut: str, world: int, peek: bool) -> None:
    for worst in run_ranks(world, train, cut, peek, None):
        assert all(worst[name] <= TOLERANCE[name] for name in TOLERANCE), worst


def test_a_rank_that_trains_on_the_wrong_data_is_seen() -> None:
    for worst in run_ranks(2, train, "fsdp", False, 1):
        assert all(worst[name] > 10 * TOLERANCE[name] for name in TOLERANCE), worst


def without_empty(rank: int, world: int, mesh: str) -> list[str]:
    """Ranks that hold nothing of a param have no gradient of it."""
    stage = Stage(rank, Scene(mesh, "odd"), gradient_policy=layerwise.GradientPolicy(strict_grads=True))
    for step in range(2):
        grads = stage.deliver(step)
        stage.oracle.step([grads])
        dropped = [param for param in stage.params.values() if local(param).numel() == 0]
        for param in dropped:
            param.grad = None
        stage.optimizer.step()
        if stage.optimizer.stats.missing:
            return [f"missing: {stage.optimizer.stats.missing}"]
    return stage.differs() + ([] if dropped or rank == 0 else ["every rank has something of everything"])


@pytest.mark.parametrize("mesh", sampled(["fsdp 3", "fsdp 4", "fsdp+tp 2x4"], "fsdp 3"))
def test_no_gradient_of_an_empty_shard_is_nothing_to_speak_of(mesh: str) -> None:
    world = MESHES[mesh].world
    *_, last = run_ranks(world, without_empty, mesh)
    assert last == []


def without_any(rank: int, world: int, mesh: str) -> list[str]:
    """A param that got no gradient on any rank counts as one of zeros."""
    stage = Stage(rank, Scene(mesh, "dense"))
    fqn = "blocks.1.up.weight"
    found = []
    for step in range(2):
        grads = stage.deliver(step)
        if step == 1:
            grads[fqn] = None
            stage.params[fqn].grad = None
        stage.oracle.step([grads])
        stage.optimizer.step()
        found += [f"step {step}: {name}" for name in stage.differs()]
        missing = list(stage.optimizer.stats.missing)
        found += [f"step {step}: missing {missing}"] if missing != [fqn] * step else []
    return found


@pytest.mark.parametrize("mesh", sampled(["fsdp 2", "hsdp 2x2", "tp 2"], "fsdp 2"))
def test_no_gradient_anywhere_counts_as_zero(mesh: str) -> None:
    world = MESHES[mesh].world
    assert run_ranks(world, without_any, mesh) == [[]] * world


def without_one(rank: int, world: int, mesh: str, fqn: str) -> tuple[str, bool, list[str]]:
    """One rank has no gradient of a param of which it holds something. What it says, whether nothing changed, and what is wrong
    after a step with all gradients."""
    stage = Stage(rank, Scene(mesh, "dense"))
    before = stage.hash()
    stage.deliver(0)
    if rank == world - 1:
        stage.params[fqn].grad = None
    said = raised(stage.optimizer.step)
    is_same = stage.hash() == before
    stage.optimizer.zero_grad()
    stage.oracle.step([stage.deliver(1)])
    stage.optimizer.step()
    return said, is_same, stage.differs()


@pytest.mark.parametrize(
    ("mesh", "fqn"),
    sampled(
        [
            ("hsdp 2x2", "blocks.0.up.bias"),
            ("blocks only 2", "embed.weight"),
            ("tp 3", "blocks.0.norm.weight"),
            ("fsdp+tp 2x2", "blocks.1.norm.weight"),
        ],
        ("hsdp 2x2", "blocks.0.up.bias"),
    ),
)
def test_a_gradient_that_one_copy_lacks_is_an_error_on_every_rank(mesh: str, fqn: str) -> None:
    world = MESHES[mesh].world
    answers = run_ranks(world, without_one, mesh, fqn)
    (said,) = {said for said, _, _ in answers}
    assert said.startswith("StateError: ")
    assert fqn in said
    assert [(is_same, wrong) for _, is_same, wrong in answers] == [(True, [])] * world


def without_some(
    rank: int, world: int, mesh: str, model: str, fqn: str, lacking: tuple[int, ...], strict: bool
) -> tuple[list[str], list[str]]:
    """Some ranks have no gradient of what they hold of a param, in the second of three steps. What steps say of it, and what
    is not as with a gradient of zeros there."""
    stage = Stage(rank, Scene(mesh, model), gradient_policy=layerwise.GradientPolicy(strict_grads=strict))
    said, wrong = [], []
    for step in range(3):
        grads = stage.deliver(step)
        before = stage.hash()
        if step == 1:
            for other in lacking:
                grads[fqn][stage.mesh.box(stage.model, fqn, stage.whole[fqn].shape, other)] = 0.0
            if rank in lacking:
                stage.params[fqn].grad = None
        said.append(raised(stage.optimizer.step))
        if said[-1] == "nothing was raised":
            stage.oracle.step([grads])
            missing = dict(stage.optimizer.stats.missing)
            wrong += [] if missing == ({fqn: len(lacking)} if step == 1 else {}) else [f"step {step}: {missing}"]
        else:
            wrong += [] if stage.hash() == before else [f"step {step} changed something"]
            stage.optimizer.zero_grad()
        wrong += [f"step {step}: {name}" for name in stage.differs()]
    return said, wrong


IDLE = [
    ("ep 2", "mixture", "blocks.0.experts.up", (1,)),
    ("ep 3", "mixture", "blocks.0.experts.down", (0, 2)),
    ("ep beside fsdp 4", "mixture", "blocks.0.experts.up", (1, 2)),
    ("ep x fsdp 2x2 dim 1", "mixture", "blocks.0.experts.up", (3,)),
    ("apart ep x fsdp 2x2 dim 0", "quartet", "blocks.0.experts.down", (0, 2)),
    ("fsdp 2", "dense", "blocks.1.up.weight", (1,)),
    ("hsdp 2x2", "dense", "blocks.0.up.bias", (1, 3)),
    ("fsdp+tp 2x2", "dense", "blocks.1.norm.weight", (0, 1)),
]
"""Ranks that lack a gradient together with all that hold copies of what they hold, if any: experts that got no token."""


@pytest.mark.parametrize(("mesh", "model", "fqn", "lacking"), sampled(IDLE, IDLE[1], IDLE[3], IDLE[6]))
def test_a_part_without_a_gradient_counts_as_zero(mesh: str, model: str, fqn: str, lacking: tuple[int, ...]) -> None:
    world = MESHES[mesh].world
    assert (
        run_ranks(world, without_some, mesh, model, fqn, lacking, False) == [(["nothing was raised"] * 3, [])] * world
    )


@pytest.mark.parametrize(("mesh", "model", "fqn", "lacking"), sampled(IDLE, IDLE[0]))
def test_a_part_without_a_gradient_is_named_under_strict_grads(
    mesh: str, model: str, fqn: str, lacking: tuple[int, ...]
) -> None:
    world = MESHES[mesh].world
    for said, wrong in run_ranks(world, without_some, mesh, model, fqn, lacking, True):
        assert f"'{fqn} ({len(lacking)} of {world} ranks)': strict_grads=True expects one" in said[1]
        assert (said[0], said[2], wrong) == ("nothing was raised", "nothing was raised", [])


@pytest.mark.parametrize(
    ("mesh", "model", "fqn", "lacking"),
    sampled(
        [
            # Ranks 0 and 2 have copies, and 1 and 3. What one pair lacks, the other must not make up for.
            ("hsdp 2x2", "dense", "blocks.0.up.bias", (0, 3)),
            ("hsdp 2x2", "dense", "blocks.0.up.bias", (1, 2)),
            ("hsdp 2x2", "dense", "blocks.0.up.bias", (0, 1)),
            ("hsdp 2x2", "dense", "blocks.0.up.bias", (0, 1, 2)),
            ("fsdp+tp 2x2", "dense", "blocks.1.norm.weight", (1, 2)),
        ],
        ("hsdp 2x2", "dense", "blocks.0.up.bias", (0, 3)),
    ),
)
def test_copies_of_parts_that_disagree_are_an_error(mesh: str, model: str, fqn: str, lacking: tuple[int, ...]) -> None:
    world = MESHES[mesh].world
    for said, wrong in run_ranks(world, without_some, mesh, model, fqn, lacking, False):
        assert f"'{fqn} (missing on {len(lacking)} of {world} ranks)'" in said[1]
        assert (said[0], said[2], wrong) == ("nothing was raised", "nothing was raised", [])


def one_bad_replica(rank: int, world: int, mesh: str) -> tuple[bool, tuple[str, ...], bool]:
    """The last rank, whose parts all are copies of others, has NaN in a gradient that the others have whole."""
    stage = Stage(rank, Scene(mesh, "dense"))
    before = stage.hash()
    stage.deliver(0)
    grad = stage.params["blocks.0.up.weight"].grad
    if rank == world - 1 and grad is not None:
        local(grad).view(-1)[0] = float("nan")
    stage.optimizer.step()
    return stage.optimizer.stats.skipped, stage.optimizer.stats.nonfinite, stage.hash() == before


def test_nan_in_one_replica_alone_skips_the_step_on_every_rank() -> None:
    """Copies were to be equal and are not. That nobody takes the step is the least: one copy would be NaN, the others not."""
    assert run_ranks(4, one_bad_replica, "hsdp 2x2") == [(True, ("blocks.0.up.weight",), True)] * 4


def other_copies(rank: int, world: int, mesh: str, fqn: str) -> tuple[str, bool]:
    """The last rank has another value in something of which others have copies."""
    scene = Scene(mesh, "dense")
    stage = Stage(rank, scene)
    if rank == world - 1:
        with torch.no_grad():
            local(stage.params[fqn].detach()).view(-1)[0].add_(1.0)
    stage.deliver(0)
    before = stage.hash()
    return raised(stage.optimizer.step), stage.hash() == before


@pytest.mark.parametrize(
    ("mesh", "fqn"),
    sampled(
        [
            ("hsdp 2x2", "blocks.0.up.weight"),
            ("blocks only 2", "embed.weight"),
            ("fsdp+tp 2x2", "blocks.1.norm.weight"),
            ("tp 3", "blocks.0.down.bias"),
        ],
        ("hsdp 2x2", "blocks.0.up.weight"),
        ("blocks only 2", "embed.weight"),
    ),
)
def test_copies_that_differ_at_the_start_are_refused_by_name(mesh: str, fqn: str) -> None:
    world = MESHES[mesh].world
    answers = run_ranks(world, other_copies, mesh, fqn)
    (said,) = {said for said, _ in answers}
    assert fqn in said, said
    assert [is_same for _, is_same in answers] == [True] * world


def other_data(rank: int, world: int, mesh: str, fqn: str) -> tuple[str, bool, str]:
    """Nobody has averaged the gradient of something of which all ranks have copies. What is said of it, whether nothing
    changed, and what is said once it is averaged."""
    stage = Stage(rank, Scene(mesh, "dense"))
    before = stage.hash()
    stage.deliver(0)
    grad = stage.params[fqn].grad
    assert grad is not None
    local(grad).mul_(1 + rank)
    said = raised(stage.optimizer.step)
    is_same = stage.hash() == before
    stage.deliver(0)
    return said, is_same, raised(stage.optimizer.step)


@pytest.mark.parametrize(
    ("mesh", "fqn"),
    sampled([("blocks only 2", "embed.weight"), ("tp 3", "blocks.0.norm.bias")], ("blocks only 2", "embed.weight")),
)
def test_a_gradient_that_nobody_averaged_is_refused_by_name(mesh: str, fqn: str) -> None:
    """`fully_shard` averages what it has sharded, and leaves the gradients of plain params beside it as they are."""
    world = MESHES[mesh].world
    answers = run_ranks(world, other_data, mesh, fqn)
    (said,) = {said for said, _, _ in answers}
    assert said.startswith(f"StateError: param {fqn!r} has another gradient on rank 1")
    assert [answer[1:] for answer in answers] == [(True, "nothing was raised")] * world


def without_all(rank: int, world: int, mesh: str) -> tuple[str, bool]:
    stage = Stage(rank, Scene(mesh, "odd"))
    before = stage.hash()
    stage.optimizer.step()
    return stage.optimizer.stats.skip_reason, stage.hash() == before


@pytest.mark.parametrize("mesh", sampled(["fsdp 3", "tp 2"], "fsdp 3"))
def test_a_step_without_any_gradient_is_none(mesh: str) -> None:
    """Also where some ranks hold nothing of some params."""
    world = MESHES[mesh].world
    assert run_ranks(world, without_all, mesh) == [("no param has a gradient on any rank", True)] * world
