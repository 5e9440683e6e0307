"""Command lines of README.md and of the pages fit the command line of today: they are parsed, and nothing is run."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import ROOT
from layerwise.cli.exits import BAD_INPUT, OK
from layerwise.cli.main import main
from layerwise.config.load import load

COMMANDS = ("train", "inspect", "plan", "ckpt", "bench", "doctor")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def documented() -> dict[str, str]:
    """Each `$ layerwise ...` line, without its comment, and the first page that has it."""
    found: dict[str, str] = {}
    for page in PAGES:
        for line in re.findall(r"^\s*\$ (layerwise\b.*)$", page.read_text(), flags=re.MULTILINE):
            found.setdefault(re.split(r"\s+#", line)[0].strip(), str(page.relative_to(ROOT)))
    return found


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Names and requests of the commands that `main` starts; their work is left out."""
    found: list[tuple[str, Any]] = []

    def instead(name: str) -> Any:
        def run(request: Any = None, **_: Any) -> int:
            found.append((name, request))
            return OK

        return run

    for name in COMMANDS:
        monkeypatch.setattr(importlib.import_module(f"layerwise.cli.{name}"), "run", instead(name))
    monkeypatch.chdir(ROOT)  # where the pages run theirs
    return found


def code_of(line: str, started: list[tuple[str, Any]]) -> int:
    """The exit code of a command line that is only parsed. A ConfigError lists dotted flags that are no settings."""
    _, *words = shlex.split(line)
    code = main(words)
    for name, request in started:
        if name == "train":
            load(request.config, request.overrides)
        elif name == "inspect":
            is_of_trainer = request.model is not None and Path(request.model).suffix == ".toml"
            load(request.model if is_of_trainer else None, request.overrides)
    return code


def test_pages_show_every_command() -> None:
    lines = documented()
    assert {line.split()[1] for line in lines} == set(COMMANDS)
    assert {"README.md", "docs/command_line.md", "docs/checkpoints.md"} <= set(lines.values())
    assert len(lines) > 25


@pytest.mark.parametrize("line", documented())
def test_a_documented_command_line_is_parsed(line: str, started: list[tuple[str, Any]]) -> None:
    assert code_of(line, started) == OK, f"{documented()[line]}: {line}"
    assert [name for name, _ in started] == [line.split()[1]]


@pytest.mark.parametrize(
    "line",
    [
        "layerwise train tiny --nporc 2",
        "layerwise inspect llama --wrld 64",
        "layerwise plan --model llama3-8b --world 128 --quantise mxfp8",
        "layerwise plan --model llama3-8b --optim.lr 0.1",
        "layerwise ckpt verfiy A",
        "layerwise bench step --steps 3",
        "layerwise doctor --verbose",
    ],
)
def test_a_word_that_the_command_line_does_not_know_is_found(
    line: str, started: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The control."""
    assert code_of(line, started) == BAD_INPUT
    assert started == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("layerwise train tiny --optim.learning-rate 0.1", "--optim.learning-rate: unknown setting"),
        ("layerwise train tinny", "tinny"),
        ("layerwise train tiny --train.steps many", "--train.steps: expected an integer"),
        ("layerwise inspect llama --parallel.layuot flat", "--parallel.layuot: unknown setting"),
    ],
)
def test_a_setting_that_nobody_knows_is_found(line: str, said: str, started: list[tuple[str, Any]]) -> None:
    """The control, for dotted flags."""
    with pytest.raises(ValueError, match=re.escape(said)):
        code_of(line, started)
