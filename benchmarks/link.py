"""A slow network between ranks of one machine, so that communication takes the time it would take between machines.

`Namespaces` is a real one: every rank in a network namespace of its own, behind a veth whose both directions are shaped by
`tc` (token buckets), all of them on one bridge. It needs root. `Delays` is for where that is not possible: collectives go
over the loopback as ever, but waiting for one takes until a modelled link, one per rank and first come first served, would
have carried its bytes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

_NEW_NET = 0x40000000  # CLONE_NEWNET
_BURST = "256kb"
_QUEUE = "8mb"


class LinkError(RuntimeError):
    """The network could not be set up."""


def _run(words: str) -> None:
    done = subprocess.run(words.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LinkError(f"`{words}` failed: {done.stderr.strip() or done.returncode}")


class Namespaces(AbstractContextManager["Namespaces"]):
    """One namespace per rank and one for the bridge; gone again at the end."""

    kind = "network namespaces: veth, bridge and tc tbf in both directions"

    def __init__(self, world: int, mbit: float) -> None:
        self.mbit = mbit
        self.prefix = f"lw{os.getpid()}"
        self.names = [f"{self.prefix}r{rank}" for rank in range(world)]
        self._made = ExitStack()

    def __enter__(self) -> Namespaces:
        try:
            self._set_up()
        except (LinkError, OSError) as error:
            self._made.close()
            raise LinkError(str(error)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made.close()

    def _set_up(self) -> None:
        hub = f"{self.prefix}hub"
        self._make(hub)
        _run(f"ip -n {hub} link add bridge type bridge")
        _run(f"ip -n {hub} link set bridge up")
        shape = f"root tbf rate {self.mbit}mbit burst {_BURST} limit {_QUEUE}"
        for rank, name in enumerate(self.names):
            self._make(name)
            _run(f"ip -n {hub} link add port{rank} type veth peer name eth0 netns {name}")
            _run(f"ip -n {hub} link set port{rank} master bridge")
            _run(f"ip -n {hub} link set port{rank} up")
            _run(f"ip -n {name} addr add 10.73.0.{rank + 1}/24 dev eth0")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip netns exec {name} tc qdisc add dev eth0 {shape}")
            _run(f"ip netns exec {hub} tc qdisc add dev port{rank} {shape}")

    def _make(self, name: str) -> None:
        _run(f"ip netns add {name}")
        self._made.callback(_run, f"ip netns del {name}")

    def joiner(self) -> Joiner:
        return Joiner(tuple(self.names))


class Joiner:
    """Moves a rank's process into its namespace. Call it before the process makes threads or sockets."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def __call__(self, rank: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        folder = os.open(f"/var/run/netns/{self._names[rank]}", os.O_RDONLY)
        try:
            if libc.setns(folder, _NEW_NET) != 0:
                raise LinkError(f"setns: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(folder)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


class Delays(AbstractContextManager["Delays"]):
    """No network at all, but waits as long as a link of this speed would take."""

    kind = "delayed transport: every wait lasts until a modelled link has carried the bytes before it and its own"

    def __init__(self, world: int, mbit: float) -> None:
        self.mbit = mbit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def joiner(self) -> Delayer:
        return Delayer(self.mbit)


class _DelayedWork:
    """A collective that is complete once both the backend and the modelled link are done with it."""

    def __init__(self, work: Any, ready_s: float) -> None:
        self._work, self._ready_s = work, ready_s

    def is_completed(self) -> bool:
        return time.monotonic() >= self._ready_s and bool(self._work.is_completed())

    def get_future(self) -> Any:
        raise RuntimeError("a delayed work has no future")

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._ready_s - time.monotonic()))


class Delayer:
    """Patches, in a rank's process, what the communicator calls. Synchronous calls (control, barriers) stay quick."""

    def __init__(self, mbit: float) -> None:
        self._bytes_per_s = mbit * 1e6 / 8
        self._free_s = 0.0

    def __call__(self, rank: int) -> None:
        import torch.distributed as dist

        from layerwise.comm import collectives

        share = collectives.wire_nbytes
        world = dist.get_world_size

        def part(kind: Any) -> Callable[..., int]:
            return lambda first, second=None, *_: share(
                kind, max(first.nbytes, getattr(second, "nbytes", 0) or 0), world()
            )

        collectives._all_gather = self._delayed(collectives._all_gather, part("all_gather"))
        collectives._reduce_scatter = self._delayed(collectives._reduce_scatter, part("reduce_scatter"))
        dist.all_reduce = self._delayed(dist.all_reduce, part("all_reduce"))
        dist.broadcast = self._delayed(dist.broadcast, lambda piece, *_: piece.nbytes)
        dist.all_to_all_single = self._delayed(
            dist.all_to_all_single,
            lambda receive, send, _, splits: (send.numel() - splits[rank]) * send.element_size(),
        )

    def _delayed(self, original: Callable[..., Any], nbytes: Callable[..., int]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            work = original(*args, **kwargs)
            if not kwargs.get("async_op"):
                return work
            self._free_s = max(self._free_s, time.monotonic()) + nbytes(*args) / self._bytes_per_s
            return _DelayedWork(work, self._free_s)

        return call


def _rank_main(
    rank: int, world: int, folder: str, before: Callable[[int], None], job: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    early = isinstance(before, Joiner)
    if early:
        before(rank)
    import pickle

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    if not early:
        before(rank)
    found = job(rank, world, *args)
    Path(folder, f"answer{rank}.part").write_bytes(pickle.dumps(found))
    Path(folder, f"answer{rank}.part").rename(Path(folder, f"answer{rank}"))
    dist.destroy_process_group()


def run_ranks(
    world: int, before: Callable[[int], None], job: Callable[..., Any], *args: Any, timeout_s: float = 1800.0
) -> list[Any]:
    """`[job(rank, world, *args) for each rank]`, each in a process that `before` has put in its place."""
    import pickle

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(rank, world, folder, before, job, args)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            while any(process.is_alive() for process in processes):
                if time.monotonic() > deadline or any(process.exitcode for process in processes):
                    raise RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}")
                time.sleep(0.2)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads(Path(folder, f"answer{rank}").read_bytes()) for rank in range(world)]


def nowhere(rank: int) -> None:
    """A rank that stays where it is."""
