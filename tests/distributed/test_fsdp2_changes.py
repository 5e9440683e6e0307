"""A sharded model that is changed under its optimizer, or put together in ways that make no sense: followed where torch's optimizers
would follow, refused by name on every rank where they would go wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import layerwise
from layerwise.engine.gradients import OwnGradients
from tests.distributed.fsdp2 import (
    HIDDEN,
    WIDTH,
    Model,
    assert_close,
    built,
    cut,
    expected,
    fill,
    loss_of,
    mine,
    optimizer_of,
    whole,
)
from tests.marks import sampled
from tests.ranks import raised, run_ranks


def one_step(model: nn.Module, optimizer: layerwise.Optimizer, rank: int, world: int, step: int = 0) -> None:
    loss_of(model, *mine(rank, world, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def moved(model: Model) -> None:
    model.to(torch.bfloat16)


def emptied(model: Model) -> None:
    model.to_empty(device="cpu")


def replaced(model: Model) -> None:
    old = model.blocks[0].up.weight
    model.blocks[0].up.weight = nn.Parameter(old.detach().clone())


def frozen(model: Model) -> None:
    model.blocks[0].up.weight.requires_grad_(False)


def added(model: Model) -> None:
    model.blocks[0].extra = nn.Parameter(torch.zeros(3))


CHANGES: dict[str, tuple[Callable[[Model], None], str]] = {
    "to": (moved, "was moved"),
    "to_empty": (emptied, "was moved"),
    "replaced": (replaced, "param 'blocks.0.up.weight' was replaced after construction"),
    "frozen": (frozen, "param 'blocks.0.up.weight' was frozen after construction"),
    "added": (added, "param 'blocks.0.extra' was added after construction"),
}


def changed(rank: int, world: int, name: str, on: str) -> str:
    """What a step says after a change, on all ranks or on the last."""
    model = cut(built(), world)
    optimizer = optimizer_of(model)
    one_step(model, optimizer, rank, world)
    loss_of(model, *mine(rank, world, 1)).backward()
    if on == "all" or rank == world - 1:
        CHANGES[name][0](model)
    return raised(optimizer.step)


@pytest.mark.parametrize(
    ("name", "on"),
    sampled(
        [(name, on) for name in CHANGES for on in ("all", "last")],
        ("to", "last"),
        ("replaced", "all"),
        ("added", "last"),
    ),
)
def test_a_change_that_cannot_be_followed_is_refused_on_every_rank(name: str, on: str) -> None:
    for text in run_ranks(2, changed, name, on):
        assert CHANGES[name][1] in text


def written(model: Model, values: dict[str, Tensor]) -> None:
    fill(model, values)


def loaded(model: Model, values: dict[str, Tensor]) -> None:
    own = model.state_dict()
    model.load_state_dict(
        {name: distribute_tensor(values[name], tensor.device_mesh, tensor.placements) for name, tensor in own.items()}
    )


def written_locally(model: Model, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            new = distribute_tensor(values[name], param.device_mesh, param.placements)
            param.to_local().copy_(new.to_local())


WRITERS = {"copy_": written, "load_state_dict": loaded, "to_local": written_locally}


def overwritten(rank: int, world: int, way: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A step whose learning rate is zero, after other weights were written: what the model has then, and what was written."""
    model = cut(built(dtype=dtype), world)
    optimizer = optimizer_of(model)
    one_step(model, optimizer, rank, world)
    values = {name: torch.arange(tensor.numel()).view(tensor.shape).to(dtype) for name, tensor in whole(model).items()}
    WRITERS[way](model, values)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    one_step(model, optimizer, rank, world, 1)
    return whole(model), values


@pytest.mark.parametrize(
    ("way", "dtype"),
    sampled(
        [(way, dtype) for way in WRITERS for dtype in (torch.float32, torch.bfloat16)],
        ("load_state_dict", torch.bfloat16),
        ("to_local", torch.bfloat16),
    ),
)
def test_values_that_the_user_writes_count(way: str, dtype: torch.dtype) -> None:
    for weights, values in run_ranks(2, overwritten, way, dtype):
        for name, tensor in values.items():
            assert torch.equal(weights[name], tensor), name


class Pair(nn.Module):
    """Two layers for tensor parallelism, with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def pair(world: int) -> Pair:
    torch.manual_seed(2)
    model = Pair()
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def backward_late(rank: int, world: int) -> str:
    model = pair(world)
    model.norm = nn.Identity()  # or a plain param would be the one that is found out
    optimizer = optimizer_of(model)
    first, second = (model(torch.ones(3, WIDTH)).square().mean() for _ in range(2))
    first.backward()
    optimizer.step()
    return raised(second.backward)


def test_a_backward_through_weights_of_before_the_step_is_an_error() -> None:
    for text in run_ranks(2, backward_late):
        assert "modified by an inplace operation" in text


def on_mesh_out_of_order() -> Model:
    return fully_shard(built(), mesh=DeviceMesh("cpu", [1, 0]))


def out_of_order(rank: int, world: int) -> str:
    model = on_mesh_out_of_order()
    return raised(lambda: optimizer_of(model))


def test_a_mesh_whose_ranks_are_out_of_order_is_refused() -> None:
    # fully_shard gives chunks by the rank in the process group: what the mesh says of them is not what is there.
    for text in run_ranks(2, out_of_order):
        assert "is on the mesh [1, 0]: expected ranks in ascending order" in text


class Beside(nn.Module):
    """A cut layer and one that nobody has cut."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(WIDTH, HIDDEN)
        torch.manual_seed(seed)
        self.own = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.up(x))


def beside_model(rank: int, world: int, *, differ: bool) -> tuple[Beside, layerwise.Optimizer]:
    """With gradients, and plain params that are the same on every rank or not."""
    model = Beside(rank if differ else 0)
    fully_shard(model.up, mesh=init_device_mesh("cpu", (world,)))
    optimizer = optimizer_of(model)
    model(torch.ones(3, WIDTH)).square().mean().backward()
    return model, optimizer


def beside(rank: int, world: int, differ: bool) -> str:
    _, optimizer = beside_model(rank, world, differ=differ)
    return raised(optimizer.step)


def test_plain_params_that_differ_between_ranks_are_refused_by_name() -> None:
    for text in run_ranks(3, beside, True):
        assert text.startswith("StateError: param 'own.")
        assert "has other values on rank 1" in text
    assert run_ranks(3, beside, False) == ["nothing was raised"] * 3


def partial_linear(world: int) -> nn.Linear:
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    return model


def partial_param(rank: int, world: int) -> str:
    model = partial_linear(world)
    return raised(lambda: optimizer_of(model))


def test_a_partial_param_is_refused() -> None:
    for text in run_ranks(2, partial_param):
        assert "param 'weight' has the placement P" in text
        assert "expected Shard(dim) or Replicate()" in text


ROWS = Shard(0)


def by_hand(world: int, placement: Placement = ROWS) -> tuple[nn.Linear, layerwise.Optimizer]:
    """One matrix that is distributed without any module's help."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(4)
    model = nn.Linear(6, 5, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [placement]))
    return model, optimizer_of(model)


def gradients(rank: int, world: int, kind: str) -> list[Any]:
    """Gradients of one matrix put by hand: plain ones, or with other placements than the param's."""
    model, optimizer = by_hand(world)
    mesh, start = model.weight.device_mesh, model.weight.detach().full_tensor().clone()
    grad = torch.arange(30.0).view(5, 6) / 8
    made = {
        "partial": lambda: DTensor.from_local(grad / world, mesh, [Partial()]),
        "replicated": lambda: distribute_tensor(grad, mesh, [Replicate()]),
        "other dim": lambda: distribute_tensor(grad, mesh, [Shard(1)]),
        "the same": lambda: distribute_tensor(grad, mesh, [Shard(0)]),
        "plain": lambda: grad,
    }[kind]
    error = raised(lambda: setattr(model.weight, "grad", made()))
    if error != "nothing was raised":
        return [error]
    error = raised(optimizer.step)
    return [error, model.weight.detach().full_tensor() - start]


def gradients_one_by_one(rank: int, world: int) -> list[int]:
    """How many gradients were looked at one by one, in each of three steps of a model that fully_shard has cut; in the third
    one of them is placed as before, and says so by other words."""
    model = cut(built(), world)
    optimizer = optimizer_of(model)
    looked = []
    for step in range(3):
        loss_of(model, *mine(rank, world, step)).backward()
        if step == 2:
            weight = next(model.parameters())
            assert isinstance(weight.grad, DTensor)
            weight.grad = DTensor.from_local(
                weight.grad.to_local(), weight.device_mesh, [Shard(0)], shape=weight.shape, stride=weight.stride()
            )
        with mock.patch.object(OwnGradients, "_look", autospec=True, side_effect=OwnGradients._look) as look:
            optimizer.step()
        looked.append(look.call_count)
        optimizer.zero_grad()
    return looked


def test_gradients_of_fully_shard_are_looked_at_all_at_once() -> None:
    assert run_ranks(3, gradients_one_by_one) == [[0, 0, 0]] * 3


def placed_otherwise_later(rank: int, world: int, kind: str) -> Tensor:
    """Weights after a step with a gradient that is placed as its param is, and one with a gradient that may not be."""
    model, optimizer = by_hand(world)
    mesh, grad = model.weight.device_mesh, torch.arange(30.0).view(5, 6) / 8
    for placements in ([ROWS], [Partial()] if kind == "partial" else [ROWS]):
        given = [distribute_tensor(grad, mesh, [ROWS]), DTensor.from_local(grad / world, mesh, [Partial()])]
        model.weight.grad = next(one for one in given if list(one.placements) == placements)
        optimizer.step()
    return model.weight.detach().full_tensor()


def test_placements_that_were_alike_are_looked_at_again_when_they_change() -> None:
    found, wanted = (run_ranks(2, placed_otherwise_later, kind) for kind in ("partial", "the same"))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", sampled(["partial", "replicated", "other dim"], "partial"))
def test_gradients_with_other_placements_are_brought_to_the_params(kind: str) -> None:
    for (error, found), (_, wanted) in zip(
        run_ranks(2, gradients, kind), run_ranks(2, gradients, "the same"), strict=True
    ):
        assert error == "nothing was raised"
        assert found.abs().max() > 0
        assert torch.equal(found, wanted)


def test_a_plain_gradient_of_a_sharded_param_is_refused() -> None:
    for found in run_ranks(2, gradients, "plain"):
        assert found[0].startswith("TypeError: param 'weight' is a DTensor and its .grad is not")


def sequence_parallel(rank: int, world: int) -> tuple[dict[str, Tensor], list[str]]:
    """Norms of sequence parallelism: copied weights, whose gradients come as sums that torch has put off."""
    torch.manual_seed(2)
    model = Pair()
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(
        model,
        mesh,
        {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        },
    )
    optimizer = optimizer_of(model)
    x = torch.arange(6.0 * WIDTH).view(6, WIDTH).sin()
    placements = []
    for _ in range(3):
        # The loss of all rows: each rank has its own, and gradients of what is shared are summed over ranks.
        out = model(x.chunk(world)[rank])
        (out.square().sum() / 36).backward()
        placements.append(str(model.norm.weight.grad.placements))
        optimizer.step()
    return whole(model), placements


def pair_alone(rank: int, world: int) -> dict[str, Tensor]:
    torch.manual_seed(2)
    model = Pair()
    optimizer = optimizer_of(model)
    x = torch.arange(6.0 * WIDTH).view(6, WIDTH).sin()
    for _ in range(3):
        (model(x).square().sum() / 36).backward()
        optimizer.step()
    return whole(model)


def put_off_on_some(rank: int, world: int, when: int, placement: Placement) -> list[str]:
    """Sums that torch has put off, of which the last rank has none in one of three steps: what the steps say."""
    model, optimizer = by_hand(world, placement)
    said = []
    for step in range(3):
        if step != when or rank != world - 1:
            model.weight.grad = DTensor.from_local(torch.eye(5, 6), model.weight.device_mesh, [Partial()])
        said.append(raised(optimizer.step))
    return said


@pytest.mark.parametrize(
    ("when", "placement"), sampled([(when, to) for when in (0, 1) for to in (Replicate(), ROWS)], (1, ROWS))
)
def test_a_sum_that_one_rank_lacks_is_an_error_on_all_and_nobody_waits(when: int, placement: Placement) -> None:
    """Also where no two ranks hold the same rows: it takes all of them to bring any."""
    for said in run_ranks(3, put_off_on_some, when, placement):
        assert [text == "nothing was raised" for text in said] == [step != when for step in range(3)]
        assert "weight (missing on 1 of 3 ranks)" in said[when]


def test_norms_of_sequence_parallelism() -> None:
    (wanted,) = run_ranks(1, pair_alone)
    for weights, placements in run_ranks(2, sequence_parallel):
        assert_close(weights, wanted)
        assert "Partial" in placements[0]  # or this shows nothing


def other_rules(rank: int, world: int) -> str:
    model = cut(built(), world)
    lr = 0.02 if rank else 0.03
    return raised(lambda: optimizer_of(model, matrix=layerwise.Muon(lr=lr)))


def test_other_rules_on_one_rank_are_named_on_all() -> None:
    for text in run_ranks(3, other_rules):
        assert text.startswith("PlanMismatchError: ")
        assert "lr" in text
        assert "0.03" in text


def on_some_ranks(rank: int, world: int, give: bool) -> Any:
    """A model on ranks 0 and 1 of three, on a mesh of its own or on one of two dims."""
    group = dist.new_group([0, 1])
    if rank == 2:
        return None
    mesh = DeviceMesh.from_group(group, "cpu")
    model = built()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, **({"process_group": group} if give else {}))
    for step in range(3):
        one_step(model, optimizer, rank, 2, step)
    return whole(model)


@pytest.mark.parametrize("give", sampled([True, False], True))
def test_a_model_on_some_of_the_ranks(give: bool) -> None:
    first, second, third = run_ranks(3, on_some_ranks, give)
    assert third is None
    for weights in (first, second):
        assert_close(weights, expected())


def not_in_the_group(rank: int, world: int) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = cut(built(), world)
    return raised(lambda: optimizer_of(model, process_group=groups[rank // 2]))


def test_a_process_group_that_lacks_ranks_of_the_mesh_is_refused() -> None:
    for text in run_ranks(3, not_in_the_group):
        assert "lies on the ranks [0, 1, 2], of which" in text
        assert "Pass process_group=" in text


def out_of_reach(rank: int, world: int, meet: str) -> str:
    """A group that moves tensors between GPUs only, as that of NCCL, and params that offload has brought to the CPU."""
    dist.init_process_group("cuda:gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    model = cut(built(), world)
    return raised(lambda: optimizer_of(model))


def test_params_that_the_group_cannot_reach_are_refused(tmp_path: Path) -> None:
    for text in run_ranks(2, out_of_reach, str(tmp_path / "meet"), meet=False):
        assert "params are on cpu (CPU offload?)" in text
        assert "init_process_group('cpu:gloo,cuda:nccl')" in text


def cut_twice(rank: int, world: int, rows: int, path: str) -> tuple[bool, str]:
    """One dim cut by tensor parallelism, then by fully_shard: what torch makes of its own DTensor."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, rows, bias=False))
    values = torch.arange(4.0 * rows).view(rows, 4)
    with torch.no_grad():
        model[0].weight.copy_(values)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    weight = model[0].weight.detach()
    is_right = torch.equal(weight.full_tensor(), values)
    try:
        dcp.save({"weight": weight}, checkpoint_id=path)
    except BaseException as error:  # torch's CheckpointException is no Exception
        return is_right, type(error).__name__
    return is_right, "saved"


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "said"), [(12, "saved"), (13, "CheckpointException")])
def test_what_torch_makes_of_two_uneven_cuts_of_one_dim(rows: int, said: str, tmp_path: Path) -> None:
    """What docs/sharded.md says of it: a torch that mends this fails here, and the page is to be changed."""
    assert run_ranks(6, cut_twice, rows, str(tmp_path)) == [(True, said)] * 6
