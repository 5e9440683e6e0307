"""Starting and stopping as one of several ranks: what a training script needs of torch.distributed besides
DataParallel."""

from __future__ import annotations

import difflib
import math
import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from layerwise.comm.dispatch import ALL_EXPERTS_HERE, ExpertRanks
from layerwise.comm.facts import gather_facts
from layerwise.comm.leaving import blocking
from layerwise.comm.tensor_parallel import ALL_HEADS_HERE, TensorRanks
from layerwise.errors import PlanMismatchError, StateError, a_few

_POLL_S = 0.01
"""How often rank 0 looks whether another rank has come."""


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is, and the device it should use."""

    rank: int
    world: int
    local_rank: int
    device: torch.device


@dataclass(frozen=True)
class Grid:
    """All ranks as pipeline x data x expert parallel, and this rank's place among them.

    Expert ranks are neighbours, pipeline ranks are furthest apart: what travels most often has the shortest way.
    """

    mesh: DeviceMesh | None
    """Axes "pp", "dp" and "ep"; None where all ranks are data parallel."""
    pp: int
    pp_coord: int
    data_world: int
    """Ranks that read different samples: all those of a pipeline stage."""
    data_coord: int
    """This rank among them; ranks of other stages with the same number read the same samples."""
    pipeline: dist.ProcessGroup | None
    """The ranks that hold the other stages of this rank's pipeline; None for a pipeline of one stage."""
    experts: ExpertRanks
    tensor: TensorRanks = ALL_HEADS_HERE
    """The ranks that read the same samples because they compute them together."""


def arrange(ranks: Ranks, *, pp: int = 1, ep: int = 1) -> Grid:
    """Arrange all ranks in a grid. Every rank must ask for the same one: groups are made in here."""
    if pp < 1 or ep < 1 or ranks.world % (pp * ep) != 0:
        raise ValueError(f"{ranks.world} ranks cannot be arranged as pp={pp} times ep={ep} times data parallel ranks.")
    if pp == ep == 1:
        return Grid(None, 1, 0, ranks.world, ranks.rank, None, ALL_EXPERTS_HERE)
    dp = ranks.world // (pp * ep)
    mesh = init_device_mesh(ranks.device.type, (pp, dp, ep), mesh_dim_names=("pp", "dp", "ep"))
    pp_coord, data_coord = divmod(ranks.rank, dp * ep)
    return Grid(
        mesh=mesh,
        pp=pp,
        pp_coord=pp_coord,
        data_world=dp * ep,
        data_coord=data_coord,
        pipeline=mesh.get_group("pp") if pp > 1 else None,
        experts=ExpertRanks(mesh.get_group("ep"), data_coord % ep, ep) if ep > 1 else ALL_EXPERTS_HERE,
    )


def init(backend: str = "auto", device: str = "auto", timeout_s: float = 600.0) -> Ranks:
    """Join the ranks that a launcher such as torchrun started, and say which one this is. Call it first.

    Without a launcher (no RANK and WORLD_SIZE in the environment) this process is the only one, and no process group is
    made. Where there is a process group already it stays as it is. Ranks that torchrun starts again (`--max-restarts`) meet
    anew, whatever those before them have left in the launcher's store.

    Args:
        backend: "nccl", "gloo", or "auto": nccl on GPUs, gloo on CPUs.
        device: "cuda" (this rank's own GPU, by LOCAL_RANK), "cpu", or "auto": a GPU if torch sees one.
        timeout_s: how long a collective may take.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}.")
    local_rank = _from_environment("LOCAL_RANK") or 0
    chosen = _device(device, local_rank)
    if dist.is_available() and dist.is_initialized():
        return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), local_rank=local_rank, device=chosen)
    rank, world = _from_environment("RANK"), _from_environment("WORLD_SIZE")
    if rank is None or world is None:
        if (rank or 0) > 0 or (world or 1) > 1:
            there, lacks = ("RANK", "WORLD_SIZE") if world is None else ("WORLD_SIZE", "RANK")
            raise ValueError(
                f"{there}={os.environ[there]} says that there are several ranks, and {lacks} is not set: expected both, as torchrun "
                "sets them. Start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT on every rank."
            )
        return Ranks(rank=0, world=1, local_rank=0, device=chosen)
    if rank >= world:
        raise ValueError(f"RANK={rank} is none of WORLD_SIZE={world} ranks: expected 0 to {world - 1}.")
    if backend == "auto":
        backend = "nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    store = _store_of_attempt(rank, world, timeout_s)
    named: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": world}
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **named)
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), local_rank=local_rank, device=chosen)


def _store_of_attempt(rank: int, world: int, timeout_s: float) -> Store | None:
    """A part of the launcher's store that only this attempt of the ranks knows; None where every attempt has a store of its
    own. Every rank calls it.

    The store of a torchrun agent outlives its ranks: those that are started again would read the addresses of those that
    died. How often an agent has restarted is no name for an attempt, since agents of several nodes count apart. So rank 0
    draws a name, and gives it to whoever asks; all other ranks of attempts before are dead, and a question is never asked twice.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    whole, _, _ = next(rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout_s)))
    store: Any = PrefixStore("layerwise", whole)  # whose append() torch does not declare
    if rank == 0:
        name = secrets.token_hex(8)
        store.append("asked", "")  # which is there from now on
        _name_attempt(store, name, world, timeout_s)
    else:
        question = secrets.token_hex(8)
        store.append("asked", f"{question} ")
        try:
            name = store.get(f"answer to {question}").decode()
        except dist.DistStoreError:
            raise _absent("rank 0", timeout_s) from None
        store.append(f"came to {name}", f"{rank} ")
    return PrefixStore(name, store)


def _name_attempt(store: Any, name: str, world: int, timeout_s: float) -> None:
    """Tell the other ranks, as they ask, until all of them have come. Rank 0 calls it."""
    store.append(f"came to {name}", "0 ")
    deadline_s, answered = time.monotonic() + timeout_s, 0
    while len(came := store.get(f"came to {name}").split()) < world:
        questions = store.get("asked").decode().split()
        for question in questions[answered:]:
            store.set(f"answer to {question}", name)
        answered = len(questions)
        if time.monotonic() > deadline_s:
            absent = [str(other) for other in range(world) if other not in map(int, came)]
            raise _absent(f"ranks {a_few(absent)} of {world}", timeout_s)
        time.sleep(_POLL_S)


def _absent(ranks: str, timeout_s: float) -> StateError:
    return StateError(
        f"{ranks} did not come to layerwise.init() in {timeout_s:g} s: expected every rank to call it. Look at what they print, "
        "or pass a longer timeout_s."
    )


def _from_environment(name: str) -> int | None:
    """A number that a launcher has set; None where it is not set, or to nothing."""
    value = os.environ.get(name, "")
    if value and not (value.isascii() and value.isdigit()):
        raise ValueError(f"{name} is {value!r} in the environment: expected a number, as torchrun sets it.")
    return int(value) if value else None


def _device(device: str, local_rank: int) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device must be 'auto', 'cuda' or 'cpu', got {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no GPU. Use device 'cpu' or 'auto'.")
    return torch.device("cuda", local_rank) if device == "cuda" else torch.device(device)


def backends() -> tuple[str, ...]:
    """The backends that this build of torch can use."""
    if not dist.is_available():
        return ()
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return tuple(name for name, there in found.items() if there)


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def mean(value: float, ranks: Ranks) -> float:
    """The average of a number over ranks."""
    return total(value, ranks) / ranks.world


def total(value: float, ranks: Ranks) -> float:
    """The sum of a number over ranks. Ranks that have nothing to say, such as those of a pipeline that see no loss, say
    0."""
    if ranks.world == 1:
        return value
    summed = torch.tensor([value], dtype=torch.float64, device=ranks.device)
    blocking(dist.all_reduce, summed)
    return float(summed)


def from_first(text: str, ranks: Ranks) -> str:
    """What the first rank says."""
    return text if ranks.world == 1 else str(gather_facts(text, device=ranks.device)[0])


def same_on_all(text: str, what: str, ranks: Ranks) -> None:
    """Raise on every rank, showing the first line that differs, if ranks hold different texts (a resolved config,
    say)."""
    if ranks.world == 1:
        return
    gathered = gather_facts(text, device=ranks.device)
    for rank, theirs in enumerate(gathered):
        if theirs != gathered[0]:
            changed = [
                line for line in difflib.ndiff(gathered[0].splitlines(), theirs.splitlines()) if line[:1] in "+-"
            ]
            raise PlanMismatchError(
                f"ranks 0 and {rank} were started with different {what}: {' | '.join(line.strip() for line in changed[:4])}. "
                "Start all ranks with the same settings."
            )
