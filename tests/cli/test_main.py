"""The command line as a user meets it. What needs no torch runs in this process; what must not import torch runs in its own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from layerwise import __version__
from layerwise.cli import main as main_module
from layerwise.cli.exits import BAD_INPUT, ENVIRONMENT, OK
from layerwise.cli.main import main
from layerwise.cli.parent import LAUNCHER
from layerwise.cli.train import torchrun_words
from layerwise.comm import launching
from layerwise.config.load import FIELD_TYPES, load

GOLDEN = Path(__file__).parent / "golden"


def layerwise(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "layerwise", *words],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        ([], 0),
        (["train", "--help"], 0),
        (["inspect", "--help"], 0),
        (["doctor", "--help"], 0),
        (["train", "--dry-run"], 0),
        (["train", "--dry-run", "--optim.lr", "fast"], 2),
        (["train", "no-such-file.toml"], 2),
        (["inspect", "--world", "0"], 2),
    ],
)
def test_what_needs_no_torch_does_not_import_it(words: list[str], code: int) -> None:
    probe = (
        "import sys\nfrom layerwise.cli.main import main\n"
        f"code = main({words!r})\nprint(code, sorted({{'torch', 'numpy'}} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr.strip().splitlines()[-1] == f"{code} []"


@pytest.mark.parametrize("command", ["train", "inspect", "ckpt", "bench", "doctor"])
def test_flags_are_pinned(command: str) -> None:
    """A new flag is a decision: when this fails on purpose, write the new list into the file."""
    help_text = layerwise(command, "--help").stdout
    found = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", help_text)))
    assert found == (GOLDEN / f"{command}_flags.txt").read_text().split()


def test_every_setting_is_a_flag_of_train() -> None:
    flags = set((GOLDEN / "train_flags.txt").read_text().split())
    settings = {f"--{section}.{name.replace('_', '-')}" for section, kinds in FIELD_TYPES.items() for name in kinds}
    assert settings == {flag for flag in flags if "." in flag}


def test_help_names_the_commands_and_the_version() -> None:
    text = layerwise("--help").stdout
    assert f"layerwise {__version__}" in text
    for command in ("train", "inspect", "doctor"):
        assert re.search(rf"• {command} ", text)


def test_version_is_one_line() -> None:
    done = layerwise("--version")
    assert (done.stdout, done.returncode) == (f"layerwise {__version__}\n", 0)


def test_dry_run_prints_settings_that_load_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text("[optim]\nlr = 0.125\n")
    assert main(["train", str(tmp_path / "run.toml"), "--dry-run", "--train.steps", "77", "--nproc", "4"]) == OK
    out = capsys.readouterr().out
    assert re.search(r"^lr = 0.125 +# file$", out, re.MULTILINE)
    assert re.search(r"^steps = 77 +# flag$", out, re.MULTILINE)
    (tmp_path / "again.toml").write_text(out)
    config = load(str(tmp_path / "again.toml")).config
    assert (config.optim.lr, config.train.steps) == (0.125, 77)


def test_all_problems_are_listed_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[modle]\n[optim]\nlr = 'fast'\n")
    done = layerwise("train", str(tmp_path / "run.toml"), "--train.stesp", "3", "--nproc", "0")
    assert done.returncode == BAD_INPUT
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "4 problems in the configuration:",
        f"  1. {tmp_path}/run.toml: modle: unknown section. Did you mean 'model'?",
        f"  2. {tmp_path}/run.toml: optim.lr: expected a number, got 'fast'.",
        "  3. --train.stesp: unknown setting. Did you mean 'steps'?",
        "  4. --nproc: expected a number of ranks from 1 to 1024, got 0.",
    ]


@pytest.mark.parametrize(
    "words", [["trian"], ["train", "--nope"], ["train", "--nproc", "two"], ["doctor", "--optim.lr", "1"]]
)
def test_unknown_words_are_bad_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == BAD_INPUT
    assert capsys.readouterr().err != ""


def test_problems_of_a_launched_run_come_once_per_machine_and_name_later_ranks() -> None:
    words = ("train", "--train.steps", "0")
    assert "1 problem" in layerwise(*words, RANK="0", LOCAL_RANK="0", WORLD_SIZE="4").stderr
    assert layerwise(*words, RANK="1", LOCAL_RANK="1", WORLD_SIZE="4").stderr == ""
    other_machine = layerwise(*words, RANK="2", LOCAL_RANK="0", WORLD_SIZE="4")
    assert other_machine.stderr.startswith("[rank 2] 1 problem")
    assert other_machine.returncode == BAD_INPUT


def test_nproc_under_a_launcher_is_refused() -> None:
    done = layerwise("train", "--nproc", "2", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    assert done.returncode == BAD_INPUT
    assert "was started by a launcher already (RANK is set)" in done.stderr


@pytest.mark.parametrize(
    ("hangup", "signals"),
    [(signal.SIG_DFL, "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"), (signal.SIG_IGN, "SIGTERM,SIGINT,SIGQUIT,SIGUSR2")],
)
def test_nproc_hands_over_to_torchrun_and_prints_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hangup: signal.Handlers, signals: str
) -> None:
    """Signals that end a run reach the ranks, but for the hang-up that nohup ignores."""
    called: list[Sequence[str]] = []
    monkeypatch.setattr(launching, "torchrun", called.append)
    for name in ("PYTHONWARNINGS", LAUNCHER):
        monkeypatch.setenv(name, "")  # and put back what it was
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        assert main(["train", "--nproc", "2", "--optim.betas", "0.8", "0.9", "--train.stop-signals", "SIGUSR2"]) == OK
    finally:
        signal.signal(signal.SIGHUP, before)
    start = ["--standalone", "--nproc-per-node", "2", "--signals-to-handle", signals, "-m", "layerwise"]
    arguments = [*start, "train", "--optim.betas", "0.8", "0.9", "--train.stop-signals", "SIGUSR2"]
    assert called == [arguments]
    assert (os.environ["OMP_NUM_THREADS"], os.environ[LAUNCHER]) == ("4", str(os.getpid()))
    said = capsys.readouterr().err.splitlines()
    assert said == [f"+ OMP_NUM_THREADS=4 torchrun {' '.join(arguments)}", "starting 2 ranks"]


def test_a_bad_config_is_refused_before_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "torchrun", lambda *_: pytest.fail("torchrun was started"))
    assert main(["train", "--nproc", "2", "--optim.lr", "-1"]) == BAD_INPUT


def test_torchrun_gets_every_word_but_nproc() -> None:
    assert torchrun_words(3, ["SIGINT"], ["train", "a.toml", "--nproc=3"])[7:] == ["train", "a.toml"]
    assert torchrun_words(3, ["SIGINT"], ["train", "--nproc", "3", "a.toml"])[7:] == ["train", "a.toml"]


@pytest.mark.parametrize(
    ("words", "before", "code"),
    [
        (["train"], ["importing torch"], ENVIRONMENT),
        (["train", "--nproc", "2"], ["+ OMP_NUM_THREADS=1 torchrun", "starting 2 ranks"], ENVIRONMENT),
        (["inspect"], ["importing torch"], ENVIRONMENT),
        (["doctor"], ["importing torch"], ENVIRONMENT),
        (["bench", "ns"], ["importing torch"], ENVIRONMENT),
        (["train", "--dry-run"], [], OK),
        (["plan", "--model", "gpt2", "--world", "8"], [], OK),
    ],
)
def test_a_line_comes_before_the_long_import_of_torch(
    tmp_path: Path, words: list[str], before: list[str], code: int
) -> None:
    """With a torch that tells when it is imported, and cannot be."""
    (tmp_path / "torch").mkdir()
    source = 'import sys\nprint("HERE", file=sys.stderr, flush=True)\nraise ImportError("a torch of this test")\n'
    (tmp_path / "torch" / "__init__.py").write_text(source)
    places = os.pathsep.join([str(tmp_path), *sys.path])
    done = layerwise(*words, PYTHONPATH=places, OMP_NUM_THREADS="1")
    said = done.stderr.partition("HERE")[0].splitlines()
    assert done.returncode == code, done.stderr
    assert ("HERE" in done.stderr) == bool(before)
    assert len(said) == len(before)
    assert all(line.startswith(start) for line, start in zip(said, before, strict=True))
    assert "Traceback" not in done.stderr


def test_an_interrupt_before_training_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launching, "torchrun", interrupted)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    monkeypatch.setenv(LAUNCHER, "")
    assert main(["train", "--nproc", "2"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "aborted."


@pytest.mark.parametrize(("names", "said"), [
    ("SIGINT,SIGTREM", "train.stop_signals: expected names of signals with commas between them, got 'SIGTREM'. Did you mean 'SIGTERM'?"),
    ("SIGKILL", "train.stop_signals: expected names of signals with commas between them, got 'SIGKILL'."),
])  # fmt: skip
def test_signals_that_nobody_knows_or_can_catch_are_refused(
    names: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--dry-run", "--train.stop-signals", names]) == BAD_INPUT
    assert said in capsys.readouterr().err
    assert main(["train", "--dry-run", "--train.stop-signals", " SIGINT, SIGUSR2"]) == OK


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m layerwise train --dry-run | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [(">&-", 0, ""), (">/dev/full", 3, "stdout cannot be written: No space left on device.\n"), ("<&- 2>&-", 0, "")],
)
@pytest.mark.parametrize("words", ["plan --model gpt2 --world 8", "ckpt ls {}", "train --dry-run"])
def test_streams_that_are_closed_or_full_are_no_traceback(
    tmp_path: Path, words: str, where: str, code: int, said: str
) -> None:
    line = f"{sys.executable} -m layerwise {words.format(tmp_path)} {where}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_only_main_imports_tyro_and_only_console_imports_rich() -> None:
    package = Path(main_module.__file__).parents[1]
    importers = {
        name: sorted(
            str(file.relative_to(package))
            for file in package.rglob("*.py")
            if re.search(rf"^\s*(import|from) {name}\b", file.read_text(), re.MULTILINE)
        )
        for name in ("tyro", "rich")
    }
    assert importers == {"tyro": ["cli/main.py"], "rich": ["cli/console.py"]}
