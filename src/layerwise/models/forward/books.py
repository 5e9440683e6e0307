"""The books of a forward that is followed: what is known of every tensor, and where the outputs of products ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerwise.models.forward.answers import Answers
from layerwise.models.forward.features import Features
from layerwise.models.forward.labels import Labels, LabelsBySource
from layerwise.models.forward.lanes import Lanes
from layerwise.models.forward.weights import Weights, storage_of


class Call(NamedTuple):
    """One operation: what was called, with what, and what it returned."""

    func: Any
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    ins: Sequence[Tensor]
    outs: Sequence[Tensor]


class Books:
    """Params and activations are meta tensors; what else there is may have values."""

    def __init__(self, params: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> None:
        self.weights = Weights(params)
        self.features = Features()
        self.answers = Answers()
        self.labels = Labels(self.features.halves)
        self.lanes = Lanes(self.features)
        self.shapes = {fqn: tuple(param.shape) for fqn, param in params.items()}
        self.looked_up: set[str] = set()
        self.other_uses: dict[str, Counter[str]] = {}
        """What is done with params that is no product, by operation."""
        self.convolutions: dict[str, str] = {}
        """Of convolutions: "plain", "grouped", "input"."""
        self.lost: dict[str, str] = {}
        """Products with params in an order that cannot be told."""
        self.step = 0
        self.live: set[int] = set()
        """Storages that depend on the model's inputs and params, unlike masks, positions and rotations."""
        self.raw: set[int] = set()
        """Storages with the model's inputs, before any product."""
        self.kept: list[Tensor] = []
        self.real: dict[int, Tensor] = {}
        """Values of meta tensors that had some, by storage."""
        self.ranked: dict[int, tuple[float, list[int]]] = {}
        """Storages that say which outputs of these sources are the largest, with how many elements say all of it: who reads
        fewer lets outputs compete."""
        for tensor in inputs:
            if tensor.dtype.is_floating_point:
                self.mark_live(tensor)
                self.raw.add(storage_of(tensor))

    def mark_live(self, tensor: Tensor) -> None:
        """It depends on what the model is given."""
        if storage_of(tensor) not in self.live:
            self.live.add(storage_of(tensor))
            self.kept.append(tensor)

    def mark_outputs(self, outputs: Iterable[Tensor]) -> None:
        """These are what the model returns: products that are still in them, and were read by nothing else, are heads."""
        returned = [item for tensor in outputs for item in self.labels.of(tensor).items()]
        unread = {source for source, _ in returned if not self.features.sources[source].has_ends}
        for source, labels in returned:
            if source not in unread:
                self.features.end(source, labels, "output")
            elif bool((labels >= 0).any()):
                self.features.sources[source].is_output = True

    def pass_on(self, ins: Sequence[Tensor], outs: Sequence[Tensor], *, is_product: bool) -> None:
        is_of_params = is_product and any(self.weights.holds(tensor) for tensor in ins)
        if is_of_params or any(storage_of(tensor) in self.live for tensor in ins):
            for out in outs:
                self.mark_live(out)
        if is_product:
            return
        self.lanes.pass_on_gates(ins, outs)
        if any(storage_of(tensor) in self.raw for tensor in ins):
            self.raw.update(storage_of(out) for out in outs)

    def compete(self, tensors: Sequence[Tensor]) -> None:
        """Who reads which outputs are the largest, but not the order of all of them, chooses."""
        for tensor in tensors:
            count, sources = self.ranked.get(storage_of(tensor), (0, []))
            if tensor.numel() < count:
                for source in sources:
                    self.features.sources[source].is_router = True

    def is_live(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and storage_of(tensor) in self.live

    def end(self, labels: LabelsBySource, place: object) -> None:
        for source, found in labels.items():
            self.features.end(source, found, (self.step, place))

    def lose(self, labels: LabelsBySource, name: str, place: int) -> None:
        """They went into something that is not known. Of a stream nothing more is to be known."""
        for source, found in labels.items():
            self.features.end(source, found, (self.step, place))
            if not self.features.sources[source].is_joined:
                self.features.sources[source].not_followed = self.features.sources[source].not_followed or name

    def used(self, tensor: Tensor, name: str) -> None:
        for fqn in self.weights.names(tensor):
            self.other_uses.setdefault(fqn, Counter())[name] += 1

    def rank(self, out: Tensor, source: int, count: float) -> None:
        self.ranked.setdefault(storage_of(out), (count, []))[1].append(source)
        self.kept.append(out)

    def value(self, found: Any) -> Any:
        """A tensor's values, where it has some."""
        if not isinstance(found, Tensor) or not found.is_meta:
            return found
        real = self.real[storage_of(found)]
        return torch.as_strided(real, found.shape, found.stride(), found.storage_offset()).cpu()
