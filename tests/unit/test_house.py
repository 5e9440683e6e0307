"""The shape of the house, where the import contract of pyproject.toml cannot see it."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path

import layerwise
from layerwise.config.layouts import LAYOUTS

SOURCE = Path(layerwise.__file__).parent


@cache
def modules() -> list[tuple[str, ast.Module]]:
    return [(str(path.relative_to(SOURCE)), ast.parse(path.read_text())) for path in sorted(SOURCE.rglob("*.py"))]


def imported_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def uses_attribute(tree: ast.Module, owner: str, attribute: str) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
        for node in ast.walk(tree)
    )


FORMATS = "torch.distributed.checkpoint."
"""What says how torch's checkpoints are written, and sends nothing; known in two files."""


def test_torch_distributed_is_used_in_comm_only() -> None:
    offenders = [
        name
        for name, tree in modules()
        if not name.startswith("comm/")
        and (
            any(
                used.startswith("torch.distributed")
                and not (
                    used.startswith(FORMATS) and (name.startswith("checkpoint/torch_") or name == "integrations/dcp.py")
                )
                for used in imported_names(tree)
            )
            or uses_attribute(tree, "torch", "distributed")
        )
    ]
    assert offenders == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Also not by way of imports inside functions, which only hide one. The package itself names its public names lazily."""
    module_of = {"layerwise." + name.removesuffix(".py").replace("/", "."): name for name, _ in modules()}
    left = {
        name: {module_of[used] for used in imported_names(tree) & module_of.keys()} - {name} for name, tree in modules()
    }
    while done := {name for name, used in left.items() if not used & left.keys()}:
        left = {name: used for name, used in left.items() if name not in done}
    assert sorted(left) == []


def test_only_one_module_imports_tyro_and_only_one_imports_rich() -> None:
    for package, home in (("tyro", "cli/main.py"), ("rich", "cli/console.py")):
        users = {
            name for name, tree in modules() if any(used.split(".")[0] == package for used in imported_names(tree))
        }
        assert users <= {home}, f"{package} is imported by {sorted(users)}"


def test_user_errors_are_never_asserts() -> None:
    """`python -O` drops asserts; what a user can get wrong must still be refused there."""
    asserts = [
        f"{name}:{node.lineno}" for name, tree in modules() for node in ast.walk(tree) if isinstance(node, ast.Assert)
    ]
    assert asserts == []


def test_the_public_names_are_pinned() -> None:
    assert sorted(layerwise.__all__) == [
        "AdaMuon",
        "AdamW",
        "AttentionHeads",
        "Checkpoints",
        "DataParallel",
        "GradientPolicy",
        "Lion",
        "LossScale",
        "Muon",
        "NorMuon",
        "Optimizer",
        "QKClip",
        "RouteRule",
        "Split",
        "__version__",
        "init",
        "load",
        "quantize",
        "record_logits",
        "save",
    ]
    assert all(getattr(layerwise, name) is not None for name in layerwise.__all__)


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, layerwise, layerwise.layout.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_module_is_called_utils() -> None:
    vague = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert [name for name, _ in modules() if name.split("/")[-1] in vague] == []


def _constants(node: ast.AST) -> set[object]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def test_modes_are_data() -> None:
    """A layout is a row of a table. Nobody compares its name, counts shards or has a number that means "every rank"."""
    offenders = []
    for name, tree in modules():
        if name.startswith("layout/"):
            continue
        for node in ast.walk(tree):
            compared = isinstance(node, ast.Compare | ast.match_case) and _constants(
                node.pattern if isinstance(node, ast.match_case) else node
            ) & set(LAYOUTS)
            asks = isinstance(node, ast.Attribute) and node.attr in ("num_shards", "EVERY_RANK")
            starts = (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("startswith", "endswith")
                and _constants(node) & set(LAYOUTS)
            )
            if compared or asks or starts:
                offenders.append(f"{name}:{getattr(node, 'lineno', 0)}")
    assert offenders == []


def test_a_layouts_name_decides_nothing_in_the_layout_room_either() -> None:
    """What a layout does is in its facts; its name is looked up and shown. `auto` is a question and no layout."""
    offenders = [
        f"{name}:{node.lineno}"
        for name, tree in modules()
        if name.startswith("layout/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and _constants(node) & set(LAYOUTS)
    ]
    assert offenders == []


def code_lines(path: Path, tree: ast.Module) -> int:
    """Lines that are neither blank nor comments nor docstrings."""
    lines = path.read_text().splitlines()
    told = sum(
        node.body[0].end_lineno - node.body[0].lineno + 1  # type: ignore[operator]
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node)
    )
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in lines) - told


BUDGETS = {
    "": 230,
    "checkpoint": 2466,
    "cli": 2570,
    "comm": 1817,
    "config": 1710,
    "engine": 3425,
    "integrations": 183,
    "kernels": 2911,
    "layout": 2628,
    "memory": 1028,
    "models": 3297,
    "optim": 829,
    "parallel": 351,
    "planner": 1274,
    "routing": 1725,
    "train": 1494,
}
"""Code lines of each folder. A commit that raises a number says what that buys; one that removes code lowers it."""


def test_rooms_keep_to_their_budgets_of_code_lines() -> None:
    found = dict.fromkeys(BUDGETS, 0)
    for name, tree in modules():
        room = name.partition("/")[0] if "/" in name else ""
        found[room] = found.get(room, 0) + code_lines(SOURCE / name, tree)
    over = {room: lines for room, lines in found.items() if lines > BUDGETS.get(room, 0)}
    assert over == {}
    slack = {room: BUDGETS[room] - lines for room, lines in found.items() if lines < BUDGETS[room] - 30}
    assert slack == {}, "lower the budgets by what went"


def test_no_file_is_longer_than_600_lines() -> None:
    lines = {name: len((SOURCE / name).read_text().splitlines()) for name, _ in modules()}
    assert {name: count for name, count in lines.items() if count > 600} == {}


def test_files_below_60_lines_do_not_become_more() -> None:
    """A concept is rarely that small. Folders of adapters and of commands are left out."""
    small = [
        name
        for name, _ in modules()
        if not name.startswith(("integrations/", "cli/", "rules/"))
        and not name.endswith("__init__.py")
        and len((SOURCE / name).read_text().splitlines()) < 60
    ]
    assert len(small) <= 47, small


def test_the_classes_that_everybody_builds_have_at_most_14_arguments() -> None:
    for kind in (layerwise.DataParallel, layerwise.Optimizer):
        assert len(inspect.signature(kind).parameters) <= 14, kind
