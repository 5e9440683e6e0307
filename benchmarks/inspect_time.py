"""How long `layerwise inspect` of a model of a thousand params takes beyond importing torch.

    python benchmarks/inspect_time.py

Writes benchmarks/results/inspect_time.json. Each repeat is a process of its own that imports torch, looks at the clock, runs
the command and looks again. The two parts are never taken from different processes: on a machine that does other things,
the difference of two processes is mostly the difference of their luck. Imports of everything but torch, building the model,
planning and printing all count. CPU seconds stand beside wall seconds, and every repeat is kept.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "inspect_time.json"
MODEL = "benchmarks.inspect_time:model_of_a_thousand_params"
WORLD = 64
REPEATS = 3
LIMIT_S = 2.0
"""What the command may take beyond importing torch."""


def model_of_a_thousand_params() -> nn.Module:
    """120 blocks of nine params, an embedding, a norm and a head."""
    from torch import nn

    width, depth, vocabulary = 1024, 120, 32_000

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
            self.down = nn.Linear(4 * width, width, bias=False)

    blocks = nn.ModuleList(Block() for _ in range(depth))
    ends = {"embed": nn.Embedding(vocabulary, width), "norm": nn.RMSNorm(width), "head": nn.Linear(width, vocabulary)}
    return nn.ModuleDict({**ends, "blocks": blocks})


PROBE = """
import json, sys, time
started = time.perf_counter()
import torch
wall, cpu = time.perf_counter(), time.process_time()
from layerwise.cli.main import main
code = main(sys.argv[1:])
sys.stdout.flush()
took = {"import_torch_s": wall - started, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
print(json.dumps({**took, "code": code, "torch": torch.__version__}), file=sys.stderr)
"""


def repeat(*words: str) -> tuple[dict[str, Any], str]:
    """One process: what it measured of itself, and what the command printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE, "inspect", MODEL, "--world", str(WORLD), *words],
        env=environment,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    if found["code"] != 0:
        raise RuntimeError(f"inspect failed with exit code {found['code']}: {done.stderr}")
    return found, done.stdout


def main() -> int:
    load_before = os.getloadavg()[0]
    tables = [repeat() for _ in range(REPEATS)]
    jsons = [repeat("--json") for _ in range(REPEATS)]
    best_s = max(min(found["wall_s"] for found, _ in runs) for runs in (tables, jsons))
    report = {
        "what": f"seconds of `layerwise inspect` for {WORLD} ranks after `import torch`, in the same process; best of "
        f"{REPEATS}, of table and JSON the slower",
        "command": "python benchmarks/inspect_time.py",
        "host": {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_before": round(load_before, 2),
            "python": platform.python_version(),
            "torch": tables[0][0]["torch"],
        },
        "params": json.loads(jsons[0][1])["totals"]["params"],
        "beyond_torch_s": round(best_s, 3),
        "limit_s": LIMIT_S,
        "repeats": {
            output: [{key: round(found[key], 3) for key in ("import_torch_s", "wall_s", "cpu_s")} for found, _ in runs]
            for output, runs in (("table", tables), ("json", jsons))
        },
    }
    RESULTS.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print(f"{report['params']} params: {best_s:.2f} s beyond import torch, limit {LIMIT_S} s; wrote {RESULTS.name}")
    return 0 if best_s < LIMIT_S else 1


if __name__ == "__main__":
    raise SystemExit(main())
