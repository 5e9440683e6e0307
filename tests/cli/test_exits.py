"""What a rank exits with: a run that crashed must never look like one that finished."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from layerwise.cli.exits import BAD_INPUT, ENVIRONMENT, FAILED, OK
from layerwise.cli.main import main
from layerwise.errors import ConfigError, PlanMismatchError, Problem
from layerwise.train import stages
from tests.cli.test_train import SMALL


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question\n" * 200)
    return ["train", *SMALL, "--data.path", str(tmp_path / "text.txt"), "--train.out-dir", str(tmp_path / "run")]


def raising(error: BaseException) -> Any:
    def function(*_: Any, **__: Any) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ZeroDivisionError("in a loss"), FAILED, "ZeroDivisionError: in a loss"),
        (MemoryError("no room"), FAILED, "MemoryError: no room"),
        (KeyboardInterrupt(), FAILED, "aborted."),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            ENVIRONMENT,
            "run: No space left on device. The run needs it",
        ),
        (OSError(errno.ECONNRESET, "Connection reset by peer"), FAILED, "Traceback"),
        (ConfigError([Problem("data.path", "is gone.")]), BAD_INPUT, "data.path: is gone."),
        (PlanMismatchError("ranks 0 and 1 differ"), BAD_INPUT, "ranks 0 and 1 differ"),
    ],
)
def test_what_is_raised_in_the_middle_of_training_decides_the_exit_code(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(stages, "next_byte_loss", raising(error))
    assert main(words) == code != OK
    assert said in capsys.readouterr().err


def test_a_rank_that_cannot_start_is_a_problem_of_the_environment(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert main(words) == ENVIRONMENT
    error = capsys.readouterr().err
    assert "this rank could not be started" in error
    assert "MASTER_ADDR" in error


def test_a_run_that_finishes_exits_with_nothing_to_complain_of(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == OK
    assert capsys.readouterr().err == "reading 8.2 KiB of text\n"
