"""`layerwise ckpt`: look at checkpoints, check them, compare them, take weights out of them and bring others in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from layerwise.checkpoint.disk import damages_of, pieces_of, read_manifest
from layerwise.checkpoint.manifest import Manifest
from layerwise.cli.console import print_table
from layerwise.cli.exits import BAD_INPUT, FAILED, OK, complain
from layerwise.errors import CheckpointError
from layerwise.units import format_nbytes

Action = Literal["ls", "inspect", "verify", "diff", "export", "import"]
_WANTED = {
    "ls": (1, 1, "a folder with checkpoints in it"),
    "inspect": (1, 1, "a checkpoint"),
    "verify": (1, 1, "a checkpoint"),
    "diff": (2, 2, "two checkpoints"),
    "export": (1, 1, "a checkpoint"),
    "import": (1, 3, "a safetensors file, and state dicts of torch's optimizers"),
}
"""How many paths each action takes, at least and at most, and to what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CkptRequest:
    """What the user asked for."""

    action: Action
    paths: Sequence[str]
    to: str
    masters: bool
    as_json: bool


def run(request: CkptRequest) -> int:
    least, most, what = _WANTED[request.action]
    if not least <= len(request.paths) <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        complain(f"ckpt {request.action} takes {count} path{'s' if most > 1 else ''}, got {len(request.paths)}.")
        return BAD_INPUT
    if request.masters and request.action != "export":
        complain(f"ckpt {request.action} takes no --masters.")
        return BAD_INPUT
    if (request.action in ("export", "import")) != bool(request.to):
        needs = "needs --to, where the result goes" if not request.to else "takes no --to"
        complain(f"ckpt {request.action} {needs}.")
        return BAD_INPUT
    paths = [Path(path) for path in request.paths]
    missing = ", ".join(path or "''" for path in request.paths if not os.path.exists(path))
    if missing:
        complain(f"{missing}: there is no such file or folder. ckpt {request.action} takes {what}.")
        return BAD_INPUT
    problem = _target_problem(request.action, Path(request.to)) if request.to else None
    if problem is not None:
        complain(f"--to {request.to}: {problem}")
        return BAD_INPUT
    wants_files = request.action == "import"
    others = ", ".join(str(path) for path in paths if os.path.isdir(path) == wants_files)
    if others:
        complain(f"{others}: not a {'file' if wants_files else 'folder'}. ckpt {request.action} takes {what}.")
        return BAD_INPUT
    actions: dict[str, Callable[[], int]] = {
        "ls": lambda: _ls(paths[0], request.as_json),
        "inspect": lambda: _inspect(paths[0], request.as_json),
        "verify": lambda: _verify(paths[0], request.as_json),
        "diff": lambda: _diff(paths[0], paths[1], request.as_json),
        "export": lambda: _export(paths[0], Path(request.to), request.masters, request.as_json),
        "import": lambda: _import(paths[0], paths[1:], Path(request.to), request.as_json),
    }
    try:
        return actions[request.action]()
    except CheckpointError as error:
        complain(str(error))
        return FAILED
    except BrokenPipeError:
        raise  # of whoever reads what is printed
    except OSError as error:
        if error.filename is None:
            raise  # of what is printed
        complain(f"{error.filename}: {error.strerror}.")
        return FAILED


def _target_problem(action: Action, target: Path) -> str | None:
    """Why a result cannot go there, found before anything is read."""
    if action == "export" and target.is_dir():
        return "is a folder. ckpt export writes a file, such as model.safetensors."
    if not target.absolute().parent.is_dir():
        return f"there is no folder {target.parent} to put it into."
    return None


def _ls(folder: Path, as_json: bool) -> int:
    """Every checkpoint in a folder."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            continue
        if path.name.endswith(".partial"):
            rows.append({"name": path.name, "what": "not whole: its writing was cut short"})
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            rows.append({"name": path.name, "what": str(error)})
            continue
        rows.append({"name": path.name, "step": manifest.step, "nbytes": manifest.nbytes, "what": _in_words(manifest)})
    if as_json:
        print(json.dumps(rows))
        return OK
    cells = [[row["name"], str(row.get("step", "")), _size(row), row["what"]] for row in rows]
    print_table(f"{len(rows)} in {folder}", ["name", "step", "size", "what"], cells, right=["step", "size"])
    return OK


def _size(row: dict[str, Any]) -> str:
    return format_nbytes(row["nbytes"]) if "nbytes" in row else ""


def _in_words(manifest: Manifest) -> str:
    about = manifest.about
    what = "weights and optimizer" if about.get("has_optimizer") else "weights"
    ranks = "1 rank" if about.get("world") == 1 else f"{about.get('world')} ranks"
    return f"{what}, {len(manifest.entries)} tensors, by {ranks}, layout {about.get('layout')}"


def _inspect(path: Path, as_json: bool) -> int:
    """Every tensor of a checkpoint, and what is said beside them."""
    manifest = read_manifest(path)
    about = {name: value for name, value in manifest.about.items() if name != "params"}
    if as_json:
        entries = {
            key: {"shape": list(entry.shape), "dtype": entry.dtype, "chunks": len(entry.chunks)}
            for key, entry in manifest.entries.items()
        }
        print(json.dumps({"about": about, "entries": entries, "params": manifest.about.get("params", {})}))
        return OK
    rows = [
        [
            key,
            " x ".join(map(str, entry.shape)) or "scalar",
            entry.dtype,
            str(len(entry.chunks)),
            format_nbytes(entry.nbytes),
        ]
        for key, entry in manifest.entries.items()
    ]
    title = f"{path}: step {manifest.step}, {_in_words(manifest)}\nwritten by layerwise {about.get('layerwise')}, torch {about.get('torch')}"
    extra = sorted(about.get("extra", {}))
    title += f"\nbeside it: {', '.join(extra)}" if extra else ""
    print_table(title, ["tensor", "shape", "dtype", "chunks", "bytes"], rows, right=["chunks", "bytes"])
    return OK


def _verify(path: Path, as_json: bool) -> int:
    """Read every byte and compare it with what was written."""
    manifest = read_manifest(path)
    damage = damages_of(path, manifest.files, pieces_of(manifest.files))
    if as_json:
        print(json.dumps({"path": str(path), "files": len(manifest.files), "damage": damage}))
    elif damage:
        complain("\n".join([f"{path} is damaged:", *(f"  {text}" for text in damage)]))
    else:
        nbytes = sum(facts.nbytes for facts in manifest.files.values())
        print(f"{path} is whole: step {manifest.step}, {len(manifest.files)} files, {format_nbytes(nbytes)}.")
    return FAILED if damage else OK


def _diff(one: Path, two: Path, as_json: bool) -> int:
    """What two checkpoints do not have in common; exit code 1 if there is anything."""
    from layerwise.checkpoint.compare import differences

    found = differences(one, read_manifest(one), two, read_manifest(two))
    if as_json:
        print(json.dumps(found))
    elif found:
        print_table(f"{len(found)} tensors differ", ["tensor", "how"], [[row["tensor"], row["how"]] for row in found])
    else:
        print("all tensors are equal, bit for bit.")
    return FAILED if found else OK


def _export(path: Path, target: Path, masters: bool, as_json: bool) -> int:
    from layerwise.checkpoint.weights import export_weights

    return _written(export_weights(path, read_manifest(path), target, masters=masters), target, as_json)


def _import(weights: Path, states: list[Path], target: Path, as_json: bool) -> int:
    from layerwise.checkpoint.weights import import_weights

    return _written(import_weights(weights, states, target), target, as_json)


def _written(count: int, target: Path, as_json: bool) -> int:
    print(json.dumps({"path": str(target), "tensors": count}) if as_json else f"{count} tensors written to {target}.")
    return OK
