"""What the engine computes, as hashes that a later engine must give again: weights, masters, state, norms, bytes sent and planned.

A case is a model, a way to wrap and to update it, and gradients that are the same everywhere. What ranks hold is put together to whole params before it
is hashed, so a record does not say where things lie. It is taken through the public surface; the few lines that are not are in `held` and `planned`.

Bits do not depend on timing: every rank has one thread (`tests.ranks`), and sums over ranks are exact, or of two numbers, or in the order of ranks. They do
depend on the machine's matrix products, so there is a file of bits for each platform, with the products it was written by; the file of bytes, paddings and
buckets is for all. `python -m tests.distributed.update_goldens` writes both.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import layerwise
from tests.arrangements import Arrangement, filled, gradients_of, mesh_of, named, wrap_stage
from tests.distributed import test_qk_clip as heads
from tests.ranks import run_ranks
from tests.reference.oracle import Hyper
from tests.worlds import Case, Net, gradient, hash_tensors, is_missing, net_loss, rules, wrap

FOLDER = Path(__file__).parents[1] / "golden" / "steps"
BYTES = FOLDER / "bytes.json"

Record = dict[str, Any]
"""Plain data, as JSON has it."""


@dataclass(frozen=True)
class Steps:
    """One case: a few steps of a model."""

    world: int = 2
    model: Literal["zoo", "tied", "few", "mixed", "net", "heads", "stages"] = "zoo"
    plain: bool = False
    """The module as it is, in one process, without a wrapper."""
    layout: str = "flat"
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    steps: int = 3
    accumulation: int = 1
    grads: Literal["eighths", "gaussian"] = "eighths"
    """Integers over 8, or numbers whose sum depends on its order."""
    missing: bool = False
    late: bool = False
    """The last step has another microbatch, when all that is known of steps was reduced."""
    overflow: bool = False
    """The last rank has an infinite gradient in the second step."""
    cohort_numel: int | None = 200
    """Few enough for several cohorts."""
    wrapping: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of DataParallel."""
    hyper: Mapping[str, Any] = field(default_factory=dict)
    """What `tests.reference.oracle.Hyper` has otherwise; decay and clipping are on unless they are here."""
    stepping: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the Optimizer."""
    spread: Mapping[str, Any] = field(default_factory=dict)
    """Of "stages": fields of `tests.arrangements.Arrangement`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the Optimizer."""
        hyper = {"weight_decay": 0.1, "other_weight_decay": 0.05, "clip": 1.0, **self.hyper}
        return {**rules(Hyper(**hyper)), "count_zeros": True, **self.stepping}

    @property
    def arrangement(self) -> Arrangement:
        return Arrangement(
            accumulation=self.accumulation,
            missing=self.missing,
            dtype=self.dtype,
            grad_dtype=self.grad_dtype,
            options=dict(self.wrapping),
            **self.spread,
        )


@dataclass
class Started:
    """A case on one rank: the model, and how it gets its gradients."""

    optimizer: layerwise.Optimizer
    model: layerwise.DataParallel | None
    params: dict[str, nn.Parameter]
    backward: Callable[[int, int, bool], None]
    """Of a step, a microbatch and whether it is the last."""
    called: Callable[[str], str] = lambda fqn: fqn
    """What a param of this rank is called among those of all ranks."""


# -- on a rank -------------------------------------------------------------------------------------


def record_rank(rank: int, world: int, cases: Mapping[str, Steps]) -> dict[str, Record]:
    """What this rank has after the steps of each case, and what it saw on the way."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = _record(case, _start(case, rank))
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return found


def _record(case: Steps, started: Started) -> Record:
    optimizer, model = started.optimizer, started.model
    rounds = case.accumulation if model is not None and case.wrapping.get("shard_grads") else 1
    seen, sent = [], []
    for step in range(case.steps):
        for micro in range(case.accumulation + (case.late and step == case.steps - 1)):
            started.backward(step, micro, micro >= case.accumulation - 1)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(_seen(optimizer, exact=case.grads != "gaussian"))
        sent.append(_nonzero(optimizer.stats.bytes_by_collective))
    record = {
        "weights": {started.called(fqn): param.detach().clone() for fqn, param in started.params.items()},
        "state": [(started.called(fqn), *entry) for fqn, *entry in held(optimizer)],
        "seen": seen,
        "bytes": {"sent": sent, "planned": _nonzero(planned(optimizer, model, rounds))},
    }
    if model is not None:
        sizes = [bucket.numel for bucket in model.plan.buckets]
        used = sum(param.numel() for param in started.params.values() if param.requires_grad)
        record["bytes"] |= {"buckets": sizes, "padding": sum(sizes) - used, "layout": model.plan.layout_label}
        model.unwrap()
    return record


def held(optimizer: layerwise.Optimizer) -> Iterator[tuple[str, str, int | None, Tensor]]:
    """(param, quantity, first element, elements) of all the state that this rank holds, masters included where they are not the weights themselves. What
    belongs to a matrix and not to elements has no first one."""
    saved: dict[str, Any] = optimizer.state_dict(part=True)
    spans = saved["layerwise"]["spans"]
    for group in saved["param_groups"]:
        for fqn, key in zip(group["fqns"], group["params"], strict=True):
            for name, tensor in saved["state"].get(key, {}).items():
                if tensor.numel() and name != "step":  # which the last step says
                    yield fqn, name, None if "." in name else spans[fqn][0], tensor.detach().reshape(-1).clone()


def planned(optimizer: layerwise.Optimizer, model: layerwise.DataParallel | None, rounds: int) -> dict[str, int]:
    """Bytes that this rank was to send in a step."""
    return optimizer.schedule.bytes_by_collective(0 if model is None else model.engine.storage.ranks, rounds)


def _seen(optimizer: layerwise.Optimizer, *, exact: bool) -> Record:
    """What the last step says of itself, where it says something. A sum of squares that is not exact has last bits that depend on its order."""

    def text(number: float | None) -> str | None:
        return None if number is None else float(number).hex() if exact else f"{number:.12e}"

    stats = optimizer.stats
    said = {
        "grad_norm": text(stats.grad_norm),
        **{f"norm of {name}": text(norm) for name, norm in sorted(stats.norms.items())},
        **{f"clip of {name}": text(factor) for name, factor in sorted(stats.clip_coefficients.items())},
        "num_zeros": stats.num_zeros,
        "skipped": stats.skipped,
        "nonfinite": list(stats.nonfinite),
        "missing": dict(sorted(stats.missing.items())),
        "loss_scale": stats.loss_scale,
        "max_logit": text(stats.max_logit),
        "clipped_heads": stats.clipped_heads,
    }
    return {name: value for name, value in said.items() if value}


def _nonzero(nbytes: Mapping[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in sorted(nbytes.items()) if count}


def _start(case: Steps, rank: int) -> Started:
    match case.model:
        case "stages":
            return _start_stages(case, rank)
        case "heads":
            return _start_heads(case, rank)
        case "net":
            return _start_net(case, rank)
    return _start_zoo(case, rank)


def _optimizer(case: Steps, model: nn.Module) -> layerwise.Optimizer:
    return layerwise.Optimizer(model, **case.arguments)


def _wrapped(case: Steps, module: nn.Module) -> layerwise.DataParallel | None:
    if case.plain:
        return None
    like = Case(
        layout=case.layout,
        dtype=case.dtype,
        grad_dtype=case.grad_dtype,
        cohort_numel=case.cohort_numel,
        hyper=dict(case.hyper),
        bucket_mib=0.0001 if case.model == "net" else 0.001,
        options=dict(case.wrapping),
    )
    return wrap(like, module)


def _start_zoo(case: Steps, rank: int) -> Started:
    like = Case(model=case.model, dtype=case.dtype, missing=case.missing)
    module = like.build()
    model = _wrapped(case, module)
    optimizer = _optimizer(case, module if model is None else model)
    params = dict(module.named_parameters())

    def backward(step: int, micro: int, is_last: bool) -> None:
        grads = {
            fqn: _gradient(case, fqn, param.shape, rank, step, micro)
            for fqn, param in params.items()
            if param.requires_grad and not is_missing(like, fqn, rank, step)
        }
        _deliver(case, optimizer, model, params, grads, sync=is_last)

    return Started(optimizer, model, params, backward)


def _start_net(case: Steps, rank: int) -> Started:
    torch.manual_seed(3)
    module = Net().to(case.dtype)
    model = _wrapped(case, module)
    optimizer = _optimizer(case, module if model is None else model)
    for param in module.parameters():
        param.register_hook(lambda grad: (grad * 64).round() / 64)  # the sum over ranks is exact

    def backward(step: int, micro: int, is_last: bool) -> None:
        forward = module if model is None else model
        with nullcontext() if model is None or is_last else model.no_sync():
            net_loss(lambda x: forward(x.to(case.dtype)).float(), rank, step, micro).backward()

    return Started(optimizer, model, dict(module.named_parameters()), backward)


def _start_heads(case: Steps, rank: int) -> Started:
    """Attention in every arrangement, with logits to clip by; a NaN among them, a module that does not run, an infinite gradient."""
    like = heads.Case(dtype=case.dtype, options=tuple(case.wrapping.items()))
    model, optimizer = heads.start(like, case.layout)
    params = dict(model.module.named_parameters())
    shapes = {fqn: param.shape for fqn, param in params.items()}

    def backward(step: int, micro: int, is_last: bool) -> None:
        for name in heads.HEADS:
            logits = heads.logits_of(name, rank, step, micro, case.world)
            if logits is not None:
                layerwise.record_logits(model.module.get_submodule(name), logits)
        grads = heads.gradients(shapes, rank, step, micro, case.world)
        _deliver(case, optimizer, model, params, grads, sync=is_last)

    return Started(optimizer, model, params, backward)


def _start_stages(case: Steps, rank: int) -> Started:
    """Experts, pipeline stages, chunks, ties. Only the first rank of a domain, and the first stage of a tie, start from the right values."""
    arrangement = case.arrangement
    stage, place = list(arrangement.places(case.world))[rank]
    expert_place = place % arrangement.ep
    modules = filled(arrangement, stage, expert_place, 0 if place < arrangement.ep else rank)
    model = wrap_stage(arrangement, modules, case.layout, mesh_of(arrangement, case.world))
    optimizer = _optimizer(case, model)
    params = named(modules)

    def backward(step: int, micro: int, is_last: bool) -> None:
        grads = gradients_of(arrangement, stage, place, step, micro)
        _deliver(case, optimizer, model, params, grads, sync=is_last)

    return Started(optimizer, model, params, backward, called=lambda fqn: arrangement.called(stage, expert_place, fqn))


def _gradient(case: Steps, fqn: str, shape: torch.Size, rank: int, step: int, micro: int) -> Tensor:
    grad = gradient(fqn, shape, rank, step, micro, exact=case.grads == "eighths")
    is_last_param = fqn.endswith("qkv.weight")
    return grad * math.inf if case.overflow and step == 1 and rank == case.world - 1 and is_last_param else grad


def _deliver(
    case: Steps,
    optimizer: layerwise.Optimizer,
    model: layerwise.DataParallel | None,
    params: Mapping[str, nn.Parameter],
    grads: Mapping[str, Tensor],
    *,
    sync: bool,
) -> None:
    """Hand over gradients as backward would: through a loss whose gradient they are."""
    loss = sum((params[fqn] * grad.to(params[fqn].dtype)).sum() for fqn, grad in grads.items())
    if isinstance(loss, Tensor):
        scaled = optimizer.scale_loss(loss) if "loss_scale" in case.stepping else loss
        with nullcontext() if sync or model is None else model.no_sync():
            scaled.backward()


# -- of all ranks ----------------------------------------------------------------------------------


def record(cases: Mapping[str, Steps]) -> tuple[Record, Record]:
    """The bits and the bytes of cases of one world, by name."""
    (world,) = {case.world for case in cases.values()}
    answers = run_ranks(world, record_rank, dict(cases))
    bits, nbytes = {}, {}
    for name in cases:
        ranks = [answer[name] for answer in answers]
        bits[name] = {"params": _params(ranks), "steps": _alike([rank["seen"] for rank in ranks])}
        nbytes[name] = {
            quantity: _alike(
                [_alike(rank["bytes"][quantity]) if quantity == "sent" else rank["bytes"][quantity] for rank in ranks]
            )
            for quantity in ranks[0]["bytes"]
        }
    return bits, nbytes


def _alike(values: Sequence[Any]) -> Any:
    """What all ranks (or steps) have in common, or what each of them has."""
    return values[0] if all(value == values[0] for value in values) else {str(at): v for at, v in enumerate(values)}


def _params(ranks: Sequence[Record]) -> dict[str, dict[str, str]]:
    """A hash of every quantity of every param, whole."""
    numels: dict[str, int] = {}
    hashes: dict[str, dict[str, str]] = {}
    for rank in ranks:
        for name, weight in rank["weights"].items():
            numels[name] = weight.numel()
            found = _hash(weight.reshape(-1))
            before = hashes.setdefault(name, {}).setdefault("weight", found)
            if found != before:
                hashes[name]["weight"] = "ranks differ"
    parts: dict[tuple[str, str], list[tuple[int | None, Tensor]]] = {}
    for rank in ranks:
        for name, quantity, start, tensor in rank["state"]:
            parts.setdefault((name, quantity), []).append((start, tensor))
    for (name, quantity), pieces in parts.items():
        hashes[name][quantity] = _whole(numels[name], pieces)
    return {name: dict(sorted(found.items())) for name, found in sorted(hashes.items())}


def _whole(numel: int, pieces: Iterable[tuple[int | None, Tensor]]) -> str:
    """The hash of what pieces make up, or a word that says why they do not. What several ranks hold must be the same on all."""
    whole: Tensor | None = None
    covered = torch.zeros(0, dtype=torch.bool)
    for start, tensor in pieces:
        if whole is None:
            size = tensor.numel() if start is None else numel
            whole, covered = torch.zeros(size, dtype=tensor.dtype), torch.zeros(size, dtype=torch.bool)
        at = slice(start or 0, (start or 0) + tensor.numel())
        again = covered[at]
        if _hash(whole[at][again]) != _hash(tensor[again]):
            return "copies differ"
        whole[at], covered[at] = tensor, True
    return _hash(whole) if whole is not None and bool(covered.all()) else "incomplete"


def _hash(tensor: Tensor) -> str:
    return hash_tensors([tensor])[:16]


# -- files -----------------------------------------------------------------------------------------


def bits_file() -> Path:
    """The file of this platform's bits."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return FOLDER / f"{platform.machine()}-{capability}-torch-{torch.__version__.partition('+')[0]}.json"


def products() -> str:
    """A hash of what this machine's matrix products and reductions give. Processors of one kind may still differ in it."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows, inner, cols in ((7, 31, 7), (12, 20, 12), (12, 12, 20), (6, 10, 6), (31, 7, 7), (9, 9, 9), (64, 48, 80)):
        left, right = (
            torch.randint(-99, 100, s, generator=generator) / 97 for s in ((3, rows, inner), (3, inner, cols))
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            one, other = left.to(dtype), right.to(dtype)
            found += [one @ other, one[0] @ other[0], torch.baddbmm(one @ other, one, other, beta=0.3, alpha=0.7)]
        found += [left.sum(dim=1), left.square().sum().sqrt(), torch.addcdiv(left, left, left.abs() + 0.1)]
    return _hash(torch.cat([tensor.float().reshape(-1) for tensor in found]))


def read_bits() -> tuple[Record, str]:
    """The recorded bits of this platform by case, or none and the reason."""
    path = bits_file()
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*-torch-*.json")))
        return {}, f"no bits were recorded for {path.stem}, only for {known}"
    saved = json.loads(path.read_text())
    if saved["products"] != products():
        return {}, f"matrix products of this machine have other bits than those that {path.name} was recorded with"
    return {name: saved["records"][first] for name, first in saved["cases"].items()}, ""


def read_bytes() -> Record:
    found: Record = json.loads(BYTES.read_text())
    return found


def write(bits: Record, nbytes: Record) -> None:
    """Write both files. Cases whose bits are the same, as those of all layouts should be, share a record."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    records: Record = {}
    first_of: dict[str, str] = {}
    cases = {}
    for name in sorted(bits):
        cases[name] = first = first_of.setdefault(json.dumps(bits[name], sort_keys=True), name)
        records[first] = bits[name]
    bits_file().write_text(_as_lines({"products": products(), "cases": cases, "records": records}, depth=4) + "\n")
    BYTES.write_text(_as_lines(dict(sorted(nbytes.items())), depth=1) + "\n")


def _as_lines(value: Any, depth: int, indent: str = "") -> str:
    """JSON that has a line for each entry down to a depth: a diff shows what changed."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + " "
    entries = [f"{inner}{json.dumps(key)}: {_as_lines(each, depth - 1, inner)}" for key, each in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def differences(recorded: Any, found: Any, where: str) -> list[str]:
    """Where two records differ, down to the param and the quantity."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        texts = []
        for key in [*recorded, *(key for key in found if key not in recorded)]:
            texts += differences(recorded.get(key, "nothing"), found.get(key, "nothing"), f"{where}, {key}")
        return texts
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        return [
            text
            for at, (one, other) in enumerate(zip(recorded, found, strict=True))
            for text in differences(one, other, f"{where}[{at}]")
        ]
    return [] if recorded == found else [f"{where}: recorded {recorded!r}, found {found!r}"]
