"""Params as plain values: what routing and layout know about a model, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from layerwise.dtypes import DType
from layerwise.errors import did_you_mean
from layerwise.routing.split import Split

DENSE, EXPERT = "dense", "expert"
DOMAINS = (DENSE, EXPERT)
"""The sets of ranks that hold copies of the same params: all data-parallel ranks, or those with the same experts."""


class ModuleKind(StrEnum):
    """What kind of module holds a param directly; found by its type or what its class is called, never by its own
    name."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    NORM = "norm"
    CONV = "conv"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One named tensor of the model. Its fully qualified name is its identity."""

    fqn: str
    shape: tuple[int, ...]
    dtype: DType = DType.FP32
    trainable: bool = True
    module_kind: ModuleKind = ModuleKind.OTHER
    module_type: str = ""
    """Class name of the module that holds it, for the reason given to the user."""
    stands_for: str = ""
    """The name of the weight that a parametrization makes of it (weight_norm, spectral_norm ...), where there is one."""
    is_scale: bool = False
    """The lengths that weight_norm sets apart from a weight's directions."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tensor, in registration order."""
    alias_kinds: tuple[ModuleKind, ...] = ()
    """Kinds of the modules behind the aliases: a linear weight that is also an embedding is a tied head."""
    maps_to_vocabulary: bool = False
    """A linear layer with one output row per row of one of the model's embeddings."""
    maps_to_labels: bool = False
    """A linear layer outside the repeated blocks with one output row per label of the model's config."""
    in_block: bool = False
    """Inside a block that the model repeats, so no output head whatever its name."""
    routes_to: int = 0
    """The weight of a router: how many experts it chooses among."""
    reads_input: bool = False
    """A convolution over the channels of the model's input."""
    conv_groups: int = 1
    split: Split | None = None
    """How it breaks into matrices, where its module says so (fused QKV, gate and up) or its class is known."""
    split_is_known: bool = False
    """The split is what is known of the class, not the module's own word."""
    misfit: str = ""
    """Why the module is not what is known of its class, which says how its weights split."""
    looks_fused: str = ""
    """The name by which a weight seems to be several in one, where nobody says how it splits."""
    domain: str = DENSE
    """Name of the set of ranks that hold copies of this param."""
    tie: str = ""
    """Name of the tie, where the same weight lives on another pipeline stage too: its shard borders and its owner must
    then not depend on its neighbours."""
    chunk: int = 0
    """Which of the rank's modules it belongs to: interleaved pipelines have several."""
    recipe: str = ""
    """How its values were quantised, where they are."""
    codes_nbytes: int = 0
    """Bytes of the codes that are kept of it then."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class ParamTable:
    """All params of a model in registration order, which is forward order as far as anyone knows before the first
    forward."""

    params: tuple[ParamSpec, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for param in self.params:
            for name in (param.fqn, *param.aliases):
                if name in seen:
                    raise ValueError(
                        f"param {name!r} appears twice in the table: names identify params, so each may come once."
                    )
                seen.add(name)

    def __iter__(self) -> Iterator[ParamSpec]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)

    @cached_property
    def by_name(self) -> dict[str, ParamSpec]:
        """Every param under its fqn and under each of its aliases."""
        return {name: param for param in self.params for name in (param.fqn, *param.aliases)}

    def find(self, name: str) -> ParamSpec:
        """The param of that name; an unknown one is an error with the nearest name."""
        found = self.by_name.get(name)
        if found is None:
            raise KeyError(f"no param is called {name!r}." + did_you_mean(name, self.by_name))
        return found


def table_of(shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: DType = DType.BF16) -> ParamTable:
    """A table of linear-layer weights from names and shapes alone: presets, examples, tests."""
    return ParamTable(
        tuple(
            ParamSpec(fqn=fqn, shape=shape, dtype=dtype, module_kind=ModuleKind.LINEAR, module_type="Linear")
            for fqn, shape in shapes
        )
    )
