"""What the flat layout costs for known models, from 8 to 1024 ranks: padding, buckets, balance, planning time, bytes.

    python benchmarks/flat_plans.py

Writes benchmarks/results/flat_plans.json. Needs no torch and no accelerator: these are plans, and nothing of them runs.
Every domain is planned over N ranks: for the models with experts, N ranks hold copies of the dense params and N ranks
hold copies of each group of experts.
"""

from __future__ import annotations

import datetime
import json
import platform
import time
from pathlib import Path
from typing import Any

from layerwise.layout.plan import make_plan
from layerwise.planner.presets import preset
from layerwise.units import format_nbytes

RESULTS = Path(__file__).parent / "results" / "flat_plans.json"
MODELS = (("llama3-8b", 1), ("llama3-70b", 1), ("deepseek-v3", 32), ("kimi-k2", 16))
WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
STATS_NUMEL = 8
"""Elements of the one statistics vector; its bytes are nothing beside the rest."""


HEADER = "model            N  matrices  buckets  padding %   plan s       sent  exchanged  imbalance"


def measure(name: str, expert_parallel: int, world: int) -> dict[str, Any]:
    """One row: the plan of a model over some ranks, made three times to time it."""
    table = preset(name, expert_parallel=expert_parallel)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        plan = make_plan(table, world=world, layout="flat")
        seconds.append(time.perf_counter() - started)
    return {
        "model": name,
        "expert_parallel": expert_parallel,
        "world": world,
        "params": sum(param.numel for param in table),
        "matrices": sum(len(work.items) for work in plan.works),
        "buckets": len(plan.buckets),
        "padding_numel": sum(buffer.padding for buffer in plan.buffers),
        "padding_percent": round(100 * plan.padding_ratio, 9),
        "imbalance": {work.domain: round(work.imbalance, 4) for work in plan.works},
        "plan_seconds": round(min(seconds), 4),
        "bytes_by_collective_rank_0": plan.schedule(stats_numel=STATS_NUMEL).bytes_by_collective(0),
        "digest": plan.digest,
    }


def line(row: dict[str, Any]) -> str:
    balance = ", ".join(f"{domain} {value:.2f}" for domain, value in row["imbalance"].items())
    sent = row["bytes_by_collective_rank_0"]
    cells = (
        f"{row['model']:<12} {row['world']:>5} {row['matrices']:>9} {row['buckets']:>8}",
        f"{row['padding_percent']:>10.6f} {row['plan_seconds']:>8.3f}",
        f"{format_nbytes(sum(sent.values())):>10} {format_nbytes(sent['all_to_all']):>10}  {balance}",
    )
    return " ".join(cells)


def main() -> int:
    print(HEADER)
    rows = []
    for name, expert_parallel in MODELS:
        for world in WORLDS:
            rows.append(measure(name, expert_parallel, world))
            print(line(rows[-1]), flush=True)
    report = {
        "what": "plans of the flat layout; bytes are what rank 0 sends in one step with fp32 gradients and bf16 params",
        "command": "python benchmarks/flat_plans.py",
        "host": {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        "rows": rows,
        "worst_padding_percent": max(row["padding_percent"] for row in rows),
        "worst_plan_seconds": max(row["plan_seconds"] for row in rows),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    worst, slowest = report["worst_padding_percent"], report["worst_plan_seconds"]
    print(f"worst padding {worst} %, slowest plan {slowest} s; wrote {RESULTS.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
