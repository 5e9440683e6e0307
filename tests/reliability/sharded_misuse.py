"""Wrong uses of models that torch has cut over meshes, or has copied: FSDP, HSDP, tensor and expert parallelism, DistributedDataParallel.

What is built, and what is done to it, is what `tests/distributed` builds and does: each has a test of its own there. Where a scene changes a model, it does so before it yields:
what must stay as it is then is what was there when the step began.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import layerwise
from layerwise.errors import PlanMismatchError, StateError
from layerwise.routing.split import Split
from tests.distributed import test_ddp, test_fsdp2_changes, test_fsdp2_experts, test_sharded_refused, test_sharded_state
from tests.distributed.fsdp2 import built, cut, loss_of, mine, optimizer_of
from tests.mesh_zoo import Scene as Zoo
from tests.mesh_zoo import Stage
from tests.meshes import local
from tests.reliability.refusals import CASES, Scene, misuse
from tests.worlds import net_loss

UNGUARDED = (
    "a sharded model on all ranks: to",
    "a sharded model on one rank: replaced",
    "a sharded model on all ranks: frozen",
    "a sharded model on all ranks: added",
    "plain params that differ beside sharded ones",
    "norms that differ under tensor parallelism",
    "gradients of plain params that nobody averaged",
    "gradients that nobody reduced",
    "a last backward inside of no_sync",
    "other weights where gradients are reduced",
)
"""Cases on two ranks that nothing but the checks of a step refuses: without those each must go unnoticed."""


def trained(rank: int, world: int) -> tuple[Any, layerwise.Optimizer]:
    """A model of fully_shard that has taken a step, and has gradients for the next."""
    model = cut(built(), world)
    optimizer = optimizer_of(model)
    test_fsdp2_changes.one_step(model, optimizer, rank, world)
    loss_of(model, *mine(rank, world, 1)).backward()
    return model, optimizer


# ------------------------------------------------------------------------------------------------ a model that is changed under its optimizer


def _changed(change: str, on: str) -> None:
    def scene(rank: int, world: int) -> Scene:
        model, optimizer = trained(rank, world)
        if on == "all ranks" or rank == world - 1:
            test_fsdp2_changes.CHANGES[change][0](model)
        yield optimizer
        optimizer.step()

    says = (test_fsdp2_changes.CHANGES[change][1], "before")
    # Where one rank has changed it, the others hear of that.
    errors = StateError if on == "all ranks" else (StateError, PlanMismatchError)
    misuse(f"a sharded model on {on}: {change}", errors, *says, world=2, alike=False)(scene)


for _change in test_fsdp2_changes.CHANGES:
    for _on in ("all ranks", "one rank"):
        _changed(_change, _on)


@misuse("fully_shard after the optimizer", StateError, "param 'embedding.weight'", world=2)
def _(rank: int, world: int) -> Scene:
    model = built()
    optimizer = optimizer_of(model, gradients="reduced")
    cut(model, world)
    loss_of(model, *mine(rank, world, 0)).backward()
    yield optimizer
    optimizer.step()


# ------------------------------------------------------------------------------------------------ meshes and placements


@misuse(
    "a mesh whose ranks are out of order",
    ValueError,
    "on the mesh [1, 0]",
    "ascending order",
    "init_device_mesh()",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    yield (model := test_fsdp2_changes.on_mesh_out_of_order())
    optimizer_of(model)


@misuse(
    "a mesh that does not cover the model's group",
    ValueError,
    "param 'embedding.weight' lies on the ranks [0, 1]",
    "Pass process_group=",
    world=2,
    alike=False,
)
def _(rank: int, world: int) -> Scene:
    groups = [dist.new_group([0]), dist.new_group([1])]
    yield (model := cut(built(), world))
    optimizer_of(model, process_group=groups[rank])


@misuse(
    "meshes of two dims on some of the ranks",
    ValueError,
    "params lie on the ranks [",
    "of 4",
    "Pass process_group=",
    world=4,
    alike=False,
)
def _(rank: int, world: int) -> Scene:
    names = ("replicate", "shard")
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=names) for ranks in ([[0], [1]], [[2], [3]])]
    yield (model := fully_shard(built(), mesh=meshes[rank // 2]))
    optimizer_of(model)


@misuse(
    "a param that is a sum put off",
    TypeError,
    "param 'weight' has the placement P",
    "expected Shard(dim) or Replicate()",
    "Redistribute it first",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    yield (model := test_fsdp2_changes.partial_linear(world))
    optimizer_of(model)


@misuse(
    "a local tensor that is not what its placements say",
    ValueError,
    "param 'weight' of shape (5, 4)",
    "has a local tensor of shape",
    "Cut it with fully_shard()",
    world=2,
    alike=False,
)
def _(rank: int, world: int) -> Scene:
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Linear(4, 5, bias=False)
    # Five rows are three and two for torch.chunk. Here they are two and three.
    own = model.weight.detach()[: 2 + rank]
    model.weight = nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=(5, 4), stride=(4, 1)))
    yield model
    optimizer_of(model)


@misuse(
    "blocks of tensor parallelism that end within heads",
    ValueError,
    "param 'weight' of shape (20, 4) is cut by tensor parallelism to 0 to 10, 0 to 4",
    "expects cuts between heads",
    "options={'tp_mode': 'auto'}",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    model = nn.Linear(4, 20, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (world,)), [Shard(0)]))
    # Of five heads, one row each is of queries and three are of keys; of the third head each rank has one half.
    split = Split(grid=(5, 4, 4), roles="rrc", block_axis=1, blocks=(1, 3))
    yield model
    optimizer_of(
        model,
        rules=[layerwise.RouteRule(pattern="weight", to="matrix", split=split)],
        matrix=layerwise.Muon(lr=0.02, tp_mode="blockwise"),
    )


@misuse("a sharded model without values", ValueError, "param 'head.weight'", "meta device", "Materialise", world=2)
def _(rank: int, world: int) -> Scene:
    yield (model := cut(built().to("meta"), world))
    optimizer_of(model)


def _wrapped(how: str) -> None:
    def scene(rank: int, world: int) -> Scene:
        torch.manual_seed(1)
        model = test_sharded_refused.Model()
        test_sharded_refused.CUTS[how][0](model, world)
        yield model
        layerwise.DataParallel(model)

    fqn = test_sharded_refused.CUTS[how][1]
    misuse(
        f"a DataParallel around {how}",
        TypeError,
        f"param '{fqn}' is a DTensor",
        "pass it to layerwise.Optimizer as it is",
        world=2,
    )(scene)


for _how in test_sharded_refused.CUTS:
    _wrapped(_how)


@misuse("experts that nobody calls experts", StateError, "param 'experts.weight' has other values on rank 2", world=4)
def _(rank: int, world: int) -> Scene:
    model, optimizer, _ = test_fsdp2_experts.experts_apart(world, dim=0, named=False)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    yield optimizer
    optimizer.step()


# ------------------------------------------------------------------------------------------------ what ranks do not have in common


@misuse(
    "plain params that differ beside sharded ones",
    StateError,
    "param 'own.",
    "has other values on rank 1",
    "Load the same weights on every rank",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    _, optimizer = test_fsdp2_changes.beside_model(rank, world, differ=True)
    yield optimizer
    optimizer.step()


def _copies(name: str, mesh: str, fqn: str, world: int) -> None:
    def scene(rank: int, world: int) -> Scene:
        stage = Stage(rank, Zoo(mesh, "dense"))
        if rank == world - 1:
            with torch.no_grad():
                local(stage.params[fqn].detach()).view(-1)[0].add_(1.0)
        stage.deliver(0)
        yield stage.optimizer
        stage.optimizer.step()

    misuse(name, StateError, f"param {fqn!r} has other values", "Load the same weights on every rank", world=world)(
        scene
    )


_copies("replicas that differ", "hsdp 2x2", "blocks.0.up.weight", 4)
_copies("norms that differ under tensor parallelism", "tp 2", "blocks.1.norm.weight", 2)


@misuse("other rules for a sharded model on one rank", PlanMismatchError, "ranks 0 and 1", "lr", "0.03", world=2)
def _(rank: int, world: int) -> Scene:
    yield (model := cut(built(), world))
    optimizer_of(model, matrix=layerwise.Muon(lr=0.03 if rank else 0.02))


@misuse(
    "an lr changed on one rank of a sharded model", PlanMismatchError, "ranks 0 and 1", "param group 0", "lr", world=2
)
def _(rank: int, world: int) -> Scene:
    _, optimizer = trained(rank, world)
    if rank:
        optimizer.param_groups[0]["lr"] = 0.5
    yield optimizer
    optimizer.step()


@misuse(
    "a sharded param frozen on one rank before construction", PlanMismatchError, "ranks 0 and 1", "head.weight", world=2
)
def _(rank: int, world: int) -> Scene:
    model = cut(built(), world)
    model.head.weight.requires_grad_(rank == 0)
    yield model
    optimizer_of(model)


# ------------------------------------------------------------------------------------------------ gradients


@misuse(
    "a plain gradient of a sharded param",
    TypeError,
    "param 'weight' is a DTensor and its .grad is not",
    "distribute_tensor()",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    model, optimizer = test_fsdp2_changes.by_hand(world)
    yield optimizer
    model.weight.grad = torch.ones(5, 6)
    optimizer.step()


@misuse(
    "a gradient on another mesh than its param",
    ValueError,
    "the .grad of param 'weight' is on another mesh",
    "distribute_tensor()",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    model, optimizer = test_fsdp2_changes.by_hand(world)
    model.weight.grad = distribute_tensor(
        torch.ones(5, 6), init_device_mesh("cpu", (1, world)), [Replicate(), Shard(0)]
    )
    yield optimizer
    optimizer.step()


@misuse(
    "a gradient whose placements change",
    ValueError,
    "the .grad of param 'weight' had the placements",
    "grad.redistribute()",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    model, optimizer = test_fsdp2_changes.by_hand(world)
    mesh = model.weight.device_mesh
    model.weight.grad = DTensor.from_local(torch.ones(5, 6), mesh, [Partial()])
    optimizer.step()
    model.weight.grad = distribute_tensor(torch.ones(5, 6), mesh, [Replicate()])
    yield optimizer
    optimizer.step()


@misuse("a sum put off that one rank lacks", StateError, "weight (missing on 1 of 2 ranks)", world=2)
def _(rank: int, world: int) -> Scene:
    model, optimizer = test_fsdp2_changes.by_hand(world, Replicate())
    if rank != world - 1:
        model.weight.grad = DTensor.from_local(torch.eye(5, 6), model.weight.device_mesh, [Partial()])
    yield optimizer
    optimizer.step()


@misuse(
    "gradients of plain params that nobody averaged",
    StateError,
    "param 'embed.weight' has another gradient on rank 1",
    "average its gradient over them",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    stage = Stage(rank, Zoo("blocks only 2", "dense"))
    stage.deliver(0)
    local(stage.params["embed.weight"].grad).mul_(1 + rank)
    yield stage.optimizer
    stage.optimizer.step()


def _lacking(name: str, mesh: str, fqn: str, world: int, says: str, **options: Any) -> None:
    """The last rank has no gradient of what others have one of."""

    def scene(rank: int, world: int) -> Scene:
        stage = Stage(rank, Zoo(mesh, "dense"), **options)
        stage.deliver(0)
        if rank == world - 1:
            stage.params[fqn].grad = None
        yield stage.optimizer
        stage.optimizer.step()

    misuse(name, StateError, says, world=world)(scene)


_lacking(
    "a gradient that one replica lacks", "hsdp 2x2", "blocks.0.up.bias", 4, "blocks.0.up.bias (missing on 1 of 4 ranks)"
)
_lacking("a gradient that one copy lacks", "blocks only 2", "embed.weight", 2, "embed.weight (missing on 1 of 2 ranks)")
_lacking(
    "a gradient that one shard lacks under strict_grads",
    "fsdp 2",
    "head.weight",
    2,
    "head.weight (",
    gradient_policy=layerwise.GradientPolicy(strict_grads=True),
)


@misuse("an unused sharded param under strict_grads", StateError, "head.weight (", "strict_grads=True", world=2)
def _(rank: int, world: int) -> Scene:
    stage = Stage(rank, Zoo("fsdp 2", "dense"), gradient_policy=layerwise.GradientPolicy(strict_grads=True))
    stage.deliver(0)
    stage.params["head.weight"].grad = None
    yield stage.optimizer
    stage.optimizer.step()


# ------------------------------------------------------------------------------------------------ DistributedDataParallel


@misuse(
    "gradients that nobody reduced",
    StateError,
    "the gradient of param 'first.bias' has other values on rank 1",
    "layerwise.DataParallel",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    module = test_ddp.net()
    optimizer = layerwise.Optimizer(module, gradients="reduced", **test_ddp.RULES)
    net_loss(module, rank, 0).backward()
    yield optimizer
    optimizer.step()


@misuse(
    "a last backward inside of no_sync",
    StateError,
    "the gradient of param 'first.bias' has other values on rank 1",
    "no_sync()",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    ddp, optimizer = test_ddp.ddp_net(layout="replicated")
    with ddp.no_sync():
        net_loss(ddp, rank, 0).backward()
    yield optimizer
    optimizer.step()


@misuse(
    "other weights where gradients are reduced",
    StateError,
    "param 'shared.bias'",
    "has other values on rank 1",
    "Load the same weights on every rank",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    module = test_ddp.net(seed=rank)
    optimizer = layerwise.Optimizer(module, gradients="reduced", layout="replicated", **test_ddp.RULES)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    yield optimizer
    optimizer.step()


@misuse("a reduced gradient that one rank lacks", StateError, "shared.bias (missing on 1 of 2 ranks)", world=2)
def _(rank: int, world: int) -> Scene:
    ddp, optimizer = test_ddp.ddp_net(layout="replicated")
    net_loss(ddp, rank, 0).backward()
    if rank:
        ddp.module.shared.bias.grad = None
    yield optimizer
    optimizer.step()


@misuse("a second optimizer for a DistributedDataParallel", StateError, "already", world=2)
def _(rank: int, world: int) -> Scene:
    ddp, optimizer = test_ddp.ddp_net()
    yield optimizer
    layerwise.Optimizer(ddp, **test_ddp.RULES)


@misuse("a DataParallel around a DistributedDataParallel", TypeError, "DistributedDataParallel", "(.module)", world=2)
def _(rank: int, world: int) -> Scene:
    yield (ddp := DistributedDataParallel(test_ddp.net()))
    layerwise.DataParallel(ddp)


@misuse("a DistributedDataParallel around a DataParallel", TypeError, "DistributedDataParallel", world=2)
def _(rank: int, world: int) -> Scene:
    yield (model := layerwise.DataParallel(test_ddp.net()))
    layerwise.Optimizer(DistributedDataParallel(model), **test_ddp.RULES)


@misuse("another layout of reduced gradients on one rank", PlanMismatchError, "ranks 0 and 1", "layout", world=2)
def _(rank: int, world: int) -> Scene:
    yield (module := test_ddp.net())
    layerwise.Optimizer(module, gradients="reduced", layout=("flat", "replicated")[rank], **test_ddp.RULES)


@misuse(
    "a layout for a sharded model", ValueError, "layout was passed to the Optimizer", "gradients='reduced'", world=2
)
def _(rank: int, world: int) -> Scene:
    yield (model := cut(built(), world))
    optimizer_of(model, layout="flat")


# ------------------------------------------------------------------------------------------------ state


@misuse("the state dict of another mesh", ValueError, "state dict belongs to another layout", "same plan", world=2)
def _(rank: int, world: int) -> Scene:
    torch.manual_seed(0)
    model, saved = test_sharded_state.build("fsdp", world)
    _, optimizer = test_sharded_state.build("hsdp", world)
    test_sharded_state.train(model, saved, range(1))
    yield optimizer
    optimizer.load_state_dict(saved.state_dict())


@misuse(
    "tensors of another mesh",
    ValueError,
    "of param '0.weight' on other ranks, or cut in another way",
    "torch.distributed.checkpoint",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    torch.manual_seed(0)
    (_, saved), (_, optimizer) = test_sharded_state.build("fsdp", world), test_sharded_state.build("hsdp", world)
    state = saved.state_dict()
    del state["layerwise"]
    yield optimizer
    optimizer.load_state_dict(state)


@misuse("the state dict of the whole model for a sharded one", ValueError, "state dict", world=2)
def _(rank: int, world: int) -> Scene:
    whole = test_ddp.net()
    saved = layerwise.Optimizer(whole, gradients="reduced", layout="replicated", **test_ddp.RULES)
    model = test_ddp.net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = layerwise.Optimizer(model, **test_ddp.RULES)
    yield optimizer
    optimizer.load_state_dict(saved.state_dict())


@misuse("consolidated state of DTensors", StateError, "consolidate_state_dict()", "get_optimizer_state_dict()", world=2)
def _(rank: int, world: int) -> Scene:
    _, optimizer = trained(rank, world)
    yield optimizer
    optimizer.consolidate_state_dict()


NAMES = [case.name for case in CASES.values() if case.scene.__module__ == __name__]
