"""Pages that cannot go stale: their Python runs, their figures come from JSON, their links lead somewhere."""

from __future__ import annotations

import io
import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from benchmarks import loss_over_time
from benchmarks.tables import pages, render
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def execute(rank: int, world: int, code: str, folder: Path) -> None:
    os.chdir(folder)  # what a page writes stays out of the repository
    with redirect_stdout(io.StringIO()):
        exec(compile(code, "page", "exec"), {"__name__": "__main__"})


def python_blocks() -> list[tuple[str, str]]:
    """Every block of Python with its place. The README's program has tests of its own."""
    return [
        (f"{page.name} block {number}", block)
        for page in PAGES
        if page.name != "README.md"
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL))
    ]


@pytest.mark.parametrize(("where", "code"), python_blocks(), ids=[where for where, _ in python_blocks()])
def test_python_on_a_page_runs(where: str, code: str, tmp_path: Path) -> None:
    run_ranks(1, execute, code, tmp_path, meet=False)  # a page makes its own group where it needs one


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_tables_listings_and_diffs_are_those_of_the_files_they_come_from(page: Path) -> None:
    text = page.read_text()
    assert render(text) == text, "run: python benchmarks/tables.py"


def test_links_between_pages_lead_to_files() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert broken == []


def test_the_chart_and_its_summary_are_those_of_the_measured_runs() -> None:
    report = json.loads(loss_over_time.RESULTS.read_text())
    assert report["best"] == loss_over_time.summary(report)
    assert loss_over_time.CHART.read_text() == loss_over_time.chart(report), (
        "run: python benchmarks/loss_over_time.py --draw"
    )
    for arm, best in report["best"].items():  # a best rate at an end of the sweep would not be known to be the best
        rates = sorted(run["lr"] for run in report["runs"] if run["arm"] == arm)
        assert rates[0] < best["lr"] < rates[-1], arm


def test_the_readme_says_of_the_chart_what_the_runs_show() -> None:
    best = json.loads(loss_over_time.RESULTS.read_text())["best"]
    torchs, same, ours = (best[arm] for arm in ("torch.optim.Muon", "layerwise Muon, as torch's", "layerwise Muon"))
    quicker = 100 * (1 - same["ms_per_step"] / torchs["ms_per_step"])
    said = f"ends at {same['val_loss']:.2f} (torch at {torchs['val_loss']:.2f}) in {quicker:.0f} % less time"
    text = (ROOT / "README.md").read_text()
    assert said in text
    assert f"bring the rest: {ours['val_loss']:.2f}." in text
