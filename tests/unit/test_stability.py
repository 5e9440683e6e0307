"""docs/stability.md names the public interfaces that there are."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import layerwise
from layerwise.config.schema import SECTIONS
from layerwise.engine.totals import StepStats

PAGE = (Path(__file__).parent.parent.parent / "docs" / "stability.md").read_text()


def quoted(text: str) -> list[str]:
    """Words between backticks, in order."""
    return re.findall(r"`([^`]+)`", text)


def between(start: str, end: str) -> list[str]:
    """Words between backticks of the part of the page from `start` to `end`."""
    return quoted(PAGE[PAGE.index(start) : PAGE.index(end, PAGE.index(start))])


def test_the_page_lists_every_public_name() -> None:
    assert between("* **`layerwise`**", "* **`layerwise.integrations`**")[1:] == sorted(layerwise.__all__)


def test_every_other_name_of_the_page_is_in_its_module() -> None:
    text = PAGE[PAGE.index("* **`layerwise.errors`**") : PAGE.index("* **Methods")]
    modules = [name for name in quoted(text) if name.startswith("layerwise.")]
    names = [name for name in quoted(text) if not name.startswith("layerwise.")]
    assert [name for name in names if not any(hasattr(import_module(module), name) for module in modules)] == []
    assert len(names) > 10


def test_the_page_lists_every_statistic() -> None:
    listed = set(between("`optimizer.stats` has", "`help(")) - {"optimizer.stats"}
    assert listed == {field.name for field in fields(StepStats)} | {"bytes_sent"}


def test_the_page_lists_every_section_of_the_settings() -> None:
    assert between("Sections of the trainer's TOML", "; `layerwise train") == list(SECTIONS)
