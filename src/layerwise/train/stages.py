"""How one rank runs the model: all of it, or the chunks of a pipeline that are its own.

Both ways have the same three questions to answer: the loss and gradients of a step, the logits of a batch, and whether
this rank is one that sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from layerwise.comm.joining import Grid
from layerwise.comm.pipeline import Pipeline, Wires
from layerwise.comm.scopes import scope
from layerwise.config.resolve import resolve_model
from layerwise.config.schema import TrainConfig
from layerwise.train.data import Batch
from layerwise.train.model import GPT, Stage, build_gpt, next_byte_loss


def build_chunks(config: TrainConfig, grid: Grid, device: torch.device, dtype: torch.dtype) -> list[GPT]:
    """This rank's stages of the model, with their initial weights; without a pipeline the whole model as one."""
    shape = resolve_model(config.model)
    count = config.parallel.pp * config.parallel.chunks
    return [
        build_gpt(
            shape,
            Stage(number, count),
            grid.experts,
            grid.tensor,
            seed=config.train.seed,
            penalty_share=1.0 / config.train.accumulation,
            device=device,
            dtype=dtype,
        )
        for number in range(grid.pp_coord, count, grid.pp)
    ]


def ties_of(chunks: Sequence[GPT]) -> dict[str, str]:
    """Weights that another pipeline rank holds too, each with the name of this rank's copy."""
    prefixes = [f"{index}." for index in range(len(chunks))] if len(chunks) > 1 else [""]
    return {
        tie: prefix + fqn for prefix, chunk in zip(prefixes, chunks, strict=True) for tie, fqn in chunk.ties().items()
    }


class Passes(Protocol):
    """Forward and backward through the model."""

    def train(self, batches: Sequence[Batch]) -> Tensor:
        """Leave the gradients of the mean loss over all microbatches; that mean, or 0 where it is not seen."""

    def logits(self, tokens_BT: Tensor) -> Tensor | None:
        """Logits without gradients, or None where they are not seen."""


class WholeModel:
    """Every rank runs the whole model, whoever holds its params, and sees its own losses."""

    def __init__(self, model: nn.Module, no_sync: Callable[[], AbstractContextManager[object]]) -> None:
        """`no_sync` leaves the reduction of a backward's gradients to a later one."""
        self._model, self._no_sync = model, no_sync

    def train(self, batches: Sequence[Batch]) -> Tensor:
        losses = []
        for micro, batch in enumerate(batches):
            with nullcontext() if micro == len(batches) - 1 else self._no_sync():
                # The gradient of the mean over all samples: microbatches share it here, ranks in whoever reduces gradients.
                with scope("forward"):
                    logits = self._model(batch.tokens)
                    loss = next_byte_loss(logits, batch.targets).mean() / len(batches)
                with scope("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def logits(self, tokens_BT: Tensor) -> Tensor | None:
        logits: Tensor = self._model(tokens_BT)
        return logits


class PipelinedModel:
    """Every rank has some stages of the model; those with the last one see the losses."""

    def __init__(self, chunks: Sequence[GPT], config: TrainConfig, grid: Grid, device: torch.device) -> None:
        if grid.pipeline is None:
            raise ValueError("a pipeline needs two or more ranks: arrange them with pp=2 or more.")
        shape, microbatches = chunks[0].shape, config.train.accumulation
        dtype = next(chunks[0].parameters()).dtype
        size = (config.train.batch_size, shape.seq_len)

        def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
            return next_byte_loss(logits_BTV, targets_BT).mean() / microbatches

        self._device = device
        self._pipeline = Pipeline(
            chunks,
            grid.pipeline,
            device=device,
            schedule=config.parallel.schedule,
            num_microbatches=microbatches,
            wires=Wires(
                source=torch.empty(size, dtype=torch.int64, device="meta"),
                between=torch.empty((*size, shape.d_model), dtype=dtype, device="meta"),
                result=torch.empty((*size, shape.vocab_size), dtype=dtype, device="meta"),
            ),
            loss=loss,
        )

    def train(self, batches: Sequence[Batch]) -> Tensor:
        losses = self._pipeline.step([batch.tokens for batch in batches], [batch.targets for batch in batches])
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    def logits(self, tokens_BT: Tensor) -> Tensor | None:
        return self._pipeline.evaluate(tokens_BT)
