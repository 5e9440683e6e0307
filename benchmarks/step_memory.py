"""Most memory that a step of a plain module holds on a GPU, beside what its plan says.

    python benchmarks/step_memory.py

Writes benchmarks/results/step_memory.json. Params are those of a GPT with 24 layers, with gradients of their own dtype already there; what the
process holds besides (the context of CUDA, the allocator's rounding) is not counted: the figures are of tensors.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch
from torch import nn

import layerwise

sys.path.insert(0, str(Path(__file__).parent.parent))  # what is measured is built in another benchmark

from benchmarks.optimizer_step import AS_TORCH_DOES, build
from layerwise.planner.memory import worst_memory
from layerwise.planner.rules import Rules

RESULTS = Path(__file__).parent / "results" / "step_memory.json"


def measure(width: int, dtype: torch.dtype) -> dict[str, object]:
    torch.cuda.empty_cache()
    module: nn.Module = build(width).to(dtype)
    rules = Rules(matrix=layerwise.Muon(lr=1e-3), other=layerwise.AdamW(lr=1e-3))
    optimizer = layerwise.Optimizer(module, matrix=rules.matrix, other=rules.other, rules=[AS_TORCH_DOES])
    params = list(module.parameters())

    def prepare() -> None:
        for param in params:
            param.grad = torch.randn_like(param)

    prepare()
    optimizer.step()  # kernels are compiled, tables and workspaces of libraries made
    prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    planned = worst_memory(optimizer.plan, optimizer.schedule, rules)
    grads = sum(param.nbytes for param in params)
    return {
        "width": width,
        "dtype": str(dtype).removeprefix("torch."),
        "peak_mib": round(peak / 2**20, 1),
        "planned_mib": round(planned.total / 2**20, 1),
        "ratio": round(peak / planned.total, 4),
        "gradients_mib": round(grads / 2**20, 1),
        "planned": planned.to_json(),
    }


def main() -> int:
    rows = [measure(width, dtype) for width in (1024, 2048) for dtype in (torch.float32, torch.bfloat16)]
    RESULTS.write_text(
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "rows": rows,
            },
            indent=1,
        )
        + "\n"
    )
    for row in rows:
        print(
            f"width {row['width']} {row['dtype']}: peak {row['peak_mib']} MiB, planned {row['planned_mib']} MiB, ratio {row['ratio']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
