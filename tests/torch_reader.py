"""Reads a checkpoint with nothing but torch, as a process of its own: `python torch_reader.py RANK WORLD MEET CHECKPOINT EXPECTED`.

It reads into plain tensors, and into DTensors that are cut along every dim in turn.
"""

from __future__ import annotations

import os
import sys

sys.modules["layerwise"] = None  # type: ignore[assignment]  # whoever imports it here fails

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def main(rank: int, world: int, meet: str, checkpoint: str, expected_file: str) -> None:
    torch.set_num_threads(1)
    expected: dict[str, Tensor] = torch.load(expected_file, weights_only=True)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    told = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    missing = sorted(set(expected) - set(told))
    others = sorted(key for key in set(told) - set(expected) if not key.startswith(("rng.", "extra.")))
    if missing or others:
        raise SystemExit(f"missing: {missing}, unexpected: {others}")
    ways = [None, Shard(0), Shard(1), Replicate()]
    for way in ways:
        given: dict[str, Tensor] = {}
        for key, tensor in expected.items():
            nothing = torch.full(tensor.shape, 77, dtype=tensor.dtype)
            given[key] = nothing
            if way is not None and tensor.dim() > (way.dim if isinstance(way, Shard) else 0):
                given[key] = distribute_tensor(nothing, init_device_mesh("cpu", (world,)), [way])
        dcp.load(given, checkpoint_id=checkpoint)
        for key, tensor in expected.items():
            found = given[key]
            if isinstance(found, DTensor):
                found = found.full_tensor()
            if found.dtype != tensor.dtype or not torch.equal(found, tensor):
                raise SystemExit(f"{key} as {way} is not what was saved")
    if [name for name, module in sys.modules.items() if name.startswith("layerwise") and module is not None]:
        raise SystemExit("the library was imported")
    print(f"{len(expected)} tensors in {len(ways)} ways", flush=True)
    dist.destroy_process_group()
    # torch's own collectives may leave tensors with gloo's threads, which then abort the end of the interpreter on a busy machine.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
