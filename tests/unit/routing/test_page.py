"""docs/routing.md says what the code does."""

import re
from pathlib import Path

from layerwise.routing import split
from layerwise.routing.defaults import DEFAULT_RULES

PAGE = (Path(__file__).parents[3] / "docs" / "routing.md").read_text()


def test_the_page_lists_the_default_rules_in_order() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (matrix|other) \| ([^|]*)\|$", PAGE, flags=re.MULTILINE)
    assert [(name, family) for name, family, _ in rows] == [(rule.name, rule.family) for rule in DEFAULT_RULES]
    assert [name for name, _, note in rows if "fallback" in note] == [r.name for r in DEFAULT_RULES if r.is_fallback]


def test_the_page_has_the_table_of_splits() -> None:
    rows = [line for line in str(split.__doc__).splitlines() if line.startswith("|")]
    assert rows
    assert "\n".join(rows) in PAGE
