"""A small GPT with layerwise: Muon for matrices, AdamW for the rest. docs/from_ddp.md says how train_ddp.py became it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from data import Text
from model import GPT, GPTConfig

import layerwise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="a text file; empty: the text of Python's standard library")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and microbatch")
    parser.add_argument("--accumulation", type=int, default=2, help="microbatches per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of autocast; weights stay fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--out", default="", help="folder to save to, and to go on from with --resume")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def share_of_lr(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    args = arguments(argv)
    ranks = layerwise.init()
    rank, world, device = ranks.rank, ranks.world, ranks.device

    torch.manual_seed(args.seed)
    config = GPTConfig()
    text = Text(args.data, config.block_size)
    module = GPT(config).to(device)
    if args.compile:
        module.compile()
    fused = layerwise.RouteRule(pattern="*.c_attn.weight", to="matrix", row_blocks=(config.n_embd,) * 3)
    model = layerwise.DataParallel(module, rules=[fused])
    optimizer = layerwise.Optimizer(
        model,
        matrix=layerwise.Muon(lr=args.lr, weight_decay=args.weight_decay),
        other=layerwise.AdamW(lr=args.lr, betas=(0.9, 0.95)),
        clip_grad_norm=args.grad_clip,
        loss_scale=layerwise.LossScale() if args.dtype == "fp16" else None,
    )
    autocast = torch.autocast(device.type, DTYPES[args.dtype], enabled=args.dtype != "fp32")

    first = 0
    if args.resume:
        saved = layerwise.Checkpoints(args.out).load(model, optimizer).extra
        first = saved["step"]

    history: dict[str, list[float]] = {"train": [], "val": [], "norm": []}
    for step in range(first, args.steps):
        lr = args.lr * share_of_lr(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr

        total = 0.0
        for micro in range(args.accumulation):
            number = (step * args.accumulation + micro) * world + rank
            tokens, targets = (part.to(device) for part in text.train_batch(args.batch_size, number))
            is_last = micro == args.accumulation - 1
            with nullcontext() if is_last else model.no_sync():
                with autocast:
                    loss = model(tokens, targets) / args.accumulation
                (optimizer.scale_loss(loss) if args.dtype == "fp16" else loss).backward()
            total += loss.item()
        optimizer.step()
        norm = optimizer.stats.grad_norm
        optimizer.zero_grad()
        history["train"].append(total)
        history["norm"].append(float(norm))

        if (step + 1) % args.eval_every == 0 and rank == 0:
            module.eval()
            with torch.no_grad(), autocast:
                tokens, targets = (part.to(device) for part in text.val_batch(32))
                history["val"].append(float(module(tokens, targets)))
            module.train()
            print(f"step {step + 1}: train {total:.4f}, val {history['val'][-1]:.4f}, norm {norm:.3f}", flush=True)

    if args.out:
        layerwise.Checkpoints(args.out).save(model, optimizer, step=args.steps, extra={"step": args.steps})
    if dist.is_initialized():
        dist.destroy_process_group()
    return history


if __name__ == "__main__":
    main()
