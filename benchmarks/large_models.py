"""How long a large model takes to read, once it is built: `inspect` of 45,154 matrices, and following forwards of 8B and more.

    python benchmarks/large_models.py

Writes benchmarks/results/large_models.json. Everything is imported and built on the meta device before the clock is looked at.
Limits are of CPU seconds: all of it is one thread, so that is what it takes on a machine that does nothing else. Wall seconds
stand beside them, and every repeat is kept.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn

from layerwise.cli import inspect
from layerwise.cli.meta import shapes_only
from layerwise.cli.models import build_model, find_model, hf_class
from layerwise.config.schema import TrainConfig
from layerwise.models.forward.parts import trace_model
from layerwise.routing.readings import Role

RESULTS = Path(__file__).parent / "results" / "large_models.json"
REPEATS = 3
INSPECT_LIMIT_S, TRACE_LIMIT_S = 2.0, 3.0
WORLDS = (2, 64)
TRACED: Mapping[str, Mapping[str, object]] = {
    "llama": {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen3": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen3_moe": {"num_hidden_layers": 48},
    "jamba": {},
}  # fmt: skip
"""Configs by model type: two of 8B, one with experts, and one with blocks of four kinds."""


def measured(limit_s: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The repeats of one piece of work, the best of them, and what it says about itself."""
    times = []
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        facts = work()
        times.append({"wall_s": round(time.perf_counter() - wall, 3), "cpu_s": round(time.process_time() - cpu, 3)})
    return {**facts, "best_cpu_s": min(took["cpu_s"] for took in times), "limit_s": limit_s, "repeats": times}


def inspected(model: nn.Module, world: int) -> dict[str, Any]:
    """`layerwise inspect deepseek_v3` with a model that is there already."""
    inspect.build_model = lambda *_: model  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = inspect.run(inspect.InspectRequest(model="deepseek_v3", overrides=(), world=world))
    if code:
        raise RuntimeError(f"inspect failed with exit code {code}")
    line = next(line for line in shown.getvalue().splitlines() if " matrices in " in line)
    return {"matrices": int(line.split(" matrices in ")[0].split()[-1])}


def followed(model: nn.Module) -> dict[str, Any]:
    """Follow a forward to its end."""
    found = trace_model(model)
    if found.problem:
        raise RuntimeError(found.problem)
    seen = [reading for reading in found.readings.values() if reading.role is not Role.UNSEEN]
    elements = sum(param.numel() for param in model.parameters())
    return {"params": len(found.readings), "seen": len(seen), "elements": elements}


def built(name: str, settings: Mapping[str, object]) -> nn.Module:
    """A model of that type, shapes only."""
    import transformers

    config = transformers.CONFIG_MAPPING[name](**settings)
    with shapes_only():
        model: nn.Module = hf_class(name, transformers, config)(config)
    return model


def main() -> int:
    warnings.filterwarnings("ignore")
    import transformers

    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    found = {}
    followed(built("gpt2", {"n_layer": 1}))  # what torch imports at the first operation on meta tensors
    for name, settings in TRACED.items():
        model = built(name, settings)
        found[f"trace {name}"] = measured(TRACE_LIMIT_S, lambda model=model: followed(model))  # type: ignore[misc]
    large = build_model(find_model("deepseek_v3"), TrainConfig())
    inspected(large, 1)  # imports
    for world in WORLDS:
        found[f"inspect deepseek_v3 --world {world}"] = measured(
            INSPECT_LIMIT_S,
            lambda world=world: inspected(large, world),  # type: ignore[misc]
        )
    report = {
        "what": f"CPU seconds of one thread beyond imports and building, best of {REPEATS}",
        "command": "python benchmarks/large_models.py",
        "host": {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_before": round(load_before, 2),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "models": found,
    }
    RESULTS.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    for name, row in found.items():
        print(f"{name}: {row['best_cpu_s']:.2f} s, limit {row['limit_s']:.0f} s")
    return 0 if all(row["best_cpu_s"] < row["limit_s"] for row in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
