"""Sizes that a module or its config says, and what is the simplest to say with them: equal blocks, or one matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from layerwise.routing.split import Split, row_blocks, whole

Describe = Callable[[nn.Module], Mapping[str, Split]]


def size_of(module: nn.Module, *names: str) -> int:
    """A size by any of these names, from the module or from its config."""
    for source in (module, getattr(module, "config", None)):
        for name in names:
            found = getattr(source, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    raise ValueError(f"neither it nor its config has {' or '.join(repr(name) for name in names)}.")


def flag_of(module: nn.Module, name: str) -> bool:
    return bool(getattr(module, name, getattr(getattr(module, "config", None), name, False)))


def shape_of(module: nn.Module, name: str) -> tuple[int, ...]:
    """The shape of the param of that name, also one of a child that an adapter has wrapped; empty if there is none."""
    path, _, leaf = name.rpartition(".")
    holder: object = module
    for part in path.split(".") if path else ():
        holder = getattr(holder, part, None)
    holder = getattr(holder, "base_layer", holder)
    return tuple(getattr(getattr(holder, leaf, None), "shape", ()))


def pair_of(module: nn.Module, name: str) -> tuple[int, int]:
    shape = shape_of(module, name)
    if len(shape) != 2:
        raise ValueError(f"it has no 2-D param {name!r}.")
    return shape[0], shape[1]


def wide_of(module: nn.Module, name: str) -> tuple[int, ...]:
    shape = shape_of(module, name)
    if len(shape) < 2:
        raise ValueError(f"it has no param {name!r} of two or more dims.")
    return shape


def triple_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ValueError(f"its experts have shape {shape}, not three dims.")
    return shape[0], shape[1], shape[2]


def head_dim_of(module: nn.Module) -> int:
    try:
        return size_of(module, "head_dim", "head_size")
    except ValueError:
        return size_of(module, "hidden_size") // size_of(module, "num_attention_heads")


def those_there(*sizes: int) -> tuple[int, ...]:
    """Sizes of the blocks that there are: keys may have no part that is rotated, or nothing else."""
    return tuple(size for size in sizes if size)


def blocks(name: str, count: int, of: Callable[[nn.Module, str], tuple[int, ...]] = pair_of) -> Describe:
    """Equal row blocks one after the other; `of` says what dims the param may have."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        shape = of(module, name)
        return {name: row_blocks(shape, (shape[0] // count,) * count)}

    return describe


def one_each(*names: str) -> Describe:
    """Weights that are called as if they were several, and are one."""
    return lambda module: {name: whole(shape) for name in names if (shape := shape_of(module, name))}
