"""Lightning's Trainer: `configure_optimizers()` returns a `layerwise.Optimizer`; there is nothing else to change.

torchrun --nproc-per-node 2 examples/frameworks/lightning_trainer.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from task import Sequences, arguments, build, rules
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import layerwise


class Module(lightning.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build()
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return layerwise.Optimizer(
            self, gradients="reduced", **rules()
        )  # Lightning wraps it in DistributedDataParallel


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The loss of every step, over all ranks."""
    args = arguments(argv, __doc__)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    data = Sequences()
    sampler = DistributedSampler(data, world, int(os.environ.get("RANK", "0")), shuffle=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulation,
        gradient_clip_val=args.grad_clip,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    file = Path(args.out) / "lightning.ckpt"
    module = Module()
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=str(file) if args.resume else None)
    trainer.save_checkpoint(file)
    steps = torch.stack(module.losses).view(-1, args.accumulation).mean(dim=1)
    means: list[float] = trainer.strategy.reduce(steps, reduce_op="mean").tolist()
    return means


if __name__ == "__main__":
    print(main())
