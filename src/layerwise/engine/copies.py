"""Whether ranks that should hold the same have the same bits: before a bad start is spread, or whenever it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.groups import Groups, share
from layerwise.errors import StateError
from layerwise.kernels.hashing import hash_bits
from layerwise.memory.hooked import grads_of
from layerwise.memory.storage import Storage

_NORM_TOLERANCE = 0.01
"""By how much norms of copies of a gradient may differ. Those of other data differ by more."""
_ADVICE = "a step would mix them. Load the same weights on every rank, or build the model anew."


def check_copies(storage: Storage, communicators: Mapping[str, Communicator], groups: Groups) -> None:
    """Raise on every rank, naming a param, unless all that are copies of each other are equal: replicas of all ranks of a
    domain, and shards that several ranks hold, with the gradients that somebody else has reduced, where there are any. All
    replicas must be up to date, and no reduction under way."""
    problems = [
        _in_replicas(storage, domain, communicator) or _in_shards(storage, domain, communicator)
        for domain, communicator in sorted(communicators.items())
    ]
    told = share(groups, lambda: {"problem": next(filter(None, problems), "")})
    found = next((text for facts in told if (text := str(facts["problem"]))), "")
    if found:
        raise StateError(found)


def _in_replicas(storage: Storage, domain: str, communicator: Communicator) -> str:
    """The first param of the domain's replicas that is not the same on every rank, in words."""
    replicas = [replica for replica in storage.replicas if replica.plan.domain == domain]
    held = [(replica.plan, tensor) for replica in replicas for tensor in replica.held]
    differs = _first_difference([tensor for _, tensor in held], communicator)
    if differs is None:
        return ""
    number, rank = differs
    plan = held[number][0]
    params = [storage.params[placement.fqn].detach().view(-1) for placement in plan.placements]
    which = _first_difference(params, communicator)
    name = plan.placements[which[0] if which else 0].fqn
    return (
        f"param {name!r} ({plan.label}) has other values on rank {rank} of domain {domain!r} than on rank 0: {_ADVICE}"
    )


def _first_difference(tensors: Sequence[Tensor], communicator: Communicator) -> tuple[int, int] | None:
    """The first tensor whose bits are not those of rank 0 on some rank, and that rank. The same answer on every rank."""
    if not tensors:
        return None
    rows = communicator.gather_numbers(torch.cat([hash_bits(tensor) for tensor in tensors]), label="replicas").cpu()
    differing = (rows != rows[0]).nonzero()
    if not len(differing):
        return None
    rank, number = differing[differing[:, 1].argmin()].tolist()
    return number // 2, rank


def _in_shards(storage: Storage, domain: str, communicator: Communicator) -> str:
    """The first span of this rank's own shards in the domain of which an earlier rank has another copy, in words."""
    shards = [] if storage.replicas else [shard for shard in storage.shards if shard.plan.domain == domain]
    if not shards or communicator.world == 1:
        return ""
    me = communicator.rank
    most_spans = {own.index: own.most_spans for own in storage.plan.own}
    *first_slot, total = accumulate((most_spans[shard.plan.index] for shard in shards), initial=0)
    numbers = torch.zeros(total, 3, dtype=torch.int64, device=storage.device)
    for shard, slot in zip(shards, first_slot, strict=True):
        for number, span in enumerate(shard.spans):
            numbers[slot + number, :2] = hash_bits(shard.rounded()[span.part])
            norm = torch.linalg.vector_norm(shard.update.view(-1)[span.part], dtype=torch.float64)
            numbers[slot + number, 2] = norm.view(torch.int64)
    rows = communicator.gather_numbers(numbers.flatten(), label="copies").cpu().view(communicator.world, total, 3)
    norms = rows[..., 2].contiguous().view(torch.float64)
    for shard, slot in zip(shards, first_slot, strict=True):
        for number, span in enumerate(shard.spans):
            first = shard.plan.copies(span, me)[0]
            there = [other[:-1] for other in shard.plan.spans_of(span.fqn, first)].index(span[:-1])
            mine, theirs = (me, slot + number), (first, slot + there)
            who = f"on rank {me} of domain {domain!r} than on rank {first}, which hold copies of the same part of it"
            if not torch.equal(rows[mine][:2], rows[theirs][:2]):
                return f"param {span.fqn!r} has other values {who}: {_ADVICE}"
            norm, other = float(norms[mine]), float(norms[theirs])
            # Where one is missing, or not finite, that is what there is to say. Copies of a sum may round differently.
            if norm and other and abs(norm - other) > _NORM_TOLERANCE * max(norm, other):
                return (
                    f"param {span.fqn!r} has another gradient {who} (norm {norm:.4g}, there {other:.4g}): it was not reduced, and "
                    "copies would drift apart. fully_shard() averages gradients over its mesh; parallelize_module() does nothing beyond "
                    "its own. Shard the param over the other ranks with fully_shard(), or average its gradient over them before "
                    "step(). Where these are different params (experts of each rank), name them in param_domains()."
                )
    return ""


def check_gradients(params: Mapping[str, Tensor], communicator: Communicator) -> None:
    """Raise on every rank, naming a param, unless all ranks have the same gradients: somebody else was to reduce them."""
    named = sorted(params.items())
    grads = grads_of(param for _, param in named)
    flat = [
        param.detach().view(-1)[:0] if grad is None else grad.detach().reshape(-1)
        for (_, param), grad in zip(named, grads, strict=True)
    ]
    differs = _first_difference(flat, communicator)
    if differs is not None:
        number, rank = differs
        raise StateError(
            f"the gradient of param {named[number][0]!r} has other values on rank {rank} than on rank 0: nobody has reduced it, and "
            "weights would drift apart. The last backward before step() must be a synchronised one (outside of no_sync()) of the "
            "DistributedDataParallel, through its own forward; or wrap the module in layerwise.DataParallel, which reduces gradients "
            "itself."
        )
