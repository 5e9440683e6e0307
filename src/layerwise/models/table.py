"""From a module to a table of params: the facts that routing needs, read off module types and sharing, as plain
values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from layerwise.dtypes import DType
from layerwise.kernels.stored import codes_nbytes_of, recipe_of
from layerwise.models import names
from layerwise.models.facts import (
    input_convolutions,
    is_within,
    label_heads,
    repeated_blocks,
    routers_of,
    vocabularies_of,
    vocabulary_heads,
)
from layerwise.models.kinds import kind_of, place_of, type_name
from layerwise.models.names import joined
from layerwise.models.splits import all_splits, fused_name, method_of
from layerwise.routing.spec import DENSE, DOMAINS, ParamSpec, ParamTable

_TORCH_BY_DTYPE = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}
_DTYPE_BY_TORCH = {value: key for key, value in _TORCH_BY_DTYPE.items()}
_PARAM_DTYPES = (DType.FP32, DType.BF16, DType.FP16)


def torch_dtype(dtype: DType) -> torch.dtype:
    return _TORCH_BY_DTYPE[dtype]


def plain_dtype(dtype: torch.dtype, owner: str) -> DType:
    """The plan's name for a torch dtype; `owner` is named in the error."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{owner} is {dtype!r}: expected one of torch.float32, torch.bfloat16, torch.float16.")
    found = _DTYPE_BY_TORCH.get(dtype)
    if found is None:
        raise TypeError(f"{owner} has dtype {dtype}: expected one of fp32, bf16, fp16. Convert it first.")
    return found


def advice_apart(fqn: str) -> str:
    """How a param that this library cannot update is trained all the same."""
    return (
        f"To train it apart, call requires_grad_(False) on {fqn!r} before layerwise.DataParallel and layerwise.Optimizer are built and "
        "requires_grad_(True) after, and give it to an optimizer of torch. A DistributedDataParallel that was built before averages its "
        "gradient; layerwise.DataParallel leaves that to you (torch.distributed.all_reduce)."
    )


def are_apart(*chunks: nn.Module) -> frozenset[str]:
    """The params that this library cannot update, by their dtype or because their gradients are sparse: frozen while it lays out
    the others, and trained by another optimizer after."""
    return frozenset(
        f"{prefix}{joined(name, local)}"
        for prefix, chunk in zip(_prefixes(chunks), chunks, strict=True)
        for name, module in names.named_modules(chunk, remove_duplicate=False)
        for local, param in module.named_parameters(recurse=False)
        if _DTYPE_BY_TORCH.get(param.dtype) not in _PARAM_DTYPES or getattr(module, "sparse", False) is True
    )


def _prefixes(chunks: Sequence[nn.Module]) -> list[str]:
    """What comes before the names of each chunk's params: nothing for the only one, else its number."""
    return [""] if len(chunks) == 1 else [f"{number}." for number in range(len(chunks))]


def named_params(*chunks: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All params by fqn, one entry per tensor, also if chunks share it."""
    seen: set[int] = set()
    for prefix, chunk in zip(_prefixes(chunks), chunks, strict=True):
        for name, param in names.named_parameters(chunk):
            if id(param) not in seen:
                seen.add(id(param))
                yield f"{prefix}{name}", param


def named_buffers(*chunks: nn.Module, persistent: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """All buffers of the modules by name, or those that are part of their state."""
    for prefix, chunk in zip(_prefixes(chunks), chunks, strict=True):
        for name, buffer in names.named_buffers(chunk, persistent=persistent):
            yield f"{prefix}{name}", buffer


def named_trainables(*chunks: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable params by fqn, one entry per tensor."""
    return {fqn: param for fqn, param in named_params(*chunks) if param.requires_grad}


def declarations(*chunks: nn.Module, method: str) -> Iterator[tuple[str, nn.Module, object]]:
    """Every module that tells us something by this method: its name, itself, and what it says."""
    for prefix, chunk in zip(_prefixes(chunks), chunks, strict=True):
        for name, module in names.named_modules(chunk):
            declare = method_of(module, method)
            if declare is not None:
                yield f"{prefix}{name}" if name else prefix.removesuffix("."), module, declare()


def _declared_domains(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Domains by fqn, where a module's own `param_domains()` names one."""
    found: dict[str, str] = {}
    for prefix, child in modules.items():
        declare = method_of(child, "param_domains")
        if declare is None:
            continue
        where = f"{type(child).__name__}.param_domains()"
        declared = declare()
        if not isinstance(declared, Mapping):
            raise TypeError(f"{where} returned {type(declared).__name__}: expected a dict from param name to domain.")
        params = dict(names.named_parameters(child))
        for local, domain in declared.items():
            if local not in params:
                raise ValueError(
                    f"{where} names {local!r}, which is no param of it. Its params: {', '.join(sorted(params))}."
                )
            if domain not in DOMAINS:
                raise ValueError(
                    f"{where} puts {local!r} into domain {domain!r}: expected one of {', '.join(map(repr, DOMAINS))}."
                )
            found[joined(prefix, local)] = domain
    return found


def domains_by_prefix(*chunks: nn.Module) -> Callable[[str], str]:
    """Which domain a param or a buffer belongs to. Params go by their own word; a buffer goes with the innermost module
    around it that has params, if those of them that are trained are all of one domain."""
    domains: dict[str, str] = {}
    frozen: set[str] = set()
    for prefix, chunk in zip(_prefixes(chunks), chunks, strict=True):
        declared = _declared_domains(dict(names.named_modules(chunk, remove_duplicate=False)))
        for fqn, param in names.named_parameters(chunk, remove_duplicate=False):
            domains[f"{prefix}{fqn}"] = declared.get(fqn, DENSE)
            frozen.update(() if param.requires_grad else (f"{prefix}{fqn}",))
    within: dict[str, set[str]] = {}
    trained: set[str] = set()
    for fqn in sorted(domains, key=frozen.__contains__):  # frozen ones last: they count where nothing is trained
        holder, domain = fqn, domains[fqn]
        while holder:
            holder = holder.rpartition(".")[0]
            if fqn not in frozen or holder not in trained:
                within.setdefault(holder, set()).add(domain)
            if fqn not in frozen:
                trained.add(holder)

    def domain_of(name: str) -> str:
        if name in domains:
            return domains[name]
        holder = name
        while holder:
            holder = holder.rpartition(".")[0]
            if holder in within:
                return next(iter(within[holder])) if len(within[holder]) == 1 else DENSE
        return DENSE

    return domain_of


def vocabulary_shapes(*chunks: nn.Module) -> set[tuple[int, int]]:
    """Shapes of the tables that look up tokens."""
    return {shape for chunk in chunks for shape in vocabularies_of(dict(names.named_modules(chunk)))}


def param_table(
    *chunks: nn.Module, vocabularies: Collection[tuple[int, int]] = (), ties: Mapping[str, str] | None = None
) -> ParamTable:
    """All params of a module (also on the meta device), in registration order, shared tensors once with all their
    names; of several modules one after the other.

    `vocabularies` are shapes of embeddings elsewhere, on other pipeline stages; `ties` names params that have a copy
    there.
    """
    found = {**dict.fromkeys(vocabulary_shapes(*chunks)), **dict.fromkeys(vocabularies)}
    tie_of = {fqn: tie for tie, fqn in (ties or {}).items()}
    specs: dict[int, ParamSpec] = {}
    for number, (prefix, chunk) in enumerate(zip(_prefixes(chunks), chunks, strict=True)):
        for param, spec in _chunk_specs(chunk, prefix, found):
            if id(param) in specs:
                specs[id(param)] = _also_called(specs[id(param)], spec)
            else:
                specs[id(param)] = replace(spec, chunk=number, tie=tie_of.get(spec.fqn, ""))
    return ParamTable(tuple(specs.values()))


def _also_called(first: ParamSpec, other: ParamSpec) -> ParamSpec:
    """A param that another chunk holds too: one tensor, with the names it has there."""
    return replace(
        first,
        aliases=(*first.aliases, other.fqn, *other.aliases),
        alias_kinds=(*first.alias_kinds, other.module_kind, *other.alias_kinds),
    )


def _chunk_specs(
    module: nn.Module, prefix: str, vocabularies: Collection[tuple[int, int]]
) -> Iterator[tuple[nn.Parameter, ParamSpec]]:
    names_by_id: dict[int, list[str]] = {}
    for fqn, param in names.named_parameters(module, remove_duplicate=False):
        names_by_id.setdefault(id(param), []).append(fqn)
    modules = dict(names.named_modules(module, remove_duplicate=False))
    splits, blocks, domains = all_splits(modules), repeated_blocks(modules), _declared_domains(modules)
    to_words = vocabulary_heads(module, modules, blocks, vocabularies)
    to_labels = label_heads(module, modules, blocks)
    routers, inputs = routers_of(modules), input_convolutions(modules, blocks)
    for fqn, param in names.named_parameters(module):
        if is_lazy(param):
            raise ValueError(
                f"param {prefix + fqn!r} has no shape yet ({type(modules[fqn.rpartition('.')[0]]).__name__}): run a batch through the "
                "module first."
            )
        aliases = tuple(name for name in names_by_id[id(param)] if name != fqn)
        place = place_of(modules, fqn)
        holder = modules[place.holder]
        called = () if place.is_scale else (place.fqn, *aliases)
        yield (
            param,
            ParamSpec(
                fqn=f"{prefix}{fqn}",
                shape=tuple(param.shape),
                dtype=_param_dtype(f"{prefix}{fqn}", param),
                trainable=param.requires_grad,
                module_kind=kind_of(holder),
                module_type=type_name(holder),
                stands_for=f"{prefix}{place.fqn}" if place.fqn != fqn else "",
                is_scale=place.is_scale,
                aliases=tuple(f"{prefix}{alias}" for alias in aliases),
                alias_kinds=tuple(kind_of(modules[place_of(modules, alias).holder]) for alias in aliases),
                maps_to_vocabulary=id(param) in to_words,
                maps_to_labels=id(param) in to_labels,
                in_block=is_within(fqn, blocks),
                routes_to=routers.get(id(param), 0),
                reads_input=id(param) in inputs,
                conv_groups=holder.groups if isinstance(holder, _ConvNd) else 1,
                looks_fused=fused_name(place.fqn),
                split=next(
                    (known[name] for known in (splits.declared, splits.known) for name in called if name in known), None
                ),
                split_is_known=not any(name in splits.declared for name in called),
                misfit=splits.misfits.get(place.fqn, ""),
                domain=next((domains[name] for name in (fqn, *aliases) if name in domains), DENSE),
                recipe=recipe_of(param),
                codes_nbytes=codes_nbytes_of(param),
            ),
        )


def _param_dtype(fqn: str, param: nn.Parameter) -> DType:
    if param.layout is not torch.strided:
        raise TypeError(f"param {fqn!r} is sparse ({param.layout}): expected a dense one. Convert it with .to_dense().")
    if not param.requires_grad:
        return _DTYPE_BY_TORCH.get(param.dtype, DType.FP32)
    dtype = _DTYPE_BY_TORCH.get(param.dtype)
    if dtype not in _PARAM_DTYPES:
        convert = "" if param.is_complex() else " Convert it with .float()."
        raise TypeError(
            f"param {fqn!r} has dtype {param.dtype}: expected one of fp32, bf16, fp16.{convert} {advice_apart(fqn)}"
        )
    return dtype
