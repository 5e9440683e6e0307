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
