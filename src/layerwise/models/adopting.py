"""Taking over weights that somebody else has quantised: before a module is wrapped, and in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from layerwise.errors import listed
from layerwise.kernels.foreign import Adopted, adapter_of
from layerwise.kernels.stored import QuantizedStorage, recipe_of, stored_of
from layerwise.models import names
from layerwise.models.quantized import QuantizedTensor
from layerwise.models.quantizing import put_params

_PROBE_ROWS = 32
"""Rows of the zeros that a weight is multiplied with once: kernels want whole tiles."""


def adopt(module: nn.Module, values: Mapping[str, Tensor] | None = None, *, from_codes: bool = False) -> nn.Module:
    """Have weights that are quantised tensors of others trained, torchao's `MXTensor` among them; returns the module.

    They become trainable params that read as bf16, over the memory of the tensors that they were. Call it before
    `DataParallel`.

    Args:
        module: the model.
        values: by name, the bf16 values that the codes were made of, such as `state_dict()` of before: masters begin with
            these. Other names in it do not matter.
        from_codes: let masters begin with what the codes stand for, where no values are given. The bits that rounding took
            are lost to training then.
    """
    params = dict(names.named_parameters(module))
    every: dict[int, list[str]] = {}
    for fqn, param in names.named_parameters(module, remove_duplicate=False):
        every.setdefault(id(param), []).append(fqn)
    wanted = {fqn: param for fqn, param in params.items() if adapter_of(param) is not None}
    if not wanted:
        raise ValueError(
            f"{type(module).__name__} has no weight to adopt: expected params that are quantised tensors of a known type. Make "
            "other types known with layerwise.quant.register_quantized()."
        )
    made: dict[tuple[str, ...], nn.Parameter] = {}
    problems: dict[str, str] = {}
    for fqn, param in wanted.items():
        fqns = tuple(every[id(param)])
        given = next((values[name] for name in fqns if name in values), None) if values is not None else None
        try:
            made[fqns] = nn.Parameter(QuantizedTensor(_adopted(param, given, from_codes), param.device))
        except ValueError as error:
            problems[fqn] = f"{fqn} ({error})"
    if problems:
        raise ValueError(
            f"cannot adopt {listed(list(problems.values()))}. What cannot be adopted cannot be trained: have plain tensors in its place."
        )
    put_params(module, made)
    return module


@torch.no_grad()
def _adopted(param: nn.Parameter, given: Tensor | None, from_codes: bool) -> Adopted:
    """A param's codes, once it was seen that they can be trained; a ValueError says why not, and leaves them as they were."""
    if param.dim() != 2:
        raise ValueError(f"it has shape {tuple(param.shape)}, expected rows and columns")
    if param.dtype is not torch.bfloat16:
        raise ValueError(f"it reads as {param.dtype}, expected torch.bfloat16")
    if param.device.type == "meta":
        raise ValueError("it is on the meta device and has no codes")
    storage = _storage_of(param)
    before, codes = storage.read(), [tensor.clone() for tensor in storage.codes]
    values = _beginning(storage, before, given, from_codes)
    try:
        made = Adopted(storage, values)
        found = [tensor.clone() for tensor in storage.codes]
        storage.settle(values)
        if not _same(found, storage.codes):
            raise ValueError(
                "it makes other codes of the same values whenever it is asked: ranks would not have the same ones"
            )
        if not _same([before], [storage.read()]):
            raise ValueError(
                "its codes are not those that the same rules make of the values: these are others, or it was quantised by other rules"
            )
        for by_rows in (True, False):
            made.product(before.new_zeros(_PROBE_ROWS, param.shape[1 if by_rows else 0]), by_rows=by_rows)
    except Exception as error:
        for tensor, old in zip(storage.codes, codes, strict=True):
            tensor.copy_(old)
        if isinstance(error, ValueError):
            raise
        # What a type does not do comes as an error of any kind.
        raise ValueError(
            f"{type(param).__name__} does not do here what training needs: {type(error).__name__} {error}".rstrip()
        ) from error
    return made


def _storage_of(param: nn.Parameter) -> QuantizedStorage:
    adapter = adapter_of(param)
    storage = None if adapter is None else adapter(param.detach())
    if not isinstance(storage, QuantizedStorage):
        raise TypeError(
            f"the adapter of {type(param).__name__} returned a {type(storage).__name__}: expected all of layerwise.quant.QuantizedStorage."
        )
    if tuple(storage.shape) != tuple(param.shape):
        raise ValueError(f"its adapter has shape {tuple(storage.shape)} for it, expected {tuple(param.shape)}")
    return storage


def _beginning(storage: QuantizedStorage, codes_mean: Tensor, given: Tensor | None, from_codes: bool) -> Tensor:
    """What a master is to begin with."""
    if given is None:
        given = storage.given
    if given is None and from_codes:
        given = codes_mean
    if given is None:
        raise ValueError(
            "no values are given for it, and a master must not begin with what codes stand for: pass values= with those of before it "
            "was quantised, or from_codes=True to have it so"
        )
    if stored_of(given) is not None or hasattr(given, "__tensor_flatten__"):
        raise ValueError(f"what is given for it is a {type(given).__name__}, expected a plain tensor of bf16 values")
    if given.shape != storage.shape or given.dtype is not torch.bfloat16:
        raise ValueError(
            f"what is given for it is {given.dtype} of shape {tuple(given.shape)}, expected torch.bfloat16 of {tuple(storage.shape)}"
        )
    return given.detach().to(codes_mean.device).clone(memory_format=torch.contiguous_format)


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors have the same bits."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).contiguous().view(torch.uint8)

    return all(torch.equal(bits(one), bits(other)) for one, other in zip(some, others, strict=True))


def refuse_foreign(modules: Sequence[nn.Module], param_gather: str) -> None:
    """Raise for a param that is made of other tensors and that nobody has adopted: what a step leaves would not reach it, and
    nobody would notice. Also for adopted ones whose codes are to be made at use."""
    for module in modules:
        for fqn, param in names.named_parameters(module):
            if param_gather == "bf16" and isinstance(stored_of(param), Adopted):
                raise ValueError(
                    f"param_gather='bf16' has codes made at use, and param {fqn!r} has its own ({recipe_of(param)}): only what "
                    "layerwise.quantize() made can be had so. Leave param_gather out."
                )
            if hasattr(param, "placements") or stored_of(param) is not None:
                continue
            if adapter_of(param) is not None or (param.requires_grad and hasattr(param, "__tensor_flatten__")):
                raise not_adopted(fqn, param)


def not_adopted(fqn: str, param: Tensor) -> TypeError:
    """The error for a param that is somebody's quantised tensor as it was."""
    known = (
        "" if adapter_of(param) is not None else "make its type known with layerwise.quant.register_quantized() and "
    )
    return TypeError(
        f"param {fqn!r} is a {type(param).__name__}, a tensor that is made of others: what a step leaves would not reach it. To train "
        f"it, {known}call layerwise.quant.adopt(module, values) first; else have a plain tensor in its place."
    )
