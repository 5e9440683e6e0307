"""README.md for a stranger: short, its program runs as it stands, its links work on a package index as well as in the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from benchmarks.tables import ROOT

README = (ROOT / "README.md").read_text()
HOME = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
PICTURES = HOME.replace("//github.com/", "//raw.githubusercontent.com/")
"""An index shows the pictures of this address; those under HOME are pages around pictures."""


def program() -> str:
    """The first Python block that has layerwise in it."""
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return next(block for block in blocks if "layerwise" in block)


def test_it_has_at_most_900_words() -> None:
    """As `wc -w` counts: pipes, links and code too. Longer explanations and tables go to docs/."""
    assert len(README.split()) <= 900


def test_its_program_runs_under_torchrun_on_two_ranks_as_it_stands_and_then_alone(tmp_path: Path) -> None:
    """One rank prints, and what the first run leaves in the folder does not stop the second."""
    code = program()
    (tmp_path / "program.py").write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    for launcher in (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], []):
        command = [sys.executable, *launcher, "program.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(set(lines)) == len(lines), f"more than one rank prints: {done.stdout}"
        for claim in re.findall(r"^ *print\(.*\)  # (.*)$", code, flags=re.MULTILINE):
            assert claim in done.stdout


def test_python_in_it_is_whole_programs() -> None:
    """Fragments are differences: what is marked as Python can be pasted and run."""
    for block in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        compile(block, "README.md", "exec")
        assert "layerwise" not in block or re.search(r"^import layerwise", block, flags=re.MULTILINE), block


def test_its_links_work_outside_of_the_repository() -> None:
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", README) + re.findall(r"(?:src|href)=\"([^\"]+)\"", README)
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    for target in targets:
        file = re.fullmatch(rf"(?:{HOME}/(?:blob|tree)/main|{PICTURES}/main)/([^#?]+)(?:[#?].*)?", target)
        if file is not None:
            assert (ROOT / file.group(1)).exists(), target
        elif target.startswith((HOME, PICTURES)):
            assert re.fullmatch(rf"{HOME}(/(issues|discussions|releases|security|actions)(/.*)?)?", target), target


def test_its_pictures_are_shown_by_an_index() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)\s]+)[^)]*\)", README) + re.findall(r"<img[^>]*src=\"([^\"]+)\"", README)
    ours = [picture for picture in pictures if HOME.rsplit("//", 1)[1].split("/", 1)[1] in picture]
    assert [picture for picture in ours if not picture.startswith(f"{PICTURES}/main/")] == []


def added_lines(block: str) -> list[str]:
    return [line[1:].strip() for line in block.splitlines() if line.startswith("+")]


def test_it_says_how_to_install() -> None:
    consoles = "".join(re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL))
    assert re.search(r"^\$ pip install layerwise(\s+#.*)?$", consoles, flags=re.MULTILINE)


def test_a_change_to_fsdp2_is_one_line_and_one_to_ddp_two() -> None:
    blocks = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    (fsdp2,) = [block for block in blocks if "fully_shard(" in block]
    (optimizer,) = added_lines(fsdp2)
    assert optimizer.startswith("optimizer = layerwise.Optimizer(")
    (ddp,) = [block for block in blocks if "DistributedDataParallel(" in block]
    model, optimizer = added_lines(ddp)
    assert model.startswith("model = layerwise.DataParallel(")
    assert optimizer.startswith("optimizer = layerwise.Optimizer(")
    for block in blocks:  # as many lines come as go: nothing else of the trainer changes
        assert len(re.findall(r"^-", block, flags=re.MULTILINE)) == len(added_lines(block)), block


def test_its_limits_come_before_its_command_line() -> None:
    headings = re.findall(r"^## (.*)$", README, flags=re.MULTILINE)
    order = ["Install", "Tested on", "Not for you if", "Command line"]
    assert [heading for heading in headings if heading in order] == order
    assert re.search(rf"\]\({HOME}/blob/main/docs/tested_on\.md\)", README)


def test_it_makes_three_claims_each_with_hardware_baseline_and_command() -> None:
    table = re.search(r"<!-- table: claims -->\n(.*?)\n<!-- end -->", README, flags=re.DOTALL)
    assert table is not None
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.group(1).splitlines()]
    assert header == ["measured", "layerwise", "baseline", "on", "command"]
    assert len(rows) == 3
    for row in rows:
        assert len(row) == len(header)
        assert all(re.search(r"\w", cell) for cell in row), row
        assert re.search(r"\d+ (to \d+ )?ranks?", row[3]), row
        command = re.fullmatch(r"`(make|python) (\S+)( .*)?`", row[4])
        assert command is not None, row
        if command.group(1) == "python":
            assert (ROOT / command.group(2)).exists()
        else:
            assert re.search(rf"^{command.group(2)}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
