"""Two checkpoints side by side."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from layerwise.checkpoint.files import Reader
from layerwise.checkpoint.manifest import Manifest


def differences(one: Path, mine: Manifest, two: Path, theirs: Manifest) -> list[dict[str, str]]:
    """Every tensor that is not the same in both, and how it differs; one tensor at a time in memory."""
    found = []
    with Reader(one, mine) as left, Reader(two, theirs) as right:
        for key in sorted({*mine.entries, *theirs.entries}):
            entry, other = mine.entries.get(key), theirs.entries.get(key)
            if entry is None or other is None:
                how = f"only in {one if other is None else two}"
            elif (entry.shape, entry.dtype) != (other.shape, other.dtype):
                how = f"{entry.shape} {entry.dtype} against {other.shape} {other.dtype}"
            else:
                how = _how(left.whole(key), right.whole(key))
            if how:
                found.append({"tensor": key, "how": how})
    return found


def _how(one: Tensor, two: Tensor) -> str:
    """How two tensors of one shape and dtype differ; empty where they do not, bit for bit."""
    if torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)):
        return ""
    count = int((one != two).sum())
    if not one.is_floating_point():
        return f"{count} of {one.numel()} elements"
    gap = (one.double() - two.double()).abs()
    return f"{count} of {one.numel()} elements, by at most {float(gap.nan_to_num(float('inf')).max()):.3g}"
