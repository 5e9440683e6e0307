"""What must have the same bits on every rank, compared by hashes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.errors import StateError
from layerwise.kernels.hashing import hash_bits
from layerwise.memory.hooked import grads_of


def first_difference(tensors: Sequence[Tensor], communicator: Communicator) -> tuple[int, int] | None:
    """The first tensor whose bits are not those of rank 0 on some rank, and that rank. The same answer on every rank."""
    if not tensors:
        return None
    rows = communicator.gather_numbers(torch.cat([hash_bits(tensor) for tensor in tensors]), label="replicas").cpu()
    differing = (rows != rows[0]).nonzero()
    if not len(differing):
        return None
    rank, number = differing[differing[:, 1].argmin()].tolist()
    return number // 2, rank


def check_gradients(params: Mapping[str, Tensor], communicator: Communicator) -> None:
    """Raise on every rank, naming a param, unless all ranks have the same gradients: somebody else was to reduce them."""
    named = sorted(params.items())
    grads = grads_of(param for _, param in named)
    flat = [
        param.detach().view(-1)[:0] if grad is None else grad.detach().reshape(-1)
        for (_, param), grad in zip(named, grads, strict=True)
    ]
    differs = first_difference(flat, communicator)
    if differs is not None:
        number, rank = differs
        raise StateError(
            f"the gradient of param {named[number][0]!r} has other values on rank {rank} than on rank 0: nobody has reduced it, and "
            "weights would drift apart. The last backward before step() must be a synchronised one (outside of no_sync()) of the "
            "DistributedDataParallel, through its own forward; or wrap the module in layerwise.DataParallel, which reduces gradients "
            "itself."
        )
