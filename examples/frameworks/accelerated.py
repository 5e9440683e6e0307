"""accelerate: `prepare()` of ours in place of its own for the model and the optimizer.

torchrun --nproc-per-node 2 examples/frameworks/accelerated.py
torchrun --nproc-per-node 2 examples/frameworks/accelerated.py --fsdp     # FSDP2, which accelerate has on GPUs only

On GPUs `accelerate launch` starts as many processes as torchrun; with --cpu it starts one, whatever its --num_processes says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from task import Sequences, arguments, build, rules
from torch.utils.data import DataLoader

from layerwise.integrations.accelerate import prepare


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The loss of every step, over all ranks."""
    args = arguments(argv, __doc__)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.accumulation,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        if args.fsdp
        else None,
    )
    loader = DataLoader(Sequences(), args.batch_size)
    model, optimizer, loader = prepare(accelerator, build(), loader, **rules())
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))
    folder, first = Path(args.out) / "state", 0
    if args.resume:
        accelerator.load_state(str(folder))
        first = optimizer.optimizer.stats.step or int(scheduler.scheduler.last_epoch) // accelerator.num_processes
    losses: list[float] = []
    total = torch.zeros((), device=accelerator.device)
    batches = accelerator.skip_first_batches(loader, first * args.accumulation)
    for batch in batches:
        if first + len(losses) == args.steps:
            break
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            total += loss.detach() / args.accumulation
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            losses.append(float(accelerator.reduce(total, "mean")))
            total.zero_()
    accelerator.save_state(str(folder))
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    print(main())
