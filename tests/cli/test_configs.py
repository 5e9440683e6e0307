"""The configs that ship with the project."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import layerwise
from layerwise.cli.exits import BAD_INPUT, OK
from layerwise.cli.main import main
from layerwise.cli.models import ModelKind, find_model
from layerwise.cli.settings import load_settings

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def test_there_are_configs() -> None:
    assert "tiny.toml" in [file.name for file in CONFIGS]


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_shipped_configs_are_valid(file: Path) -> None:
    load_settings(str(file), [])


@pytest.mark.parametrize("name", ["tiny", "moe", "pipeline"])
def test_a_shipped_config_has_a_name_that_is_that_of_its_file(name: str) -> None:
    """In a checkout `configs` leads to the package, where the files are."""
    assert load_settings(name, []).config == load_settings(str(ROOT / "configs" / f"{name}.toml"), []).config
    assert find_model(name).kind is ModelKind.TRAINER
    assert sorted(file.stem for file in CONFIGS) == ["moe", "pipeline", "tiny"]


def test_what_is_installed_has_the_configs(tmp_path: Path) -> None:
    """A wheel has all of the package's folder: with that alone, in another folder, they are found by name."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == ["src/layerwise"]
    assert "src/layerwise/configs" in targets["sdist"]["force-include"]  # beside the link to it
    shutil.copytree(Path(layerwise.__file__).parent, tmp_path / "site" / "layerwise", symlinks=True)
    places = os.pathsep.join(
        [str(tmp_path / "site"), *(place for place in sys.path if not place.startswith(str(ROOT)))]
    )
    code = "import sys, layerwise; print(layerwise.__file__); from layerwise.cli.main import main; sys.exit(main(sys.argv[1:]))"
    for name in ("tiny", "moe", "pipeline"):
        done = subprocess.run(
            [sys.executable, "-c", code, "train", name, "--dry-run"],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(tmp_path / "site"))
        assert f'out_dir = "runs/{name}"' in done.stdout


def test_an_unknown_name_lists_the_known_ones_and_a_file_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "huge", "--dry-run"]) == BAD_INPUT
    assert "huge: no config of layerwise has this name, and there is no such file." in (said := capsys.readouterr().err)
    assert "Known: moe, pipeline, tiny." in said
    assert main(["train", "huge.toml", "--dry-run"]) == BAD_INPUT
    assert "huge.toml: there is no such file." in capsys.readouterr().err
    (tmp_path / "moe").mkdir()  # of runs, say
    assert main(["train", "moe", "--dry-run"]) == OK
    assert "n_experts = 8" in capsys.readouterr().out
    (tmp_path / "tiny").write_text("[train]\nsteps = 77\n")
    assert main(["train", "tiny", "--dry-run"]) == OK
    assert "steps = 77" in capsys.readouterr().out
