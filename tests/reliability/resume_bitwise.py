"""S2, resume_bitwise: a run that is stopped after any of eight steps and gone on with is, to the bit, the run that was not.

The model has dropout, samples come by a cursor, rates by a schedule, and every rank has random numbers of its own. What is compared is all of it: weights,
masters, momenta, moments, what homes keep, steps, rates, random numbers, cursor; once after loading and once after the last step. Whoever goes on began
with other weights, other random numbers and another cursor. Checkpoints are written on the spot, or in the background while the next steps are taken. With sabotage
a checkpoint lacks something, or has something of the steps after it, in each of four ways, and each must be seen.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import layerwise
from layerwise.checkpoint import loading, saving
from layerwise.checkpoint.files import Reader
from layerwise.checkpoint.manifest import Manifest
from layerwise.engine.engine import Engine
from layerwise.models.quantized import QuantizedTensor
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally
from tests.reliability.training import held_up
from tests.worlds import hash_tensors, held

STEPS = 9
STOPS = tuple(range(1, STEPS))
CUT = "FSDP2"
LAYOUTS = ("flat", "padded", "compact", "replicated", CUT)
CODES = "mxfp8"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, CODES: torch.bfloat16}
SIZES = {"fp32": (8, 12), "bf16": (8, 12), CODES: (32, 64)}
"""Width and hidden width; those of codes are multiples of a block."""


class Cell(NamedTuple):
    """One way to train; each is stopped after every step."""

    layout: str
    overlap: bool
    dtype: str
    background: bool = False

    def describe(self, world: int, stop: int) -> str:
        how = f"{'overlap' if self.overlap else 'no overlap'}, {'background' if self.background else 'on the spot'}"
        return f"{world} ranks, {self.layout}, {how}, {self.dtype}, stopped after {stop}"


def cells() -> list[Cell]:
    """torch's own sharding overlaps as it likes, and has no codes."""
    return [
        cell
        for cell in itertools.starmap(Cell, itertools.product(LAYOUTS, (True, False), DTYPES, (False, True)))
        if cell.layout != CUT or (cell.overlap and cell.dtype != CODES)
    ]


class Net(nn.Module):
    """Draws random numbers in forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.up(self.embedding(tokens))), 0.3)
        out: Tensor = self.down(self.norm(hidden))
        return out


class Cursor:
    """Which sample is next."""

    def __init__(self, at: int) -> None:
        self.at = at

    def batch(self, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.at + rank)
        self.at += 1
        return torch.randint(13, (4,), generator=generator), torch.randint(5, (4,), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Run:
    """A training run, from a seed on."""

    def __init__(self, rank: int, world: int, cell: Cell, seed: int) -> None:
        self.rank = rank
        torch.manual_seed(seed)
        module = Net(*SIZES[cell.dtype]).to(DTYPES[cell.dtype])
        if cell.dtype == CODES:
            layerwise.quantize(module, recipe=CODES, skip=["down.weight"])
        self.model: nn.Module
        if cell.layout == CUT:
            self.model = fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
        else:
            overlap = {"overlap_grad_reduce": cell.overlap, "overlap_param_gather": cell.overlap}
            self.model = layerwise.DataParallel(module, layout=cell.layout, bucket_mib=2**-12, **overlap)
        rules: dict[str, Any] = {
            "matrix": layerwise.NorMuon(lr=0.05, weight_decay=0.1, ns_dtype="fp32"),
            "other": layerwise.AdamW(lr=0.02),
        }
        self.optimizer = layerwise.Optimizer(self.model, **rules, clip_grad_norm=1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.cursor = Cursor(at=seed)
        torch.manual_seed(100 * seed + rank)

    def step(self) -> None:
        tokens, targets = self.cursor.batch(self.rank)
        F.cross_entropy(self.model(tokens).float(), targets).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    @property
    def extra(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "scheduler": self.scheduler}

    def save(self, path: Path, *, background: bool) -> layerwise.Saving:
        return layerwise.save(path, self.model, self.optimizer, extra=self.extra, background=background)

    def load(self, path: Path, **policy: Any) -> None:
        layerwise.load(path, self.model, self.optimizer, extra=self.extra, **policy)

    def hash(self) -> str:
        """Of everything that the next step depends on."""
        engine = self.optimizer.engine
        engine.publisher.ensure_all()
        tensors = [*held(engine.storage), torch.get_rng_state()]
        for _, param in sorted(engine.storage.params.items()):
            own = [] if isinstance(param, QuantizedTensor) else [param]  # codes lie in what replicas hold
            tensors += [*own, *(state for _, state in sorted(self.optimizer.state[param].items()))]
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        facts = [engine.count.steps, self.cursor.at, self.scheduler.last_epoch]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return hashlib.sha256((hash_tensors(local) + repr((facts, rates))).encode()).hexdigest()


def stop_and_go_on(
    rank: int, world: int, folder: str, found: Sequence[Cell], stops: Sequence[int], sabotage: str
) -> dict[str, str]:
    """What is not as in the run that was not stopped, by cell and stop, on this rank."""
    warnings.filterwarnings("ignore")
    answers = {}
    for number, cell in enumerate(found):
        straight, expected = Run(rank, world, cell, seed=1), []
        for _ in range(STEPS):
            straight.step()
            expected.append(straight.hash())
        stopped = Run(rank, world, cell, seed=1)
        paths = [Path(folder, f"{world} ranks {number} {stop}") for stop in range(1, STEPS + 1)]
        with SABOTAGES[sabotage](rank) if sabotage else nullcontext({}):
            for stop in range(1, STEPS + 1):  # one more than is saved: what is written must not be of it
                stopped.step()
                if stop in stops:
                    last = stopped.save(paths[stop - 1], background=cell.background)
            last.wait()
        other = Run(rank, world, cell, seed=2)
        for stop in stops:
            with SABOTAGES[sabotage](rank) if sabotage else nullcontext({}) as policy:
                other.load(paths[stop - 1], **policy)
            wrong = [] if other.hash() == expected[stop - 1] else ["it differs after loading"]
            for _ in range(stop, STEPS):
                other.step()
            wrong += [] if other.hash() == expected[-1] else ["it differs after the last step"]
            answers[cell.describe(world, stop)] = ", ".join(wrong)
    return answers


@contextmanager
def _no_random_numbers(rank: int) -> Iterator[dict[str, Any]]:
    """Generators stay where they are."""
    with mock.patch.object(loading, "_generators_of", return_value=None):
        yield {}


@contextmanager
def _those_of_the_first_rank(rank: int) -> Iterator[dict[str, Any]]:
    """Every rank goes on with the random numbers of rank 0."""

    def first(engine: Engine, reader: Reader, manifest: Manifest) -> dict[str, Tensor]:
        return {"cpu": reader.whole("rng.0.cpu")}

    with mock.patch.object(loading, "_generators_of", first):
        yield {}


@contextmanager
def _no_state(rank: int) -> Iterator[dict[str, Any]]:
    """The optimizer begins anew."""
    yield {"reset": ["*"]}


@contextmanager
def _no_copy(rank: int) -> Iterator[dict[str, Any]]:
    """What is written in the background is what the steps after it have left, and slowly."""
    with (
        mock.patch.object(saving, "_copied", lambda parts, copies: list(parts)),
        held_up(lambda *_: time.sleep(0.2)),
    ):
        yield {}


SABOTAGES = {
    "no random numbers": _no_random_numbers,
    "rank 0's random numbers for all": _those_of_the_first_rank,
    "no optimizer state": _no_state,
    "no copy in the background": _no_copy,
}


def complaints_of(world: int, found: Sequence[Cell], stops: Sequence[int], sabotage: str = "") -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            answers = run_ranks(world, stop_and_go_on, folder, found, stops, sabotage, timeout_s=1200.0)
        except RankFailure as failure:
            return {cell.describe(world, stop): str(failure)[-300:] for cell in found for stop in stops}
    return {
        name: "; ".join(f"rank {rank}: {theirs[name]}" for rank, theirs in enumerate(answers) if theirs[name])
        for name in answers[0]
    }


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every stop of every way to train on 1, 2 and 4 ranks; with sabotage one way for each of four that go wrong."""
    if sabotage:
        return _run_controls()
    found = cells()
    complaints: dict[str, str] = {}
    for world in (2,) if quick else (1, 2, 4):
        complaints.update(complaints_of(world, found[::5] if quick else found, (1, 8) if quick else STOPS))
    return tally(complaints)


def _run_controls() -> Outcome:
    seen = {}
    for name in SABOTAGES:
        found = complaints_of(2, [Cell("flat", overlap=True, dtype="bf16", background=True)], (3,), name)
        seen[name] = next(iter(found.values()))
    missed = [name for name, text in seen.items() if not text]
    if missed:
        return Outcome(n=len(seen), bad=0, worst=f"not seen: {', '.join(missed)}")
    return tally(seen)
