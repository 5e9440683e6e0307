"""Settings of earlier versions: arguments, files and flags say what to write instead."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
from torch import nn

import layerwise
from layerwise.cli.main import main
from layerwise.config.gone import GONE, GONE_VALUES
from layerwise.config.load import load
from layerwise.errors import ConfigError

SECTION_OF_VALUES = {"layout": "parallel", "reducer": "parallel"}

FIELDS_OF_POLICY = {field.name for field in dataclasses.fields(layerwise.GradientPolicy)}


@pytest.mark.parametrize("name", sorted(GONE))
def test_an_argument_that_is_gone_says_what_to_write(name: str) -> None:
    for called in (
        lambda: layerwise.DataParallel(nn.Linear(2, 2), **{name: None}),
        lambda: layerwise.Optimizer(nn.Linear(2, 2), matrix=layerwise.Muon(lr=0.1), **{name: None}),
        lambda: layerwise.Muon(lr=0.1, **{name: None}),
    ):
        with pytest.raises(TypeError) as caught:
            called()
        assert f"no argument {name!r}: {GONE[name]}." in str(caught.value)


@pytest.mark.parametrize("name", sorted(GONE))
def test_a_line_of_a_file_or_a_flag_that_is_gone_says_what_to_write(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[parallel]\n{name} = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(str(file))
    assert [problem.what for problem in caught.value.problems] == [f"is gone: {GONE[name]}."]
    flag = f"--{name.replace('_', '-')}"
    assert main(["plan", "gpt2", "--world", "2", flag, "1"]) == 2
    assert f"{flag} is gone: {GONE[name]}." in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), sorted(GONE_VALUES))
def test_a_value_that_is_gone_says_what_to_write(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = f"Earlier versions had {name}={value!r}: {GONE_VALUES[name, value]}."
    takes = layerwise.GradientPolicy if name in FIELDS_OF_POLICY else partial(layerwise.DataParallel, nn.Linear(2, 2))
    with pytest.raises(ValueError) as from_argument:
        takes(**{name: value})
    assert advice in str(from_argument.value)
    if name not in SECTION_OF_VALUES:
        return
    file = tmp_path / "run.toml"
    file.write_text(f'[{SECTION_OF_VALUES[name]}]\n{name} = "{value}"\n')
    with pytest.raises(ConfigError) as from_file:
        load(str(file))
    assert advice in str(from_file.value)
    for words in ((f"--{name}", value), (f"--{name}={value}",)):
        assert main(["plan", "gpt2", "--world", "2", *words]) == 2
        assert f"--{name} {value} is gone: {GONE_VALUES[name, value]}." in capsys.readouterr().err


def test_the_config_of_an_earlier_run_may_have_gone_settings_at_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    sections = {"optim": {"method": "auto"}, "parallel": {"layout": "auto", "prefetch": None, "staging": "slots"}}
    file.write_text(json.dumps(sections))
    assert load(str(file)).config == load(None).config
    sections["parallel"]["staging"] = "gradients"
    file.write_text(json.dumps(sections))
    with pytest.raises(ConfigError, match=r"parallel\.staging: is gone"):
        load(str(file))
