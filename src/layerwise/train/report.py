"""From metrics records to a picture and a page: pure functions, one self-contained file each, no scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from layerwise.units import format_count, format_seconds

Records = Sequence[Mapping[str, object]]

_WIDTH, _HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 28, 44
_TRAIN_COLOUR, _VAL_COLOUR = "#8fa8c8", "#c0392b"
_MOST_POINTS = 1500  # more than the picture has pixels; keeps the file small for any length of run

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:800px;margin:2rem auto;padding:0 1rem;color:#222}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse}
td,th{text-align:left;padding:.2rem 1rem .2rem 0;border-bottom:1px solid #ddd;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}code{font-size:.9em}"""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    label: str
    colour: str
    points: tuple[tuple[float, float], ...]


def _number(record: Mapping[str, object], name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def series_of(records: Records, kind: str, name: str) -> tuple[tuple[float, float], ...]:
    """(step, value) of every record of a kind that has a finite value."""
    found = []
    for record in records:
        step, value = _number(record, "step"), _number(record, name)
        if record.get("kind") == kind and step is not None and value is not None:
            found.append((step, value))
    return tuple(found)


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers that cover [low, high], about `count` of them."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _thinned(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    stride = -(-len(points) // _MOST_POINTS) or 1
    return points[::stride] if (len(points) - 1) % stride == 0 else (*points[::stride], points[-1])


@dataclass(frozen=True, slots=True)
class _Frame:
    """Maps data to pixels."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, value: float) -> float:
        share = (value - self.low_x) / ((self.high_x - self.low_x) or 1.0)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low_y) / ((self.high_y - self.low_y) or 1.0)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def line_chart(title: str, y_label: str, lines: Sequence[Series], x_label: str = "step") -> str:
    """An SVG of lines over steps or another quantity, readable on its own."""
    points = [point for line in lines for point in line.points]
    if not points:
        points = [(0.0, 0.0), (1.0, 1.0)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    margin = 0.05 * (max(ys) - min(ys)) or 0.5
    frame = _Frame(min(xs), max(xs), min(ys) - margin, max(ys) + margin)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}" font-family="system-ui,sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14" fill="#222">{escape(title)}</text>',
        *_axes(frame, x_label, y_label),
        *(_polyline(frame, line) for line in lines if line.points),
        *_legend(lines),
        "</svg>",
    ]
    return "\n".join(parts)


def _axes(frame: _Frame, x_label: str, y_label: str) -> list[str]:
    parts = []
    for tick in nice_ticks(frame.low_y, frame.high_y):
        y = frame.y(tick)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end" fill="#555">{tick:.4g}</text>')
    for tick in nice_ticks(frame.low_x, frame.high_x):
        x = frame.x(tick)
        parts.append(f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle" fill="#555">{tick:.6g}</text>')
    middle = (_HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle" fill="#555">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" fill="#555" transform="rotate(-90 14 {middle})">'
        f"{escape(y_label)}</text>"
    )
    return parts


def _polyline(frame: _Frame, line: Series) -> str:
    path = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in _thinned(line.points))
    if len(line.points) == 1:
        x, y = path.split(",")
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{line.colour}"/>'
    return f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.8"/>'


def _legend(lines: Sequence[Series]) -> list[str]:
    parts = []
    for index, line in enumerate(lines):
        y = _TOP + 14 + 16 * index
        x = _WIDTH - _RIGHT - 130
        parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="4" fill="{line.colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y - 3}" fill="#222">{escape(line.label)}</text>')
    return parts


def loss_curve(records: Records) -> str:
    """Training and validation loss in bits per byte, as SVG."""
    return line_chart(
        "Loss over training",
        "bits per byte",
        (
            Series("training", _TRAIN_COLOUR, series_of(records, "step", "bpb")),
            Series("validation", _VAL_COLOUR, series_of(records, "eval", "val_bpb")),
        ),
    )


def html_report(records: Records) -> str:
    """One page about a run: result, curve, how it was set up."""
    run = next((record for record in reversed(records) if record.get("kind") == "run"), {})  # with the newest settings
    end = next((record for record in reversed(records) if record.get("kind") == "end"), {})
    title = "layerwise training run"
    return "\n".join(
        (
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"/><title>{title}</title><style>{_STYLE}</style></head><body>',
            f"<h1>{title}</h1>",
            _table(_result_rows(run, end)),
            "<h2>Loss</h2>",
            loss_curve(records),
            "<h2>Validation</h2>",
            _table([(f"step {step:.0f}", f"{bpb:.4f} bits per byte") for step, bpb in _some_evals(records)]),
            "<h2>Config</h2>",
            *_config_tables(run.get("config")),
            "</body></html>\n",
        )
    )


def _some_evals(records: Records, most: int = 20) -> list[tuple[float, float]]:
    evals = series_of(records, "eval", "val_bpb")
    stride = -(-len(evals) // most) or 1
    return sorted({*evals[::stride], *evals[-1:]})


def _result_rows(run: Mapping[str, object], end: Mapping[str, object]) -> list[tuple[str, str]]:
    def shown(record: Mapping[str, object], name: str, template: str) -> str:
        value = _number(record, name)
        return "not known" if value is None else template.format(value)

    elapsed = _number(end, "elapsed_s")
    tokens = _number(end, "tokens")
    return [
        ("outcome", str(end.get("outcome", "the run did not end"))),
        ("final validation", shown(end, "final_val_bpb", "{:.4f} bits per byte")),
        ("first validation", shown(end, "first_val_bpb", "{:.4f} bits per byte")),
        ("steps", shown(end, "step", "{:.0f}") + " of " + shown(run, "steps", "{:.0f}")),
        ("tokens", "not known" if tokens is None else format_count(tokens)),
        ("speed", shown(end, "tokens_per_s", "{:,.0f} tokens/s")),
        ("time", "not known" if elapsed is None else format_seconds(elapsed)),
        ("ranks", f"{run.get('world', 'not known')} on {run.get('device', 'not known')}"),
        ("params", shown(run, "num_params", "{:,.0f}")),
        ("routing", str(run.get("routing", "not known"))),
        ("layout", f"{run.get('layout', 'not known')}, plan {str(run.get('plan_digest', 'not known'))[:12]}"),
        ("versions", ", ".join(f"{name} {run.get(name, 'not known')}" for name in ("layerwise", "torch", "python"))),
    ]


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _config_tables(config: object) -> list[str]:
    if not isinstance(config, Mapping):
        return ["<p>not known</p>"]
    parts = []
    for section, values in config.items():
        if isinstance(values, Mapping):
            parts.append(f"<h3>{escape(str(section))}</h3>")
            parts.append(_table([(str(name), str(value)) for name, value in values.items()]))
    return parts
