"""Models and exact gradients for parity tests, and the comparison of a distributed run with the oracle.

Gradients are small integers times a power of two. Their sums over ranks are exact in any order and in any layout, so whatever differs is a bug and not
rounding. Weights are read back from the shards that own them, with momenta and averaged gradients: short runs with bf16 Newton-Schulz can have equal
weights and unequal momenta.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerwise
from layerwise.comm.sharded import local_of
from layerwise.engine import engine
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.memory.storage import Storage
from layerwise.routing.spec import ParamTable
from tests import seams
from tests.reference.oracle import Hyper, Oracle


class Zoo(nn.Module):
    """One of everything: embedding, tied or untied head, fused weight, odd shapes, a stack, a convolution, norms, biases, a scalar, a frozen weight."""

    def __init__(self, *, tied: bool = False, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.qkv = nn.Linear(width, width + 8, bias=True)
        self.tall = nn.Linear(7, 31, bias=False)
        self.row = nn.Linear(5, 1)
        self.column = nn.Linear(1, 9, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 6, 10))
        self.conv = nn.Conv1d(3, 8, 3)
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(width, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        width = self.qkv.in_features
        # A single row or column is a vector by default; here it is meant to be the smallest matrix there is.
        return {"qkv.weight": (width, 4, 4), "row.weight": (1,), "column.weight": (9,)}


class Few(nn.Module):
    """Fewer params than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(5, 3, bias=False)
        self.norm = nn.LayerNorm(4)


class Net(nn.Module):
    """A small real network whose middle layer is used twice, optionally under activation checkpointing."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.first = nn.Linear(6, 8)
        self.shared = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self._checkpointed(x)
        return self.last(self.norm(x))

    def _block(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.shared(x))

    def _checkpointed(self, x: Tensor) -> Tensor:
        if self.checkpointing == "none":
            return self._block(x)
        return checkpoint(self._block, x, use_reentrant=self.checkpointing == "reentrant")


def net_loss(module: nn.Module, rank: int, step: int, micro: int = 0) -> Tensor:
    """A loss on data that depends on rank, step and microbatch and on nothing else."""
    generator = torch.Generator().manual_seed(hash_of(f"data {rank} {step} {micro}"))
    x, y = torch.randn(3, 6, generator=generator), torch.randn(3, 5, generator=generator)
    return (module(x) - y).square().mean()


class Layers(nn.Module):
    """Says that its layers are matrices, also those of a single row or column, which are vectors by default."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.rows = [rows for rows, _ in shapes]

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {f"layer{index}.weight": (rows,) for index, rows in enumerate(self.rows)}


def shapes_module(shapes: list[tuple[int, int]]) -> nn.Module:
    """Linear layers without bias of the given (rows, cols), and one norm."""
    module = Layers(shapes)
    for index, (rows, cols) in enumerate(shapes):
        module.add_module(f"layer{index}", nn.Linear(cols, rows, bias=False))
    module.add_module("norm", nn.LayerNorm(3))
    return module


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "zoo": Zoo,
    "tied": lambda: Zoo(tied=True),
    "few": Few,
    "mixed": Zoo,
}

MIXED: dict[str, dict[str, str]] = {
    "mixed experts": {"matrix": "flat", "expert/matrix": "padded"},
    "mixed others": {"matrix": "compact", "other": "replicated"},
}
"""Layouts of each buffer, by a name that tests give them beside the names of layouts."""


def layout_named(name: str) -> str | dict[str, str]:
    """The argument `layout` for a name of the library or of `MIXED`."""
    return MIXED.get(name, name)


@dataclass
class Case:
    """One parity run."""

    model: str = "zoo"
    layout: str = "flat"
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    steps: int = 4
    accumulation: int = 1
    bucket_mib: float | None = 0.001
    missing: bool = False
    hyper: dict[str, Any] = field(default_factory=dict)
    schedule: Sequence[dict[str, Any]] = ()
    """What changes in `hyper` before each step."""
    shapes: list[tuple[int, int]] | None = None
    exact: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of DataParallel."""
    cohort_numel: int | None = None
    """Elements per rank that travel together; None takes the default, which no small model fills."""
    sabotage: str = ""
    """"momentum" or "gradient": move one element by one ulp in the library's run only, in the second step. A comparison must see it."""

    def build(self) -> nn.Module:
        torch.manual_seed(5)
        module = shapes_module(self.shapes) if self.shapes is not None else BUILDERS[self.model]()
        with torch.no_grad():
            for param in module.parameters():
                param.copy_(torch.randn(param.shape) * 0.1)
        module.to(self.dtype)
        if self.model == "mixed" and isinstance(module, Zoo):
            module.norm.float()
            module.gain.data = module.gain.data.float()
        return module


def matrices_of(module: nn.Module) -> dict[str, list[tuple[int, int]] | None]:
    """Which params of the test models are matrices, written down by hand."""
    if isinstance(module, Zoo):
        width = module.qkv.in_features
        return {
            "qkv.weight": [(0, width), (width, width + 4), (width + 4, width + 8)],
            "tall.weight": [(0, 31)],
            "row.weight": [(0, 1)],
            "column.weight": [(0, 9)],
            "experts": None,
            "conv.weight": [(0, 8)],
        }
    return {fqn: [(0, param.shape[0])] for fqn, param in module.named_parameters() if param.dim() == 2}


def gradient(fqn: str, shape: torch.Size, rank: int, step: int, micro: int, *, exact: bool = True) -> Tensor:
    """The gradient of one param on one rank: integers in [-4, 4] over 8, or Gaussian numbers for the control that must fail."""
    seed = hash_of(f"{fqn} {rank} {step} {micro}")
    generator = torch.Generator().manual_seed(seed)
    if not exact:
        return torch.randn(shape, generator=generator)
    return torch.randint(-4, 5, shape, generator=generator).float() / 8.0


def hash_of(text: str) -> int:
    value = 0
    for char in text:
        value = (value * 131 + ord(char)) % (2**31 - 1)
    return value


def is_missing(case: Case, fqn: str, rank: int, step: int) -> bool:
    return case.missing and (hash_of(f"{fqn} {step}") + rank) % 3 == 0


NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def rules(hyper: Hyper, **policy: Any) -> dict[str, Any]:
    """The library's arguments for the oracle's numbers, with more fields of its gradient policy."""
    decay = {"weight_decay": hyper.weight_decay, "weight_decay_mode": hyper.weight_decay_mode}
    muon: dict[str, Any] = {
        "lr": hyper.lr,
        "momentum": hyper.momentum,
        "nesterov": hyper.nesterov,
        "scale": hyper.scale,
        "extra_scale": hyper.extra_scale,
        "ns_dtype": NAMES[hyper.ns_dtype],
        **decay,
    }
    adaptive = {"beta2": hyper.beta2, "eps": hyper.matrix_eps}
    matrix: Any
    if hyper.matrix == "muon":
        matrix = layerwise.Muon(**muon)
    elif hyper.matrix == "normuon":
        matrix = layerwise.NorMuon(**muon, **adaptive)
    elif hyper.matrix == "adamuon":
        matrix = layerwise.AdaMuon(**muon, **adaptive)
    elif hyper.matrix == "adamw":
        matrix = layerwise.AdamW(lr=hyper.lr, betas=hyper.betas, eps=hyper.eps, **decay)
    else:
        matrix = layerwise.Lion(lr=hyper.lr, betas=hyper.betas, **decay)
    decay = {"weight_decay": hyper.other_weight_decay, "weight_decay_mode": hyper.other_weight_decay_mode}
    other: Any = (
        layerwise.AdamW(lr=hyper.other_lr, betas=hyper.betas, eps=hyper.eps, **decay)
        if hyper.other == "adamw"
        else layerwise.Lion(lr=hyper.other_lr, betas=hyper.betas, **decay)
    )
    return {
        "matrix": matrix,
        "other": other,
        "clip_grad_norm": hyper.clip,
        "gradient_policy": layerwise.GradientPolicy(
            **{"clip": hyper.clip_scope, "norm_groups": hyper.norm_groups, **policy}
        ),
    }


def reschedule(optimizer: layerwise.Optimizer, oracle: Oracle) -> None:
    """Write the oracle's numbers of now into the live param groups, as schedulers do."""
    for group in optimizer.param_groups:
        fqn = group["fqns"][0]
        group.update(rules(oracle.of(fqn))["matrix" if fqn in oracle.matrices else "other"].options())


def deliver(model: layerwise.DataParallel, grads: dict[str, Tensor], *, sync: bool) -> None:
    """Hand gradients to the model as backward would: through a loss whose gradient they are."""
    params = model.engine.storage.params
    loss = sum((params[fqn] * grad.to(params[fqn].dtype)).sum() for fqn, grad in grads.items())
    with nullcontext() if sync else model.no_sync():
        if isinstance(loss, Tensor):
            loss.backward()


@contextmanager
def cohorts_of(numel: int | None) -> Iterator[None]:
    """Models that are wrapped in here have cohorts of so many elements; users cannot ask for that."""

    def planned(table: ParamTable, options: Options, **more: Any) -> Plan:
        return make_plan(table, options if numel is None else replace(options, cohort_numel=numel), **more)

    with mock.patch.object(engine, "make_plan", planned):
        yield


def wrap(case: Case, module: nn.Module) -> layerwise.DataParallel:
    with cohorts_of(case.cohort_numel):
        return seams.data_parallel(
            module,
            layout=layout_named(case.layout),
            rules=_route_rules(Hyper(**case.hyper), matrices_of(module)),
            bucket_mib=case.bucket_mib,
            grad_dtype=case.grad_dtype,
            **case.options,
        )


def _route_rules(hyper: Hyper, matrices: dict[str, Any]) -> list[layerwise.RouteRule]:
    """Route rules that give params the oracle's overrides."""

    def option(name: str, value: Any) -> tuple[str, Any]:
        return name.removeprefix("other_"), NAMES[value] if isinstance(value, torch.dtype) else value

    return [
        layerwise.RouteRule(
            pattern=fqn,
            to="matrix" if fqn in matrices else "other",
            options=dict(option(name, value) for name, value in values.items()),
        )
        for fqn, values in hyper.overrides.items()
    ]


def oracle_for(module: nn.Module, hyper: Hyper) -> Oracle:
    """An oracle that starts from the module's trainable params."""
    trainable = {fqn: param.detach().clone() for fqn, param in module.named_parameters() if param.requires_grad}
    return Oracle(trainable, matrices_of(module), hyper)


def train_and_compare(rank: int, world: int, case: Case, layouts: Sequence[str] = ()) -> list[str]:
    """Run a case on this rank beside the oracle of all ranks, in its own layout or in several side by side; returns what
    differs, by name."""
    hyper = Hyper(**case.hyper)
    oracle = oracle_for(case.build(), hyper)
    runs = []
    for layout in layouts or (case.layout,):
        model = wrap(replace(case, layout=layout), case.build())
        runs.append((layout, model, layerwise.Optimizer(model, **rules(hyper), count_zeros=True)))
    shapes = {fqn: param.shape for fqn, param in oracle.params.items()}
    for step in range(case.steps):
        everyone = [
            [_gradients(case, shapes, other, step, micro) for micro in range(case.accumulation)]
            for other in range(world)
        ]
        if step < len(case.schedule):
            oracle.hyper = replace(oracle.hyper, **case.schedule[step])
            for _, _, optimizer in runs:
                reschedule(optimizer, oracle)
        oracle.step([accumulated(micros) for micros in everyone], case.grad_dtype)
        if case.sabotage == "gradient" and step == 1 and rank == 0:
            _nudge_gradient(everyone)
        found = []
        for layout, model, optimizer in runs:
            for micro, grads in enumerate(everyone[rank]):
                deliver(model, grads, sync=micro == case.accumulation - 1)
            seen = reduced_differences(model, oracle)
            optimizer.step()
            optimizer.zero_grad()
            if case.sabotage == "momentum" and step == 1:
                nudge_state(model)
            seen += differences(model, optimizer, oracle, rounds=rounds_of(model, case.accumulation))
            found += [f"rank {rank} step {step} {layout}: {text}" for text in seen]
        if anywhere(found):
            return found
    return []


def anywhere(found: Sequence[str]) -> bool:
    """Whether any rank has found something: then all of them stop, and none of them is left waiting."""
    flag = torch.tensor([len(found)])
    if dist.is_initialized():
        dist.all_reduce(flag)
    return bool(flag)


def rounds_of(model: layerwise.DataParallel, accumulation: int) -> int:
    """How often gradients are reduced in a step of so many microbatches."""
    return accumulation if model.plan.options.shard_grads else 1


def _nudge_gradient(everyone: list[list[dict[str, Tensor]]]) -> None:
    """Move one gradient element of rank 0 by one ulp where the other ranks have zero, so that the sum keeps the change."""
    for fqn, grad in everyone[0][0].items():
        others = sum(
            (micros[0][fqn].float().abs() for micros in everyone[1:] if fqn in micros[0]), torch.zeros(grad.shape)
        )
        for index in ((others == 0) & (grad != 0)).nonzero().tolist():
            where = tuple(index)
            everyone[0][0][fqn] = grad.clone()
            everyone[0][0][fqn][where] = torch.nextafter(grad[where], torch.tensor(float("inf"), dtype=grad.dtype))
            return
    raise RuntimeError("no gradient element is non-zero on rank 0 alone: the sabotage needs a larger model.")


def nudge_state(model: layerwise.DataParallel) -> None:
    """Move one element of this rank's first momentum by one ulp."""
    for shard in model.engine.storage.shards:
        if shard.spans and "momentum" in shard.state:
            element = shard.state["momentum"][shard.spans[0].shard_offset :][:1]
            element.copy_(torch.nextafter(element, torch.full_like(element, float("inf"))))
            return


def _gradients(case: Case, shapes: dict[str, torch.Size], rank: int, step: int, micro: int) -> dict[str, Tensor]:
    return {
        fqn: gradient(fqn, shape, rank, step, micro, exact=case.exact).to(case.dtype)
        for fqn, shape in shapes.items()
        if not is_missing(case, fqn, rank, step)
    }


def accumulated(micros: list[dict[str, Tensor]]) -> dict[str, Tensor | None]:
    total: dict[str, Tensor | None] = {}
    for grads in micros:
        for fqn, grad in grads.items():
            before = total.get(fqn)
            total[fqn] = grad.float() if before is None else before + grad.float()
    return total


def reduced_differences(
    model: layerwise.DataParallel, oracle: Oracle, called: Callable[[str], str] = lambda fqn: fqn
) -> list[str]:
    """Sums over ranks that this rank's shards hold and the oracle does not. Gradients in fp16 are divided before they are
    summed, by a power of two that is no less than the number of ranks: these are exact."""
    model.engine.reducer.finish()
    plan = model.plan
    divided = 2 ** (plan.world - 1).bit_length() if str(plan.grad_dtype) == "fp16" else 1
    return [
        f"reduced gradient of {span.fqn}"
        for shard in model.engine.storage.shards
        for span in shard.spans
        if not torch.equal(
            shard.update[span.part] * divided,
            oracle.totals[called(span.fqn)].float().reshape(-1)[span.start : span.stop],
        )
    ]


def differences(
    model: layerwise.DataParallel,
    optimizer: layerwise.Optimizer,
    oracle: Oracle,
    called: Callable[[str], str] = lambda fqn: fqn,
    rounds: int = 1,
) -> list[str]:
    """What this rank holds that is not what the oracle holds: replicas, masters, state, gradient norm, zeros, bytes sent.

    `called` says what the oracle calls a param of this rank.
    """
    found = []
    weights = oracle.weights()
    for fqn, param in model.engine.storage.params.items():
        if not torch.equal(param.detach(), weights[called(fqn)]):
            found.append(f"replica of {fqn}")
    for shard in model.engine.storage.shards:
        for span in shard.spans:
            inside = slice(span.start, span.stop)
            if not torch.equal(shard.master[span.part], oracle.masters[called(span.fqn)].reshape(-1)[inside]):
                found.append(f"master of {span.fqn}")
            for name, expected in oracle.state[called(span.fqn)].items():
                if name in shard.state and not torch.equal(shard.state[name][span.part], expected.reshape(-1)[inside]):
                    found.append(f"{name} of {span.fqn}")
    found += _home_differences(model, optimizer, oracle, called)
    if optimizer.stats.grad_norm != oracle.grad_norm:
        found.append(f"grad norm {optimizer.stats.grad_norm} against {oracle.grad_norm}")
    if optimizer.stats.num_zeros != oracle.num_zeros:
        found.append(f"zero count {optimizer.stats.num_zeros} against {oracle.num_zeros}")
    predicted = optimizer.schedule.bytes_by_collective(model.engine.storage.ranks, rounds)
    if dict(optimizer.stats.bytes_by_collective) != predicted:
        found.append(f"bytes {dict(optimizer.stats.bytes_by_collective)} against {predicted}")
    engine, steps = model.engine, optimizer.stats.step
    due = {kind: steps * nbytes for kind, nbytes in engine.publisher.due_nbytes.items()}
    if dict(engine.traffic.gathered) != due:  # all replicas were read above
        found.append(f"bytes {dict(engine.traffic.gathered)} were gathered in {steps} steps, {due} were due")
    return found


def _home_differences(
    model: layerwise.DataParallel, optimizer: layerwise.Optimizer, oracle: Oracle, called: Callable[[str], str]
) -> list[str]:
    """Second moments that live with a matrix at its home."""
    found = []
    for fqn, param in model.engine.storage.params.items():
        for name, tensor in optimizer.state[param].items():
            kind, _, index = name.partition(".")
            at_home = kind in ("row_moment", "second_moment") and tensor.numel() > 0
            if at_home and not torch.equal(tensor, oracle.state[called(fqn)][f"second.{index}"]):
                found.append(f"{name} of {fqn}")
    return found


def put_together(model: layerwise.DataParallel) -> dict[str, Tensor]:
    """Whole masters, reduced gradients and state by name, from the shards of all ranks of a dense model. Collective."""
    found: dict[str, Tensor] = {}
    storage = model.engine.storage
    for shard in storage.shards:
        parts = {"gradient": shard.update, "master": shard.master, **shard.state}
        rank = storage.ranks[shard.plan.domain]
        for fqn in shard.plan.fqns:
            for name, tensor in parts.items():
                found[f"{name} of {fqn}"] = full = torch.zeros(storage.params[fqn].numel())
                for span in shard.spans_by_fqn.get(fqn, []):
                    if shard.plan.copies(span, rank)[0] == rank:  # of copies, one counts
                        full[span.start : span.stop] = tensor[span.part]
    whole = {name: found[name] for name in sorted(found)}
    if dist.is_initialized():
        # Every element has one owner, so a sum is a copy.
        together = torch.cat(list(whole.values()))
        dist.all_reduce(together)
        whole = dict(zip(whole, together.split([tensor.numel() for tensor in whole.values()]), strict=True))
    return whole


def hashes_by_layout(rank: int, world: int, case: Case, layouts: Sequence[str]) -> dict[str, str]:
    """Train a case in each layout; one hash each of all gradients of all steps, and of masters and state after them."""
    hyper, found = Hyper(**case.hyper), {}
    for layout in layouts:
        model = wrap(replace(case, layout=layout), case.build())
        optimizer = layerwise.Optimizer(model, **rules(hyper))
        shapes = {fqn: param.shape for fqn, param in model.engine.storage.params.items()}
        digest = hashlib.sha256()
        for step in range(case.steps):
            for micro in range(case.accumulation):
                grads = _gradients(case, shapes, rank, step, micro)
                deliver(model, grads, sync=micro == case.accumulation - 1)
            model.engine.reducer.finish()
            digest.update(hash_whole(model).encode())
            optimizer.step()
        digest.update(hash_whole(model, gradients=False).encode())
        found[layout] = digest.hexdigest()
    return found


def hash_whole(model: layerwise.DataParallel, *, gradients: bool = True) -> str:
    """A hash of what all ranks hold together, the same in every layout and on every rank. Collective."""
    whole = put_together(model)
    return hash_tensors(tensor for name, tensor in whole.items() if gradients or not name.startswith("gradient"))


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over the bytes of tensors, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous()
        digest.update(f"{flat.dtype} {tuple(flat.shape)}".encode())
        digest.update(ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b"")
    return digest.hexdigest()


def held(storage: Storage) -> list[Tensor]:
    """What a rank has of a model, gradients aside: what it reads, masters and state."""
    tensors = [tensor for replica in storage.replicas for tensor in replica.held]
    for shard in storage.shards:
        tensors += [*(() if shard.weight is None else (shard.weight,)), shard.master]
        tensors += [shard.state[name] for name in sorted(shard.state)]
    return tensors


def hash_by_param(optimizer: layerwise.Optimizer) -> str:
    """One hash of weights, state and counters by param, wherever they lie: of a plain module and of a wrapped one alike."""
    optimizer.engine.publisher.ensure_all()
    tensors: list[Tensor] = []
    for _, param in sorted(optimizer.engine.storage.params.items()):
        # Whatever shapes it has: elements count. And steps are counted beside them.
        names = [name for name in sorted(optimizer.state[param]) if name != "step"]
        tensors += [param, *(optimizer.state[param][name].flatten() for name in names)]
    extra = {name: value for name, value in optimizer.state_dict(part=True)["layerwise"].items() if name != "plan"}
    return hashlib.sha256((hash_tensors(tensors) + json.dumps(extra, sort_keys=True)).encode()).hexdigest()


def hash_everything(optimizer: layerwise.Optimizer) -> str:
    """One hash of all that a step may change on this rank: replicas, masters, state, and the counters beside them. Not of
    how it was asked for: runs with another reducer can be compared."""
    storage, chunks = optimizer.engine.storage, optimizer.engine.chunks
    optimizer.engine.publisher.ensure_all()
    tensors = held(storage)
    for param in storage.params.values():
        # Whatever shapes it has: elements count. And steps are counted beside them.
        names = [name for name in sorted(optimizer.state[param]) if name != "step"]
        tensors += [local_of(param), *(local_of(optimizer.state[param][name]).flatten() for name in names)]
    frozen = [local_of(param) for chunk in chunks for param in chunk.parameters() if not param.requires_grad]
    extra = {name: value for name, value in optimizer.state_dict(part=True)["layerwise"].items() if name != "plan"}
    counters = json.dumps(extra, sort_keys=True, default=repr)
    return hashlib.sha256((hash_tensors([*tensors, *frozen]) + counters).encode()).hexdigest()
