"""Matrices that tensor parallelism has cut, orthogonalised block by block: each block is a matrix then, and everything that
comes after knows it as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from layerwise.layout.meshes import Chunks, Placed
from layerwise.layout.spans import factors, in_fine, refined
from layerwise.routing.geometry import Box, collapse
from layerwise.routing.matrices import Matrix, default_split
from layerwise.routing.rules import Route
from layerwise.routing.spec import ParamSpec, ParamTable
from layerwise.routing.split import Part, Split


class _Block(NamedTuple):
    """What a matrix is but for its name; in its order."""

    rows: int
    cols: int
    grid: tuple[int, ...]
    box: Box
    transposed: bool
    whole: tuple[int, int] | None


def in_blocks(
    table: ParamTable, routes: Mapping[str, Route], placed: Mapping[str, Placed], tp_mode: str
) -> dict[str, Route]:
    """The same routes with blocks in place of the matrices that tensor parallelism has cut, for params whose route, or else
    `tp_mode`, asks for it."""
    found, known = dict(routes), dict[tuple[Split, tuple[int, ...], tuple[Chunks, ...]], tuple[_Block, ...]]()
    for param in table:
        route = routes[param.fqn]
        asked = dict(route.options).get("tp_mode", tp_mode)
        if route.family != "matrix" or asked != "blockwise" or param.fqn not in placed:
            continue
        split = route.split or default_split(param)
        key = split, param.shape, _inside_of_matrices(param, split, placed[param.fqn].chunks(param.shape))
        if key not in known:
            known[key] = tuple(_blocks(param, *key[::2]))
        if any(block.whole for block in known[key]):
            found[param.fqn] = replace(
                route,
                matrices=tuple(Matrix(param.fqn, index, *block) for index, block in enumerate(known[key])),
                reason=f"{route.reason}; tensor parallelism cuts it into {len(known[key])} blocks, each orthogonalised by itself "
                "(tp_mode='blockwise'): another update than that of whole matrices",
            )
    return found


def count_blocks(routes: Iterable[Route]) -> int:
    """How many matrices are blocks of larger ones."""
    return sum(matrix.whole is not None for route in routes for matrix in route.matrices)


def _inside_of_matrices(param: ParamSpec, split: Split, chunks: tuple[Chunks, ...]) -> tuple[Chunks, ...]:
    """The chunks of dims that run through matrices. Where each index along a dim is a matrix apart, as in a stack of experts,
    a cut is between matrices."""
    fine = refined(param.shape, split.grid)
    roles = _roles(split, fine)
    return tuple(
        ((0, size),) if all(roles[axis] == "a" for axis in axes) else own
        for size, axes, own in zip(param.shape, factors(param.shape, fine), chunks, strict=True)
    )


def _roles(split: Split, fine: tuple[int, ...]) -> str:
    """The roles of the axes of a finer grid."""
    return "".join(role * len(axes) for role, axes in zip(split.roles, factors(split.grid, fine), strict=True))


def _blocks(param: ParamSpec, split: Split, chunks: tuple[Chunks, ...]) -> Iterator[_Block]:
    fine = refined(param.shape, split.grid)
    roles = _roles(split, fine)
    cells = []
    for combination in product(*chunks):
        cell = Box(tuple(start for start, _ in combination), tuple(stop for _, stop in combination))
        cells.append((cell, list(in_fine(cell, param.shape, fine))))
    for part in split.parts():
        own = list(in_fine(part.box, split.grid, fine))
        for cell, pieces in cells:
            common = [both for piece in pieces for one in own if (both := piece.intersect(one)) is not None]
            if common:
                box = _as_one(common)
                if box is None:
                    raise ValueError(_not_a_matrix(param, split, cell))
                yield _block(part, box, fine, roles, split)


def _as_one(boxes: list[Box]) -> Box | None:
    """The box that some boxes make up together, if they do."""
    whole = Box(
        tuple(map(min, zip(*(box.starts for box in boxes), strict=True))),
        tuple(map(max, zip(*(box.stops for box in boxes), strict=True))),
    )
    return whole if whole.numel == sum(box.numel for box in boxes) else None


def _block(part: Part, box: Box, fine: tuple[int, ...], roles: str, split: Split) -> _Block:
    lead = "c" if split.transposed else "r"
    rows = math.prod(size for size, role in zip(box.shape, roles, strict=True) if role == lead)
    cols = box.numel // rows
    whole = None if (rows, cols) == (part.rows, part.cols) else (part.rows, part.cols)
    return _Block(rows, cols, *collapse(fine, box), split.transposed, whole)


def _not_a_matrix(param: ParamSpec, split: Split, cell: Box) -> str:
    where = ", ".join(f"{start} to {stop}" for start, stop in zip(cell.starts, cell.stops, strict=True))
    return (
        f"param {param.fqn!r} of shape {param.shape} is cut by tensor parallelism to {where}, and its matrices ({split.describe()}) have "
        "parts of several heads there that make up no matrix: tp_mode='blockwise' expects cuts between heads. Cut it so, or let this "
        f"one be orthogonalised whole: RouteRule(pattern={param.fqn!r}, to='matrix', options={{'tp_mode': 'auto'}})."
    )
