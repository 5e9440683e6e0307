"""Which rows of which projections make the logits of which attention heads: what QK-clip scales.

A module says so by a method `attention_heads()` that returns an `AttentionHeads`. The usual arrangements have a
constructor each; any other is a list of `HeadRows`.

Logits are bilinear in query and key. To bring those of a head down by `eta`, its query rows take one share of the factor
and its key rows the rest. Heads that share key rows are a group: the largest logit of the group decides for all of it.
Rows whose partner must not move, as the rotary queries of multi-head latent attention, whose key all heads share, take
all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from layerwise.config.habits import understands
from layerwise.errors import did_you_mean, listed
from layerwise.routing.geometry import Box, collapse
from layerwise.routing.spec import DENSE, ParamSpec, ParamTable
from layerwise.routing.split import is_size

Role = Literal["query", "key", "query_alone"]
Order = Literal["blocks", "groups"]

_ROLES = ("query", "key", "query_alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRows:
    """Rows of one projection that are scaled together. Rows are outputs, however the weight is stored."""

    param: str
    """Local name of the weight, or of the module that holds it; a bias next to it is scaled like its rows."""
    start: int
    stop: int
    heads: tuple[int, ...]
    """Query heads of the group: the largest logit of any of them decides."""
    role: Role

    def power(self, balance: float) -> float:
        """Of eta: what these rows are multiplied with."""
        return {"query": balance, "key": 1.0 - balance, "query_alone": 1.0}[self.role]


@understands()
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionHeads:
    """The query heads of an attention module and the rows behind their logits.

    >>> heads = AttentionHeads.grouped(query="q_proj", key="k_proj", n_heads=4, n_kv_heads=2, head_dim=8)
    >>> [(rows.param, rows.start, rows.stop, rows.heads) for rows in heads.rows]
    [('q_proj', 0, 16, (0, 1)), ('k_proj', 0, 8, (0, 1)), ('q_proj', 16, 32, (2, 3)), ('k_proj', 8, 16, (2, 3))]

    Args:
        n_heads: number of query heads: as many maxima are recorded.
        rows: a `HeadRows` for each stretch of rows that is scaled together; every head is in one group of heads.
        records: the module calls `layerwise.record_logits` itself. False, so that the library finds its attention.
    """

    n_heads: int
    rows: tuple[HeadRows, ...]
    records: bool = False

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ValueError(f"AttentionHeads: {problem}")

    def _problem(self) -> str | None:
        if not _is_positive(self.n_heads):
            return f"n_heads must be a positive integer, got {self.n_heads!r}."
        roles_of: dict[tuple[int, ...], set[str]] = {}
        for rows in self.rows:
            if rows.role not in _ROLES:
                return f"role must be one of {', '.join(_ROLES)}, got {rows.role!r}."
            if not 0 <= rows.start < rows.stop:
                return f"rows of {rows.param!r} must be a stretch of at least one, got [{rows.start}, {rows.stop})."
            if not rows.heads or not all(0 <= head < self.n_heads for head in rows.heads):
                return f"heads of {rows.param!r} must be some of 0 to {self.n_heads - 1}, got {list(rows.heads)}."
            roles_of.setdefault(rows.heads, set()).add(rows.role)
        if sorted(head for group in roles_of for head in group) != list(range(self.n_heads)):
            return f"every one of {self.n_heads} heads must be in one group of heads, got {sorted(roles_of)}."
        for group, roles in roles_of.items():
            if ("query" in roles) != ("key" in roles):
                return f"heads {list(group)} have {' and '.join(sorted(roles))} rows: expected query and key rows together."
        return None

    @classmethod
    def grouped(
        cls, *, query: str, key: str, n_heads: int, head_dim: int, n_kv_heads: int | None = None, records: bool = False
    ) -> AttentionHeads:
        """Queries and keys in two projections, head after head; `n_kv_heads` key heads, each for as many query heads."""
        groups, per_group = _groups(n_heads, n_kv_heads, head_dim)
        rows: list[HeadRows] = []
        for number, heads in enumerate(groups):
            size = per_group * head_dim
            rows.append(HeadRows(param=query, start=number * size, stop=(number + 1) * size, heads=heads, role="query"))
            rows.append(
                HeadRows(param=key, start=number * head_dim, stop=(number + 1) * head_dim, heads=heads, role="key")
            )
        return cls(n_heads=n_heads, rows=tuple(rows), records=records)

    @classmethod
    def fused(
        cls,
        qkv: str,
        *,
        n_heads: int,
        head_dim: int,
        n_kv_heads: int | None = None,
        order: Order = "blocks",
        value_dim: int | None = None,
        records: bool = False,
    ) -> AttentionHeads:
        """Queries, keys and values in one projection: in three `blocks`, or in `groups` of query heads with their key and
        value, as Megatron-LM has them (and, with as many key heads as query heads, GPT-NeoX)."""
        groups, per_group = _groups(n_heads, n_kv_heads, head_dim)
        if order not in ("blocks", "groups"):
            raise ValueError(f"AttentionHeads: order must be one of blocks, groups, got {order!r}.")
        size = per_group * head_dim
        stride = size + head_dim + (head_dim if value_dim is None else value_dim)
        rows: list[HeadRows] = []
        for number, heads in enumerate(groups):
            first = number * (size if order == "blocks" else stride)
            then = n_heads * head_dim + number * head_dim if order == "blocks" else first + size
            rows.append(HeadRows(param=qkv, start=first, stop=first + size, heads=heads, role="query"))
            rows.append(HeadRows(param=qkv, start=then, stop=then + head_dim, heads=heads, role="key"))
        return cls(n_heads=n_heads, rows=tuple(rows), records=records)

    @classmethod
    def mla(
        cls,
        *,
        query: str,
        key_value: str,
        n_heads: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        records: bool = False,
    ) -> AttentionHeads:
        """Multi-head latent attention: of each head `query` has rows without and rows with rotary positions, `key_value`
        key rows without and value rows. The rotary key, which all heads share, is left alone."""
        for name, size in (("nope_dim", nope_dim), ("rope_dim", rope_dim), ("value_dim", value_dim)):
            if not _is_positive(size):
                raise ValueError(f"AttentionHeads: {name} must be a positive integer, got {size!r}.")
        rows: list[HeadRows] = []
        for (head,) in _groups(n_heads, None, nope_dim)[0]:
            first = head * (nope_dim + rope_dim)
            rope, stop = first + nope_dim, first + nope_dim + rope_dim
            then = head * (nope_dim + value_dim)
            rows.append(HeadRows(param=query, start=first, stop=rope, heads=(head,), role="query"))
            rows.append(HeadRows(param=query, start=rope, stop=stop, heads=(head,), role="query_alone"))
            rows.append(HeadRows(param=key_value, start=then, stop=then + nope_dim, heads=(head,), role="key"))
        return cls(n_heads=n_heads, rows=tuple(rows), records=records)


def _is_positive(value: object) -> bool:
    return is_size(value) and value > 0


def _groups(n_heads: int, n_kv_heads: int | None, head_dim: int) -> tuple[list[tuple[int, ...]], int]:
    """The query heads of each key head, and how many those are."""
    groups = n_heads if n_kv_heads is None else n_kv_heads
    for name, size in (("n_heads", n_heads), ("n_kv_heads", groups), ("head_dim", head_dim)):
        if not _is_positive(size):
            raise ValueError(f"AttentionHeads: {name} must be a positive integer, got {size!r}.")
    if n_heads % groups:
        raise ValueError(f"AttentionHeads: n_kv_heads must divide n_heads={n_heads}, got {groups}.")
    each = n_heads // groups
    return [tuple(range(number * each, (number + 1) * each)) for number in range(groups)], each


# -- in a model ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClippedRows:
    """Rows of one param of a model, as a box in the grid of its elements."""

    fqn: str
    grid: tuple[int, ...]
    box: Box
    rows: HeadRows


@dataclass(frozen=True, slots=True)
class ClippedModule:
    """An attention module of a model whose heads are clipped."""

    name: str
    n_heads: int
    parts: tuple[ClippedRows, ...]

    def to_json(self) -> dict[str, object]:
        """As plain data, for ranks to compare."""
        return {
            "label": f"attention_heads() of {self.name!r}",
            "heads": self.n_heads,
            "rows": [[p.fqn, p.rows.start, p.rows.stop, list(p.rows.heads), p.rows.role] for p in self.parts],
        }


def clipped_modules(
    declared: Mapping[str, AttentionHeads], table: ParamTable, is_transposed: Callable[[ParamSpec], bool]
) -> tuple[ClippedModule, ...]:
    """The modules of a model that have rows to scale, from what each says under its name. One whose projections are all
    frozen has none: its logits are what they are."""
    found = []
    for name, heads in declared.items():
        where = f"attention_heads() of module {name!r}"
        parts = tuple(part for rows in heads.rows for part in _parts(where, name, rows, table, is_transposed))
        frozen = sorted({part.fqn for part in parts if not table.find(part.fqn).trainable})
        if frozen and len(frozen) == len({part.fqn for part in parts}):
            continue
        if frozen:
            raise ValueError(
                f"{where} names {listed(frozen)}, frozen: expected all of its params to be trained, or none, because "
                "scaling some would not bring logits down. Give the queries role 'query_alone' or leave the module out."
            )
        found.append(ClippedModule(name, heads.n_heads, parts))
    _refuse_shared(found)
    return tuple(found)


def _parts(
    where: str, name: str, rows: HeadRows, table: ParamTable, is_transposed: Callable[[ParamSpec], bool]
) -> Iterator[ClippedRows]:
    """Rows of the weight, and of the bias next to it."""
    for param in _params_of(where, name, rows.param, table):
        if param.domain != DENSE or param.tie:
            kind = (
                f"in domain {param.domain!r}" if param.domain != DENSE else f"tied over pipeline stages ({param.tie!r})"
            )
            raise ValueError(f"{where}: param {param.fqn!r} is {kind}: expected a dense one of this stage alone.")
        if len(param.shape) not in (1, 2):
            raise ValueError(
                f"{where}: param {param.fqn!r} has shape {param.shape}: expected (rows, columns) or (rows,)."
            )
        axis = 1 if len(param.shape) == 2 and is_transposed(param) else 0
        if rows.stop > param.shape[axis]:
            raise ValueError(
                f"{where} takes rows [{rows.start}, {rows.stop}) of param {param.fqn!r}: expected at most "
                f"{param.shape[axis]} rows, as its shape {param.shape} has{' (stored transposed)' if axis else ''}. "
                "Check the sizes it gives."
            )
        starts, stops = [0] * len(param.shape), list(param.shape)
        starts[axis], stops[axis] = rows.start, rows.stop
        grid, box = collapse(param.shape, Box(tuple(starts), tuple(stops)))
        yield ClippedRows(param.fqn, grid, box, rows)


def _params_of(where: str, name: str, local: str, table: ParamTable) -> Sequence[ParamSpec]:
    full = f"{name}.{local}" if name else local
    weight = next((found for found in (full, f"{full}.weight") if found in table.by_name), None)
    if weight is None:
        known = [fqn for fqn in table.by_name if fqn.startswith(f"{name}.") or not name]
        raise ValueError(f"{where} names {local!r}, which is no param of it." + did_you_mean(full, known))
    found = [table.find(weight)]
    bias = table.by_name.get(f"{weight.removesuffix('weight')}bias") if weight.endswith("weight") else None
    return found if bias is None or len(bias.shape) != 1 else [*found, bias]


def _refuse_shared(modules: Sequence[ClippedModule]) -> None:
    """Raise if a row would be scaled twice."""
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for module in modules:
        for part in module.parts:
            taken.setdefault(part.fqn, []).append((part.rows.start, part.rows.stop, module.name))
    for fqn, stretches in taken.items():
        for (start, stop, one), (next_start, next_stop, other) in pairwise(sorted(stretches)):
            if next_start < stop:
                raise ValueError(
                    f"attention_heads() of module {other!r} takes rows [{next_start}, {next_stop}) of param {fqn!r}, of "
                    f"which module {one!r} takes [{start}, {stop}): expected every row once."
                )
