"""From `python` to the end of the first step of a two-layer model: this library beside DDP and `torch.optim.AdamW`.

    python benchmarks/first_step.py

Each repeat is a fresh process of either script, turn by turn, alone in a gloo group. The clock starts before the process does and
stops when its first step has returned; the processes themselves note when imports were done and when model and optimizer were
built. CPU seconds stand beside wall seconds, since another job on the machine counts in those most.

Writes benchmarks/results/first_step.json.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "first_step.json"
REPEATS = 15
LIMIT_S = 0.5
"""What the first step may come later."""

IMPORTS = {
    "ddp": """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
""",
    "layerwise": """
import torch
from torch import nn
from layerwise import AdamW, DataParallel, Muon, Optimizer, init
""",
}
BUILDS = {
    "ddp": """
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
""",
    "layerwise": """
init()
model = DataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
optimizer = Optimizer(model, matrix=Muon(lr=1e-3), other=AdamW(lr=1e-3))
""",
}
STEP = """
model(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
"""
NOTE = "notes.append((time.time(), time.process_time()))\n"
PHASES = ("imported", "built", "stepped")


def script(which: str) -> str:
    """The program of one side, with a note of the time after each part."""
    parts = NOTE.join((IMPORTS[which], BUILDS[which], STEP, ""))
    end = "print(json.dumps({'notes': notes, 'compiler': 'torch._dynamo' in sys.modules, 'torch': torch.__version__}))"
    return f"import json, sys, time\nnotes = []\n{parts}{end}\ntorch.distributed.destroy_process_group()\n"


def repeat(which: str) -> dict[str, Any]:
    """Wall and CPU seconds since one process was started, after each part of its program."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    meeting = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, **meeting, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    command = [sys.executable, "-W", "ignore", "-c", script(which)]
    started = time.time()
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    parts = dict(zip(PHASES, told["notes"], strict=True))
    return {
        "wall_s": {phase: wall - started for phase, (wall, _) in parts.items()},
        "cpu_s": {phase: cpu for phase, (_, cpu) in parts.items()},
        "compiler": told["compiler"],
        "torch": told["torch"],
    }


def median(runs: list[dict[str, Any]], clock: str, phase: str = PHASES[-1]) -> float:
    return statistics.median(run[clock][phase] for run in runs)


def main() -> int:
    load_before = os.getloadavg()[0]
    for which in BUILDS:
        repeat(which)  # reads files from disk, and writes bytecode
    runs: dict[str, list[dict[str, Any]]] = {which: [] for which in BUILDS}
    for _ in range(REPEATS):
        for which, found in runs.items():
            found.append(repeat(which))
    ours, theirs = runs["layerwise"], runs["ddp"]
    last = PHASES[-1]
    more = {
        clock: statistics.median(one[clock][last] - other[clock][last] for one, other in zip(ours, theirs, strict=True))
        for clock in ("wall_s", "cpu_s")
    }
    report = {
        "what": "seconds from the start of python to the end of the first step of a two-layer model, in a gloo group of one rank; "
        f"medians of {REPEATS} fresh processes of each script, turn by turn, and of the differences of those that ran one after the other",
        "command": "python benchmarks/first_step.py",
        "host": {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_before": round(load_before, 2),
            "python": platform.python_version(),
            "torch": ours[0]["torch"],
        },
        "limit_s": LIMIT_S,
        "more_than_ddp": {clock: round(value, 3) for clock, value in more.items()},
        "medians": {
            which: {
                clock: {phase: round(median(found, clock, phase), 3) for phase in PHASES}
                for clock in ("wall_s", "cpu_s")
            }
            for which, found in runs.items()
        },
        "quickest": {
            which: {clock: round(min(run[clock][last] for run in found), 3) for clock in ("wall_s", "cpu_s")}
            for which, found in runs.items()
        },
        "loads_the_compiler": {which: found[0]["compiler"] for which, found in runs.items()},
        "repeats": {
            which: [{clock: round(run[clock][last], 3) for clock in ("wall_s", "cpu_s")} for run in found]
            for which, found in runs.items()
        },
    }
    RESULTS.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    for which, found in runs.items():
        print(f"{which}: {median(found, 'wall_s'):.2f} s, {median(found, 'cpu_s'):.2f} s of CPU")
    print(
        f"layerwise takes {more['wall_s']:+.2f} s ({more['cpu_s']:+.2f} s of CPU) more, limit {LIMIT_S} s; wrote {RESULTS.name}"
    )
    return 0 if more["wall_s"] <= LIMIT_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
