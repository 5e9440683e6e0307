"""Metadata for a package index and a repository host: pyproject.toml and the files beside it."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from benchmarks.tables import ROOT
from layerwise import __version__


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_package_has_addresses_authors_and_what_it_runs_on(project: dict[str, Any]) -> None:
    home = project["urls"]["Homepage"]
    assert set(project["urls"]) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    for name, address in project["urls"].items():
        assert address == home or address.startswith(f"{home}/"), name
        file = re.match(rf"{home}/blob/main/(.*)", address)
        assert file is None or (ROOT / file.group(1)).exists(), name
    assert project["authors"] == [{"name": "layerwise developers"}]
    assert {"Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3 :: Only"} <= set(
        project["classifiers"]
    )


def test_what_doctor_asks_for_is_an_extra(project: dict[str, Any]) -> None:
    assert [requirement.partition(";")[0] for requirement in project["optional-dependencies"]["triton"]] == ["triton"]


def test_one_version_everywhere(project: dict[str, Any]) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert newest.groups() == (__version__, citation["date-released"])
    assert citation["version"] == __version__
    assert citation["repository-code"] == project["urls"]["Homepage"]
    assert citation["license"] == project["license"]


def test_the_changelog_is_dated_short_lines() -> None:
    """A section has a version and a date, a line has fewer than 25 words, and there are at most 120 of them a version."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    sections = [line for line in lines if line.startswith("## ")]
    assert sections
    assert all(re.fullmatch(r"## (\d+\.\d+\.\d+ - \d{4}-\d{2}-\d{2}|Unreleased)", line) for line in sections)
    assert {line for line in lines if line.startswith("### ")} <= {
        f"### {kind}" for kind in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    }
    assert [line for line in lines if line.startswith("- ") and len(line[2:].split()) >= 25] == []
    for version in "\n".join(lines).split("\n## ")[1:]:
        assert version.count("\n- ") <= 120, version.splitlines()[0]


def test_a_bug_report_asks_for_the_doctor() -> None:
    forms = {
        path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    }
    assert set(forms) == {"bug_report", "feature_request", "config"}
    fields = {field["id"]: field for field in forms["bug_report"]["body"]}
    assert "`layerwise doctor`" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"] == {"required": True}


def test_a_vulnerability_can_be_reported_privately(project: dict[str, Any]) -> None:
    """SECURITY.md names the form that only maintainers read, and CONTRIBUTING.md leads to SECURITY.md."""
    text = (ROOT / "SECURITY.md").read_text()
    section = text.partition("\n## Reporting a vulnerability\n")[2].partition("\n## ")[0]
    assert "privately" in section
    assert f"<{project['urls']['Homepage']}/security/advisories/new>" in section
    assert "[privately](SECURITY.md)" in (ROOT / "CONTRIBUTING.md").read_text()
