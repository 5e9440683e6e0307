"""Labels of outputs: which feature of which product each element of a tensor comes from.

A source is one product's outputs, numbered from 0. A tensor may carry labels of several sources at once, where products
were added. Labels lie beside a storage, so that views of it have them without anybody doing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from layerwise.models.forward.weights import storage_of

NONE = -1
LabelsBySource = Mapping[int, Tensor]
"""For each source, the labels of a tensor's elements, in its shape; `NONE` where there is none."""


class Labels:
    """The labels of all tensors."""

    def __init__(self, on_pair: Callable[[int, Tensor], None]) -> None:
        self._flat: dict[int, dict[int, Tensor]] = {}
        self._itemsize: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self._on_pair = on_pair
        """Told of a source's labels that have become the two halves of one number."""

    def of(self, tensor: object) -> dict[int, Tensor]:
        """The labels of a tensor, by source; empty for most."""
        if not isinstance(tensor, Tensor):
            return {}
        flat = self._flat.get(storage_of(tensor))
        if not flat:
            return {}
        stored, own = self._itemsize[storage_of(tensor)], tensor.element_size()
        if own == stored:
            return {source: _strided(labels, tensor) for source, labels in flat.items()}
        if own == 2 * stored:  # seen as complex numbers
            return {source: self._paired(source, labels, tensor) for source, labels in flat.items()}
        if 2 * own == stored:  # complex numbers seen as pairs
            return {source: _strided(labels.repeat_interleave(2), tensor) for source, labels in flat.items()}
        return {}

    def put(self, tensor: Tensor, labels: LabelsBySource) -> None:
        """Say what a tensor's elements are, and that they are nothing else."""
        key = storage_of(tensor)
        stored = self._flat.get(key, {})
        for source in stored.keys() - labels.keys():
            _strided(stored[source], tensor).fill_(NONE)
        if not labels:
            return
        self._itemsize.setdefault(key, tensor.element_size())
        count = tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
        for source, found in labels.items():
            if source not in stored or stored[source].numel() < count:
                stored[source] = torch.full((count,), NONE, dtype=torch.int32, device="cpu")
            _write(_strided(stored[source], tensor), found.expand(tensor.shape))
        if key not in self._flat:
            self._flat[key] = stored
            self._kept.append(tensor)

    def _paired(self, source: int, labels: Tensor, tensor: Tensor) -> Tensor:
        strides = [2 * stride for stride in tensor.stride()]
        start = 2 * tensor.storage_offset()
        real, imaginary = (torch.as_strided(labels, tensor.shape, strides, start + part) for part in (0, 1))
        self._on_pair(source, torch.stack([real.reshape(-1), imaginary.reshape(-1)], 1))
        return real


def _write(target: Tensor, labels: Tensor) -> None:
    """Copy labels to where they belong, once where a tensor repeats its elements."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, labels = target.narrow(dim, 0, 1), labels.narrow(dim, 0, 1)
    is_same = target.untyped_storage().data_ptr() == labels.untyped_storage().data_ptr()
    target.copy_(labels.clone() if is_same else labels)


def _strided(flat: Tensor, tensor: Tensor) -> Tensor:
    return torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset())


def constant_along(labels: Tensor, dims: tuple[int, ...]) -> bool:
    """Whether labels are the same all along these axes."""
    if not dims or labels.numel() == 0:
        return True
    first, last = labels, labels
    for dim in dims:
        first, last = first.narrow(dim, 0, 1), last.narrow(dim, last.shape[dim] - 1, 1)
    return torch.equal(first, last) and bool((labels == first).all())  # the ends mostly tell: labels may be many


def without_repeats(*labels: Tensor) -> tuple[Tensor, ...]:
    """Labels of one shape, once along each axis along which none of them changes: nearly all of a picture's say the same."""
    for dim in range(labels[0].dim()):
        if labels[0].shape[dim] > 1 and all(constant_along(one, (dim,)) for one in labels):
            labels = tuple(one.narrow(dim, 0, 1) for one in labels)
    return labels
