"""Everything that is drawn: step lines, the progress bar, tables. The only importer of rich.

A bar and colours only on a terminal, plain aligned lines everywhere else; `NO_COLOR` is honoured.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from layerwise.cli.exits import complain, note, write_nowhere
from layerwise.train.metrics import EndRecord, EvalRecord, Record, RunRecord, StepRecord
from layerwise.units import format_count, format_seconds

_FILE_WIDTH = 198
"""Of tables in a file or a pipe: lines stay below 200 characters."""
_LEAST, _LEAST_OF_NAMES, _GAP = 18, 26, 3
"""Characters that the last column keeps, that names keep, and between two columns."""
_SHARE_OF_NAMES = 0.35
"""Share of the width that names keep."""
_PLAIN_WIDTH = 10_000  # a file has no width, so nothing is wrapped or cut there


def make_console() -> Console:
    """Results go to stdout."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def format_rate(per_second: float) -> str:
    """`71234` -> `71.2k tok/s`."""
    if per_second < 1000:
        return f"{per_second:.0f} tok/s"
    return f"{per_second / 1000:.1f}k tok/s" if per_second < 1e6 else f"{per_second / 1e6:.1f}M tok/s"


def step_line(record: StepRecord, total: int) -> str:
    """One step in one line, every column always in the same place."""
    width = len(str(total))
    eta_s = (total - record.step) * record.step_ms / 1000
    parts = [
        f"step {record.step:>{width}}/{total} {100 * record.step // total:>3}%",
        f"loss {record.loss:.3f}",
        f"bpb {record.bpb:.3f}",
        f"grad {record.grad_norm:>6.3f}",
        *([] if record.max_logit is None else [f"logit {record.max_logit:>6.2f}"]),
        f"{record.step_ms:>4.0f} ms",
        f"{format_rate(record.tokens_per_s):>11}",
        f"eta {format_seconds(eta_s)}",
    ]
    if record.skipped:
        parts.append(f"{record.skipped} skipped: {record.skip_reason}")
    return " | ".join(parts)


def eval_line(record: EvalRecord, total: int) -> str:
    width = len(str(total))
    return f"eval {record.step:>{width}}/{total} {100 * record.step // total:>3}% | validation {record.val_bpb:.3f} bpb"


def start_lines(record: RunRecord) -> list[str]:
    """What is about to be trained."""
    ranks = f"{record.world} rank{'s' if record.world != 1 else ''}"
    return [
        f"model: {format_count(record.num_params)} params on {ranks} ({record.device}), layout {record.layout}, "
        f"plan {record.plan_digest[:12]}",
        f"routing: {record.routing}",
        *([f"going on from the checkpoint of step {record.first_step}"] if record.first_step else []),
        *([f"changed since then: {', '.join(record.changes)}"] if record.changes else []),
        f"data: {format_count(record.train_bytes)} bytes to train on, {format_count(record.val_bytes)} to validate; "
        f"{record.steps} steps of {format_count(record.tokens_per_step)} tokens",
    ]


def batch_warning(record: RunRecord) -> str | None:
    """A sentence where a run goes on with another global batch."""
    before, now = record.tokens_per_step_before, record.tokens_per_step
    if before is None or before == now:
        return None
    return (
        f"warning: the global batch changes from {before} to {now} tokens per step, and learning rates do not change with it. "
        f"To keep it, choose ranks, train.batch_size and train.accumulation whose product is that of before."
    )


def end_lines(record: EndRecord, steps: int) -> list[str]:
    """How it went."""
    what = "finished" if record.outcome == "finished" else f"stopped on request at step {record.step} of {steps}"
    rate = (
        f", {format_rate(record.tokens_per_s)}" if math.isfinite(record.tokens_per_s) else ""
    )  # no step was left to take
    return [
        f"{what}: {record.step} steps, {format_count(record.tokens)} tokens in {format_seconds(record.elapsed_s)}{rate}",
        f"validation: {record.first_val_bpb:.3f} -> {record.final_val_bpb:.3f} bits per byte",
    ]


class TrainConsole:
    """Shows a training run as it happens."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._console = make_console()
        self.failure: str | None = None
        """Why nothing is shown any more, for the one who talks to the user."""
        self._bar: Progress | None = None
        if self._console.is_terminal and os.environ.get("TERM") != "dumb":
            columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[eta]}"))
            # Twice a second is smooth enough and leaves the cores to the training.
            self._bar = Progress(*columns, console=self._console, transient=True, refresh_per_second=2)
            self._task = self._bar.add_task("training", total=total_steps, eta="")
            self._bar.start()

    def write(self, record: Record) -> None:
        """Show it. A reader that is gone, or a full disk, ends the showing and never the training."""
        if self.failure is not None:
            return
        try:
            self._show(record)
        except (OSError, SystemExit) as error:  # rich ends the process when nobody reads
            why = "nobody reads it" if isinstance(error, BrokenPipeError | SystemExit) else str(error)
            self.failure = f"stdout is no longer written: {why}. Training goes on."
            write_nowhere(1)
            self.close()  # the bar stands in for both streams as long as it is there
            complain(self.failure)

    def _show(self, record: Record) -> None:
        match record:
            case RunRecord():
                self._say(*start_lines(record))
                if (warning := batch_warning(record)) is not None:
                    note(warning)
            case StepRecord():
                self._say(step_line(record, self._total))
                if self._bar is not None:
                    eta_s = (self._total - record.step) * record.step_ms / 1000
                    self._bar.update(self._task, completed=record.step, eta=f"eta {format_seconds(eta_s)}")
            case EvalRecord():
                self._say(eval_line(record, self._total))
            case EndRecord():
                self.close()
                self._say(*end_lines(record, self._total))

    def close(self) -> None:
        """Take the bar away; safe to call twice."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError, SystemExit):
                bar.stop()

    def _say(self, *lines: str) -> None:
        for line in lines:
            self._console.print(line, markup=False)
        sys.stdout.flush()


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """A table on stdout; columns named in `right` hold numbers. Where there is no room, those in `optional` are left out,
    then long names in the first column lose their middle but never a range of layers, then columns at the end go, which is said;
    the last column holds the longest text and is folded, or cut in a file, whose lines stay below 200 characters."""
    console = make_console()
    width = console.width if console.is_terminal else _FILE_WIDTH
    for line in title.splitlines():
        for part in textwrap.wrap(line, width, subsequent_indent="    ") or [""]:
            console.print(part, markup=False)
    every = columns
    columns, rows, widths = _fitted(columns, rows, optional, width)
    lost = [column for column in every if column not in columns and column not in optional]
    if lost:
        text = f"(no room here for {', '.join(lost)}: see a wider terminal, a file, or --json)"
        for part in textwrap.wrap(text, width):
            console.print(part, markup=False)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column in right else "left"
        is_last = number == len(columns) - 1
        table.add_column(
            column, justify=justify, no_wrap=number == 0 or not console.is_terminal, overflow="fold", max_width=widths[number],
            min_width=None if is_last else min(widths[number], len(column)),
        )  # fmt: skip
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))  # brackets are text here, not markup
    if console.is_terminal:
        console.print(table, soft_wrap=False)
        return
    with console.capture() as drawn:
        console.print(table, soft_wrap=False)
    for line in drawn.get().splitlines():  # rich fills every row up to the width of its last column
        print(line.rstrip())


def _fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str], width: int
) -> tuple[list[str], list[list[str]], list[int]]:
    """Columns and cells that fit into so many characters, and how many each column has."""
    full = [max([len(column), *(len(row[n]) for row in rows)]) for n, column in enumerate(columns)]
    kept = list(range(len(columns)))

    def names() -> int:
        """Long names give way to the last column until it has the least that it needs, but keep a share of the width."""
        others = sum(full[n] for n in kept[1:-1]) + _GAP * len(kept)
        return min(full[0], max(_LEAST_OF_NAMES, int(width * _SHARE_OF_NAMES), width - others - least()))

    def least() -> int:
        return min(full[kept[-1]], _LEAST)

    def room() -> int:
        return width - names() - sum(full[n] for n in kept[1:-1]) - _GAP * len(kept)

    for name in optional:
        if room() < least() and name in columns:
            kept.remove(list(columns).index(name))
    cells = [[row[n] for n in kept] for row in rows]
    if room() < least() and len(kept) > 2:  # a word in every line would be unreadable
        return _fitted([columns[n] for n in kept[:-1]], [row[:-1] for row in cells], optional, width)
    found = [names(), *(full[n] for n in kept[1:-1]), max(_LEAST // 2, room())]
    for row in cells:
        row[0] = _without_middle(row[0], found[0])
        if width == _FILE_WIDTH and len(row[-1]) > found[-1]:
            row[-1] = f"{row[-1][: found[-1] - 2]}.."
    return [columns[n] for n in kept], cells, found


def _without_middle(name: str, width: int) -> str:
    """`model.la..self_attn.q_proj.weight`: the end of a long name says most, and its beginning where it is. A range of layers
    stays, since the rest would be the name of one param.

    >>> _without_middle("model.language_model.layers.31.self_attn.q_proj.weight", 34)
    'model.lan..self_attn.q_proj.weight'
    >>> _without_middle("model.layers.{0..31}.self_attn.q_proj.weight", 34)
    '..{0..31}.self_attn.q_proj.weight'
    """
    if len(name) <= width:
        return name
    if "{" in name and len(short := _around_ranges(name, width)) <= width:
        return short
    most = width - 2 - (width - 2) // 4
    starts = (at + 1 for at, letter in enumerate(name) if letter == "." and name[at + 1 : at + 2] not in ("", "."))
    start = next((at for at in starts if len(name) - at <= most and not name[at].isdecimal()), len(name))
    if len(name) - start < most // 2:  # the part before is a long one: most of it is better than nothing
        start = len(name) - most
    left, right = name[: width - 2 - (len(name) - start)], name[start:]
    if left.count("{") > left.count("}"):  # half of a range says nothing
        left = left[: left.rindex("{")]
    if right.count("}") > right.count("{"):
        right = right[right.index("}") + 1 :]
    return f"{left.rstrip('.')}..{right.lstrip('.')}"


def _around_ranges(name: str, width: int) -> str:
    """The ranges of a name, its end, and of the parts between its dots as many as there is room for, the last ones first."""
    parts = re.split(r"\.(?![^{]*\})", name)
    kept = {number for number, part in enumerate(parts) if "{" in part or part is parts[-1]}

    def joined(numbers: set[int]) -> str:
        shown = [part if number in numbers else "" for number, part in enumerate(parts)]
        return re.sub(r"\.{2,}(?![^{]*\})", "..", f".{'.'.join(shown)}" if not shown[0] else ".".join(shown))

    for number in reversed(range(len(parts))):
        if len(joined(kept | {number})) <= width:
            kept.add(number)
    return joined(kept)
