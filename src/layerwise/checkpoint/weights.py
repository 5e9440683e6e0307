"""Weights to and from safetensors files, and optimizer state from torch's own optimizers: how a model comes in, and how it goes
out to who reads it by the model's own names."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerwise._version import __version__
from layerwise.checkpoint.contents import MASTER, MODEL, STATE, ParamFacts, Part
from layerwise.checkpoint.disk import (
    check_free,
    damages_of,
    make_partial,
    none_left,
    opened,
    partial_of,
    pieces_of,
    read_at,
)
from layerwise.checkpoint.files import Reader, bytes_of
from layerwise.checkpoint.manifest import Manifest
from layerwise.checkpoint.saving import commit, write_parts
from layerwise.errors import CheckpointError, listed
from layerwise.routing.geometry import Box

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What safetensors files call the dtypes of torch."""
_MOST_HEADER = 100 << 20
"""Bytes of the largest header that safetensors files may have."""
_DTYPES = {theirs: ours for ours, theirs in _NAMES.items()}
_KINDS = {
    "momentum_buffer": ("muon", "momentum"),
    "exp_avg": ("adamw", "exp_avg"),
    "exp_avg_sq": ("adamw", "exp_avg_sq"),
}
"""The state of torch.optim.Muon and AdamW: whose rule it is here, and its name. Both Muons keep a moving average."""


def export_weights(folder: Path, manifest: Manifest, target: Path, *, masters: bool) -> int:
    """Write all weights into one safetensors file, one tensor at a time; masters in their place, if asked for and there.
    Returns how many. Files are checked first."""
    damage = damages_of(folder, manifest.files, pieces_of(manifest.files))
    if damage:
        raise CheckpointError(f"{folder} is damaged: {listed(damage)}. Nothing was written.")
    keys = {}
    for key in manifest.entries:
        if key.startswith(f"{MODEL}."):
            name = key.removeprefix(f"{MODEL}.")
            master = f"{STATE}.{name}.{MASTER}"
            keys[name] = master if masters and master in manifest.entries else key
    unknown = [name for name, key in keys.items() if manifest.entries[key].dtype not in _NAMES]
    if unknown:
        raise CheckpointError(f"{listed(unknown)} have a dtype that safetensors files do not know.")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, key in keys.items():
        entry = manifest.entries[key]
        header[name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = partial_of(target)
    with open(partial, "wb") as file:
        try:
            with Reader(folder, manifest) as reader:
                file.write(len(text).to_bytes(8, "little") + text)
                for key in keys.values():
                    whole = reader.whole(key)
                    file.write(bytes_of(whole))
            file.flush()
            os.fsync(file.fileno())
            os.rename(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return len(keys)


def read_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file, one at a time."""
    with opened(path, "a safetensors file") as descriptor:
        nbytes = os.fstat(descriptor).st_size
        length = int.from_bytes(read_at(descriptor, 0, 8), "little")
        if not 0 < length <= min(_MOST_HEADER, nbytes - 8):
            raise CheckpointError(f"{path} is no safetensors file: its header would have {length} bytes.")
        try:
            header = json.loads(read_at(descriptor, 8, length))
            header.pop("__metadata__", None)
            found = [
                (name, said["dtype"], tuple(said["shape"]), *said["data_offsets"]) for name, said in header.items()
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} has a malformed header: {error}.") from None
        for name, dtype, shape, start, stop in found:
            if dtype not in _DTYPES:
                raise CheckpointError(f"{path} has {name!r} with dtype {dtype!r}: known are {', '.join(_DTYPES)}.")
            kind = getattr(torch, _DTYPES[dtype])
            if not 0 <= start <= stop <= nbytes - 8 - length or stop - start != math.prod(shape) * kind.itemsize:
                raise CheckpointError(
                    f"{path} has {name!r} outside of the file, or with another size than its shape has."
                )
            raw = read_at(descriptor, 8 + length + start, stop - start)
            yield (
                name,
                torch.frombuffer(raw, dtype=kind).view(shape) if raw else torch.empty(shape, dtype=kind, device="cpu"),
            )


def import_weights(weights: Path, states: list[Path], target: Path) -> int:
    """Make a checkpoint of a safetensors file and of state dicts of torch.optim.Muon and AdamW over the same params, as
    torch.save() wrote them. Returns how many tensors."""
    check_free(target)
    tensors = {f"{MODEL}.{name}": tensor for name, tensor in read_weights(weights)}
    params = {key.removeprefix(f"{MODEL}."): tensor for key, tensor in tensors.items()}
    rules: dict[str, str] = {}
    steps: dict[str, int] = {}
    states_of: dict[str, Path] = {}
    for path in states:
        for name, state in _named_states(path).items():
            if name not in params:
                raise CheckpointError(f"{path} has state of {name!r}, and {weights} has no such param.")
            if name in states_of:
                raise CheckpointError(
                    f"{path} has state of {name!r}, and so has {states_of[name]}: expected one of them."
                )
            states_of[name] = path
            for kind, tensor in state.items():
                if kind == "step":
                    steps[name] = int(tensor)
                elif kind in _KINDS and tensor.shape == params[name].shape:
                    rules[name], own = _KINDS[kind]
                    tensors[f"{STATE}.{name}.{own}"] = tensor.to(torch.float32)
                else:
                    raise CheckpointError(
                        f"{path} has {kind!r} of shape {tuple(tensor.shape)} for {name!r}: expected {listed(sorted(_KINDS))} of the "
                        "param's shape, as torch.optim.Muon and AdamW keep them."
                    )
    # The model has taken as many as the param with most; torch's Muon counts none.
    most = max(steps.values(), default=0)
    facts = {
        name: ParamFacts(
            list(tensor.shape), rules.get(name, "frozen" if rules else ""), [], [], begun=most - steps.get(name, most)
        )
        for name, tensor in params.items()
    }
    about = {
        "step": most,
        "world": 1,
        "layout": "imported",
        "plan": "",
        "layerwise": __version__,
        "torch": str(torch.__version__),
        "loss_scale": None,
        "options": [],
        "has_optimizer": bool(rules),
        "extra": {},
        "params": {name: tuple(said) for name, said in facts.items()},
    }
    parts = (
        Part(key, tuple(tensor.shape), Box.whole(tuple(tensor.shape)), tensor, True) for key, tensor in tensors.items()
    )
    partial = make_partial(target)
    with none_left([partial]):
        written = write_parts(parts, partial / "__0_0.distcp")
        commit(Manifest(written.entries, written.files, about), target)
    return len(tensors)


def _named_states(path: Path) -> dict[str, Mapping[str, Tensor]]:
    """The state of every param in a state dict of a torch optimizer, by name."""
    with opened(path, "an optimizer's state dict"):
        try:
            saved: Any = torch.load(path, weights_only=True, map_location="cpu")
        except OSError:
            raise
        except Exception:
            # Bytes that are no pickle fail in any way there is, and what torch says of it advises to unpickle whatever it is.
            raise CheckpointError(
                f"{path} is no state dict of a torch optimizer, as torch.save() writes one: nothing else is read from such files."
            ) from None
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or "state" not in saved:
        raise CheckpointError(f"{path} is no state dict of a torch optimizer: expected 'state' and 'param_groups'.")
    found: dict[str, Mapping[str, Tensor]] = {}
    for group in groups:
        names = group.get("param_names")
        if names is None:
            raise CheckpointError(
                f"{path} does not say whose state it has: expected param_names in every group. Build the optimizer with "
                "named_parameters() in place of parameters(), load its state and save it again."
            )
        for name, number in zip(names, group["params"], strict=True):
            if number in saved["state"]:
                found[name] = saved["state"][number]
    return found
