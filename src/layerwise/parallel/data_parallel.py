"""DataParallel: a module whose gradients are averaged over ranks into the engine's buckets."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from layerwise.comm.device_mesh import check_coverage, check_mesh, describe_mesh, num_stages
from layerwise.comm.groups import (
    Mesh,
    ProcessGroup,
    all_ranks,
    arranged,
    check_process_group,
    derive_together,
)
from layerwise.comm.scopes import scope
from layerwise.comm.sharded import refuse_first_fsdp
from layerwise.config.habits import OF_DATA_PARALLEL, understands
from layerwise.engine.engine import Engine
from layerwise.engine.reducer import GradReducer
from layerwise.engine.settings import OverlapParamGather, Settings
from layerwise.errors import StateError
from layerwise.layout.options import Options, bucket_numel_of
from layerwise.layout.plan import Plan
from layerwise.layout.storage import ParamGather, Reducer
from layerwise.memory.hooked import take_grad
from layerwise.memory.storage import refuse_sparse
from layerwise.models.adopting import refuse_foreign
from layerwise.models.names import named_buffers, named_parameters, unwrapped
from layerwise.models.table import plain_dtype
from layerwise.models.tracing import never_traced
from layerwise.parallel.watch import ensure_compiled, refuse_scripted, watch_forward
from layerwise.routing.evidence import RulesArgument, rules_and_evidence

_SAME_EVERYWHERE = ("overlap_grad_reduce", "overlap_param_gather")
"""Settings that decide when collectives are issued, and are in no plan."""


@understands(OF_DATA_PARALLEL)
class DataParallel(nn.Module):
    """Wraps a module for training on all ranks of the default process group; without one it runs alone.

    Gradients go to flat buckets as backward produces them, so `param.grad` stays None; `layerwise.Optimizer` takes them
    from there.

    Args:
        module: the model, or a list of the pipeline chunks that this rank holds; call chunks directly then. Its params
            are re-pointed at flat buffers: move and convert it before wrapping.
        layout: where optimizer state of matrices lives: "flat", "padded", "compact" or "replicated"; or a mapping from buffers
            ("matrix", "other", "<domain>/matrix") to these names, in which a buffer without an entry is "flat".
        rules: routing rules that come before the defaults (see `RouteRule`): a list, or the path of a file with [[rule]] tables or
            of a routing that `layerwise inspect --record` wrote. A list may hold paths too, a recorded routing last.
        strict: refuse a param of two or more dims that only a fallback rule explains.
        mesh: a DeviceMesh over all ranks with dims out of "pp", "dp" and "ep": dense params are copied over dp and ep,
            expert params (which modules name in `param_domains()`) over dp, and pp counts pipeline stages. None means
            that all ranks are data parallel.
        process_group: the ranks to train on, as DistributedDataParallel has it; None means all of them. Not beside `mesh`.
        ties: weights of which another pipeline stage holds a copy: name of the tie -> fqn of the copy here.
        reducer: how gradients are summed: "collective" as the layout needs, "ordered" in fp32 in the order of ranks,
            so that bits do not depend on the layout.
        param_gather: what is kept of params that `layerwise.quantize()` has made codes of. "quantized": codes alone; a gather
            brings bf16 to idle gradient memory, and every rank makes codes of it. "bf16": what the gather brings, and codes
            are made whenever they are used; the same bits, to compare with. Of params that `layerwise.quant.adopt()` has taken over
            there are codes alone.
        shard_grads: release full gradients once they are reduced (ZeRO-2). Every microbatch is reduced then.
        overlap_grad_reduce: reduce full buckets while backward goes on. Params whose gradients stay away are waited for
            in eight backwards, and then no more.
        overlap_param_gather: True: gathers of params run under the next forward, which waits for each bucket just before it
            reads the bucket; any other reader of a weight waits for it too. False: `step()` waits for all gathers. "by chunk",
            for interleaved pipelines: the first module of a chunk launches the gathers of that chunk, so all ranks must run
            the same chunks; before one rank reads weights alone, call `ensure()` on every rank.
        bucket_mib: size of gradient buckets; None takes 40 M elements, or more on many ranks.
        grad_dtype: dtype in which gradients are accumulated and reduced.
    """

    _is_accelerate_prepared = True
    """accelerate's own mark of what its `prepare()` has wrapped: it leaves a marked model as it is."""

    def __init__(
        self,
        module: nn.Module | Sequence[nn.Module],
        *,
        layout: str | Mapping[str, str] = "flat",
        rules: RulesArgument = None,
        strict: bool = False,
        mesh: Mesh | None = None,
        process_group: ProcessGroup | None = None,
        ties: Mapping[str, str] | None = None,
        reducer: Reducer = "collective",
        param_gather: ParamGather = "quantized",
        shard_grads: bool = False,
        overlap_grad_reduce: bool = True,
        overlap_param_gather: OverlapParamGather = True,
        bucket_mib: float | None = None,
        grad_dtype: torch.dtype = torch.float32,
    ) -> None:
        # Before there is a group over which ranks could tell each other.
        check_process_group(process_group)
        check_coverage(mesh)
        everyone = all_ranks(process_group)

        def checked() -> tuple[tuple[nn.Module, ...], Settings]:
            chunks = _chunks_of(module)
            check_mesh(mesh)
            if mesh is not None and process_group is not None:
                raise ValueError(
                    "mesh and process_group were both given: a mesh arranges all ranks. Leave process_group out, or build the "
                    "model without a mesh."
                )
            if overlap_param_gather:
                refuse_scripted(chunks)
            refuse_foreign(chunks, param_gather)
            dtype = plain_dtype(grad_dtype, "grad_dtype")
            own_rules, evidence = rules_and_evidence(rules)
            options = Options(
                layout=layout,
                rules=own_rules,
                strict=strict,
                evidence=evidence,
                grad_dtype=dtype,
                bucket_numel=bucket_numel_of(bucket_mib, dtype),
                reducer=reducer,
                param_gather=param_gather,
                shard_grads=shard_grads,
            )
            settings = Settings(
                options=options,
                ties={} if ties is None else ties,
                overlap_grad_reduce=overlap_grad_reduce,
                overlap_param_gather=overlap_param_gather,
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
        self.engine = Engine(chunks, arranged(everyone, mesh), settings)
        self.engine.spread_from_first()
        if overlap_param_gather:
            storage = self.engine.storage
            replica_of = {param: storage.replicas[self.plan.bucket_of[fqn]] for fqn, param in storage.params.items()}
            watch_forward(self.engine.chunks, replica_of, self.engine.publisher, self.engine.when_released)
        for fqn, param in self.engine.storage.params.items():
            hook = _take_gradient(fqn, weakref.ref(self.engine.reducer))
            handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self.engine.when_released(handle.remove)
        if len(chunks) == 1 and type(self).forward is DataParallel.forward:  # a subclass may have one of its own
            self.forward = _with_signature_of(chunks[0], self)  # type: ignore[method-assign]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """What DistributedDataParallel asks a module for when it wraps one."""
        raise TypeError(
            "a layerwise.DataParallel was passed to DistributedDataParallel: it averages gradients itself, and one wrapper does. "
            "Train with the layerwise.DataParallel as it is."
        )

    @property
    def plan(self) -> Plan:
        """What was decided: `.digest`, `.describe()`, `.route(fqn).reason`."""
        return self.engine.plan

    def __repr__(self) -> str:
        """One line. The tree of modules is `repr(model.module)`."""
        return f"{type(self).__name__}({type(self.module).__name__}, {self.plan.headline})"

    @partial(never_traced, recursive=False)
    def forward(self, *args: object, **kwargs: object) -> object:
        if len(self.engine.chunks) > 1:
            raise StateError(
                f"the model is {len(self.engine.chunks)} chunks: there is no forward through all of them here. Call "
                "model.module[i], or hand the chunks to a pipeline schedule."
            )
        self.engine.check_bound()
        self.engine.calls.has_run = True
        ensure_compiled(self.engine.publisher)
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
        self.engine.calls.has_zeroed = True
        super().zero_grad(set_to_none)

    def ensure(self) -> None:
        """Bring all weights up to date, with `overlap_param_gather`. A read of a weight does so as well, but "by chunk" it waits
        for the other ranks to read it too. Call it on every rank.

        Forward on another CUDA stream than the one that brought weights up to date is ordered behind that. What reads them
        there by itself, outside of any module's forward, calls this on its stream first."""
        self.engine.publisher.ensure_all()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the coming `step()` to this global norm; returns the norm as it is, over all ranks.

        The same bits as with `clip_grad_norm=` of the `Optimizer`, which takes one pass over gradients less. Call it on
        every rank, after backward. `clip` and `norm_groups` of the optimizer's `GradientPolicy` say whose norm it is.
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type must be 2, got {norm_type!r}: gradients are clipped by their Euclidean norm.")
        optimizer = self.engine.optimizer
        if optimizer is None:
            raise StateError(
                "clip_grad_norm_() was called on a model without an optimizer: nobody would take the clipped gradients. Build a "
                "layerwise.Optimizer first."
            )
        return optimizer.clip_next_step(max_norm)

    def unwrap(self) -> nn.Module:
        """The module as it was: weights up to date and in memory of their own, no hooks, safe to copy, pickle and wrap
        again. This wrapper and its optimizer are of no use afterwards. Call it on every rank."""
        self.engine.check_bound()
        self.engine.release()
        return self.module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DataParallel:
        """What `to()`, `half()`, `cpu()` and their like do. Weights stay where they are: there is nothing to do where they
        are there already, and no way elsewhere."""
        self.engine.check_bound()
        for name, tensor in (*named_parameters(self.module), *named_buffers(self.module)):
            found = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if found.dtype != tensor.dtype or not _same_device(found.device, tensor.device):
                raise StateError(
                    f"{name!r} is {tensor.dtype} on {tensor.device} and would become {found.dtype} on {found.device}: expected a "
                    "module that stays as it is, since its weights lie in buffers that were laid out for it. Move or convert the "
                    "module before it is wrapped, or unwrap() it first."
                )
        return self

    def share_memory(self) -> DataParallel:
        raise StateError(
            "a layerwise.DataParallel cannot share its weights with other processes: they lie in buffers that the optimizer writes. "
            "Share a copy, as in copy.deepcopy(model.module).share_memory(), or unwrap() it first."
        )

    def free_buffers(self) -> None:
        raise StateError("DataParallel.free_buffers() has moved: call optimizer.free_buffers().")

    def pull_from_replicas(self) -> None:
        raise StateError("DataParallel.pull_from_replicas() has moved: call optimizer.pull_from_replicas().")

    def __deepcopy__(self, memo: dict[int, object]) -> DataParallel:
        raise TypeError(
            "a DataParallel cannot be copied: its params are views of buffers that ranks share. Copy model.module, which gets "
            "memory of its own, as in copy.deepcopy(model.module) or AveragedModel(model.module)."
        )

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a DataParallel cannot be pickled or copied: save or copy model.module.state_dict() instead.")


def _same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two names are of one device: "cpu:0" is "cpu", and "cuda" the current one."""

    def number(device: torch.device) -> int:
        return device.index if device.index is not None else torch.cuda.current_device() if device.type == "cuda" else 0

    return one.type == other.type and number(one) == number(other)


def _with_signature_of(module: nn.Module, model: DataParallel) -> Callable[..., object]:
    """The wrapper's forward with the module's signature, which tells trainers what columns of a data set to keep. Holds
    the wrapper weakly, since that holds it."""
    own = weakref.ref(model)

    def forward(*args: object, **kwargs: object) -> object:
        wrapper = own()
        if wrapper is None:
            raise StateError("the forward of a DataParallel was kept and called when that was gone: keep the wrapper.")
        return DataParallel.forward(wrapper, *args, **kwargs)

    untraced = never_traced(forward, recursive=False)
    untraced.__signature__ = inspect.signature(unwrapped(module).forward)  # type: ignore[attr-defined]
    return untraced


def _take_gradient(fqn: str, reducer_of: Callable[[], GradReducer | None]) -> Callable[[Tensor], None]:
    """A hook that brings a param's gradient to its bucket. Python cannot see through such a hook: one that held the
    reducer, and with it the param, would keep the whole model for ever."""

    # Backward may be called in a function that is compiled; what runs under it would be traced as well.
    @never_traced
    def hook(param: Tensor) -> None:
        reducer = reducer_of()
        if reducer is None:
            return
        grad = take_grad(param)
        if grad is None:
            return
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
        if isinstance(chunk, nn.parallel.DistributedDataParallel):
            raise TypeError(
                f"{where} is a DistributedDataParallel, which averages gradients itself: one wrapper does. Pass the module that it "
                "wraps (.module)."
            )
        if not isinstance(chunk, nn.Module):
            what = type(chunk).__name__
            got = f"got {what}" if chunk is module else f"{where} is a {what}"
            raise TypeError(f"module must be an nn.Module or a list of them, {got}.")
        refuse_first_fsdp(chunk)
        found.append(chunk)
    return tuple(found)
