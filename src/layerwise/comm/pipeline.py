"""A pipeline of stages on torch's own schedules.

A model of S stages lies on P ranks: rank r holds stages r, r + P, r + 2P and so on, its chunks. Stages pass one tensor
on. Its shape is said beforehand, because torch would otherwise find it out with pickled messages.

Training is torch's schedule. Evaluation is a plain relay without one: torch's schedules want the same number of
microbatches of the same size every time, and before 2.13 cannot train after they have evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from layerwise.comm.lifetimes import check_alive

Loss = Callable[[Tensor, Tensor], Tensor]
"""From the last stage's output and a target to a scalar."""


@dataclass(frozen=True, kw_only=True)
class Wires:
    """What goes into the first stage, between stages, and out of the last, for one microbatch: tensors that hold
    nothing (on the meta device, say) with the right shape and dtype."""

    source: Tensor
    between: Tensor
    result: Tensor


class Pipeline:
    """The stages of one rank, and a schedule that runs microbatches through those of all ranks.

    Args:
        chunks: this rank's stages, in order; every rank has the same number.
        group: the ranks of the pipeline, in order.
        device: where the stages are.
        schedule: "1f1b" or "gpipe"; several chunks need "1f1b".
        num_microbatches: in one step.
        wires: what travels.
        loss: called on the last rank, once per microbatch. The gradients of a step are those of the sum of losses, so a
            mean over microbatches is divided in here.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        schedule: str,
        num_microbatches: int,
        wires: Wires,
        loss: Loss,
    ) -> None:
        self._chunks = tuple(chunks)
        self._group = group
        self._device = device
        self._wires = wires
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.num_stages = self.world * len(self._chunks)
        self.num_microbatches = num_microbatches
        stages = [self._stage(index) for index in range(len(self._chunks))]
        self._schedule = _schedule(stages, schedule, num_microbatches, loss)

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, which reads the input."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which knows the loss."""
        return self.rank == self.world - 1

    def _stage(self, index: int) -> PipelineStage:
        number = self.rank + index * self.world
        is_last = number == self.num_stages - 1
        return PipelineStage(
            self._chunks[index],
            number,
            self.num_stages,
            self._device,
            # Floating point tensors between stages have gradients, and torch makes buffers for them only if it is told.
            input_args=(self._wires.source if number == 0 else _with_gradient(self._wires.between),),
            output_args=(_with_gradient(self._wires.result if is_last else self._wires.between),),
            group=self._group,
        )

    def step(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Forward and backward of every microbatch; the losses, which are known on the last rank only.

        All ranks give all microbatches: the first rank uses the sources and the last the targets.
        """
        if len(sources) != self.num_microbatches or len(targets) != self.num_microbatches:
            raise ValueError(
                f"expected {self.num_microbatches} microbatches, got {len(sources)} sources and {len(targets)} targets."
            )
        check_alive(self._group, "microbatches")
        losses: list[Tensor] = []
        inputs = (torch.cat(list(sources)),) if self.is_first else ()
        if self.is_last:
            self._schedule.step(*inputs, target=torch.cat(list(targets)), losses=losses, return_outputs=False)
        else:
            self._schedule.step(*inputs, return_outputs=False)
        return [loss.detach() for loss in losses]

    @torch.no_grad()
    def evaluate(self, source: Tensor) -> Tensor | None:
        """The last stage's output for one batch of any size, on the last rank; None on the others. All ranks call it
        with the same source."""
        check_alive(self._group, "what stages pass on")
        x = source
        for index, chunk in enumerate(self._chunks):
            number = self.rank + index * self.world
            if number > 0:
                shape = (source.shape[0], *self._wires.between.shape[1:])
                x = torch.empty(shape, dtype=self._wires.between.dtype, device=self._device)
                dist.recv(x, self._peer(number - 1), group=self._group)
            x = chunk(x)
            if number < self.num_stages - 1:
                dist.send(x.contiguous(), self._peer(number + 1), group=self._group)
        return x if self.is_last else None

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self._group, stage % self.world)


def _with_gradient(example: Tensor) -> Tensor:
    return example.detach().requires_grad_()


def _schedule(
    stages: list[PipelineStage], name: str, num_microbatches: int, loss: Loss
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    # Gradients are not torch's to scale: they are in buckets by the time it would divide `param.grad`.
    if len(stages) > 1:
        if name != "1f1b":
            raise ValueError(f"a pipeline of {len(stages)} chunks per rank needs the schedule '1f1b', got {name!r}.")
        return ScheduleInterleaved1F1B(list(stages), num_microbatches, loss_fn=loss, scale_grads=False)
    kinds = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    if name not in kinds:
        raise ValueError(f"schedule must be one of {', '.join(map(repr, kinds))}, got {name!r}.")
    return kinds[name](stages[0], num_microbatches, loss_fn=loss, scale_grads=False)
