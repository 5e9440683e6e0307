"""One digest over layouts, wrappers and worlds: nine steps of one model give the same masters, state and norms to the bit, however it is distributed.

Gradients are multiples of 1/8 whose mean over ranks does not depend on the number of ranks, so every sum is exact and every cell of the table must end
with the bits of one process. `tests/golden/digests` keeps these bits for each platform; `python -m tests.distributed.test_digests` writes them. The file
uses the public API only, so it stays valid while the inside is rewritten.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import layerwise
from tests.distributed.goldens import bits_file, products
from tests.marks import sampled
from tests.ranks import run_ranks

WIDTH, EXPERTS, STEPS, SKIPPED = 32, 6, 9, 4
"""In step SKIPPED one gradient holds a NaN."""
GOLDEN = Path(__file__).parents[1] / "golden" / "digests"

Digest = dict[str, str]
"""Hashes by quantity and param ("momentum of block2.up"), and the norm of each step."""


class Terms(nn.Module):
    """A module whose loss is the sum of param * gradient, so backward delivers exactly the gradients that it is given."""

    def forward(self, grads: dict[str, Tensor], prefix: str = "") -> Tensor:
        total = torch.zeros(())
        for name, param in self.named_parameters(recurse=False):
            values = param.to_local() if isinstance(param, DTensor) else param
            total = total + (values.float() * grads[prefix + name]).sum()
        for name, child in self.named_children():
            total = total + child(grads, f"{prefix}{name}.")
        return total


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


class Dense(Terms):
    """A fused weight of three matrices, two matrices of one shape each, a bias and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = _weight(2 * WIDTH, WIDTH)
        self.up = _weight(3 * WIDTH, WIDTH)
        self.down = _weight(WIDTH, 3 * WIDTH)
        self.bias = _weight(3 * WIDTH)
        self.gain = _weight(WIDTH)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv": (WIDTH, WIDTH // 2, WIDTH // 2)}


class Experts(Terms):
    """A stack of experts: all of them, or those of one expert-parallel rank."""

    def __init__(self, count: int, domain: str) -> None:
        super().__init__()
        self.domain = domain
        self.stack = _weight(count, WIDTH, WIDTH)

    def param_domains(self) -> dict[str, str]:
        return {"stack": self.domain}


class Net(Terms):
    """The whole model; or one stage of a pipeline; or one rank of an expert-parallel group."""

    def __init__(self, stage: int = 0, stages: int = 1, ep: int = 1) -> None:
        super().__init__()
        if stage == 0:
            self.table = nn.Embedding(37, WIDTH)
            self.table.forward = partial(Terms.forward, self.table)
            self.block0 = Dense()
        if stage == min(1, stages - 1):
            self.block1 = Dense()
            self.experts = Experts(EXPERTS // ep, "dense" if ep == 1 else "expert")
        if stage == stages - 1:
            self.block2 = Dense()


RULES: dict[str, Callable[[], dict[str, Any]]] = {
    "muon": lambda: {
        "matrix": layerwise.Muon(lr=0.02, weight_decay=0.1),
        "other": layerwise.AdamW(lr=0.01, weight_decay=0.05),
    },
    "normuon": lambda: {"matrix": layerwise.NorMuon(lr=0.02, weight_decay=0.1), "other": layerwise.Lion(lr=0.01)},
    "adamuon": lambda: {"matrix": layerwise.AdaMuon(lr=0.02), "other": layerwise.AdamW(lr=0.01)},
}
LAYOUTS = ("flat", "padded", "compact", "replicated")
KINDS = ("plain", *LAYOUTS, "bf16", "mxfp8", "mxfp8 padded", "ddp", "fsdp2", "tp", "ep", "pp")


# -- on a rank -------------------------------------------------------------------------------------


def _seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big"))


def _cut(fqn: str, whole: Tensor, place: int, ep: int) -> Tensor:
    """The experts of one expert-parallel rank; any other param is whole."""
    return whole.chunk(ep)[place] if ep > 1 and fqn == "experts.stack" else whole


def _initial(fqn: str, shape: torch.Size) -> Tensor:
    """Values that bf16 holds exactly."""
    return (torch.randn(shape, generator=_seeded(fqn)) * 0.1).bfloat16().float()


def _gradient(fqn: str, shape: torch.Size, step: int, rank: int, world: int, *, differs: bool) -> Tensor:
    """The gradient of one rank, in multiples of world / 8: DDP divides by the world before it adds, others after it, and both are exact.

    The mean over ranks does not depend on their number. Without `differs` every rank has the mean itself.
    """

    def eighths(who: str) -> Tensor:
        return torch.randint(-16, 17, shape, generator=_seeded(f"{fqn} {step} {who}")) / 8

    grad = eighths("mean")
    if differs and world > 1:
        others = [eighths(f"rank {other}") for other in range(world - 1)]
        grad = world * (others[rank] if rank < world - 1 else grad - torch.stack(others).sum(0))
    if step == SKIPPED and fqn == "block1.up" and rank == world - 1:
        grad.view(-1)[5] = math.nan
    return grad


def run(rank: int, world: int, kinds: tuple[str, ...], rule: str, spoiled: str = "") -> list[dict[str, Any]]:
    """Nine steps of each kind on this rank: its part of masters and state, and the norms that every rank sees."""
    return [_run(rank, world, kind, rule, spoiled) for kind in kinds]


def _run(rank: int, world: int, kind: str, rule: str, spoiled: str) -> dict[str, Any]:
    stages, ep = (min(world, 3) if kind == "pp" else 1), (world if kind == "ep" else 1)
    whole = {fqn: param.shape for fqn, param in Net().named_parameters()}
    module: nn.Module = Net(rank if stages > 1 else 0, stages, ep)
    with torch.no_grad():
        for fqn, param in module.named_parameters():
            param.copy_(_cut(fqn, _initial(fqn, whole[fqn]), rank, ep))
    model, given = module, module
    options: dict[str, Any] = {"bucket_mib": 0.05}
    match kind.split():
        case ["ddp"]:
            model = given = DistributedDataParallel(module)
        case ["fsdp2"]:
            for child in module.children():
                if isinstance(child, Terms):
                    fully_shard(child)
            fully_shard(module)
        case ["tp"]:
            _cut_tensors(module, world)
        case ["ep"]:
            mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "ep"))
            model = given = layerwise.DataParallel(module, mesh=mesh, layout="flat", **options)
        case ["pp"]:
            mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "dp"))
            model = given = layerwise.DataParallel(module, mesh=mesh, layout="flat", **options)
        case ["mxfp8", *layout]:
            quantized = layerwise.quantize(module.bfloat16(), "mxfp8")
            model = given = layerwise.DataParallel(quantized, layout=layout[0] if layout else "flat", **options)
        case ["bf16"]:
            model = given = layerwise.DataParallel(module.bfloat16(), layout="flat", **options)
        case [layout] if layout in LAYOUTS:
            model = given = layerwise.DataParallel(module, layout=layout, **options)
    optimizer = layerwise.Optimizer(given, **RULES[rule](), clip_grad_norm=0.5)
    params = dict(module.named_parameters())
    norms = []
    for step in range(STEPS):
        grads = {}
        for fqn, param in params.items():
            if fqn == "experts.stack" and ep > 1:  # the mean is over all ranks, and one of them has these experts
                grad = world * _cut(fqn, _gradient(fqn, whole[fqn], step, 0, 1, differs=False), rank, ep)
            else:
                # A plain module, a tensor-parallel group and a stage have one gradient.
                alone = kind in ("plain", "tp", "pp")
                grad = _gradient(fqn, whole[fqn], step, *((0, 1) if alone else (rank, world)), differs=not alone)
            if isinstance(param, DTensor) and kind == "tp":
                local = distribute_tensor(grad, param.device_mesh, param.placements)
                grad = local.to_local()
            if spoiled == "gradient" and fqn == "block0.qkv" and step == STEPS - 1 and rank == world - 1:
                grad.view(-1)[7] += 0.125
            grads[fqn] = grad
        model(grads).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.stats.skipped != (step == SKIPPED):
            raise AssertionError(f"{kind}, step {step}: skipped {optimizer.stats.skipped}")
        norm = optimizer.stats.grad_norm
        # In fp32: a mean over three ranks divides the norm, and its last bit in fp64 may differ.
        norms.append("none" if norm is None or not math.isfinite(norm) else torch.tensor(norm).item().hex())
    if spoiled == "state" and rank == world - 1:
        _spoil_momentum(kind, optimizer, params["block0.qkv"])
    first_expert = rank * EXPERTS // ep if ep > 1 else 0
    return {"norms": norms, "tensors": dict(_held(kind, optimizer, params, first_expert))}


def _spoil_momentum(kind: str, optimizer: layerwise.Optimizer, param: nn.Parameter) -> None:
    """Move one element of a momentum on this rank by one ulp."""
    momentum = optimizer.state[param]["momentum"]
    local = (momentum.to_local() if isinstance(momentum, DTensor) else momentum).view(-1)
    local[:1] = torch.nextafter(local[:1], torch.full_like(local[:1], math.inf))


def _cut_tensors(module: nn.Module, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))

    class Cut(ParallelStyle):
        """Cuts the columns of `down` and the rows of every other param."""

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            for name, param in list(module.named_parameters(recurse=False)):
                dim = 1 if name == "down" else 0
                cut = distribute_tensor(param.detach(), device_mesh, [Shard(dim)])
                module.register_parameter(name, nn.Parameter(cut))
            return module

    parallelize_module(module, mesh, {name: Cut() for name, child in module.named_children() if name != "experts"})


def _held(
    kind: str, optimizer: layerwise.Optimizer, params: dict[str, nn.Parameter], first_expert: int
) -> Iterator[tuple[str, Tensor]]:
    """(quantity and param, elements) that this rank holds, flat. Masters are the weights where the state has none; state of a whole matrix ends in its
    number, which for experts counts those of all ranks."""
    if kind in ("fsdp2", "tp"):
        entries = {fqn: optimizer.state[param] for fqn, param in params.items()}
    else:
        saved = optimizer.state_dict(part=True)
        names = {
            key: fqn for group in saved["param_groups"] for fqn, key in zip(group["fqns"], group["params"], strict=True)
        }
        entries = {fqn: saved["state"].get(key, {}) for key, fqn in names.items()}
    for fqn, entry in entries.items():
        found = dict(entry)
        found.pop("step", None)
        found.setdefault("master", params[fqn].detach())
        for name, tensor in found.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            quantity, _, number = name.partition(".")
            label = f"{quantity}.{int(number) + first_expert}" if number and fqn == "experts.stack" else name
            yield f"{label} of {fqn}", full.reshape(-1).clone()


# -- of all ranks ----------------------------------------------------------------------------------


def digest(ranks: list[dict[str, Any]], numels: dict[str, int]) -> Digest:
    """What all ranks hold, put together in the order of ranks; copies must be equal."""
    if any(each["norms"] != ranks[0]["norms"] for each in ranks):
        raise AssertionError("ranks saw different norms")
    found: Digest = {f"norm of step {step}": norm for step, norm in enumerate(ranks[0]["norms"])}
    for label in sorted({label for each in ranks for label in each["tensors"]}):
        quantity, _, fqn = label.partition(" of ")
        pieces = [
            each["tensors"][label] for each in ranks if label in each["tensors"] and each["tensors"][label].numel()
        ]
        if not pieces:
            continue
        if "." in quantity or pieces[0].numel() == numels[fqn]:  # a matrix, or a whole param: all others are copies
            if any(not torch.equal(piece, pieces[0]) for piece in pieces):
                raise AssertionError(f"copies of {label} differ")
            pieces = pieces[:1]
        whole = torch.cat(pieces).contiguous()
        found[label] = f"{whole.numel()} {hashlib.sha256(whole.float().numpy().tobytes()).hexdigest()[:16]}"
    return found


@cache
def digests(world: int, rule: str) -> dict[str, Digest]:
    """The digest of every kind in one world."""
    kinds = tuple(kind for kind in KINDS if kind != "plain" or world == 1)
    return _digests(world, kinds, rule)


def _digests(world: int, kinds: tuple[str, ...], rule: str, spoiled: str = "") -> dict[str, Digest]:
    answers = run_ranks(world, run, kinds, rule, spoiled)
    numels = {fqn: param.numel() for fqn, param in Net().named_parameters()}
    return {kind: digest([answer[at] for answer in answers], numels) for at, kind in enumerate(kinds)}


def golden_file() -> Path:
    """The file of this platform: bits depend on its matrix products."""
    return GOLDEN / bits_file().name


def differences(expected: Digest, found: Digest) -> list[str]:
    return sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))


@pytest.mark.parametrize("rule", sampled(RULES, "muon"))
def test_every_layout_and_wrapper_has_the_bits_of_one_process(rule: str) -> None:
    expected = digests(1, rule)["plain"]
    for world in (1, 2, 3):
        for kind, found in digests(world, rule).items():
            assert differences(expected, found) == [], f"{kind} on {world} ranks"


@pytest.mark.parametrize("rule", sampled(RULES, "muon"))
def test_one_process_has_the_recorded_bits(rule: str) -> None:
    if not golden_file().exists():
        pytest.skip(f"no bits were recorded for {golden_file().stem}")
    recorded = json.loads(golden_file().read_text())
    if recorded["products"] != products():
        pytest.skip("matrix products of this machine have other bits than those of the recorded platform")
    assert differences(recorded["rules"][rule], digests(1, rule)["plain"]) == []


@pytest.mark.parametrize("spoiled", ["gradient", "state"])
def test_control_one_changed_element_on_one_rank_is_seen(spoiled: str) -> None:
    """A gradient that is off by 1/8 in the last step, and one element of momentum that is off by an ulp."""
    expected = digests(1, "muon")["plain"]
    found = _digests(2, ("flat", "fsdp2"), "muon", spoiled)
    for kind, each in found.items():
        changed = differences(expected, each)
        assert "momentum of block0.qkv" in changed, kind
        assert ("master of block0.qkv" in changed) == (spoiled == "gradient"), kind


def write() -> None:
    """Record the bits of one process on this platform."""
    GOLDEN.mkdir(exist_ok=True)
    rules = {rule: digests(1, rule)["plain"] for rule in RULES}
    golden_file().write_text(json.dumps({"products": products(), "rules": rules}, indent=1) + "\n")


if __name__ == "__main__":
    write()
