"""How long `layerwise plan` takes, from the shell and back.

    python benchmarks/plan_time.py

Writes benchmarks/results/plan_time.json. Each repeat is a process of its own: interpreter, imports, four layouts and the
choice between them, and the table. CPU seconds (user and system) stand beside wall seconds, and every repeat is kept: on a
machine that does other things wall seconds are mostly about those.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "plan_time.json"
CASES = (
    ("gpt2", 8, 1),
    ("llama3-8b", 128, 1),
    ("llama3-405b", 4096, 1),
    ("qwen3-235b-a22b", 1024, 8),
    ("deepseek-v3", 4096, 1),
    ("deepseek-v3", 4096, 64),
    ("kimi-k2", 4096, 1),
)
REPEATS = 3
LIMIT_S = 3.0
LIMITED = ("deepseek-v3", 4096, 1)
"""The case that has to be within the limit."""


def repeat(model: str, world: int, expert_parallel: int) -> dict[str, float]:
    """One process: wall and CPU seconds."""
    words = ["plan", "--model", model, "--world", str(world), "--ep", str(expert_parallel)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "layerwise", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3)}


def main() -> int:
    load_before = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for model, world, expert_parallel in CASES:
        repeats = [repeat(model, world, expert_parallel) for _ in range(REPEATS)]
        best = {f"best_{key}": min(found[key] for found in repeats) for key in ("wall_s", "cpu_s")}
        rows.append({"model": model, "world": world, "expert_parallel": expert_parallel, **best, "repeats": repeats})
        print(
            f"{model:<16} {world:>5} {expert_parallel:>3}  {best['best_wall_s']:.2f} s, CPU {best['best_cpu_s']:.2f} s"
        )
    report = {
        "what": f"seconds of `layerwise plan --model M --world N --ep E`, all layouts; {REPEATS} processes each",
        "command": "python benchmarks/plan_time.py",
        "host": {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_before": round(load_before, 2),
            "python": platform.python_version(),
        },
        "limit_s": LIMIT_S,
        "limited": dict(zip(("model", "world", "expert_parallel"), LIMITED, strict=True)),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    found = next(row for row in rows if (row["model"], row["world"], row["expert_parallel"]) == LIMITED)
    print(f"wrote {RESULTS.name}; {LIMITED[0]} on {LIMITED[1]} ranks: {found['best_wall_s']} s, limit {LIMIT_S} s")
    return 0 if found["best_wall_s"] < LIMIT_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
