"""Experts in one product: `einsum("btd,efd->btef", x, w)` multiplies with all of them at once, as if they were one matrix.

A param of three or more dims whose leading axis is an axis of its outputs has *lanes*, one for each entry. They are matrices
apart where something treats them so: a gate for each of them, made of scores that compete, or a stack of further params
that has an entry for each. What else there is of three dims (heads, most of all) stays one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.models.forward.features import Features
from layerwise.models.forward.labels import NONE, Labels, LabelsBySource, constant_along
from layerwise.models.forward.weights import View, storage_of


class Lanes:
    """Which lane of which product each element of a tensor comes from, and which tensors are gates."""

    def __init__(self, features: Features) -> None:
        self._features = features
        self._of = Labels(lambda *_: None)
        self._gates: set[int] = set()
        self._kept: list[Tensor] = []

    def begin(self, out: Tensor, labels: LabelsBySource, shape: Sequence[int]) -> None:
        """A product with a param of that shape: note the lanes of its outputs, if it has any."""
        for source, found in labels.items():
            size = lane_size(self._features.sources[source].views, shape)
            if size and not self._features.sources[source].is_stack:
                lanes = torch.div(found, size, rounding_mode="floor")
                self._of.put(out, {source: torch.where(found == NONE, NONE, lanes)})

    def carry(self, ins: Sequence[Tensor], out: Tensor) -> None:
        """Values changed one by one, or copied: lanes stay."""
        for tensor in ins:
            found = self._of.of(tensor) if tensor.numel() == out.numel() else {}
            if found:
                self._of.put(out, {source: lanes.reshape(out.shape) for source, lanes in found.items()})
                return

    def mark_gates(self, out: Tensor) -> None:
        """It says how much each of several outputs counts."""
        self._gates.add(storage_of(out))
        self._kept.append(out)

    def pass_on_gates(self, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """What is made of gates is one, unless it is what they are for."""
        if any(storage_of(tensor) in self._gates for tensor in ins) and not any(map(self._of.of, ins)):
            for out in outs:
                self.mark_gates(out)

    def gate(self, ins: Sequence[Tensor], out: Tensor) -> None:
        """A product of elements: lanes that are multiplied with a gate each are apart."""
        for gate in ins:
            if storage_of(gate) in self._gates and gate.numel() < out.numel():
                sizes = (*(1 for _ in range(out.dim() - gate.dim())), *gate.shape)
                for axis, size in enumerate(sizes):
                    self._apart(ins, axis - out.dim(), size)

    def gate_as_product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """A batched product over an axis of one number multiplies elements, too."""
        for gate, tensor, axis in ((left, right, -1), (right, left, -2)):
            if storage_of(gate) in self._gates and gate.dim() == 3 and gate.shape[axis] == 1:
                self._apart([tensor], -3, gate.shape[0])
                self.carry([tensor], out)

    def meet_stack(self, left: Tensor) -> None:
        """A batched product with a stack of params: lanes that go to an entry each are apart."""
        self._apart([left], -left.dim(), left.shape[0])

    def _apart(self, tensors: Sequence[Tensor], axis: int, size: int) -> None:
        for tensor in tensors:
            for source, lanes in self._of.of(tensor).items() if tensor.dim() >= -axis else ():
                others = tuple(dim for dim in range(-tensor.dim(), 0) if dim != axis)
                if (
                    size == tensor.shape[axis] > 1
                    and constant_along(lanes, others)
                    and not constant_along(lanes, (axis,))
                ):
                    self._features.set_apart(source, int(lanes.max()) + 1)

    def runs(self, left: Tensor) -> list[int]:
        """Lengths of the lanes along the last axis of what a product contracts, where they are apart; else empty."""
        for source, lanes in self._of.of(left).items():
            others = tuple(range(lanes.dim() - 1))
            if self._features.sources[source].is_stack and constant_along(lanes, others):
                row = lanes.reshape(-1, lanes.shape[-1])[0]
                found, counts = torch.unique_consecutive(row, return_counts=True)
                if len(found) > 1 and len(found.unique()) == len(found) and int(found.min()) != NONE:
                    lengths: list[int] = counts.tolist()
                    return lengths
        return []


def lane_size(views: Sequence[View], shape: Sequence[int]) -> int:
    """Outputs of each entry of a param's leading axis, where that is the outermost axis of all outputs; else 0."""
    if len(shape) < 3 or shape[0] < 2 or any(view.fqn != views[0].fqn for view in views):
        return 0
    entries, stride = shape[0], 1
    for size in shape[1:]:
        stride *= size
    n_out = sum(view.sizes[0] for view in views)
    if n_out % entries or n_out * views[0].sizes[1] != entries * stride:
        return 0
    each = n_out // entries
    if len(views) == entries:
        return each if all(view.offset == number * stride for number, view in enumerate(views)) else 0
    return each if len(views) == 1 and views[0].strides[0] * each == stride else 0
