"""Benchmarks are run by hand, some of them on machines that tests never see: a name that has moved must not wait for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_benchmark_can_be_imported() -> None:
    names = [
        f"benchmarks.{path.stem}" for path in sorted((ROOT / "benchmarks").glob("*.py")) if path.stem != "__init__"
    ]
    assert "benchmarks.end_to_end" in names
    asked = [sys.executable, "-W", "ignore", "-c", f"import {', '.join(names)}"]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
