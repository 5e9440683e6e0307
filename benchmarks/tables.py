"""Write the tables of README.md from the committed JSON: `python benchmarks/tables.py`. A test checks that they are up to date."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def convergence(data: dict[str, Any]) -> str:
    rows = [[best["rule"], best["lr"], best["val_bpb"]] for best in data["best"].values()]
    return markdown(["rule for matrices", "best lr", f"bits per byte after {data['steps']} steps"], rows)


def optimizer_step(data: dict[str, Any]) -> str:
    return markdown([f"on {data['host']['gpu']}", "ms"], [[name, row["ms"]] for name, row in data["rows"].items()])


def flat_plans(data: dict[str, Any]) -> str:
    shown = [row for row in data["rows"] if row["world"] in (8, 64, 1024)]
    return markdown(
        ["model", "ranks", "padding", "buckets", "matrices", "imbalance"],
        [
            [
                row["model"],
                row["world"],
                f"{row['padding_percent']:.4f} %",
                row["buckets"],
                row["matrices"],
                f"{max(row['imbalance'].values()):.2f}",
            ]
            for row in shown
        ],
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "convergence": convergence,
    "flat_plans": flat_plans,
    "optimizer_step": optimizer_step,
}


def render(text: str) -> str:
    """The text with every marked table filled in."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        table = TABLES[name](json.loads((RESULTS / f"{name}.json").read_text()))
        return f"<!-- table: {name} -->\n{table}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> int:
    readme = ROOT / "README.md"
    readme.write_text(render(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
