"""Weights that torchao has quantised, and the same model with bf16 weights of which torchao makes codes whenever they are used: what every step of a run left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise
from layerwise import quant
from layerwise.kernels.stored import stored_of
from layerwise.kernels.torchao_mx import MXStorage
from layerwise.memory.replicas import ReplicaState
from tests import seams
from tests.quantizing import Seen, Small, coded_params, plain_params, starting_faults, tokens_of
from tests.worlds import hash_tensors, put_together


def to_mx(values: Tensor, *, mode: str = "floor", swizzled: bool = False, element: str = "float8_e4m3fn") -> Any:
    """A tensor of torchao's, by torchao."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs, ScaleCalculationMode

    kind, scaling = getattr(torch, element), ScaleCalculationMode(mode)
    inputs = QuantizeTensorToMXKwargs(elem_dtype=kind, scaling_mode=scaling, is_swizzled_scales=swizzled)
    return MXTensor.to_mx(values, kind, scaling_mode=scaling, act_quant_kwargs=inputs, is_swizzled_scales=swizzled)


def with_mx_weights(module: nn.Module, *, skip: Sequence[str] = (), **how: Any) -> dict[str, Tensor]:
    """Have the linear layers of a module have torchao's weights, frozen as torchao leaves them; returns the values of before."""
    before = {name: values.clone() for name, values in module.state_dict().items()}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and not any(fnmatchcase(f"{name}.weight", glob) for glob in skip):
            layer.weight = nn.Parameter(to_mx(layer.weight.detach(), **how), requires_grad=False)
    return before


class _AtUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: dict[str, Any]) -> Tensor:
        codes = to_mx(weight.detach(), **how)
        ctx.save_for_backward(x, codes.dequantize(torch.bfloat16))
        return F.linear(x, codes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, seen = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return (flat @ seen).view(x.shape), flat.mT @ x.reshape(-1, x.shape[-1]), None


class LinearAtUse(nn.Linear):
    """A bf16 weight of which torchao makes codes in every forward."""

    how: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _AtUse.apply(x, self.weight, self.how)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class MXWay:
    """How a run is set up."""

    layout: str = "flat"
    overlap: bool = True
    mode: str = "floor"
    swizzled: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def how(self) -> dict[str, Any]:
        return {"mode": self.mode, "swizzled": self.swizzled}


def build() -> nn.Module:
    torch.manual_seed(3)
    return Small(32).bfloat16()


def prepare(way: MXWay, *, at_use: bool = False) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    module = build()
    if at_use:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.__class__, layer.how = LinearAtUse, way.how
    else:
        quant.adopt(module, with_mx_weights(module, **way.how))
    options = dict(way.options)
    checks = bool(options.pop("check_replicas", False))
    model = seams.data_parallel(
        module,
        layout=way.layout,
        overlap_param_gather=way.overlap,
        bucket_mib=0.012,  # two weights in a bucket
        **options,
    )
    optimizer = layerwise.Optimizer(
        model,
        matrix=layerwise.Muon(lr=0.05, weight_decay=0.1),
        other=layerwise.AdamW(lr=0.02),
        clip_grad_norm=1.0,
        check_replicas=checks,
    )
    return model, optimizer


@contextmanager
def counted_settles() -> Iterator[list[int]]:
    """How often torchao's tensors are told to take values over, by the address of their codes."""
    real, found = MXStorage.settle, []

    def settle(self: MXStorage, values: Tensor) -> None:
        found.append(self.codes[0].data_ptr())
        real(self, values)

    with mock.patch.object(MXStorage, "settle", settle):
        yield found


def train(rank: int, way: MXWay, steps: int, *, at_use: bool = False) -> Seen:
    """A run of which everything is written down."""
    model, optimizer = prepare(way, at_use=at_use)
    seen, storage = Seen(), model.engine.storage
    seen.faults += starting_faults(model, build())
    with counted_settles() as settles:
        for step in range(steps):
            take_step(model, rank, step, seen)
            model.engine.reducer.finish()
            for shard in storage.shards:
                seen.facts += [
                    (f"gradient of {span.fqn}", hash_tensors([shard.update[span.part]])) for span in shard.spans
                ]
            optimizer.step()
            seen.deferred += sum(
                replica.plan.is_staged and replica.state is not ReplicaState.FRESH for replica in storage.replicas
            )
            optimizer.zero_grad()
            for shard in storage.shards:
                held = [shard.master, *(tensor for _, tensor in sorted(shard.state.items()))]
                seen.facts += [
                    (f"master of {span.fqn}", hash_tensors(tensor[span.part] for tensor in held))
                    for span in shard.spans
                ]
            if step in (0, steps - 1):
                linear = {fqn for fqn, _ in weights(model)}
                seen.facts += [
                    (f"plain {fqn}", hash_tensors([param])) for fqn, param in plain_params(model) if fqn not in linear
                ]
                seen.faults += [f"step {step}: {text}" for text in ([] if at_use else faults(model, way))]
        model.ensure()
    if not at_use:
        due = {stored.codes[0].data_ptr() for _, param in coded_params(model) if (stored := stored_of(param))}
        counts = {address: settles.count(address) for address in due}
        if not due or set(counts.values()) != {steps} or len(settles) != steps * len(due):
            seen.faults.append(f"in {steps} steps, weights were taken over {sorted(counts.values())} times")
    return seen


def take_step(model: nn.Module, rank: int, step: int, seen: Seen) -> None:
    tokens = tokens_of(rank, step, 0)
    out = model(tokens[:, :-1])
    loss = F.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    seen.facts += [("loss", loss.item()), ("output", hash_tensors([out]))]


def weights(model: layerwise.DataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Weights of linear layers, however they are kept."""
    for name, layer in model.module.named_modules():
        if isinstance(layer, nn.Linear):
            yield f"{name}.weight", layer.weight


def faults(model: layerwise.DataParallel, way: MXWay) -> list[str]:
    """Codes that are not those that torchao makes of what masters round to, or not the same on every rank. Collective."""
    model.ensure()
    found, masters, mine = [], put_together(model), []
    for fqn, param in weights(model):
        stored = stored_of(param)
        if stored is None or stored.given is not None:
            found.append(f"{fqn} is not kept as codes alone")
            continue
        expected = to_mx(masters[f"master of {fqn}"].view(param.shape).bfloat16(), **way.how)
        codes, scales = stored.codes
        if hash_tensors([codes, scales]) != hash_tensors([expected.qdata, expected.scale]):
            found.append(f"codes of {fqn} are not those of its master")
        if not torch.equal(param.detach() * 1, expected.dequantize(torch.bfloat16)):
            found.append(f"{fqn} does not read as its codes")
        mine.append(hash_tensors([codes, scales]))
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, mine)
    if not mine or any(other != mine for other in others):
        found.append("codes differ between ranks")
    return found
