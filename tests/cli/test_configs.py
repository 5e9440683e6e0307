"""The configs that ship with the project."""

from pathlib import Path

import pytest

from layerwise.cli.settings import load_settings

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def test_there_are_configs() -> None:
    assert "tiny.toml" in [file.name for file in CONFIGS]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_shipped_configs_are_valid(file: Path) -> None:
    load_settings(str(file), [])
