"""The `defaults` of an optimizer whose options belong to rules."""

from __future__ import annotations

import sys
from typing import Any

from torch.optim.lr_scheduler import CyclicLR, OneCycleLR


class Defaults(dict[str, Any]):
    """Empty. Schedulers that cycle momentum look here for it: the one moment to tell their user what to write. Others, such
    as monitors of learning rates, look too and find nothing."""

    def __contains__(self, name: object) -> bool:
        scheduler = sys._getframe(1).f_locals.get("self")
        if isinstance(scheduler, OneCycleLR | CyclicLR):
            raise ValueError(
                f"{type(scheduler).__name__} was built over a layerwise.Optimizer with cycle_momentum=True, its default: rules differ in "
                "what they call momentum, and it would cycle one name in all param groups. Pass cycle_momentum=False."
            )
        return super().__contains__(name)
