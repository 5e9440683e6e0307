"""Saving and loading a checkpoint, beside a raw copy of the same bytes to and from the same disk, in one run.

    python benchmarks/checkpoint.py                  # 1 and 2 ranks
    python benchmarks/checkpoint.py --mib 2048 --folder /data/somewhere

Writes benchmarks/results/checkpoint.json. A raw copy is one file per rank of as many bytes, written from memory and brought to disk; a raw read brings it into memory again, and nothing more.
Both kinds of reading are done twice: of files that the system's cache has let go of, as after a restart, and of the same files when they are in the cache. Loading reads every byte twice, once to
check it, and then has every rank get all weights from the others, which a raw read has not: such a gather alone is measured, too. Of saving in the background there is how long a call
keeps the caller, and how long until all is on disk. Memory is the most that the process had, beyond what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import layerwise

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
REPEATS = 5
WIDTH = 1024
PIECE = 16 << 20


def build(nbytes: int) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    """A model of which weights and momenta have about so many bytes."""
    layers = max(1, nbytes // (2 * 4 * WIDTH * WIDTH))
    torch.manual_seed(0)
    model = layerwise.DataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))))
    rules: dict[str, Any] = {"matrix": layerwise.Muon(lr=1e-3), "other": layerwise.AdamW(lr=1e-3)}
    return model, layerwise.Optimizer(model, **rules)


class Watch:
    """The most memory that this process held meanwhile, beyond what it held before."""

    def __enter__(self) -> Watch:
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
        self._before = _most_resident()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = _most_resident() - self._before


def _most_resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def raw_save(path: Path, raw: bytearray) -> None:
    """The same bytes, from memory to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    left = memoryview(raw)
    while left:
        left = left[os.write(descriptor, left[:PIECE]) :]
    os.fsync(descriptor)
    os.close(descriptor)


def forget(*paths: Path) -> None:
    """Have the system's cache let go of files that are on disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def raw_load(path: Path, into: bytearray) -> None:
    with open(path, "rb", buffering=0) as file:
        done = 0
        while count := file.readinto(memoryview(into)[done : done + PIECE]):
            done += count


def gather(model: layerwise.DataParallel) -> None:
    """Every rank's weights from their owners, as after a step."""
    model.engine.publisher.begin()
    model.engine.publisher.ensure_all()


def timed(action: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    action()
    took = torch.tensor(time.perf_counter() - began)
    if dist.is_initialized():
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measure(rank: int, world: int, nbytes: int, folder: Path) -> dict[str, Any]:
    model, optimizer = build(nbytes)
    state_nbytes = sum(param.nbytes for param in model.module.parameters()) * 2
    mine = state_nbytes // world
    raw = bytearray(mine)
    torch.frombuffer(raw, dtype=torch.uint8).random_()
    own = folder / f"raw_{rank}"
    ways: dict[str, list[float]] = {}
    peaks = {"save": 0, "save_in_background": 0, "load": 0, "gather": 0}
    on_disk = 0
    for repeat in range(REPEATS + 1):
        path = folder / f"checkpoint_{repeat}"
        found = {"raw_save": timed(lambda: raw_save(own, raw))}
        with Watch() as saving:
            found["save"] = timed(lambda path=path: layerwise.save(path, model, optimizer))
        aside = folder / f"aside_{repeat}"
        with Watch() as begun:
            began = time.perf_counter()
            found["begin_in_background"] = timed(
                lambda aside=aside: layerwise.save(aside, model, optimizer, background=True)
            )
            model.engine.errands.finish()
            found["save_in_background"] = time.perf_counter() - began
        forget(own, *(path.iterdir() if rank == 0 else ()))
        found["raw_load_from_disk"] = timed(lambda: raw_load(own, raw))
        with Watch() as loading:
            found["load_from_disk"] = timed(lambda path=path: layerwise.load(path, model, optimizer))
        found["raw_load"] = timed(lambda: raw_load(own, raw))
        found["load"] = timed(lambda path=path: layerwise.load(path, model, optimizer))
        with Watch() as gathering:
            found["gather"] = timed(lambda: gather(model))
        peaks["save_in_background"] = max(peaks["save_in_background"], begun.peak)  # of the first: it is kept
        if repeat:  # the first is a warm-up
            for name, seconds in found.items():
                ways.setdefault(name, []).append(seconds)
            for name, watch in (("save", saving), ("load", loading), ("gather", gathering)):
                peaks[name] = max(peaks[name], watch.peak)
        on_disk = sum(file.stat().st_size for file in path.iterdir())
        if dist.is_initialized():
            dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
            shutil.rmtree(aside)
        own.unlink()
    seconds = {name: statistics.median(values) for name, values in ways.items()}
    return {
        "ranks": world,
        "state_mib": round(state_nbytes / 2**20, 1),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "save_over_raw": round(seconds["raw_save"] / seconds["save"], 3),
        "begin_over_save": round(seconds["begin_in_background"] / seconds["save"], 3),
        "load_over_raw": round(seconds["raw_save"] / seconds["load_from_disk"], 3),
        "load_over_raw_read_from_disk": round(seconds["raw_load_from_disk"] / seconds["load_from_disk"], 3),
        "load_over_raw_read_and_gather_from_disk": round(
            (seconds["raw_load_from_disk"] + seconds["gather"]) / seconds["load_from_disk"], 3
        ),
        "load_over_raw_read": round(seconds["raw_load"] / seconds["load"], 3),
        "disk_over_state": round(on_disk / state_nbytes, 4),
        "extra_mib": {name: round(peak / 2**20, 1) for name, peak in peaks.items()},
    }


def one_rank(rank: int, world: int, nbytes: int, folder: str, answer: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = measure(rank, world, nbytes, Path(folder))
    if rank == 0:
        Path(answer).write_text(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of weights and momenta together")
    parser.add_argument("--folder", default=None, help="on the disk to measure")
    arguments = parser.parse_args()
    rows = []
    for world in (1, 2):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, tempfile.NamedTemporaryFile() as answer:
            mp.spawn(one_rank, args=(world, arguments.mib << 20, folder, answer.name), nprocs=world)
            rows.append(json.loads(Path(answer.name).read_text()))
        print(json.dumps(rows[-1]), flush=True)
    host = {"machine": platform.machine(), "python": platform.python_version(), "torch": str(torch.__version__)}
    RESULTS.write_text(json.dumps({"host": host, "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
