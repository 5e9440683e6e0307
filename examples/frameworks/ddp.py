"""DistributedDataParallel as it is, with one line changed: what steps it. The other trainers here follow its losses.

torchrun --nproc-per-node 2 examples/frameworks/ddp.py
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from task import Sequences, arguments, build, rules
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import layerwise


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The loss of every step, over all ranks."""
    args = arguments(argv, __doc__)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    optimizer = layerwise.Optimizer(model, **rules())
    data = Sequences()
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data, shuffle=False))
    first, file = 0, Path(args.out) / "checkpoint.pt"
    if args.resume:
        saved = torch.load(file, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    losses: list[float] = []
    total = 0.0
    for number, batch in enumerate(loader):
        step, micro = divmod(number, args.accumulation)
        if step < first:
            continue
        if step == args.steps:
            break
        is_last = micro == args.accumulation - 1
        with nullcontext() if is_last else model.no_sync():
            loss = model(**batch)["loss"] / args.accumulation
            loss.backward()
        total += loss.item()
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(total))
            total = 0.0
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": args.steps}
        torch.save(state, file)
    dist.destroy_process_group()
    return losses


def mean_over_ranks(value: float) -> float:
    found = torch.tensor(value)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


if __name__ == "__main__":
    print(main())
