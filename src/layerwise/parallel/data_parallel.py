"""DataParallel: a module whose gradients are averaged over ranks into the engine's buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from layerwise.comm.engine import Engine
from layerwise.comm.groups import all_ranks
from layerwise.layout.plan import Plan
from layerwise.routing.rules import RouteRule


class DataParallel(nn.Module):
    """Wraps a module for training on all ranks of the default process group; without one it runs alone.

    Gradients go to flat buckets as backward produces them, so `param.grad` stays None; `layerwise.Optimizer` takes them
    from there.

    Args:
        module: the model. Its params are re-pointed at flat buffers: move and convert it before wrapping.
        layout: where optimizer state lives. "flat" shards it evenly, "replicated" keeps all of it everywhere,
            "auto" chooses.
        rules: routing rules that come before the defaults; see `RouteRule`.
        strict: refuse a param of two or more dims that only a fallback rule explains.
        mesh: reserved for sharded models; None means that all ranks are data parallel.
        overlap_grad_reduce: reduce full buckets while backward goes on.
        overlap_param_gather: gather params during the next forward instead of in `step()`; not built yet.
        bucket_mib: size of gradient buckets; None takes 40 M elements, or more on many ranks.
        grad_dtype: dtype in which gradients are accumulated and reduced.
        check_collectives: before every collective compare across ranks what is about to happen; slow, for debugging.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        layout: str = "auto",
        rules: Sequence[RouteRule] | None = None,
        strict: bool = False,
        mesh: object | None = None,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        bucket_mib: float | None = None,
        grad_dtype: torch.dtype = torch.float32,
        check_collectives: bool = False,
    ) -> None:
        if isinstance(module, DataParallel):
            raise TypeError("module is a DataParallel already: wrap a model once.")
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be an nn.Module, got {type(module).__name__}.")
        if mesh is not None:
            raise NotImplementedError("mesh is not built yet: pass None, which makes all ranks data parallel.")
        if overlap_param_gather:
            raise NotImplementedError(
                "overlap_param_gather is not built yet: leave it False, params are gathered at the end of step()."
            )
        super().__init__()
        self.module = module
        self.engine = Engine(
            module,
            all_ranks(),
            layout=layout,
            rules=rules,
            strict=strict,
            bucket_mib=bucket_mib,
            grad_dtype=grad_dtype,
            overlap_grad_reduce=overlap_grad_reduce,
            check_collectives=check_collectives,
            hooked=True,
        )
        self.engine.spread_from_first()
        self._sync = True
        for fqn, param in self.engine.storage.params.items():
            param.register_post_accumulate_grad_hook(self._take_gradient(fqn))  # type: ignore[no-untyped-call]

    @property
    def plan(self) -> Plan:
        """What was decided: `.digest`, `.describe()`, `.route(fqn).reason`."""
        return self.engine.plan

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards in here are only accumulated; the first backward outside reduces the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, as `optimizer.zero_grad()` does."""
        self.engine.reducer.reset()
        super().zero_grad(set_to_none)

    def pull_from_replicas(self) -> None:
        """Call after changing weights behind torch's back (`param.data.copy_()`), so that the optimizer goes on from
        them.

        `load_state_dict` and in-place changes under `torch.no_grad()` are noticed without it.
        """
        self.engine.pull_from_replicas()

    def _take_gradient(self, fqn: str) -> Callable[[Tensor], None]:
        def hook(param: Tensor) -> None:
            grad, param.grad = param.grad, None
            if grad is None:
                return
            if grad.is_sparse:
                raise TypeError(
                    f"param {fqn!r} has a sparse gradient: buckets are dense. Use sparse=False on its module."
                )
            self.engine.reducer.write(fqn, grad, sync=self._sync)

        return hook

    def __deepcopy__(self, memo: dict[int, object]) -> DataParallel:
        raise TypeError(
            "a DataParallel cannot be copied: its params are views of buffers that ranks share. Copy .module before wrapping."
        )

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a DataParallel cannot be pickled: save model.module.state_dict() instead.")
