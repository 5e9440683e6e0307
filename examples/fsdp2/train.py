"""A small GPT under torch's fully_shard, with Muon for its matrices. docs/sharded.md says how train_adamw.py became it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from small import GPT, batch, text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import layerwise


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--accumulation", type=int, default=2, help="microbatches per step")
    parser.add_argument("--out", default="", help="folder to save to, and to go on from where it has a checkpoint")
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = GPT().to(device)
    mesh = init_device_mesh(device, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=args.lr), other=layerwise.AdamW(lr=args.lr))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    first = 0
    if args.out and Path(args.out).exists():
        of_model, of_optimizer = get_state_dict(model, optimizer)
        saved = {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict(), "step": 0}
        dcp.load(saved, checkpoint_id=args.out)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["step"]

    data, losses = text(), []
    for step in range(first, args.steps):
        total = 0.0
        for micro in range(args.accumulation):
            model.set_requires_gradient_sync(micro == args.accumulation - 1)
            tokens, targets = batch(data, (step * args.accumulation + micro) * world + rank)
            logits = model(tokens.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten()) / args.accumulation
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {total:.4f}", flush=True)

    if args.out:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        now = {"model": of_model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict(), "step": args.steps}
        dcp.save(now, checkpoint_id=args.out)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
