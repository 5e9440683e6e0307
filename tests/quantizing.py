"""Training with weights that are kept as codes, seen from outside: what every step of a run left, and what codes have to be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise
from layerwise.kernels.stored import stored_of
from layerwise.memory.replicas import ReplicaState
from layerwise.routing.split import stack
from tests import seams
from tests.reference.block_formats import encoded
from tests.worlds import hash_tensors, put_together

VOCABULARY = 40
FORMATS: dict[str, tuple[str, tuple[int, int], str]] = {
    "mxfp8": ("e4m3", (1, 32), "e8m0"),
    "blockwise": ("e4m3", (128, 128), "fp32"),
}


def codes_of(values: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Codes as bytes, and scales, of a matrix or of a stack of them, by the oracle."""
    entries = values.float().reshape(-1, *values.shape[-2:]).numpy()
    found = [encoded(entry, *FORMATS[recipe]) for entry in entries]
    codes = torch.stack([torch.from_numpy(values) for values, _ in found]).view(values.shape)
    scales = torch.stack([torch.from_numpy(scales) for _, scales in found])
    return codes, scales.view(*values.shape[:-2], *scales.shape[-2:])


class Small(nn.Module):
    """Embedding, blocks of two linear layers and a norm, and a head; with `experts`, a stack of them beside every block."""

    def __init__(self, width: int = 32, *, experts: int = 0, domain: str = "dense") -> None:
        super().__init__()
        self.domain = domain
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, experts, domain) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int, experts: int, domain: str) -> None:
        super().__init__()
        self.domain = domain
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.experts = nn.Parameter(torch.randn(experts, width, width) * 0.1) if experts else None

    def matrix_splits(self) -> dict[str, Any]:
        if self.experts is None:
            return {}
        count, rows, cols = self.experts.shape
        return {"experts": stack((count, rows, cols))}

    def param_domains(self) -> dict[str, str]:
        return {"experts": self.domain} if self.experts is not None and self.domain != "dense" else {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        out = self.down(F.gelu(self.up(x)))
        if self.experts is not None:  # all ways in which products read a stack
            flat = x.flatten(0, -2)
            every = torch.bmm(flat.expand(len(self.experts), -1, -1), self.experts)
            each = [F.linear(flat, expert) for expert in self.experts.unbind()]
            one = flat @ self.experts[0]
            out = out + (every.sum(0) + sum(each) + one).view_as(out) * 0.1
        return out


@dataclass(frozen=True)
class Way:
    """How a run is set up."""

    layout: str = "flat"
    gather: str = "quantized"
    overlap: bool = True
    recipe: str = "mxfp8"
    experts: int = 0
    ep: int = 0
    """Ranks that share the experts; 0: every rank has all of them, as any other param."""
    accumulation: int = 1
    evaluates: bool = False
    skip: tuple[str, ...] = ()
    """Globs of params that stay plain."""
    options: tuple[tuple[str, Any], ...] = ()
    """More arguments of DataParallel."""


def build(way: Way) -> nn.Module:
    """The module before it is quantised, the same on every rank but for experts that ranks share."""
    torch.manual_seed(3)
    width = 128 if way.recipe == "blockwise" else 32
    return Small(width, experts=way.experts, domain="expert" if way.ep else "dense").bfloat16()


def prepare(way: Way) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    module = layerwise.quantize(build(way), way.recipe, skip=way.skip)
    mesh = None
    if way.ep:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // way.ep, way.ep), mesh_dim_names=("dp", "ep"))
    options = dict(way.options)
    checks = bool(options.pop("check_replicas", False))
    model = seams.data_parallel(
        module,
        layout=way.layout,
        mesh=mesh,
        param_gather=way.gather,  # type: ignore[arg-type]
        overlap_param_gather=way.overlap,
        bucket_mib=0.012,  # two weights in a bucket
        **options,
    )
    optimizer = layerwise.Optimizer(
        model,
        matrix=layerwise.Muon(lr=0.05, weight_decay=0.1),
        other=layerwise.AdamW(lr=0.02),
        clip_grad_norm=1.0,
        check_replicas=checks,
    )
    return model, optimizer


@dataclass
class Seen:
    """What a run left behind, in order: names and hashes or numbers."""

    facts: list[tuple[str, object]] = field(default_factory=list)
    deferred: int = 0
    """Gathers that had not become codes when a step was over."""
    faults: list[str] = field(default_factory=list)


def train(rank: int, way: Way, steps: int) -> Seen:
    """A run on real data, of which everything is written down."""
    model, optimizer = prepare(way)
    seen, storage = Seen(), model.engine.storage
    seen.faults += starting_faults(model, build(way))
    writes = written(model)
    for step in range(steps):
        for micro in range(way.accumulation):
            tokens = tokens_of(rank, step, micro)
            with nullcontext() if micro == way.accumulation - 1 else model.no_sync():
                out = model(tokens[:, :-1])
                loss = F.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())
                loss.backward()
            seen.facts += [("loss", loss.item()), ("output", hash_tensors([out]))]
        model.engine.reducer.finish()
        for shard in storage.shards:
            seen.facts += [(f"gradient of {span.fqn}", hash_tensors([shard.update[span.part]])) for span in shard.spans]
        optimizer.step()
        seen.deferred += sum(
            replica.plan.is_staged and replica.state is not ReplicaState.FRESH for replica in storage.replicas
        )
        optimizer.zero_grad()
        if way.evaluates:
            with torch.no_grad():
                seen.facts.append(("eval", hash_tensors([model(tokens_of(9, step, 0)[:, :-1])])))
        for shard in storage.shards:
            for span in shard.spans:
                held = [shard.master, *(tensor for _, tensor in sorted(shard.state.items()))]
                seen.facts.append((f"master of {span.fqn}", hash_tensors(tensor[span.part] for tensor in held)))
        if step in (0, steps - 1):  # what reads weights ends the flights: not in every step
            seen.facts += [(f"plain {fqn}", hash_tensors([param])) for fqn, param in plain_params(model)]
            seen.faults += [f"step {step}: {text}" for text in faults(model)]
    model.ensure()
    due = {kind: steps * nbytes for kind, nbytes in model.engine.publisher.due_nbytes.items()}
    if dict(model.engine.traffic.gathered) != due:
        seen.faults.append(
            f"{dict(model.engine.traffic.gathered)} bytes were gathered in {steps} steps, {due} were due"
        )
    for fqn, count in written(model).items():
        if count != writes[fqn] + steps:
            seen.faults.append(f"{fqn} was written {count - writes[fqn]} times in {steps} steps")
    return seen


def tokens_of(rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randint(VOCABULARY, (2, 9), generator=generator)


def plain_params(model: layerwise.DataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Params that are no codes."""
    yield from ((fqn, param) for fqn, param in model.engine.storage.params.items() if stored_of(param) is None)


def coded_params(model: layerwise.DataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that are."""
    yield from ((fqn, param) for fqn, param in model.engine.storage.params.items() if stored_of(param) is not None)


def written(model: layerwise.DataParallel) -> dict[str, int]:
    """How often values came to params that are kept as codes."""
    return {
        fqn: stored.writes
        for fqn, param in coded_params(model)
        if (stored := stored_of(param)) is not None and stored.is_by_codes
    }


def starting_faults(model: layerwise.DataParallel, module: nn.Module) -> list[str]:
    """Masters that did not begin with the values that the module had before it was quantised, and copies of these that were
    left behind."""
    found = []
    values = dict(module.named_parameters())
    for shard in model.engine.storage.shards:
        for span in shard.spans:
            expected = values[span.fqn].detach().float().reshape(-1)[span.start : span.stop]
            if not torch.equal(shard.master[span.part], expected):
                found.append(f"master of {span.fqn} does not begin with what was given")
    for fqn, param in coded_params(model):
        stored = stored_of(param)
        if stored is not None and stored.is_by_codes and stored.given is not None:
            found.append(f"what {fqn} began with was not released")
    return found


def faults(model: layerwise.DataParallel) -> list[str]:
    """Codes that are not those of what masters round to, or not the same on every rank of a domain. Collective."""
    model.ensure()
    found, compared = [], 0
    storage = model.engine.storage
    masters = (
        put_together(model) if model.plan.world_by_domain.get("expert", model.plan.world) == model.plan.world else {}
    )
    for fqn, param in coded_params(model):
        stored = stored_of(param)
        if stored is None:
            continue
        if not stored.is_by_codes:
            if storage.plan.options.param_gather == "quantized":
                found.append(f"{fqn} is not kept as codes")
            continue
        for direction, codes in (("rows", stored.rows()), ("columns", stored.cols())):
            if f"master of {fqn}" not in masters:
                continue
            compared += 1
            values = masters[f"master of {fqn}"].view(param.shape).bfloat16()
            expected, scales = codes_of(values if direction == "rows" else values.mT.contiguous(), stored.recipe.name)
            if not torch.equal(codes.values.contiguous().view(torch.uint8), expected):
                found.append(f"codes of {fqn} by {direction} are not those of its master")
            if not torch.equal(codes.scales, scales):
                found.append(f"scales of {fqn} by {direction} are not those of its master")
    if masters and storage.plan.options.param_gather == "quantized" and not compared:
        found.append("no codes were compared")
    mine = [hash_tensors(replica.held) for replica in storage.replicas]
    for number, replica in enumerate(storage.replicas):
        group = model.engine.groups.domains[replica.plan.domain].group
        if group is None:
            continue
        others: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(others, mine[number], group=group)
        if len(set(others)) > 1:
            found.append(f"replicas of {replica.plan.label} differ between ranks")
    return found


def difference(one: Seen, two: Seen) -> str:
    """What is wrong with either of two runs, or the first thing in which they differ; nothing if they are alike."""
    if problems := [*one.faults, *two.faults]:
        return "; ".join(problems)
    names = {name.split(" ")[0] for name, _ in one.facts}
    if not {"loss", "output", "gradient", "master", "plain"} <= names:
        return f"the comparison is vacuous: it has {sorted(names)} only"
    for (name, mine), (other, theirs) in zip(one.facts, two.facts, strict=True):
        if name != other or mine != theirs:
            return f"{name} is {mine} on one side, {other} is {theirs} on the other"
    return ""


def on_and_off(rank: int, world: int, ways: Sequence[Way], steps: int) -> list[str]:
    """Every way with codes kept, against bf16 kept; and that gathers really were put off where they were to be."""
    found = []
    for way in ways:
        on = train(rank, replace(way, gather="quantized"), steps)
        off = train(rank, replace(way, gather="bf16", overlap=False), steps)
        text = difference(on, off)
        if not text and way.overlap and on.deferred == 0 and way.layout != "replicated":
            text = "no gather was put off"
        found += [f"rank {rank} {way}: {text}"] if text else []
    return found
