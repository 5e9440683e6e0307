"""What params are for, read off types, sharing, shapes and places: heads, routers, layers that read the input."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import nn
from torch.nn.modules.conv import _ConvNd

from layerwise.models import names
from layerwise.models.kinds import is_linear, type_name, weight_of, weight_shape
from layerwise.models.names import joined, unwrapped

_ROUTER_CLASS = re.compile(r"Router|TopK|Topk")
_GATE = re.compile(r"[Gg]at(e|ing)\b|[Rr]outer")
"""What is called a gate, and not a gated layer."""
_FEW_CHANNELS = 4
"""Pixels have at most this many channels (red, green, blue, alpha): a convolution that reads so few reads the input."""
_INPUT_CHANNELS = ("num_channels", "in_channels", "num_mel_bins", "in_chans", "input_feat_per_channel")
"""Names by which configs say how many channels the model's input has."""
_NOT_TOKENS = ("pos", "type", "segment")


def repeated_blocks(modules: Mapping[str, nn.Module]) -> frozenset[str]:
    """Names of the blocks that the model repeats: members of a list that have modules in them. A list says so also with
    one member, as on a short pipeline stage; a sequence only with two or more."""
    found: set[str] = set()
    for prefix, child in modules.items():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            blocks = [joined(prefix, name) for name, block in names.named_children(child) if block._modules]
            found.update(blocks if len(blocks) > 1 or isinstance(child, nn.ModuleList) else ())
    return frozenset(found)


def is_within(name: str, blocks: frozenset[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:depth]) in blocks for depth in range(1, len(parts) + 1))


def vocabularies_of(modules: Mapping[str, nn.Module]) -> set[tuple[int, int]]:
    """Shapes of the tables that look up tokens. Positions and segment types are looked up too, but no head maps onto
    them."""
    return {
        (child.num_embeddings, child.embedding_dim)
        for prefix, child in modules.items()
        if isinstance(child, nn.Embedding)
        and not any(word in f"{prefix.rpartition('.')[2]} {type(child).__name__}".lower() for word in _NOT_TOKENS)
    }


def vocabulary_heads(
    root: nn.Module,
    modules: Mapping[str, nn.Module],
    blocks: frozenset[str],
    vocabularies: Collection[tuple[int, int]],
) -> set[int]:
    """`id`s of the weights of linear layers that map the width of an embedding back to that embedding's rows.

    They must stand outside its repeated blocks, and be the last ones of the model or widen: a hidden layer may have as
    many rows as the vocabulary by chance. Also what the model itself names as its output embeddings.
    """
    linears = [(name, child) for name, child in modules.items() if is_linear(child)]
    heads = set()
    is_last = True
    for name, child in reversed(linears):
        rows, cols = weight_shape(child)
        fits = (rows, cols) in vocabularies
        is_last = is_last and fits
        if fits and not is_within(name, blocks) and (is_last or rows > cols):
            heads.add(id(weight_of(child)))
    named = getattr(root, "get_output_embeddings", None)
    output = named() if callable(named) else None
    output = unwrapped(output) if isinstance(output, nn.Module) else None
    return heads | ({id(weight_of(output))} if isinstance(output, nn.Linear) else set())


def label_heads(root: nn.Module, modules: Mapping[str, nn.Module], blocks: frozenset[str]) -> set[int]:
    """`id`s of the weights of linear layers outside the repeated blocks with one row per label of the model's config."""
    labels = getattr(getattr(root, "config", None), "num_labels", None)
    return {
        id(weight_of(child))
        for name, child in modules.items()
        if is_linear(child) and weight_shape(child)[0] == labels and not is_within(name, blocks)
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


def routers_of(modules: Mapping[str, nn.Module]) -> dict[int, int]:
    """For the weights of routers, by `id`, how many experts they choose among: what a class called so holds itself or
    applies last, and linear layers with one row for each next to the experts, or within what is called a gate there."""
    found = {}
    for child in modules.values():
        if _ROUTER_CLASS.search(type(child).__name__):
            last = [weight_of(layer) for layer in child.modules() if is_linear(layer)][-1:]
            held = [param for param in child.parameters(recurse=False) if param.ndim == 2]
            found.update({id(weight): weight.shape[0] for weight in (*held, *last) if weight is not None})
        counts = _expert_counts(child)
        for name, sibling in names.named_children(child) if counts else ():
            is_gate = _GATE.search(f"{name} {type_name(sibling)}") is not None
            for _, layer in names.named_modules(sibling) if is_gate else (("", sibling),):
                if is_linear(layer) and weight_shape(layer)[0] in counts:
                    found[id(weight_of(layer))] = weight_shape(layer)[0]
    return found


def input_convolutions(modules: Mapping[str, nn.Module], blocks: frozenset[str]) -> set[int]:
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
    made |= {weight_shape(child)[0] for child in modules.values() if is_linear(child)}
    made |= {child.embedding_dim for child in modules.values() if isinstance(child, nn.Embedding)}
    return {
        id(weight_of(child))
        for name, child in convolutions.items()
        if child.groups == 1
        and (child.in_channels in counts or (child.in_channels <= _FEW_CHANNELS and len(child.kernel_size) > 1))
        and (name == first or not is_within(name, blocks) or child.in_channels not in made)
    }
