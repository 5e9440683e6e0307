"""A model that torch cuts, priced: where its params lie, what is odd about that, and what torch itself sends for it."""

from __future__ import annotations

from dataclasses import dataclass

from layerwise.dtypes import DType
from layerwise.layout.placing import MeshSizes, is_stack, tensor_dim
from layerwise.layout.schedule import wire_nbytes
from layerwise.routing.spec import ParamTable


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTraffic:
    """Bytes that a rank sends for fully_shard() in one step, with one microbatch. What tensor parallelism sends are
    activations."""

    all_gather: int
    """Params, once for forward and once for backward."""
    reduce_scatter: int
    all_reduce: int
    """Between replicas."""

    def to_json(self) -> dict[str, int]:
        return {
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "all_reduce": self.all_reduce,
            "total": self.all_gather + self.reduce_scatter + self.all_reduce,
        }


def torch_traffic(table: ParamTable, sizes: MeshSizes, reduce_dtype: DType) -> TorchTraffic:
    """What fully_shard() sends, with params that are let go of between forward and backward.

    >>> from layerwise.routing.spec import table_of
    >>> torch_traffic(table_of([("a.weight", (8, 8))]), MeshSizes(fsdp=4), DType.FP32)
    TorchTraffic(all_gather=192, reduce_scatter=192, all_reduce=0)
    """
    gathered = reduced = between = 0
    for param in (param for param in table if param.trainable):
        stack = is_stack(param)
        ranks = sizes.experts_fsdp if stack else sizes.fsdp
        others = sizes.ep if stack else sizes.tp if tensor_dim(param) is not None else 1
        numel = -(-param.numel // others)
        gathered += 2 * wire_nbytes("all_gather", numel * param.dtype.itemsize, ranks)
        reduced += wire_nbytes("reduce_scatter", numel * reduce_dtype.itemsize, ranks)
        between += wire_nbytes("all_reduce", -(-numel // ranks) * reduce_dtype.itemsize, sizes.replicate)
    return TorchTraffic(all_gather=gathered, reduce_scatter=reduced, all_reduce=between)


def sharding_hint(table: ParamTable, sizes: MeshSizes) -> str | None:
    """A sentence where most ranks hold no part of a stack of experts, because nothing but their number could be cut."""
    for param in filter(is_stack, table):
        local, ranks = param.shape[0] // sizes.ep, sizes.experts_fsdp
        if local < ranks and param.shape[1] % ranks != 0:
            return (
                f"fully_shard() cuts {local} expert{'s' if local != 1 else ''} over {ranks} ranks, and {ranks - local} of them get "
                f"none: {ranks} divides neither them nor the {param.shape[1]} rows of each. Spread the experts over ranks first: "
                "--ep with a divisor of their number."
            )
    return None
