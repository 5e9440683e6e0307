"""The same GPT with tensor parallelism within a machine and fully_shard across: Muon sees whole matrices all the same."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small import GPT, batch, text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layerwise


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2, help="ranks that share every layer")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    replica, replicas = mesh.get_local_rank("dp"), mesh["dp"].size()

    torch.manual_seed(1)
    model = GPT().to(device)
    for block in model.blocks:
        layers = {
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh["tp"], layers)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = layerwise.Optimizer(
        model, matrix=layerwise.Muon(lr=args.lr), other=layerwise.AdamW(lr=args.lr), clip_grad_norm=1.0
    )

    data, losses = text(), []
    for step in range(args.steps):
        tokens, targets = batch(data, step * replicas + replica)  # ranks that share layers read the same text
        loss = F.cross_entropy(model(tokens.to(device)).flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, norm {optimizer.stats.grad_norm:.3f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
