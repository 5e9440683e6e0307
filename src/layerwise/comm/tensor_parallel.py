"""Tensor parallelism, seen from inside a forward: activations of which every rank uses a part.

The params themselves are cut by `comm/cutting.py`. A fused weight is cut by rows as it lies, so a rank's rows are not those
of its own heads: its output is gathered, and every rank takes what it needs of it. Separate projections need no gather.

`torch.distributed.tensor` takes long to import and is only needed where there are several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that compute the same samples together, in order: rank r has the r-th part of heads and columns."""

    mesh: DeviceMesh | None
    """None for one rank, which computes everything."""
    rank: int
    world: int

    def part(self, size: int) -> slice:
        """This rank's part of so many heads or columns, which its ranks divide."""
        each = size // self.world
        return slice(self.rank * each, (self.rank + 1) * each)

    def whole(self, x: Tensor) -> Tensor:
        """What a column-parallel layer gives, of all ranks. Every rank goes on with a part of it only: gradients are
        summed."""
        if self.mesh is None:
            return x
        from torch.distributed.tensor import Partial, Replicate

        gathered: Tensor = _as_dtensor(x).redistribute(self.mesh, (Replicate(),)).to_local(grad_placements=(Partial(),))
        return gathered

    def scatter_rows(self, x: Tensor) -> Tensor:
        """This rank's rows of what every rank has all of. Gradients are gathered."""
        if self.mesh is None:
            return x
        from torch.distributed.tensor import DTensor, Replicate, Shard

        everywhere = DTensor.from_local(x, self.mesh, (Replicate(),), run_check=False)
        own: Tensor = everywhere.redistribute(self.mesh, (Shard(0),)).to_local()
        return own

    def gather_rows(self, x: Tensor, num_rows: int) -> Tensor:
        """All rows, of `num_rows`, from this rank's as `scatter_rows` gave them. Gradients are scattered."""
        if self.mesh is None:
            return x
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape = (num_rows, *x.shape[1:])
        stride = x.new_empty(shape, device="meta").stride()
        apart = DTensor.from_local(x, self.mesh, (Shard(0),), run_check=False, shape=shape, stride=stride)  # type: ignore[arg-type]
        whole: Tensor = apart.redistribute(self.mesh, (Replicate(),)).to_local()
        return whole


ALL_HEADS_HERE = TensorRanks(mesh=None, rank=0, world=1)
"""One rank, all heads and columns."""


def _as_dtensor(tensor: Tensor) -> Any:
    return tensor
