"""How quantities are written: binary bytes, counts, seconds."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "K", "M", "B", "T")

MIB = 1024 * 1024


def format_nbytes(nbytes: float) -> str:
    """`1536` -> `1.5 KiB`: sizes are binary and say so."""
    value = float(nbytes)
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def format_count(count: float) -> str:
    """`6_980_000_000` -> `6.98B`: parameter and FLOP counts, decimal."""
    value = float(count)
    for unit in _DECIMAL:
        if abs(value) < 1000 or unit == _DECIMAL[-1]:
            return f"{value:.0f}" if unit == "" else f"{value:.2f}{unit}"
        value /= 1000
    raise AssertionError("unreachable: the last unit always returns")


def format_seconds(seconds: float) -> str:
    """`75` -> `1m15s`: durations for people."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, whole = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{whole:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"
