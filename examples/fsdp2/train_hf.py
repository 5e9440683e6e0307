"""A model of Hugging Face transformers under fully_shard, in bf16 with fp32 masters: routes and splits of its classes are known."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from small import VOCABULARY, batch, text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import layerwise


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).to(device)
    mesh = init_device_mesh(device, (world,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = layerwise.Optimizer(
        model, matrix=layerwise.Muon(lr=args.lr), other=layerwise.AdamW(lr=args.lr), clip_grad_norm=1.0
    )

    data, losses = text(), []
    for step in range(args.steps):
        tokens, _ = batch(data, step * world + rank)
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, norm {optimizer.stats.grad_norm:.3f}", flush=True)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
