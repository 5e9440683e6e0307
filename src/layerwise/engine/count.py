"""How many steps a model has taken, and since when the state of each of its params is what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class StepCount:
    """Steps taken so far; there is one count for a model."""

    def __init__(self) -> None:
        self.assumed = 0
        """As if a step of which it is not known yet had been taken."""
        self.begun: Mapping[str, int] = {}
        """Of params whose state began anew later than the model's, after which step it did. What corrects for the first steps
        of a state counts from there."""
        self._tensors: dict[int, Tensor] = {}
        self.look_back: Callable[[], None] = lambda: None
        """Called by whoever has to know."""

    @property
    def steps(self) -> int:
        self.look_back()
        return self.assumed

    @steps.setter
    def steps(self, count: int) -> None:
        self.assumed = count
        for begun, tensor in self._tensors.items():
            tensor.fill_(count - begun)

    def start(self, steps: int, begun: Mapping[str, int]) -> None:
        """Go on from what was loaded, or from nothing."""
        self.begun = {fqn: step for fqn, step in begun.items() if step}
        self._tensors.clear()
        self.steps = steps

    def as_tensor(self, fqn: str) -> Tensor:
        """The steps of a param's state, as torch's optimizers keep them with it: one tensor for all that have as many."""
        begun = self.begun.get(fqn, 0)
        return self._tensors.setdefault(begun, torch.tensor(float(self.assumed - begun), device="cpu"))
