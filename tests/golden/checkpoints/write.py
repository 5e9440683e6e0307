"""Write the checkpoints of this folder with the version of the library that is imported: `python write.py NAME`.

Each checkpoint gets a file `<kind>.json` beside it with the values that the ranks held when it was saved: a SHA-256 of every tensor,
taken from params and shards in memory. No code of `layerwise.checkpoint` takes part in that, so the file stays right when a checkpoint is
written or read wrongly.

The same file runs with old versions of the library, which is how checkpoints of old formats were made: README.md has the commits.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise

FOLDER = Path(__file__).parent
WIDTH, VOCABULARY = 8, 11
STEPS = 3
"""Steps before a checkpoint is saved."""
WORLDS = {"one_rank": 1, "two_ranks": 2, "two_stages": 2}
"""Number of ranks by kind of checkpoint. `one_rank` has bf16 params with fp32 masters and a loss scale, the others have fp32 params."""
LR, OTHER_LR, LOSS_SCALE = 2**-6, 2**-7, 1024.0


class Block(nn.Module):
    """A fused weight of three square matrices, and a matrix."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (WIDTH, WIDTH, WIDTH)}


class Model(nn.Module):
    """An embedding, two blocks, a head tied to the embedding, and a buffer that differs between ranks. The loss is linear in every param,
    so gradients are whole numbers over eight and have the same bits on every machine."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(bias=True), Block(bias=False)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, step: int, rank: int) -> Tensor:
        self.seen += rank + 1
        return linear_loss(self, step, rank)


class Stage(nn.Module):
    """One of two pipeline stages of a `Model`: modules of it under their own names."""

    def __init__(self, model: Model, stage: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(stage): model.blocks[stage]})
        if stage == 0:
            self.embed = model.embed
        else:
            self.head = model.head

    def forward(self, step: int, rank: int) -> Tensor:
        return linear_loss(self, step, rank)


def dyadic(text: str, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers over eight of magnitude 1 at most, fp32, which depend on `text`."""
    salt = int.from_bytes(hashlib.sha256(text.encode()).digest()[:2])
    numbers = torch.arange(max(1, torch.Size(shape).numel()))
    return (((numbers * numbers + 5 * numbers + salt) % 17 - 8).float() / 8).reshape(shape)


def linear_loss(module: nn.Module, step: int, rank: int) -> Tensor:
    """The sum of products of every param with its gradient for this step and rank, as a scalar of the params' dtype."""
    terms = [
        (param * dyadic(f"gradient {name} {step} {rank}", tuple(param.shape)).to(param.dtype)).sum()
        for name, param in module.named_parameters()
    ]
    return torch.stack(terms).sum()


def filled(value: str, dtype: torch.dtype) -> Model:
    """A model whose initial values depend on `value`."""
    model = Model()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(dyadic(f"{value} {name}", tuple(param.shape)) / 2)
    return model.to(dtype)


def options_of(kind: str) -> dict[str, Any]:
    """Arguments of the optimizer of a kind of checkpoint."""
    scale = {"loss_scale": layerwise.LossScale(initial=LOSS_SCALE)} if kind == "one_rank" else {}
    return {"matrix": layerwise.Muon(lr=LR), "other": layerwise.AdamW(lr=OTHER_LR), **scale}


def dtype_of(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == "one_rank" else torch.float32


def backward(model: nn.Module, optimizer: layerwise.Optimizer, kind: str, step: int, rank: int) -> None:
    """Forward and backward of one step on this rank, with the loss scaled where the kind has a loss scale."""
    loss = model(step, rank)
    (optimizer.scale_loss(loss) if kind == "one_rank" else loss).backward()


def fingerprint(tensor: Tensor) -> list[Any]:
    """Dtype, shape, SHA-256 of the elements row by row, and the first three numbers, which only help to read the file."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(bytes(flat.view(torch.uint8).tolist())).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest, flat[:3].tolist()]


# ------------------------------------------------------------------------------------------------ writing


def write(rank: int, kind: str, folder: str, meet: str) -> None:
    """Train on this rank for three steps and save. Every rank of the kind calls it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    world = WORLDS[kind]
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    module: nn.Module = filled("initial value", dtype_of(kind))
    if kind == "two_stages":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
        module = Stage(module, rank)  # type: ignore[arg-type]
        model = layerwise.DataParallel(module, mesh=mesh, ties={"tie": ("embed.weight", "head.weight")[rank]})
    else:
        model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, **options_of(kind))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in range(STEPS):
        backward(model, optimizer, kind, step, rank)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    extra = {"scheduler": scheduler, "epoch": 3, "pair": (1, 2.5)}
    if kind == "one_rank":
        extra["cursor"] = torch.arange(3)
    layerwise.save(Path(folder) / kind, model, optimizer, extra=extra)
    shares: list[Any] = [None] * world
    dist.all_gather_object(shares, list(elements_here(module, optimizer, rank)))
    if rank == 0:
        values = {
            "step": STEPS,
            "lr": {group["name"]: group["lr"] for group in optimizer.param_groups},
            "tensors": {key: fingerprint(tensor) for key, tensor in sorted(put_together(chain(*shares)).items())},
        }
        (Path(folder) / f"{kind}.json").write_text(as_text(values))
    dist.barrier()
    dist.destroy_process_group()


class Elements(NamedTuple):
    """Consecutive elements of a tensor, row by row, that one rank holds in memory."""

    key: str
    """Name of the whole tensor in a checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    values: Tensor


def elements_here(module: nn.Module, optimizer: layerwise.Optimizer, rank: int) -> Iterator[Elements]:
    """Weights, buffers, masters and optimizer state of this rank."""
    optimizer.bring_up_to_date()
    params = dict(module.named_parameters())
    for name, tensor in (*params.items(), *module.named_buffers()):
        prefix = f"own.{rank}." if name == "seen" and rank > 0 else ""
        flat = tensor.detach().reshape(-1)
        yield Elements(f"{prefix}model.{untied(name)}", tuple(tensor.shape), 0, flat.clone())
    for shard in optimizer.engine.storage.shards:
        for span in shard.spans:
            param = params[span.fqn]
            is_matrix = param.dim() == 2 and untied(span.fqn) != "embed.weight"
            kinds = ["momentum"] if is_matrix else ["exp_avg", "exp_avg_sq"]
            tensors = {kind: shard.state[kind] for kind in kinds}
            if param.dtype != torch.float32:
                tensors["master"] = shard.master
            for kind, flat in tensors.items():
                key = f"optimizer.state.{untied(span.fqn)}.{kind}"
                yield Elements(key, tuple(param.shape), span.start, flat[span.part].clone())


def untied(name: str) -> str:
    """The name of a param in the whole model, where the head is tied to the embedding."""
    return "embed.weight" if name == "head.weight" else name


def put_together(parts: Iterable[Elements]) -> dict[str, Tensor]:
    """Whole tensors from the elements of all ranks."""
    whole: dict[str, Tensor] = {}
    for key, shape, start, values in parts:
        tensor = whole.setdefault(key, torch.full(shape, torch.nan, dtype=values.dtype))
        tensor.view(-1)[start : start + len(values)] = values
    lacking = [key for key, tensor in whole.items() if tensor.isnan().any()]
    if lacking:
        raise RuntimeError(f"no rank has some elements of {lacking}")
    return whole


def as_text(values: Mapping[str, Any]) -> str:
    """JSON with one tensor a line."""
    tensors = ",\n".join(f"    {json.dumps(key)}: {json.dumps(one)}" for key, one in values["tensors"].items())
    head = "".join(f"  {json.dumps(key)}: {json.dumps(values[key])},\n" for key in ("step", "lr"))
    return f'{{\n{head}  "tensors": {{\n{tensors}\n  }}\n}}\n'


def main(name: str, *kinds: str) -> None:
    """Write the checkpoints of some kinds, or of all, into `<name>/` of this folder."""
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    for kind in kinds or WORLDS:
        with tempfile.TemporaryDirectory() as meet:
            mp.spawn(write, (kind, str(folder), f"{meet}/meet"), nprocs=WORLDS[kind])


if __name__ == "__main__":
    main(*sys.argv[1:])
