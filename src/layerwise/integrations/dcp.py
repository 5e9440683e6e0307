"""Checkpoints by torch.distributed.checkpoint, called by the user: `TrainState` has the tensors of `layerwise.save` under the same names. DCP does not know
flat shards, so a save and a load need the planners of this module.

    from layerwise.integrations.dcp import LoadPlanner, SavePlanner, TrainState

    state = TrainState(model, optimizer)
    dcp.save({"train": state}, checkpoint_id=path, planner=SavePlanner())
    dcp.load({"train": state}, checkpoint_id=path, planner=LoadPlanner())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from layerwise.checkpoint.contents import Contents, Part
from layerwise.checkpoint.loading import check_published
from layerwise.optim.optimizer import Optimizer

_STEP, _LOSS_SCALE, _BEGUN = "layerwise.step", "layerwise.loss_scale", "layerwise.begun"


@dataclass(frozen=True)
class Boxes:
    """What this rank has of one tensor."""

    parts: tuple[Part, ...]

    def size(self) -> torch.Size:
        return torch.Size(self.parts[0].shape)

    def at(self, offset: torch.Size | None) -> Tensor:
        return next(part.tensor for part in self.parts if torch.Size(part.box.starts) == offset)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(part) for part in self.parts]

    def write_items(self, key: str) -> list[WriteItem]:
        """Of what several ranks have, one writes."""
        return [
            WriteItem(
                index=MetadataIndex(key, part.box.starts),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(part), TensorProperties.create_from_tensor(part.tensor), torch.Size(part.shape)
                ),
            )
            for part in self.parts
            if part.is_mine
        ]


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.box.starts), torch.Size(part.box.shape))


class TrainState:
    """A model and its optimizer as an object that torch.distributed.checkpoint saves and loads, with the planners of this
    module. Loading writes into the live tensors, as it does for any other object: `layerwise.load` checks files first.

    Args:
        model: the model that is saved; None takes the optimizer's own.
        optimizer: the `Optimizer` that steps it.
    """

    def __init__(self, model: nn.Module | None, optimizer: Optimizer) -> None:
        self._contents = Contents.of(model, optimizer)
        if self._contents.optimizer is None:
            raise TypeError(
                "TrainState was made without an optimizer: expected the layerwise.Optimizer that steps the model."
            )
        self._optimizer = self._contents.optimizer
        self._step = torch.zeros((), dtype=torch.int64, device="cpu")
        self._scale = {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in self._scaler_state()}
        self._begun = {fqn: torch.zeros((), dtype=torch.int64, device="cpu") for fqn in self._contents.rules}

    def _scaler_state(self) -> dict[str, float]:
        scaler = self._optimizer.stepper.scaler
        return {} if scaler is None else scaler.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """What this rank has of every tensor. Call it on every rank."""
        self._optimizer.bring_up_to_date()
        self._contents.make_ready()
        self._step.fill_(self._contents.engine.count.steps)
        for name, value in self._scaler_state().items():
            self._scale[name].fill_(value)
        for fqn, tensor in self._begun.items():
            tensor.fill_(self._contents.engine.count.begun.get(fqn, 0))
        found: dict[str, list[Part]] = {}
        for part in self._contents.parts():
            found.setdefault(part.key, []).append(part)
        numbers = {_STEP: self._step, **{f"{_LOSS_SCALE}.{name}": value for name, value in self._scale.items()}}
        numbers |= {f"{_BEGUN}.{self._contents.name_of(fqn)}": tensor for fqn, tensor in self._begun.items()}
        return {**numbers, **{key: Boxes(tuple(parts)) for key, parts in found.items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What was loaded is there already; weights follow masters now, on every rank."""
        scale = {name: float(value) for name, value in self._scale.items()}
        begun = {fqn: int(tensor) for fqn, tensor in self._begun.items()}
        with self._optimizer.replacing_state(int(self._step), scale or None, begun) as follow:
            follow()
            check_published(self._contents.engine)


class SavePlanner(DefaultSavePlanner):
    """torch's own, which also knows shards that are no tensors."""

    def create_local_plan(self) -> SavePlan:
        everything = self.state_dict
        boxes = {key: value for key, value in everything.items() if isinstance(value, Boxes)}
        self.state_dict = {key: value for key, value in everything.items() if key not in boxes}
        plan = super().create_local_plan()
        self.state_dict = everything
        self.plan = replace(
            plan, items=[*plan.items, *(item for key, own in boxes.items() for item in own.write_items(key))]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        own = self.state_dict[index.fqn]
        return own.at(index.offset) if isinstance(own, Boxes) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """torch's own, which also knows shards that are no tensors."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        flat, _ = flatten_state_dict(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)  # which forgets what it does not know
        self.state_dict.update({key: value for key, value in flat.items() if isinstance(value, Boxes)})
        # Older checkpoints do not say when the state of params began: with the model's.
        known = {} if metadata is None else metadata.state_dict_metadata
        for key in [key for key in self.state_dict if f"{_BEGUN}." in key and key not in known]:
            self.state_dict.pop(key).zero_()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        own = self.state_dict[index.fqn]
        return own.at(index.offset) if isinstance(own, Boxes) else super().lookup_tensor(index)
