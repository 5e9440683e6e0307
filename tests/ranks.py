"""Run a function on N gloo ranks in forked processes and bring back what each returned, or the traceback of the first that failed.

A fork server that has torch and layerwise loaded makes a rank cost about 0.1 s instead of the 4 s of a fresh interpreter.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch.distributed.fsdp",  # and this the first that shards a model, 3 s with the next
        "torch.distributed.tensor.parallel",
        "pytest",
        "torch._dynamo",  # torch.optim.Optimizer imports it on first use, 1.5 s
        "layerwise.optim.optimizer",
        "layerwise.parallel.data_parallel",
        "layerwise.checkpoint.folder",
        "tests.worlds",
        "tests.distributed.jobs",
        "tests.reliability.misuse",
        "tests.walks",
        "tests.mesh_zoo",
    ]
)

PG_TIMEOUT_S = 80.0
"""How long a rank waits for another in a collective. Nothing waits it out unless it hangs: a machine with four times the load must not reach it."""
TIMEOUT_S = 360.0
"""How long ranks may take altogether."""

POISON = "LAYERWISE_POISON"
"""Set to 1, it has every test and every rank run with poisoned memory."""


def is_poisoned() -> bool:
    """Whether the suite was asked to run with poisoned memory."""
    return os.environ.get(POISON, "0") not in ("", "0")


def poison_memory() -> None:
    """From now on, memory that nobody wrote holds NaN (or the largest integer), so that a read of it shows. Fresh pages of
    the system are zeros, which hide it."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # The trainer sets it as its config says, and torch fills memory only while it is on.
    torch.use_deterministic_algorithms = lambda mode, *, warn_only=False: None


class RankFailure(AssertionError):
    """At least one rank raised, died or did not answer."""


UNCONNECTED = ("connectFullMesh failed", "Connection closed by peer", "Connection reset by peer")
"""What gloo says when ranks did not find each other, and what it says to the others then. With many groups coming and
going that happens to one group in thousands."""
LINGER_S = 5.0
"""How long a rank that has answered stays for the others."""
SILENCE = -1
"""Stands in for the ranks that did not answer."""


@dataclass(frozen=True)
class _Seat:
    """Where one rank sits: its number, the file at which ranks meet if they do, how long a collective may take, whether
    memory is poisoned, where answers go, and what says that all have answered."""

    rank: int
    world: int
    rendezvous: str | None
    pg_timeout_s: float
    poisoned: bool
    outbox: Any
    all_answered: Any


@dataclass
class _Answers:
    """What ranks gave back, by rank: a result or a traceback; and those that gloo did not connect when they made a group."""

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    @property
    def is_gloos_fault(self) -> bool:
        """Whether some rank was not connected and all that went wrong besides is what its peers see of that. A rank that
        failed of anything else is a failure, whatever happened to the others because of it."""
        others = [text for rank, text in self.errors.items() if rank not in self.lost and rank != SILENCE]
        return bool(self.lost) and all(any(said in text for said in UNCONNECTED) for text in others)


@contextmanager
def _lost_connections() -> Iterator[list[str]]:
    """What gloo says of groups that it does not connect, in here, whoever makes them. The maker gets the error all the same."""
    from torch.distributed import distributed_c10d

    real, found = distributed_c10d._new_process_group_helper, list[str]()

    def helper(*args: Any, **more: Any) -> Any:
        try:
            return real(*args, **more)
        except RuntimeError as error:
            found.extend([str(error)] if any(said in str(error) for said in UNCONNECTED) else [])
            raise

    with mock.patch.object(distributed_c10d, "_new_process_group_helper", helper):
        yield found


def _rank_main(seat: _Seat, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()  # what is loaded stays as it is: a collection that walks it would copy every page of the server
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if seat.poisoned:
        poison_memory()
    result, failure = None, None
    with _lost_connections() as lost:
        try:
            if seat.rendezvous is not None:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{seat.rendezvous}",
                    rank=seat.rank,
                    world_size=seat.world,
                    timeout=timedelta(seconds=seat.pg_timeout_s),
                )
            # Pickled here, as bytes: the queue would share tensors through memory that goes when this process does.
            result = pickle.dumps(job(seat.rank, seat.world, *args))
        except BaseException:
            failure = traceback.format_exc()
    try:
        seat.outbox.put((seat.rank, result, failure, bool(lost)))
    finally:
        seat.outbox.close()
        seat.outbox.join_thread()
        if failure is None:
            # A peer may still be connecting the last group, and would see this rank's end as a lost connection.
            seat.all_answered.wait(LINGER_S)
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(
    world: int,
    job: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    pg_timeout_s: float = PG_TIMEOUT_S,
    poisoned: bool = False,
    meet: bool = True,
) -> list[Any]:
    """`[job(rank, world, *args) for each rank]`, all at once. `job` is a module-level function; results are plain data or CPU tensors.

    Ranks are in a group of gloo's when the job begins. One that makes its own says `meet=False`: leaving a group at once
    would cut off peers that are still connecting to it, on a busy machine one time in four."""
    poisoned = poisoned or is_poisoned()
    answers = _run_once(world, job, args, timeout_s, pg_timeout_s, poisoned, meet)
    if answers.is_gloos_fault:
        answers = _run_once(world, job, args, timeout_s, pg_timeout_s, poisoned, meet)
    if answers.errors:
        raise RankFailure("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(answers.errors.items())))
    return [answers.results[rank] for rank in range(world)]


def _run_once(
    world: int,
    job: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
    pg_timeout_s: float,
    poisoned: bool,
    meet: bool,
) -> _Answers:
    outbox, all_answered = _CONTEXT.Queue(), _CONTEXT.Event()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "meet") if meet else None
        seats = [_Seat(rank, world, rendezvous, pg_timeout_s, poisoned, outbox, all_answered) for rank in range(world)]
        processes = [_CONTEXT.Process(target=_rank_main, args=(seat, job, args), daemon=True) for seat in seats]
        for process in processes:
            process.start()
        answers = _Answers()
        try:
            _collect(answers, processes, outbox, timeout_s)
        finally:
            all_answered.set()
            for process in processes:
                process.join(timeout=0.5 if answers.errors else 10)
                if process.is_alive():
                    process.kill()
                    process.join()
    return answers


def _collect(answers: _Answers, processes: list[Any], outbox: Any, timeout_s: float) -> None:
    """Take answers until all ranks have answered, died, or had their time."""
    results, errors = answers.results, answers.errors
    deadline = time.monotonic() + timeout_s
    while silent := [rank for rank in range(len(processes)) if rank not in results and rank not in errors]:
        dead = [
            rank for rank in silent if processes[rank].exitcode is not None
        ]  # looked up before the last look into the outbox
        try:
            rank, value, error, lost = outbox.get(timeout=max(0.05, min(1.0, deadline - time.monotonic())))
        except queue.Empty:
            errors.update({rank: f"died with exit code {processes[rank].exitcode} and no answer" for rank in dead})
            if time.monotonic() > deadline:
                errors[SILENCE] = f"ranks {silent} did not answer within {timeout_s} s"
                break
            continue
        if lost:
            answers.lost.add(rank)
        if error is None:
            results[rank] = pickle.loads(value)
        else:
            errors[rank] = error
            # Its peers may be stuck in a collective: do not wait long for them.
            deadline = min(deadline, time.monotonic() + 3.0)


def as_launched(rank: int, world: int, port: str = "0") -> None:
    """Leave this process's environment as torchrun would, all ranks on one machine without a GPU: frameworks read it."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(world), "NODE_RANK": "0"}
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    more = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "0"}
    os.environ.update({**where, **own, **more})


def raised(action: Callable[[], Any]) -> str:
    """What `action` raises, as `Type: text`; used by jobs to bring an error home as data."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
