"""Which kernels multiply in Newton-Schulz, and with which tiles: pure functions of facts, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class Products:
    """Who computes products, and the reason as a sentence."""

    backend: Literal["torch", "triton"]
    reason: str


def choose_products(
    *, device: str, capability: tuple[int, int] | None, triton: str | None, input_dtype: str, dtype: str
) -> Products:
    """The back end for matrices of `input_dtype` that are multiplied in `dtype`; `triton` is its version, if it is there.

    Shapes and batches do not matter: where there are kernels of our own they are faster than torch's at every size
    measured, and what they give for a matrix does not depend on its batch, which torch's do not promise.
    """
    if device != "cuda":
        return Products("torch", f"products on {device} are torch's")
    if dtype not in ("bf16", "fp16"):
        return Products("torch", f"our own kernels multiply bf16 and fp16, not {dtype}")
    if input_dtype not in ("bf16", "fp16", "fp32"):
        return Products("torch", f"our own kernels read bf16, fp16 and fp32, not {input_dtype}")
    if capability != _HOPPER:
        found = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
        return Products("torch", f"our own kernels are made for compute capability 9.0 (Hopper), this is {found}")
    if triton is None:
        return Products("torch", "our own kernels need Triton, which is not installed. Run: pip install triton")
    return Products("triton", f"symmetric products through Triton {triton}")


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of a product: what one program computes at a time, and how."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    parts: int = 2
    """Pieces in which a symmetric product finishes a tile's columns: a piece takes registers and shared memory."""


# The order of a sum is that of its depth, so tiles change the time and no bits.
SYMMETRIC_TILE = Tile(rows=128, cols=128, depth=64, warps=4, stages=5)
FULL_TILE = Tile(rows=128, cols=256, depth=64, warps=8, stages=3)
CHAIN_TILE = Tile(rows=128, cols=128, depth=64, warps=12, stages=4)
"""That of `chain.cu`, which is written for it."""


def symmetric_tile(size: int) -> Tile:
    """The tile of a symmetric size x size product."""
    return SYMMETRIC_TILE


def full_tile(rows: int, cols: int) -> Tile:
    """The tile of a rows x cols product."""
    return FULL_TILE


_CHAINED = 2048
"""Products of larger matrices are long enough to be launched one by one."""
_TEAM_TILES = 800
"""So many tiles of a product that none of the next has to wait for the last of them, on 132 multiprocessors."""


def chain_pays(size: int) -> bool:
    """Whether products of size x size are sooner done in one launch."""
    return size <= _CHAINED


def teams_of(batch: int, size: int) -> int:
    """In how many teams matrices of size x size go through a chain, one after the other: the fewer at a time, the more of
    them the cache holds."""
    across = -(-size // CHAIN_TILE.rows)
    return min(batch, max(1, batch * across * (across + 1) // 2 // _TEAM_TILES))
