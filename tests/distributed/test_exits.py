"""A run that is finished ends with exit code 0, whatever is still referenced and however busy the machine is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import contextlib, gc, os, sys
import torch, torch.distributed as dist
from torch import nn
import layerwise
from layerwise.comm import leaving

way = sys.argv[1]
if way == "control":
    leaving.take_back = leaving._LENT.clear
layerwise.init(device="cpu", timeout_s=60.0)

def slow_down():
    # Threads of gloo's get what is left of one core: they let go of tensors long after a collective is done.
    core = min(os.sched_getaffinity(0))
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # threads of other kinds come and go
            with open(f"/proc/self/task/{thread}/comm") as file:
                name = file.read()
            os.sched_setaffinity(thread, {core})
            if thread != os.getpid() and name.startswith("pt_gloo"):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))

module = nn.Sequential(*(nn.Linear(48, 48) for _ in range(8)))
model = layerwise.DataParallel(module, overlap_param_gather=way == "dropped")
optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
slow_down()
for _ in range(3):
    model(torch.ones(4, 48)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("done", flush=True)
if way == "dropped":
    del model, optimizer, module
    gc.collect()
if way != "left":
    dist.destroy_process_group()
"""


def exit_codes(way: str) -> list[int]:
    """Those of two ranks that have trained a few steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, way],
            env={**where, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300) for rank in ranks]
    assert [out for out, _ in told] == [b"done\n"] * 2, told
    return [rank.returncode for rank in ranks]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are slowed down by way of /proc"),
]


@pytest.mark.parametrize("way", ["held", "left", "dropped"])
def test_a_finished_run_ends_well_while_names_are_held_groups_are_left_or_all_is_dropped(way: str) -> None:
    assert [exit_codes(way) for _ in range(3)] == [[0, 0]] * 3


def test_without_waiting_for_tensors_it_does_not() -> None:
    """The control: the machine is slow enough for what the tests above are about."""
    assert any(code != 0 for _ in range(5) for code in exit_codes("control"))
