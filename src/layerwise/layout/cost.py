"""What a matrix costs to orthogonalise: the only cost model, used by the work plan, the planner and the docs."""

from __future__ import annotations


def newton_schulz_cost(rows: int, cols: int) -> int:
    """Relative cost: long * short^2. Every product of the iteration is a multiple of it, so steps and coefficients
    cancel out."""
    short, long = min(rows, cols), max(rows, cols)
    return long * short * short


def newton_schulz_flops(rows: int, cols: int, steps: int, *, gram: bool) -> int:
    """FLOPs of the whole orthogonalisation in the plain (unsymmetric) form, two per multiply-add.

    standard: per step X X^T and B X (2 n^2 m each) and A^2 (2 n^3). gram: the Gram matrix and the final product twice
    (one restart), and four n x n products per step.
    """
    short, long = min(rows, cols), max(rows, cols)
    square, oblong = 2 * short**3, 2 * short * short * long
    if gram:
        return 4 * oblong + 4 * steps * square
    return steps * (2 * oblong + square)
