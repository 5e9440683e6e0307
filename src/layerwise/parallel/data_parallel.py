"""DataParallel: a module whose gradients are averaged over ranks into the engine's buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from layerwise.buffers.storage import refuse_sparse
from layerwise.comm.engine import Engine, Settings
from layerwise.comm.groups import Mesh, all_ranks, arranged, check_mesh, derive_together, describe_mesh, num_stages
from layerwise.comm.reducer import GradReducer
from layerwise.comm.scopes import scope
from layerwise.errors import StateError
from layerwise.layout.plan import Plan
from layerwise.layout.slots import Staging
from layerwise.layout.storage import ParamSync, Reducer
from layerwise.parallel.watch import refuse_scripted, watch_forward
from layerwise.routing.rules import RouteRule

_SAME_EVERYWHERE = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "prefetch",
    "align_param_gather",
    "check_collectives",
    "check_replicas",
)
"""Settings that decide when collectives are issued, and are in no plan."""


class DataParallel(nn.Module):
    """Wraps a module for training on all ranks of the default process group; without one it runs alone.

    Gradients go to flat buckets as backward produces them, so `param.grad` stays None; `layerwise.Optimizer` takes them
    from there.

    Args:
        module: the model, or a list of the pipeline chunks that this rank holds; call chunks directly then. Its params
            are re-pointed at flat buffers: move and convert it before wrapping.
        layout: where optimizer state lives: "flat", "padded", "compact", "replicated", or "auto", which chooses for
            every buffer; `plan.describe()` says what and why. "padded:reference" packs as Megatron-LM does.
        rules: routing rules that come before the defaults; see `RouteRule`.
        strict: refuse a param of two or more dims that only a fallback rule explains.
        mesh: a DeviceMesh over all ranks with dims out of "pp", "dp" and "ep": dense params are copied over dp and ep,
            expert params (which modules name in `param_domains()`) over dp, and pp counts pipeline stages. None means
            that all ranks are data parallel.
        ties: weights of which another pipeline stage holds a copy: name of the tie -> fqn of the copy here.
        reducer: how gradients are summed: "collective" as the layout needs, "ordered" in fp32 in the order of ranks,
            so that bits do not depend on the layout, "ordered_bf16" likewise with bf16 on the wire, rounded
            stochastically.
        param_sync: "gather", or "broadcast", which sends every piece on its own: slow, to compare with.
        shard_grads: release full gradients once they are reduced (ZeRO-2). Every microbatch is reduced then.
        staging: where the exchange of matrices has its staging memory: "slots" of its own, or "gradients", which leases
            gradient memory that is idle in `step()`.
        overlap_grad_reduce: reduce full buckets while backward goes on.
        overlap_param_gather: let the gathers of params run on under the next forward, which waits for each bucket just
            before it reads it, instead of waiting in `step()`. Whatever else reads a weight waits for it too.
        prefetch: how many buckets may be on their way ahead of the one that forward reads; None starts all of them in
            `step()`. With a number a bucket arrives only once every rank has come near it, so all ranks must run the same
            modules, and no rank may read weights alone: call `ensure()` on every rank before.
        align_param_gather: start the gathers of a whole chunk with its first module, as interleaved pipelines want it.
        bucket_mib: size of gradient buckets; None takes 40 M elements, or more on many ranks.
        grad_dtype: dtype in which gradients are accumulated and reduced.
        check_collectives: before every collective compare across ranks what is about to happen; slow, for debugging.
            Nothing is reduced during backward then.
        check_replicas: after every sync compare a hash of all weights across ranks; slow, for debugging.
    """

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        *,
        layout: str = "auto",
        rules: Sequence[RouteRule] | None = None,
        strict: bool = False,
        mesh: Mesh | None = None,
        ties: Mapping[str, str] | None = None,
        reducer: Reducer = "collective",
        param_sync: ParamSync = "gather",
        shard_grads: bool = False,
        staging: Staging = "slots",
        overlap_grad_reduce: bool = True,
        overlap_param_gather: bool = True,
        prefetch: int | None = None,
        align_param_gather: bool = False,
        bucket_mib: float | None = None,
        grad_dtype: torch.dtype = torch.float32,
        check_collectives: bool = False,
        check_replicas: bool = False,
    ) -> None:
        everyone = all_ranks()

        def checked() -> tuple[tuple[nn.Module, ...], Settings]:
            chunks = _chunks_of(module)
            check_mesh(mesh)
            if overlap_param_gather:
                refuse_scripted(chunks)
            settings = Settings(
                layout=layout,
                rules=rules,
                strict=strict,
                bucket_mib=bucket_mib,
                grad_dtype=grad_dtype,
                reducer=reducer,
                param_sync=param_sync,
                shard_grads=shard_grads,
                staging=staging,
                ties={} if ties is None else ties,
                overlap_grad_reduce=overlap_grad_reduce,
                overlap_param_gather=overlap_param_gather,
                prefetch=prefetch,
                align_param_gather=align_param_gather,
                check_collectives=check_collectives,
                check_replicas=check_replicas,
            )
            if settings.ties and num_stages(mesh) == 1:
                raise ValueError(
                    f"ties={dict(settings.ties)} without pipeline stages: expected a mesh with a dim 'pp' of 2 or more. A "
                    "weight shared within one model is one tensor and needs no tie."
                )
            return chunks, settings

        chunks, settings = derive_together(
            everyone,
            "arguments",
            checked,
            lambda found: {
                "mesh": describe_mesh(mesh),
                **{name: getattr(found[1], name) for name in _SAME_EVERYWHERE},
            },
        )
        super().__init__()
        self.module = module if isinstance(module, nn.Module) else nn.ModuleList(chunks)
        self.engine = Engine(chunks, arranged(everyone, mesh, checked=check_collectives), settings, hooked=True)
        self.engine.spread_from_first()
        if overlap_param_gather:
            storage = self.engine.storage
            bucket_of = {param: storage.buckets[self.plan.bucket_of[fqn]] for fqn, param in storage.params.items()}
            watch_forward(self.engine.chunks, bucket_of, self.engine.publisher)
        for fqn, param in self.engine.storage.params.items():
            hook = _take_gradient(fqn, weakref.ref(self.engine.reducer))
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def plan(self) -> Plan:
        """What was decided: `.digest`, `.describe()`, `.route(fqn).reason`."""
        return self.engine.plan

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def forward(self, *args: object, **kwargs: object) -> object:
        if len(self.engine.chunks) > 1:
            raise StateError(
                f"the model is {len(self.engine.chunks)} chunks: there is no forward through all of them here. Call "
                "model.module[i], or hand the chunks to a pipeline schedule."
            )
        self.engine.publisher.ensure_compiled()
        return self.engine.chunks[0](*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards in here are only accumulated; the first backward outside reduces the sum.

        With `shard_grads` there is no room to accumulate them whole: they are reduced by the end of the block, and the
        sums accumulate. Every rank has to enter as many blocks then.
        """
        reducer = self.engine.reducer
        before, reducer.sync = reducer.sync, False
        try:
            yield
        except BaseException:
            reducer.sync = before
            if before:
                # Other ranks may have had no exception, and reduce this round; but this one is to be heard at once.
                reducer.end_round(wait=False)
            raise
        reducer.sync = before
        if before:
            reducer.end_round()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, as `optimizer.zero_grad()` does."""
        self.engine.reducer.forget()
        super().zero_grad(set_to_none)

    def ensure(self) -> None:
        """Bring all weights up to date, with `overlap_param_gather`. Reading them does so as well, but with `prefetch` or
        `align_param_gather` waits for the other ranks to read them too. Call it on every rank."""
        self.engine.publisher.ensure_all()

    def free_buffers(self) -> None:
        """Let go of all staging memory, to the last byte that other processes could use, as before a checkpoint is written.
        Gathers that are on their way arrive all the same: they write into the weights themselves. The next step takes
        staging memory again."""
        self.engine.free_buffers()

    def pull_from_replicas(self) -> None:
        """Call after changing weights behind torch's back (`param.data.copy_()`), so that the optimizer goes on from
        them.

        `load_state_dict` and in-place changes under `torch.no_grad()` are noticed without it.
        """
        self.engine.pull_from_replicas()

    def __deepcopy__(self, memo: dict[int, object]) -> DataParallel:
        raise TypeError(
            "a DataParallel cannot be copied: its params are views of buffers that ranks share. Copy .module before wrapping."
        )

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a DataParallel cannot be pickled or copied: save or copy model.module.state_dict() instead.")


def _take_gradient(fqn: str, reducer_of: Callable[[], GradReducer | None]) -> Callable[[Tensor], None]:
    """A hook that brings a param's gradient to its bucket. Python cannot see through such a hook: one that held the
    reducer, and with it the param, would keep the whole model for ever."""

    def hook(param: Tensor) -> None:
        reducer = reducer_of()
        grad = param.grad
        if reducer is None or grad is None:
            return
        param.grad = None
        refuse_sparse(fqn, grad)
        with scope(f"gradient hook of {fqn}"):
            reducer.write(fqn, grad, sync=reducer.sync)

    return hook


def _chunks_of(module: object) -> tuple[nn.Module, ...]:
    """The modules that this rank holds, or an error that says what is none."""
    chunks = (module,) if isinstance(module, nn.Module) or not isinstance(module, Sequence) else tuple(module)
    if not chunks:
        raise ValueError("module is an empty list: expected the chunks of the model that this rank holds.")
    found: list[nn.Module] = []
    for number, chunk in enumerate(chunks):
        where = "module" if chunk is module else f"chunk {number}"
        if isinstance(chunk, DataParallel):
            raise TypeError(f"{where} is a DataParallel already: wrap a model once.")
        if not isinstance(chunk, nn.Module):
            what = type(chunk).__name__
            got = f"got {what}" if chunk is module else f"{where} is a {what}"
            raise TypeError(f"module must be an nn.Module or a list of them, {got}.")
        found.append(chunk)
    return tuple(found)
