"""S4, dp_invariance: the same global batch on 1 to 8 ranks, in every layout, bucket size and order of reduction, gives the same bits: reduced gradients of
every step, momenta, masters and weights after sixty.

Models that torch has cut or copied are trained too, over meshes of every kind: through torch's own averages, and then the same bits as one rank that has
all of the model and all of the batch.

A step's batch is eight gradients that ranks share out among themselves, unevenly where they are three. They are integers over a power of two, so that sums
and averages are exact however they are shared out. With sabotage they are Gaussian: then sums round, in an order that depends on ranks and layout, and what
is compared must differ.
"""

from __future__ import annotations

import hashlib
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import layerwise
from tests.mesh_zoo import Scene
from tests.meshes import MESHES, Mesh, Model, with_losses
from tests.ranks import RankFailure, run_ranks
from tests.reference.oracle import Hyper
from tests.reliability import Outcome, tally, tally_control
from tests.worlds import Case, deliver, gradient, hash_tensors, hash_whole, put_together, rules, wrap

WORLDS = (1, 2, 3, 4, 8)
LAYOUTS = ("flat", "padded", "compact", "replicated")
BUCKETS: dict[str, float | None] = {"a bucket a param": 2**-18, "64": 2**-12, "128": 2**-11, "one bucket": None}
"""Bucket sizes in MiB by what they are in elements, for params of 3 to 72."""
SHAPES = [(6, 4), (5, 9), (8, 8), (12, 6)]
BATCH = 8
STEPS, QUICK_STEPS = 60, 4

MODELS_ON = {
    "fsdp 2": ("dense", "tied"),
    "fsdp 3": ("odd", "dense"),
    "fsdp 4": ("odd", "dense"),
    "fsdp 8": ("dense",),
    "zero-2 3": ("dense",),
    "blocks only 2": ("dense", "tied"),
    "hsdp 2x2": ("odd", "dense"),
    "hsdp 2x3": ("dense",),
    "hsdp 2x4": ("dense",),
    "tp 2": ("dense", "odd"),
    "tp 3": ("dense", "odd"),
    "fsdp+tp 2x2": ("dense", "odd"),
    "fsdp+tp 3x2": ("odd",),
    "fsdp+tp 2x4": ("dense",),
    "hsdp+tp 2x2x2": ("dense",),
    "ep 2": ("mixture",),
    "ep 3": ("mixture",),
    "ep beside fsdp 2": ("mixture",),
    "ep x fsdp 2x2 dim 0": ("mixture",),
    "ep x fsdp 2x2 dim 1": ("mixture",),
    "ep x fsdp 3x2 dim 1": ("mixture",),
    "declared ep x fsdp 2x2 dim 1": ("mixture",),
    "ep x fsdp in hsdp 2x2": ("mixture",),
    "ddp 2": ("dense", "tied"),
    "ddp 3": ("mixture",),
    "ddp 4": ("odd",),
}
"""Models on meshes."""
QUICK_MESHES = (
    "fsdp 2",
    "fsdp 3",
    "hsdp 2x2",
    "tp 2",
    "fsdp+tp 2x2",
    "ep 2",
    "ep x fsdp 2x2 dim 1",
    "ddp 3",
)
GIVEN_LAYOUTS = ("flat", "replicated")
"""Of a DistributedDataParallel: optimizer state is sharded, or every rank has all of it and repeats the work."""


class Cell(NamedTuple):
    """One way to run the same training."""

    layout: str
    bucket: str
    overlap: bool

    def describe(self, world: int) -> str:
        return f"{world} ranks, {self.layout}, {self.bucket}, {'overlap' if self.overlap else 'no overlap'}"


REFERENCE = Cell("flat", "one bucket", overlap=False)


def batch_share(fqn: str, shape: torch.Size, rank: int, world: int, step: int, *, exact: bool) -> Tensor:
    """A rank's part of a step's batch, scaled so that the average over ranks is that over the batch."""
    total = torch.zeros(shape)
    for sample in range(rank, BATCH, world):
        total += gradient(fqn, shape, sample, step, 0, exact=exact)
    return total * (world / BATCH)


def train(rank: int, world: int, cells: list[Cell], steps: int, exact: bool) -> dict[str, str]:
    """The hash of each cell's training: of all ranks' shards together, and of this rank's weights."""
    return {cell.describe(world): _train_one(rank, world, cell, steps, exact) for cell in cells}


def _train_one(rank: int, world: int, cell: Cell, steps: int, exact: bool) -> str:
    case = Case(
        shapes=SHAPES,
        layout=cell.layout,
        bucket_mib=BUCKETS[cell.bucket],
        options={"overlap_grad_reduce": cell.overlap},
    )
    model = wrap(case, case.build())
    optimizer = layerwise.Optimizer(model, **rules(Hyper(weight_decay=0.1, clip=1.0)))
    shapes = {fqn: param.shape for fqn, param in model.engine.storage.params.items()}
    digest = hashlib.sha256()
    for step in range(steps):
        grads = {fqn: batch_share(fqn, shape, rank, world, step, exact=exact) for fqn, shape in shapes.items()}
        deliver(model, grads, sync=True)
        model.engine.reducer.finish()
        # Sums grow with ranks, averages do not.
        whole = put_together(model)
        digest.update(hash_tensors(whole[name] / world for name in whole if name.startswith("gradient")).encode())
        optimizer.step()
    digest.update(hash_whole(model, gradients=False).encode())
    digest.update(hash_tensors(param.detach() for _, param in sorted(model.engine.storage.params.items())).encode())
    return digest.hexdigest()


class Cut(NamedTuple):
    """A model as torch has cut it; on no mesh, as one rank alone has it."""

    mesh: str
    model: str
    layout: str | None = None

    def describe(self) -> str:
        return f"{self.model} on {self.mesh}{'' if self.layout is None else ', ' + self.layout}"


ALONE = ""


def train_cut(rank: int, world: int, cuts: list[Cut], steps: int, exact: bool) -> list[str]:
    """A hash each of trainings of cut models: of their whole gradients, weights and state, from the parts of all ranks."""
    return [_train_cut(rank, cut, steps, exact) for cut in cuts]


def _train_cut(rank: int, cut: Cut, steps: int, exact: bool) -> str:
    model = Scene(cut.mesh, cut.model).build()
    mesh = MESHES.get(cut.mesh, Mesh(()))
    shapes = {fqn: param.shape for fqn, param in model.named_parameters()}
    given = model if cut.mesh == ALONE else mesh.cut(model)
    params = dict(model.named_parameters())
    with_losses(model)
    layout: dict[str, Any] = {} if cut.layout is None else {"layout": cut.layout}
    optimizer = layerwise.Optimizer(given, **rules(Hyper(weight_decay=0.1, clip=1.0)), **layout)
    digest = hashlib.sha256()
    for step in range(steps):
        given({fqn: _cut_share(model, mesh, fqn, shape, rank, step, exact) for fqn, shape in shapes.items()}).backward()
        digest.update(hash_tensors(_whole(param.grad) for param in params.values()).encode())
        optimizer.step()
        optimizer.zero_grad()
    digest.update(hash_tensors(_whole(param.detach()) for param in params.values()).encode())
    digest.update(hash_tensors(tensor for _, tensor in sorted(_state(optimizer, params).items())).encode())
    return digest.hexdigest()


def _cut_share(model: Model, mesh: Mesh, fqn: str, shape: torch.Size, rank: int, step: int, exact: bool) -> Tensor:
    """What backward makes on a rank of its part of a step's batch: whole where `fully_shard` cuts it, after it has averaged, and in the rank's own part
    where tensor or expert parallelism do. What torch averages for nobody has been averaged; inexactly, in another order than one rank alone has."""
    number, count = mesh.data_place(model, fqn, rank)
    if mesh.axes and count == 1 and not exact:
        total = sum(gradient(fqn, shape, sample, step, 0, exact=False) for sample in reversed(range(BATCH))) / BATCH
    else:
        total = batch_share(fqn, shape, number, count, step, exact=exact)
    return total[mesh.box(model, fqn, shape, rank, ("tp", "ep"))]


def _whole(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("a param has no gradient: the scene itself is wrong.")
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _state(optimizer: layerwise.Optimizer, params: dict[str, Any]) -> dict[str, Tensor]:
    """Whole state by name; masters are what weights are, in fp32."""
    if optimizer.plan.own:
        found = {
            f"{name} of {fqn}": _whole(tensor).flatten()
            for fqn, param in params.items()
            for name, tensor in optimizer.state[param].items()
        }
    else:
        found = put_together(SimpleNamespace(engine=optimizer.engine))  # type: ignore[arg-type]
    kept = {name: tensor for name, tensor in found.items() if name.split()[0] not in ("step", "gradient", "master")}
    if not kept:
        raise RuntimeError("there is no state to compare: the scene itself is wrong.")
    return kept


def given_complaints(*, quick: bool, sabotage: bool) -> dict[str, str]:
    """Models that torch has cut or copied against one rank alone. With sabotage every one of them must differ."""
    few = quick or sabotage
    cuts = [
        Cut(mesh, model, layout)
        for mesh in (QUICK_MESHES if few else MODELS_ON)
        for model in (MODELS_ON[mesh][:1] if few else MODELS_ON[mesh])
        for layout in (GIVEN_LAYOUTS if MESHES[mesh].ddp else (None,))
    ]
    steps, exact = (QUICK_STEPS if few else STEPS), not sabotage
    models = sorted({cut.model for cut in cuts})
    (alone,) = run_ranks(1, train_cut, [Cut(ALONE, model) for model in models], steps, exact, timeout_s=600.0)
    expected = dict(zip(models, alone, strict=True))
    complaints: dict[str, str] = {}
    for world in sorted({MESHES[cut.mesh].world for cut in cuts}):
        mine = [cut for cut in cuts if MESHES[cut.mesh].world == world]
        try:
            everyone = run_ranks(world, train_cut, mine, steps, exact, timeout_s=600.0)
        except RankFailure as failure:
            complaints.update({cut.describe(): str(failure)[-300:] for cut in mine})
            continue
        for cut, *hashes in zip(mine, *everyone, strict=True):
            others = [rank for rank, found in enumerate(hashes) if found != expected[cut.model]]
            complaints[cut.describe()] = f"ranks {others} have other bits than one rank alone" if others else ""
    return complaints


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every cell on every number of ranks against one rank; with sabotage some of them, with gradients whose sums round."""
    few = quick or sabotage
    steps, worlds = (QUICK_STEPS, (1, 2, 3)) if few else (STEPS, WORLDS)
    cells = [
        Cell(layout, bucket, overlap) for layout, bucket, overlap in itertools.product(LAYOUTS, BUCKETS, (True, False))
    ]
    if few:
        cells = cells[::6]
    expected = run_ranks(1, train, [REFERENCE], steps, not sabotage)[0][REFERENCE.describe(1)]
    complaints: dict[str, str] = {}
    for world in worlds:
        for layout in LAYOUTS:
            mine = [cell for cell in cells if cell.layout == layout]
            complaints.update(_complaints(world, mine, steps, expected, exact=not sabotage))
    given = given_complaints(quick=quick, sabotage=sabotage)
    return tally_control(complaints, given) if sabotage else tally({**complaints, **given})


def _complaints(world: int, cells: list[Cell], steps: int, expected: str, *, exact: bool) -> dict[str, str]:
    try:
        everyone = run_ranks(world, train, cells, steps, exact, timeout_s=600.0)
    except RankFailure as failure:
        return {cell.describe(world): str(failure)[-300:] for cell in cells}
    found = {}
    for name in everyone[0]:
        others = [rank for rank, hashes in enumerate(everyone) if hashes[name] != expected]
        found[name] = f"ranks {others} have other bits than one rank alone" if others else ""
    return found
