"""What tests read in `chain.cu`, without the Triton that its driver needs."""

from __future__ import annotations

import re
from importlib.resources import files

SOURCE = (files("layerwise.kernels") / "chain.cu").read_text()


def constant(name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)\b", SOURCE)
    assert found is not None
    return int(found[1])
