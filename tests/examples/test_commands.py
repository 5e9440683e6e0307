"""Commands of docstrings and pages, run as they are written there: the ranks that they promise do start."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tables import ROOT

COUNTS = "import os, pathlib\nif 'RANK' in os.environ: pathlib.Path(os.environ['SEEN'], os.environ['RANK']).touch()\n"
"""Every Python of a command runs this first: each rank leaves a file."""
NEEDS = {"accelerated": "accelerate", "huggingface": "transformers", "lightning": "lightning"}
"""The library that an example needs, by how its name begins."""
SHORT = {
    "examples/frameworks": ["--steps", "2"],
    "examples/nanogpt": ["--steps", "2", "--data", ast.__file__, "--batch-size", "2"],
}
"""Words that keep a script short, by its folder."""
ELSEWHERE = ("node0", "--fsdp")
"""Words of commands that need what is not here: another machine, GPUs."""


def documented() -> list[str]:
    """Every command that starts ranks of an example, or the trainer: in docstrings of examples, and on pages."""
    said = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in sorted((ROOT / "examples").glob("*/*.py"))]
    found = [
        line for text in said for line in text.splitlines() if line.startswith(("torchrun ", "accelerate ", "python "))
    ]
    for page in ("integrations", "sharded", "launching", "from_ddp"):
        found += re.findall(r"^\$ (.*)$", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.MULTILINE)
    commands = (re.split(r"\s+#", line)[0].strip() for line in found)
    return [command for command in dict.fromkeys(commands) if not any(word in command for word in ELSEWHERE)]


def test_there_are_commands() -> None:
    commands = documented()
    assert sum(command.startswith("torchrun") for command in commands) >= 6
    assert any("examples/frameworks/accelerated.py" in command for command in commands)


@pytest.mark.slow
@pytest.mark.parametrize("command", documented())
def test_a_command_runs_and_starts_as_many_ranks_as_it_says(command: str, tmp_path: Path) -> None:
    for name, library in NEEDS.items():
        if f"/{name}" in command and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install layerwise[frameworks]")
    (tmp_path / "sitecustomize.py").write_text(COUNTS)
    seen = tmp_path / "seen"
    seen.mkdir()
    # Fewer ranks than a page of larger machines says, never more.
    words = ["2" if word == "8" else word for word in shlex.split(command)]
    if words[0] == "torchrun" and "--standalone" not in words:
        words.insert(1, "--standalone")  # a port of its own: other tests run beside this one
    more = next((short for folder, short in SHORT.items() if folder in command), [])
    if more:
        words += [*more, "--out", str(tmp_path / "out")]
    elif "train" in words:
        words += ["--train.steps", "2", "--schedule.warmup-steps", "1", "--train.out-dir", str(tmp_path / "out")]
    run = subprocess.run(
        [str(Path(sys.executable).with_name(words[0])), *words[1:]],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "SEEN": str(seen),
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    asked = re.search(r"(?:--nproc-per-node|--nproc|--num_processes)[ =](\d+)", " ".join(words))
    ranks = {int(path.name) for path in seen.iterdir()}
    own = 2 if command == "layerwise doctor" else None  # its self test
    count = int(asked.group(1)) if asked else own
    assert ranks == (ranks & {0} if count is None else set(range(count)))
