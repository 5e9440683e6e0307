"""Lightning Fabric: the optimizer is made before `setup()`, which wraps the module in DistributedDataParallel.

torchrun --nproc-per-node 2 examples/frameworks/lightning_fabric.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from task import Sequences, arguments, build, rules
from torch.utils.data import DataLoader, DistributedSampler

import layerwise


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The loss of every step, over all ranks."""
    args = arguments(argv, __doc__)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=world, strategy=DDPStrategy(process_group_backend="gloo"))
    fabric.launch()
    module = fabric.to_device(build())  # before the optimizer: its buffers are where the module is
    optimizer = layerwise.Optimizer(module, gradients="reduced", **rules())
    model, optimizer = fabric.setup(module, optimizer, move_to_device=False)
    data = Sequences()
    sampler = DistributedSampler(data, world, fabric.global_rank, shuffle=False)
    loader = fabric.setup_dataloaders(DataLoader(data, args.batch_size, sampler=sampler), use_distributed_sampler=False)
    file = Path(args.out) / "fabric.ckpt"
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume:
        fabric.load(file, state)
    first = state["step"]
    losses: list[float] = []
    total = 0.0
    for number, batch in enumerate(loader):
        step, micro = divmod(number, args.accumulation)
        if step < first:
            continue
        if step == args.steps:
            break
        is_last = micro == args.accumulation - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(**batch)["loss"] / args.accumulation
            fabric.backward(loss)
        total += loss.item()
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=args.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(fabric.all_reduce(total, reduce_op="mean")))
            total = 0.0
    fabric.save(file, {**state, "step": args.steps})
    return losses


if __name__ == "__main__":
    print(main())
