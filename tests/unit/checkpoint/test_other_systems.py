"""Checkpoints on systems that have less than Linux: which calls there are is looked up when modules are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, os, sys
import torch, torch.distributed, torch.distributed.checkpoint, torch.optim  # which are made for the system that there is

for name in MODULES:
    sys.modules[name] = None
for name in NAMES:
    if hasattr(os, name):
        delattr(os, name)
real = ctypes.CDLL.__init__

def init(self, name=None, *args, **more):
    if name is None and NAMELESS:
        raise TypeError("argument of type 'NoneType' is not iterable")
    real(self, name, *args, **more)

ctypes.CDLL.__init__ = init

import layerwise
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
    return model, optimizer

model, optimizer = build()
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
layerwise.save("one", model, optimizer, background=True).wait()
many = layerwise.Checkpoints("many", keep=1)
for step in (1, 2):
    many.save(model, optimizer, step=step)
other, its = build()
assert layerwise.load("one", other, its).step == 1
assert all(map(torch.equal, model.parameters(), other.parameters()))
assert many.load(*build()).step == 1
print(sorted(os.listdir("many")))
"""

FLAGS = ["O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY"]
CALLS = [
    "posix_fadvise",
    "posix_fallocate",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
    "writev",
    "statvfs",
    "register_at_fork",
]


@pytest.mark.parametrize(
    ("modules", "names", "nameless"),
    [
        (["fcntl", "resource"], [*FLAGS, *CALLS, "fork", "getuid", "geteuid"], True),
        pytest.param([], ["posix_fadvise", "posix_fallocate"], False, marks=pytest.mark.slow),
    ],
    ids=["Windows", "macOS"],
)
def test_checkpoints_are_written_and_read_with_what_another_system_has(
    tmp_path: Path, modules: list[str], names: list[str], nameless: bool
) -> None:
    program = f"MODULES, NAMES, NAMELESS = {modules}, {names}, {nameless}\n{PROGRAM}"
    environment = {
        **os.environ,
        "USERNAME": "somebody",
    }  # which Windows sets, and torch asks for where there is no getuid()
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == "['latest', 'step_00000002']\n"
