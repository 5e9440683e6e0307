"""The lines people read."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from layerwise.cli import console
from layerwise.cli.exits import complain
from tests.unit.train.test_metrics import end_record, eval_record, run_record, step_record


def test_step_line_has_everything_and_keeps_its_columns() -> None:
    from dataclasses import replace

    early = replace(step_record(5, loss=3.2141), tokens_per_s=999.0, step_ms=412.4, grad_norm=0.83)
    late = replace(step_record(1000, loss=1.0), tokens_per_s=71_234.0, step_ms=9.0, grad_norm=12.5)
    lines = [console.step_line(record, 1000) for record in (early, late)]
    assert lines[0] == "step    5/1000   0% | loss 3.214 | bpb 4.637 | grad  0.830 |  412 ms |   999 tok/s | eta 6m50s"
    assert lines[1] == "step 1000/1000 100% | loss 1.000 | bpb 1.443 | grad 12.500 |    9 ms | 71.2k tok/s | eta 0.0s"
    assert [match.start() for match in re.finditer(r"\|", lines[0])] == [
        match.start() for match in re.finditer(r"\|", lines[1])
    ]


def test_skipped_steps_are_not_silent() -> None:
    from dataclasses import replace

    record = replace(step_record(5), skipped=2, skip_reason="gradients of 'a' hold inf or NaN")
    assert console.step_line(record, 10).endswith("| 2 skipped: gradients of 'a' hold inf or NaN")


@pytest.mark.parametrize(("rate", "text"), [(12.0, "12 tok/s"), (1234.0, "1.2k tok/s"), (2.5e6, "2.5M tok/s")])
def test_rates(rate: float, text: str) -> None:
    assert console.format_rate(rate) == text


def test_the_end_says_whether_the_run_was_stopped() -> None:
    from dataclasses import replace

    assert console.end_lines(end_record(5), 5)[0].startswith("finished: 5 steps")
    stopped = replace(end_record(3), outcome="stopped")
    assert console.end_lines(stopped, 5)[0].startswith("stopped on request at step 3 of 5")


def test_a_run_that_goes_on_says_what_changed_and_warns_of_another_global_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from dataclasses import replace

    changes = ("optim.lr 0.01 -> 0.02", "tokens per step 2048 -> 512")
    going_on = replace(run_record(), first_step=4, changes=changes, tokens_per_step=512, tokens_per_step_before=2048)
    console.TrainConsole(total_steps=5).write(going_on)
    said = capsys.readouterr()
    assert "changed since then: optim.lr 0.01 -> 0.02, tokens per step 2048 -> 512\n" in said.out
    assert said.err.startswith("warning: the global batch changes from 2048 to 512 tokens per step")
    for same in (run_record(), replace(going_on, changes=changes[:1], tokens_per_step_before=512)):
        console.TrainConsole(total_steps=5).write(same)
        assert capsys.readouterr().err == ""


def test_a_pipe_gets_plain_lines_without_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console.TrainConsole(total_steps=5)
    for record in (run_record(), eval_record(0), step_record(5), end_record(5)):
        shown.write(record)
    shown.close()
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 7


def test_tables_keep_brackets_and_have_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table("title", ("name", "size"), [("a[0]", "12"), ("long name [bold]", "3")], right=("size",))
    assert capsys.readouterr().out == "title\nname              size\na[0]                12\nlong name [bold]     3\n"


UNREAD = """
import os, sys
from tests.unit.train.test_metrics import end_record, eval_record, run_record, step_record
from layerwise.cli.console import TrainConsole
shown = TrainConsole(total_steps=5)
for record in (run_record(), eval_record(0), step_record(5), end_record(5)):
    shown.write(record)
shown.close()
assert shown.failure is not None
print("goes on")
"""


@pytest.mark.parametrize(("where", "why"), [("nobody", "nobody reads it"), ("full", "No space left on device")])
def test_a_run_goes_on_when_nobody_reads_it_or_there_is_no_room(where: str, why: str) -> None:
    if where == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, target = os.pipe()
        os.close(reader)
    with os.fdopen(target, "w") as stdout:
        ended = subprocess.run([sys.executable, "-c", UNREAD], stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stderr
    said = ended.stderr.splitlines()
    assert len(said) == 1
    assert said[0].startswith("stdout is no longer written: ")
    assert why in said[0]


def test_a_run_goes_on_when_nobody_reads_errors_either() -> None:
    """As behind `2>&1 | head`."""
    reader, target = os.pipe()
    os.close(reader)
    kept, told = os.pipe()
    script = UNREAD.replace('print("goes on")', f'os.write({told}, b"goes on")')
    with os.fdopen(target, "w") as both:
        ended = subprocess.run([sys.executable, "-c", script], stdout=both, stderr=both, pass_fds=[told])
    os.close(told)
    with os.fdopen(kept) as heard:
        assert heard.read() == "goes on"
    assert ended.returncode == 0


def test_a_run_goes_on_when_its_terminal_is_gone() -> None:
    """With a bar, which stands in for both streams."""
    master, terminal = pty.openpty()
    kept, told = os.pipe()
    go, gone = os.pipe()
    script = UNREAD.replace("for record in", f"os.read({go}, 1)\nfor record in").replace(
        'print("goes on")', f'os.write({told}, b"goes on")'
    )
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        pass_fds=[told, go],
        env=environment,
    ):
        os.close(terminal)
        os.close(told)
        os.close(master)
        os.write(gone, b"x")
        with os.fdopen(kept) as heard:
            assert heard.read() == "goes on"
    os.close(go)
    os.close(gone)


@pytest.mark.parametrize("width", [40, 60])
def test_a_table_on_a_narrow_terminal_leaves_out_what_has_no_room(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "make_console", lambda: Console(file=screen, width=width, force_terminal=True, color_system=None)
    )
    columns = ("param", "shape", "route", "home", "bucket", "why")
    row = (
        "blocks.{0..3}.attn.qkv.weight",
        "256x128",
        "muon",
        "0..7",
        "0",
        "is the weight of a Linear, in row blocks " * 2,
    )
    console.print_table("title", columns, [row], right=("bucket",))
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert any("qkv.weight" in line and "256x128" in line for line in lines)
    shown = next(line for line in lines if line.lstrip().startswith("param"))
    said = " ".join(lines[1 : lines.index(shown)])
    lost = [column for column in columns if column not in shown]
    assert lost
    assert f"(no room here for {', '.join(lost)}: " in said
    assert sum(not line for line in lines) <= 2


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_on_a_terminal_keeps_numbers_whole_and_names_their_end(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "make_console", lambda: Console(file=screen, width=width, force_terminal=True, color_system=None)
    )
    rows = [
        ("model.layers.{0..47}.mlp.experts.gate_up_proj", "512x1024x2048", "muon", "1024 of 512x2048", "192.0 GiB", "is known, " * 9),
        ("model.embed_tokens.weight", "151936x2048", "adamw", "", "1.2 GiB", "is an embedding table"),
    ]  # fmt: skip
    columns = ("param", "shape", "route", "matrices", "size", "why")
    console.print_table("title", columns, rows, right=("size",), optional=("size", "matrices"))
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert any("experts.gate_up_proj" in line and "512x1024x2048   muon" in line for line in lines)
    assert any("model.embed_tokens.weight" in line and "151936x2048" in line for line in lines)
    assert ("1024 of 512x2048" in screen.getvalue()) == (width == 120)


PLACES = ("param", "shape", "route", "home", "bucket", "why")
NAMES = ("blocks.{0..3}.attn_norm.weight", "blocks.{0..3}.mlp.gate_up.weight")
LONG_NAMES = (
    "model.language_model.layers.{0..47}.mlp.experts.gate_up_proj",
    "model.layers.{0..31..2}.mlp.experts.{0..127}.down_proj.weight",
)


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("names", [NAMES, LONG_NAMES], ids=["short", "long"])
def test_a_table_cuts_the_reason_first_and_never_a_range_of_layers(
    width: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "make_console", lambda: Console(file=screen, width=width, force_terminal=True, color_system=None)
    )
    rows = [(name, "704x128", "muon", "0..5,7", "0", "is the weight of a Linear, in row blocks") for name in names]
    console.print_table("title", PLACES, rows, right=("bucket",))
    shown = screen.getvalue().splitlines()
    assert max(map(len, shown)) <= width
    for name, line in zip(names, (line for line in shown if "704x128" in line), strict=True):
        assert all(found in line for found in re.findall(r"\{.*?\}", name))
        if width >= 80 and names is NAMES:
            assert name in line
    if width == 80 and names is NAMES:
        assert "(no room here for why: see a wider terminal, a file, or --json)" in [line.strip() for line in shown]


@pytest.mark.parametrize(("rank", "expected"), [("0", "one\ntwo\n"), ("3", "[rank 3] one\n[rank 3] two\n")])
def test_errors_name_the_rank_unless_it_is_the_first(rank: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("sys.stderr", stream)
    complain("one\ntwo\n")
    assert stream.getvalue() == expected
    assert "RANK" in os.environ
