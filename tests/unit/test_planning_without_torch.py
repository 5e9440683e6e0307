"""Planning is for machines that have no torch, and quick enough to be asked again and again."""

import os
import subprocess
import sys
from pathlib import Path

import layerwise

SOURCE = Path(layerwise.__file__).parents[1]


def printed_by(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_making_a_plan_does_not_import_torch() -> None:
    program = (
        "import sys, layerwise\n"
        "from layerwise.layout.plan import make_plan\n"
        "from layerwise.planner.presets import preset\n"
        "make_plan(preset('gpt2'), world=8).describe()\n"
        "print('torch' in sys.modules)"
    )
    assert printed_by(program) == "False"


def test_a_plan_of_llama_8b_over_1024_ranks_takes_less_than_a_second() -> None:
    program = (
        "import time\n"
        "from layerwise.layout.plan import make_plan\n"
        "from layerwise.planner.presets import preset\n"
        "def once():\n"
        "    started = time.process_time()\n"
        "    make_plan(preset('llama3-8b'), world=1024).digest\n"
        "    return time.process_time() - started\n"
        "print(min(once() for _ in range(3)))"
    )
    assert float(printed_by(program)) < 1.0
