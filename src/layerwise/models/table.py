"""From a module to a table of params: the facts that routing needs, read off module types and sharing, as plain
values."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from layerwise.dtypes import DType
from layerwise.kernels.stored import codes_nbytes_of, recipe_of
from layerwise.models import names
from layerwise.models.known import is_transposed_linear, known_splits
from layerwise.models.names import joined, unwrapped
from layerwise.routing.spec import DENSE, DOMAINS, ModuleKind, ParamSpec, ParamTable
from layerwise.routing.split import Split, row_blocks, transposed

_TORCH_BY_DTYPE = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}
_DTYPE_BY_TORCH = {value: key for key, value in _TORCH_BY_DTYPE.items()}
_PARAM_DTYPES = (DType.FP32, DType.BF16, DType.FP16)

_KINDS: tuple[tuple[tuple[type[nn.Module], ...], ModuleKind], ...] = (
    ((nn.Linear, nn.Bilinear), ModuleKind.LINEAR),
    ((nn.Embedding, nn.EmbeddingBag), ModuleKind.EMBEDDING),
    ((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase), ModuleKind.NORM),
    ((_ConvNd,), ModuleKind.CONV),
)


_FUSED_NAMES = frozenset(
    {
        "qkv",
        "qkv_proj",
        "qkv_linear",
        "to_qkv",
        "in_proj_qkv",
        "in_proj_qkvz",
        "in_proj_weight",
        "wqkv",
        "Wqkv",
        "query_key_value",
        "c_attn",
        "kv",
        "kv_proj",
        "to_kv",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "wkv_a",
        "wkv_b",
        "gate_up",
        "gate_up_proj",
        "gate_and_up",
        "w12",
        "w13",
    }
)
"""Names that modules give to weights which are several in one."""

_NORM_CLASS = re.compile(r"Norm(?!al|ed)")
"""LlamaRMSNorm, T5LayerNorm, MambaRMSNormGated; not NormalizedLinear."""
_LINEAR_CLASS = re.compile(r"Linear(\d+bit\w*)?$")
"""ColumnParallelLinear, Linear4bit; not KimiLinearModel."""
_ROUTER_CLASS = re.compile(r"Router|TopK|Topk")
_GATE = re.compile(r"[Gg]at(e|ing)\b|[Rr]outer")
"""What is called a gate, and not a gated layer."""
_FEW_CHANNELS = 4
"""Pixels have at most this many channels (red, green, blue, alpha): a convolution that reads so few reads the input."""
_INPUT_CHANNELS = ("num_channels", "in_channels", "num_mel_bins", "in_chans", "input_feat_per_channel")
"""Names by which configs say how many channels the model's input has."""
_NOT_TOKENS = ("pos", "type", "segment")
_ADAPTER_PARTS = frozenset({"base_layer", "original_module"})
"""What adapter libraries put between a module and the weight that it had before."""


def torch_dtype(dtype: DType) -> torch.dtype:
    return _TORCH_BY_DTYPE[dtype]


def plain_dtype(dtype: torch.dtype, owner: str) -> DType:
    """The plan's name for a torch dtype; `owner` is named in the error."""
    found = _DTYPE_BY_TORCH.get(dtype)
    if found is None:
        raise TypeError(f"{owner} has dtype {dtype}: expected one of fp32, bf16, fp16. Convert or freeze it first.")
    return found


def _kind_of(module: nn.Module) -> ModuleKind:
    """By type; for classes of libraries that are not imported here, by what their class is called."""
    known = next((kind for types, kind in _KINDS if isinstance(module, types)), None)
    if known is not None:
        return known
    name = _type_name(module)
    if is_transposed_linear(module) or _LINEAR_CLASS.search(name):
        return ModuleKind.LINEAR
    inside = [
        child for child in module.children() if not isinstance(child, nn.ModuleDict)
    ]  # parametrizations are in one
    if _NORM_CLASS.search(name) and not inside:
        return ModuleKind.NORM
    return ModuleKind.EMBEDDING if "Embed" in name else ModuleKind.OTHER


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


def _method(module: nn.Module, name: str) -> Callable[[], object] | None:
    """A method by which a module tells us about its params, if it has one."""
    found = getattr(module, name, None)
    if found is not None and not callable(found):
        raise TypeError(f"{type(module).__name__}.{name} is a {type(found).__name__}: expected a method.")
    return found


def declarations(*chunks: nn.Module, method: str) -> Iterator[tuple[str, nn.Module, object]]:
    """Every module that tells us something by this method: its name, itself, and what it says."""
    for prefix, chunk in zip(_prefixes(chunks), chunks, strict=True):
        for name, module in names.named_modules(chunk):
            declare = _method(module, method)
            if declare is not None:
                yield f"{prefix}{name}" if name else prefix.removesuffix("."), module, declare()


def _declared_domains(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Domains by fqn, where a module's own `param_domains()` names one."""
    found: dict[str, str] = {}
    for prefix, child in modules.items():
        declare = _method(child, "param_domains")
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
    return {shape for chunk in chunks for shape in _vocabularies(dict(names.named_modules(chunk)))}


class _Splits(NamedTuple):
    """What is known of how params split, by fqn."""

    declared: dict[str, Split]
    """What a module's own `matrix_splits()` says."""
    known: dict[str, Split]
    """What is known of its class."""
    misfits: dict[str, str]
    """Why a module is not what is known of its class, for its params. No error yet: a user's rule may know better."""


def _all_splits(modules: Mapping[str, nn.Module]) -> _Splits:
    """Splits of fused weights. Of what is known the outermost module's word counts: attention knows more about its
    projection than the projection."""
    found = _Splits({}, {}, {})
    for prefix, child in modules.items():
        known: Mapping[str, Split] = {}
        if not callable(getattr(child, "matrix_splits", None)):
            try:
                known = known_splits(child)
            except ValueError as error:
                found.misfits.update(dict.fromkeys(_in_doubt(child, prefix), str(error)))
        if is_transposed_linear(child) and not _fused_name(prefix):
            known = {"weight": transposed(_weight_shape(child))}
        for local, split in known.items():
            found.known.setdefault(_wrapped(child, prefix, local), split)
    for prefix, child in modules.items():
        found.declared.update(_declared_splits(child, prefix))
    return found


def _in_doubt(module: nn.Module, prefix: str) -> list[str]:
    """The weights of a module, or of its children, that may be several in one: those called so, or else all."""
    near = [name for name, param in names.named_parameters(module) if param.ndim > 1 and name.count(".") <= 1]
    return [joined(prefix, name) for name in [name for name in near if _fused_name(name)] or near]


def _wrapped(module: nn.Module, prefix: str, local: str) -> str:
    """The fqn of a known param, also if an adapter has wrapped its module since."""
    path, _, leaf = local.rpartition(".")
    wrapped = path and hasattr(module.get_submodule(path), "base_layer")
    return ".".join(part for part in (prefix, path, "base_layer" if wrapped else "", leaf) if part)


def _declared_splits(module: nn.Module, prefix: str) -> dict[str, Split]:
    """What a module's own `matrix_splits()` says, by fqn."""
    declared = _declaration(module)
    if not declared:
        return {}
    found: dict[str, Split] = {}
    modules = dict(names.named_modules(module))
    params = {
        place.fqn: param
        for fqn, param in names.named_parameters(module)
        if not (place := _place_of(modules, fqn)).is_scale
    }
    for local, split in declared.items():
        if local not in params:
            raise ValueError(
                f"{type(module).__name__}.matrix_splits() names {local!r}, which is no param of it. Its params: "
                f"{', '.join(sorted(params))}."
            )
        fqn = joined(prefix, local)
        if isinstance(split, Split):
            found[fqn] = split
        else:
            try:
                found[fqn] = row_blocks(tuple(params[local].shape), tuple(int(size) for size in split))
            except ValueError as error:
                where = f"{type(module).__name__}.matrix_splits() for param {fqn!r}"
                raise ValueError(f"{where}: {error} Fix matrix_splits().") from None
    return found


def _declaration(module: nn.Module) -> Mapping[str, Split | Sequence[int]]:
    splits = _method(module, "matrix_splits")
    if splits is None:
        return {}
    declared = splits()
    if not isinstance(declared, Mapping):
        raise TypeError(
            f"{type(module).__name__}.matrix_splits() returned {type(declared).__name__}: expected a dict from param name "
            "to a Split or row block sizes."
        )
    return declared


def _weight(module: nn.Module) -> nn.Parameter | None:
    """A module's own param of that name, or what a parametrization makes it of. Asked for as an attribute, a parametrized
    weight would be computed, and what computes it may change: spectral_norm counts its iterations."""
    if "weight" in module._parameters:
        return module._parameters["weight"]
    modules = dict(names.named_modules(module))
    for fqn, param in names.named_parameters(module):
        if _place_of(modules, fqn) == _Place("", "weight", False):
            return param
    return None


class _Place(NamedTuple):
    """Which weight of which module a param is, or what a parametrization makes it of."""

    holder: str
    name: str
    is_scale: bool

    @property
    def fqn(self) -> str:
        return joined(self.holder, self.name)


def _place_of(modules: Mapping[str, nn.Module], fqn: str) -> _Place:
    """Where a param is for its module: `parametrizations.weight.original1`, `weight_v` and `weight_orig` are its weight."""
    holder, _, leaf = fqn.rpartition(".")
    module = modules[holder]
    if isinstance(module, ParametrizationList):
        outer, _, name = f".{holder}".rpartition(".parametrizations.")
        return _Place(outer.removeprefix("."), name, leaf == "original0" and isinstance(module[0], _WeightNorm))
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm) and leaf in (f"{hook.name}_{end}" for end in ("g", "v", "orig")):
            return _Place(holder, hook.name, leaf == f"{hook.name}_g")
    return _Place(holder, leaf, False)


def _type_name(module: nn.Module) -> str:
    """What a module's class was called before a parametrization made another one of it."""
    return type_before_parametrizations(module).__name__


def _weight_shape(module: nn.Module) -> tuple[int, int]:
    """(rows, cols) of a linear layer's weight; zeros if it has none of two dims."""
    weight = _weight(module)
    if weight is None and isinstance(module, nn.Linear):  # parametrized
        return module.out_features, module.in_features
    if weight is None or weight.ndim != 2:
        return 0, 0
    return weight.shape[0], weight.shape[1]


def _is_linear(module: nn.Module) -> bool:
    return _kind_of(module) is ModuleKind.LINEAR and _weight_shape(module) != (0, 0)


def _repeated(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Names of the blocks that the model repeats: members of a list that have modules in them. A list says so also with
    one member, as on a short pipeline stage; a sequence only with two or more."""
    found: set[str] = set()
    for prefix, child in modules.items():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            blocks = [joined(prefix, name) for name, block in names.named_children(child) if block._modules]
            found.update(blocks if len(blocks) > 1 or isinstance(child, nn.ModuleList) else ())
    return frozenset(found)


def _within(name: str, blocks: frozenset[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in blocks for depth in range(1, len(parts) + 1))


def _vocabularies(modules: Mapping[str, nn.Module]) -> set[tuple[int, int]]:
    """Shapes of the tables that look up tokens. Positions and segment types are looked up too, but no head maps onto
    them."""
    return {
        (child.num_embeddings, child.embedding_dim)
        for prefix, child in modules.items()
        if isinstance(child, nn.Embedding)
        and not any(word in f"{prefix.rpartition('.')[2]} {type(child).__name__}".lower() for word in _NOT_TOKENS)
    }


def _vocabulary_heads(
    root: nn.Module,
    modules: Mapping[str, nn.Module],
    blocks: frozenset[str],
    vocabularies: Collection[tuple[int, int]],
) -> set[int]:
    """`id`s of the weights of linear layers that map the width of an embedding back to that embedding's rows.

    They must stand outside its repeated blocks, and be the last ones of the model or widen: a hidden layer may have as
    many rows as the vocabulary by chance. Also what the model itself names as its output embeddings.
    """
    linears = [(name, child) for name, child in modules.items() if _is_linear(child)]
    heads = set()
    is_last = True
    for name, child in reversed(linears):
        rows, cols = _weight_shape(child)
        fits = (rows, cols) in vocabularies
        is_last = is_last and fits
        if fits and not _within(name, blocks) and (is_last or rows > cols):
            heads.add(id(_weight(child)))
    named = getattr(root, "get_output_embeddings", None)
    output = named() if callable(named) else None
    output = unwrapped(output) if isinstance(output, nn.Module) else None
    return heads | ({id(_weight(output))} if isinstance(output, nn.Linear) else set())


def _label_heads(root: nn.Module, modules: Mapping[str, nn.Module], blocks: frozenset[str]) -> set[int]:
    """`id`s of the weights of linear layers outside the repeated blocks with one row per label of the model's config."""
    labels = getattr(getattr(root, "config", None), "num_labels", None)
    return {
        id(_weight(child))
        for name, child in modules.items()
        if _is_linear(child) and _weight_shape(child)[0] == labels and not _within(name, blocks)
    }


def _expert_counts(module: nn.Module) -> set[int]:
    """How many experts a module holds: members of a list, or entries of stacked weights, of what is called experts."""
    found = set()
    for name, child in names.named_children(module):
        if "expert" in f"{name} {type(child).__name__}".lower():
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                found.add(len(child))
            found.update(param.shape[0] for param in child.parameters(recurse=False) if param.ndim == 3)
    return found - {1}


def _routers(modules: Mapping[str, nn.Module]) -> dict[int, int]:
    """For the weights of routers, by `id`, how many experts they choose among: what a class called so holds itself or
    applies last, and linear layers with one row for each next to the experts, or within what is called a gate there."""
    found = {}
    for child in modules.values():
        if _ROUTER_CLASS.search(type(child).__name__):
            last = [_weight(layer) for layer in child.modules() if _is_linear(layer)][-1:]
            held = [param for param in child.parameters(recurse=False) if param.ndim == 2]
            found.update({id(weight): weight.shape[0] for weight in (*held, *last) if weight is not None})
        counts = _expert_counts(child)
        for name, sibling in names.named_children(child) if counts else ():
            is_gate = _GATE.search(f"{name} {_type_name(sibling)}") is not None
            for _, layer in names.named_modules(sibling) if is_gate else (("", sibling),):
                if _is_linear(layer) and _weight_shape(layer)[0] in counts:
                    found[id(_weight(layer))] = _weight_shape(layer)[0]
    return found


def _input_convolutions(modules: Mapping[str, nn.Module], blocks: frozenset[str]) -> set[int]:
    """`id`s of the weights of convolutions that read the model's input: images of as few channels as pixels have, or as
    many channels as a config says that the input has; outside the repeated blocks, before all other convolutions, or
    where nothing in the model makes as many."""
    counts: set[int] = set()
    for config in {
        id(found): found for child in modules.values() if (found := getattr(child, "config", None))
    }.values():
        counts.update(found for name in _INPUT_CHANNELS if isinstance(found := getattr(config, name, None), int))
    convolutions = {name: child for name, child in modules.items() if isinstance(child, _ConvNd)}
    first = next(iter(convolutions), None)
    made = {child.out_channels for child in convolutions.values()}
    made |= {_weight_shape(child)[0] for child in modules.values() if _is_linear(child)}
    made |= {child.embedding_dim for child in modules.values() if isinstance(child, nn.Embedding)}
    return {
        id(_weight(child))
        for name, child in convolutions.items()
        if child.groups == 1
        and (child.in_channels in counts or (child.in_channels <= _FEW_CHANNELS and len(child.kernel_size) > 1))
        and (name == first or not _within(name, blocks) or child.in_channels not in made)
    }


def _fused_name(fqn: str) -> str:
    """The part of a weight's name that says it is fused, or nothing."""
    parts = [part for part in fqn.split(".") if part not in _ADAPTER_PARTS]
    return next((part for part in reversed(parts[-2:]) if part in _FUSED_NAMES), "")


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
    splits, blocks, domains = _all_splits(modules), _repeated(modules), _declared_domains(modules)
    vocabulary_heads = _vocabulary_heads(module, modules, blocks, vocabularies)
    label_heads = _label_heads(module, modules, blocks)
    routers, inputs = _routers(modules), _input_convolutions(modules, blocks)
    for fqn, param in names.named_parameters(module):
        aliases = tuple(name for name in names_by_id[id(param)] if name != fqn)
        place = _place_of(modules, fqn)
        holder = modules[place.holder]
        called = () if place.is_scale else (place.fqn, *aliases)
        yield (
            param,
            ParamSpec(
                fqn=f"{prefix}{fqn}",
                shape=tuple(param.shape),
                dtype=_param_dtype(f"{prefix}{fqn}", param),
                trainable=param.requires_grad,
                module_kind=_kind_of(holder),
                module_type=_type_name(holder),
                stands_for=f"{prefix}{place.fqn}" if place.fqn != fqn else "",
                is_scale=place.is_scale,
                aliases=tuple(f"{prefix}{alias}" for alias in aliases),
                alias_kinds=tuple(_kind_of(modules[_place_of(modules, alias).holder]) for alias in aliases),
                maps_to_vocabulary=id(param) in vocabulary_heads,
                maps_to_labels=id(param) in label_heads,
                in_block=_within(fqn, blocks),
                routes_to=routers.get(id(param), 0),
                reads_input=id(param) in inputs,
                conv_groups=holder.groups if isinstance(holder, _ConvNd) else 1,
                looks_fused=_fused_name(place.fqn),
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
    if not param.requires_grad:
        return _DTYPE_BY_TORCH.get(param.dtype, DType.FP32)
    dtype = plain_dtype(param.dtype, f"param {fqn!r}")
    if dtype not in _PARAM_DTYPES:
        raise TypeError(
            f"param {fqn!r} has dtype {param.dtype}: expected one of fp32, bf16, fp16. Convert it with .float()."
        )
    return dtype
