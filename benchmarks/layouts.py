"""What the layouts cost, as plans: padding, buckets, balance, bytes in memory and on the wire, from 8 to 1024 ranks.

    python benchmarks/layouts.py

Writes benchmarks/results/layouts.json. Needs no torch and no accelerator: these are plans, and nothing of them runs.

First, the packing of `padded` against figures that were measured on Megatron-LM's own layout code, for the same shapes. Then
the layouts side by side, for those shapes and for the presets. Last, the padding of `padded` for every preset beside what a
search reached, by which earlier versions packed.
"""

from __future__ import annotations

import datetime
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from layerwise.config.layouts import Layout
from layerwise.dtypes import DType
from layerwise.layout.options import Options
from layerwise.layout.packing import megatron_cost
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.work import imbalance_of
from layerwise.planner.presets import preset
from layerwise.routing.spec import ParamTable, table_of
from layerwise.units import format_nbytes

RESULTS = Path(__file__).parent / "results" / "layouts.json"
WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
LAYOUTS: tuple[Layout, ...] = ("padded", "compact", "flat")
STATS_NUMEL = 8
"""Elements of the one statistics vector; its bytes are nothing beside the rest."""

Shape = tuple[int, int]


def layers(*shapes_by_layer: Sequence[Shape]) -> ParamTable:
    """Matrices as Megatron fuses them, in forward order. Names say nothing, so that none is split again."""
    return table_of(
        [
            (f"layers.{layer}.m{number}.weight", shape)
            for layer, shapes in enumerate(shapes_by_layer)
            for number, shape in enumerate(shapes)
        ]
    )


_LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
_LLAMA_70B_TP8 = ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))
_LATENT_ATTENTION = ((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384))
_DENSE_MLP = ((36864, 7168), (7168, 18432))
_ROUTER_AND_SHARED_EXPERT = ((256, 7168), (4096, 7168), (7168, 2048))
_EIGHT_EXPERTS = (*[(4096, 7168)] * 8, *[(7168, 2048)] * 8)
"""Grouped layers hold the first weight of all experts, then the second of all."""

MEASURED_SHAPES: dict[str, ParamTable] = {
    "Llama-8B": layers(*[_LLAMA_8B] * 32),
    "Llama-70B TP8": layers(*[_LLAMA_70B_TP8] * 80),
    "DeepSeek-V3 dense": layers(
        *[(*_LATENT_ATTENTION, *_DENSE_MLP)] * 3, *[(*_LATENT_ATTENTION, *_ROUTER_AND_SHARED_EXPERT)] * 58
    ),
    "DeepSeek-V3 experts": layers(*[_EIGHT_EXPERTS] * 58),
}
"""The matrices that Megatron's layout code was measured on."""

DIFFERENCES = {
    "Llama-8B": "llama3-8b has these params; routing splits query, key, value, gate and up, so it has 224 matrices, not 128",
    "Llama-70B TP8": "llama3-70b is not tensor-parallel: its matrices are eight times as large",
    "DeepSeek-V3 dense": "deepseek-v3 leaves the 58 routers to AdamW and splits gate and up of dense and shared experts",
    "DeepSeek-V3 experts": "deepseek-v3 stacks the 8 local experts: 3 params of 8 matrices per layer, not 16 of one; a stack is "
    "one param, which padded and compact keep whole",
}
"""How the preset of the same model differs from the shapes that were measured."""


class Figures(NamedTuple):
    """As measured: percent of padding, buckets, and the busiest rank's cost over the mean, by Megatron's own `megatron_cost`."""

    waste_percent: float
    buckets: int
    megatron_imbalance: float


MEASURED: dict[str, dict[int, Figures]] = {
    "Llama-8B": {
        8: Figures(7.7, 8, 1.02),
        32: Figures(7.7, 2, 1.08),
        64: Figures(7.7, 1, 1.08),
        128: Figures(115, 1, 2.15),
        256: Figures(331, 1, 4.31),
        512: Figures(762, 1, 8.6),
    },
    "Llama-70B TP8": {32: Figures(14.5, 5, 1.32), 64: Figures(31.8, 3, 1.84), 128: Figures(75.7, 2, 2.46)},
    "DeepSeek-V3 dense": {32: Figures(44, 4, 1.62), 128: Figures(122, 1, 3.28), 256: Figures(343, 1, 6.57)},
    "DeepSeek-V3 experts": {8: Figures(0, 116, 1.00), 32: Figures(35.6, 20, 1.06)},
}
"""Measured on Megatron-LM's own layout code (August 2026), fp32 gradients, buckets of max(40 M, 1 M per rank)."""

SEARCHED: dict[str, dict[int, float]] = {
    "llama3-8b": {8: 3.34, 64: 6.69, 512: 661.87},
    "llama3-70b": {8: 0.38, 64: 3.42, 512: 243.88},
    "llama3-405b": {8: 0.05, 64: 11.1, 512: 121.15},
    "qwen3-30b-a3b": {8: 0.22, 64: 28.68, 512: 239.69},
    "qwen3-235b-a22b": {8: 0.29, 64: 10.17, 512: 75.93},
    "deepseek-v3": {8: 1.66, 64: 7.82, 512: 187.04},
    "kimi-k2": {8: 2.17, 64: 5.69, 512: 181.44},
    "gpt2": {8: 0.0, 64: 53.09, 512: 902.46},
}
"""Percent of padding over all params of a preset by number of ranks, as commit 67d58b1 printed it (`layerwise plan --layout padded`):
it searched all cuts into buckets and several packings of each for the least padding. The search is gone."""

PRESETS = (
    ("gpt2", 1),
    ("llama3-8b", 1),
    ("llama3-70b", 1),
    ("llama3-405b", 1),
    ("qwen3-30b-a3b", 8),
    ("qwen3-235b-a22b", 16),
    ("deepseek-v3", 32),
    ("kimi-k2", 16),
)
"""Models and over how many ranks each one's experts are spread."""


def figures(plan: Plan) -> dict[str, Any]:
    """Padding, buckets, number and balance of a plan's matrices."""
    buffers = [buffer for buffer in plan.buffers if buffer.key.family == "matrix"]
    numel = sum(buffer.param_numel for buffer in buffers)
    return {
        "waste_percent": round(100 * sum(buffer.padding for buffer in buffers) / numel, 4),
        "buckets": sum(len(buffer.buckets) for buffer in buffers),
        "matrices": sum(len(work.items) for work in plan.works),
        "imbalance": round(plan.imbalance, 4),
    }


def reference_figures(plan: Plan) -> dict[str, Any]:
    """Figures of a plan, with its balance by what Megatron-LM takes matrices to cost."""
    loads = [0] * plan.world
    for work in plan.works:
        for item in work.items:
            for home in item.homes:
                loads[home] += megatron_cost(item.matrix.rows, item.matrix.cols)
    return {**figures(plan), "megatron_imbalance": round(imbalance_of(loads), 4)}


def compare(model: str, world: int, measured: Figures) -> dict[str, Any]:
    """One measured figure of Megatron-LM beside that of `padded`."""
    found = reference_figures(make_plan(MEASURED_SHAPES[model], Options(layout="padded"), world=world))
    return {
        "model": model,
        "world": world,
        "measured": measured._asdict(),
        "found": found,
        "difference_points": round(found["waste_percent"] - measured.waste_percent, 2),
    }


def preset_padding(model: str, world: int) -> dict[str, Any]:
    """The padding of `padded` for a preset as `layerwise plan` prints it, now and under the search of earlier versions."""
    plan = make_plan(preset(model), Options(layout="padded"), world=world)
    now = round(100 * plan.padding_ratio, 2)
    return {"model": model, "world": world, "padding_percent": now, "searched_percent": SEARCHED[model][world]}


def memory_nbytes(plan: Plan) -> dict[str, int]:
    """Bytes that the fullest rank keeps between steps."""
    masters = [0] * plan.world
    moments = [0] * plan.world
    params = grads = 0
    for buffer in plan.buffers:
        params += buffer.numel * buffer.key.dtype.itemsize
        grads += buffer.numel * plan.grad_dtype.itemsize
        # Muon keeps one momentum, AdamW two.
        states = 1 if buffer.key.family == "matrix" else 2
        for bucket in buffer.buckets:
            for rank in range(plan.world):
                numel = bucket.shard_numel(rank)
                masters[rank] += numel * (0 if buffer.key.dtype is DType.FP32 else DType.FP32.itemsize)
                moments[rank] += numel * states * DType.FP32.itemsize
    fullest = max(range(plan.world), key=lambda rank: masters[rank] + moments[rank])
    return {"params": params, "grads": grads, "masters": masters[fullest], "momentum": moments[fullest]}


def sent_nbytes(plan: Plan) -> dict[str, int]:
    """Bytes by collective of the rank that sends most in one step."""
    schedule = plan.schedule(stats_numel=STATS_NUMEL)
    return max(
        (schedule.bytes_by_collective(rank) for rank in range(plan.world)), key=lambda by_kind: sum(by_kind.values())
    )


def exposed_percent(plan: Plan) -> float:
    """What is still to be reduced when backward ends, over all params, on a wire that reduces an element while backward
    makes one; an all-reduce moves every element twice."""
    ready = wire_free = 0
    for bucket in plan.buckets:
        ready += sum(placement.numel for placement in bucket.placements)
        wire_free = max(ready, wire_free) + bucket.numel * (2 if bucket.reducer == "all_reduce" else 1)
    return 100 * (wire_free - ready) / ready


def measure(model: str, table: ParamTable, layout: str, world: int) -> dict[str, Any]:
    """One row: a layout of a model over some ranks."""
    started = time.perf_counter()
    plan = make_plan(table, Options(layout=layout), world=world)
    seconds = time.perf_counter() - started
    return {
        "model": model,
        "layout": layout,
        "world": world,
        **figures(plan),
        "exposed_percent": round(exposed_percent(plan), 2),
        "memory_nbytes": memory_nbytes(plan),
        "sent_nbytes": sent_nbytes(plan),
        "plan_seconds": round(seconds, 4),
    }


def models() -> Iterator[tuple[str, ParamTable]]:
    yield from MEASURED_SHAPES.items()
    for name, expert_parallel in PRESETS:
        yield name, preset(name, expert_parallel=expert_parallel)


HEADER = (
    "model                    N  layout            padding %  buckets  imbalance  exposed %      memory        sent"
)


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:<20} {row['world']:>5}  {row['layout']:<16} {row['waste_percent']:>10.2f} {row['buckets']:>8} "
        f"{row['imbalance']:>10.2f} {row['exposed_percent']:>10.1f} {format_nbytes(sum(row['memory_nbytes'].values())):>11} "
        f"{format_nbytes(sum(row['sent_nbytes'].values())):>11}"
    )


def main() -> int:
    compared = []
    for model, by_world in MEASURED.items():
        for world, measured in by_world.items():
            compared.append(compare(model, world, measured))
            print(f"{model:<20} {world:>4}: {measured.waste_percent} %, found {compared[-1]['found']}")
    print(HEADER)
    rows = []
    for model, table in models():
        for world in WORLDS:
            for layout in LAYOUTS:
                rows.append(measure(model, table, layout, world))
                print(line(rows[-1]), flush=True)
    padding = [preset_padding(model, world) for model, by_world in SEARCHED.items() for world in by_world]
    report = {
        "what": "plans of all layouts with fp32 gradients and bf16 params. measured: Megatron-LM's own layout code; waste, buckets "
        "and imbalance are of matrices only; memory is what the fullest rank keeps between steps, sent is what the rank that "
        "sends most sends in one step; every domain is planned over N ranks. padding: over all params of a preset with all of its "
        "experts; searched is that of commit 67d58b1, which searched for the least padding",
        "command": "python benchmarks/layouts.py",
        "host": {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        "presets": [{"model": name, "expert_parallel": expert_parallel} for name, expert_parallel in PRESETS],
        "differences": DIFFERENCES,
        "reference": compared,
        "padding": padding,
        "worst_difference_points": max(abs(row["difference_points"]) for row in compared),
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print(f"worst difference {report['worst_difference_points']} percentage points; wrote {RESULTS.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
