"""What a matrix costs to orthogonalise: the only cost model, used by the work plan, the planner and the docs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from layerwise.config.rules import Muon


@dataclass(frozen=True, slots=True, kw_only=True)
class NewtonSchulz:
    """How matrices will be orthogonalised, and so what each costs: what homes are balanced by and times come from."""

    steps: int = 5

    def flops(self, rows: int, cols: int) -> int:
        """FLOPs of one (rows, cols) matrix in the form that will run.

        >>> NewtonSchulz().flops(4096, 1024) == newton_schulz_flops(4096, 1024, 5, gram=True)
        True
        """
        return _flops(rows, cols, self.steps)


DEFAULT_COST = NewtonSchulz()
"""What is assumed where nobody has said which rule will run."""


def cost_of(rule: object) -> NewtonSchulz:
    """What a matrix costs under a rule. Of one that does not orthogonalise, homes are those of the default."""
    return NewtonSchulz(steps=rule.steps) if isinstance(rule, Muon) else DEFAULT_COST


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a rank can do: figures to turn bytes and FLOPs into time."""

    ns_tflops: float = 400.0
    """Newton-Schulz in bf16 as one H200 runs it: 60 % of what its largest products reach."""
    link_gb_s: float = 45.0
    """One 400 Gb/s network card per rank."""

    def ns_ms(self, flops: int) -> float:
        """Time of so many FLOPs of Newton-Schulz."""
        return flops / (self.ns_tflops * 1e9)

    def wire_ms(self, nbytes: int) -> float:
        """Time of so many bytes that a rank sends, or receives."""
        return nbytes / (self.link_gb_s * 1e6)


DEFAULT_HARDWARE = Hardware()
"""What is assumed where nobody has said what a step will run on."""


@cache
def _flops(rows: int, cols: int, steps: int) -> int:
    return newton_schulz_flops(rows, cols, steps, gram=resolve_method("auto", rows, cols) == "gram")


def resolve_method(method: str, rows: int, cols: int) -> str:
    """`standard` or `gram` for a matrix of this shape; `auto` takes gram when one side is at least twice the other.

    Five steps cost, with r = long/short side and in short^3 FLOPs, 10(2r + 1) as standard and 28 + 8r as gram with one
    restart (14 + 6r where kernels use symmetry): 50 against 44 at r = 2, 90 against 60 at r = 4. On an H200 gram is
    even with standard at r = 2, takes 0.7 of its time at r = 4 and is slower below.
    """
    match method:
        case "auto":
            return "gram" if max(rows, cols) >= 2 * min(rows, cols) else "standard"
        case "standard" | "gram":
            return method
        case _:
            raise ValueError(f"method must be one of standard, gram, auto, got {method!r}.")


_FIRST_RESTART = 2
_RESTART_EVERY = 3
_SHORTEST_RESTARTED = 4


def gram_segments(steps: int) -> list[int]:
    """How many steps the Gram form takes between restarts: 5 -> [2, 3], 10 -> [2, 3, 3, 2]. The kernel says why."""
    if steps < _SHORTEST_RESTARTED:
        return [steps]
    rest = steps - _FIRST_RESTART
    num_segments = -(-rest // _RESTART_EVERY)
    return [_FIRST_RESTART] + [rest // num_segments + (idx < rest % num_segments) for idx in range(num_segments)]


def newton_schulz_flops(rows: int, cols: int, steps: int, *, gram: bool) -> int:
    """FLOPs of the whole orthogonalisation in the plain (unsymmetric) form, two per multiply-add.

    standard: per step X X^T and B X (2 n^2 m each) and A^2 (2 n^3). gram: per segment the Gram matrix and the final
    product, one n x n product for its first step and four for each of the others.
    """
    short, long = min(rows, cols), max(rows, cols)
    square, oblong = 2 * short**3, 2 * short * short * long
    if gram:
        segments = gram_segments(steps)
        return 2 * len(segments) * oblong + sum(4 * length - 3 for length in segments) * square
    return steps * (2 * oblong + square)


def fewest_flops(rows: int, cols: int, steps: int) -> int:
    """FLOPs of the cheaper form with symmetric products at half their size: what no kernel can do without.

    >>> fewest_flops(4, 4, 5) == 20 * 4**3
    True
    """
    short, long = min(rows, cols), max(rows, cols)
    square, oblong, segments = short**3, short * short * long, gram_segments(steps)
    standard = steps * (3 * oblong + square)
    gram = 3 * len(segments) * oblong + sum(4 * length - 3 for length in segments) * square
    return min(standard, gram)


GRAM_OTHERS = 3
"""Small matrices that the Gram form has beside the one that it multiplies with in the end."""
HALVED_FROM = 48 * 2**20
"""Elements of a workspace (96 MiB) up to which a batch stays whole: halves of a small batch leave much of a device idle."""


class GramRoom(NamedTuple):
    """How a batch of the Gram form changes places between its own memory and a workspace.

    Matrices that are away lie in the workspace; where only a part of the batch goes there, the others follow into the place
    that it left. Small matrices lie where nothing else does.
    """

    part: int
    """Matrices that go to the workspace."""
    fitting: int
    """Small matrices of all of the batch for which there is room in its own memory while matrices are away."""
    numel: int
    """Elements of the workspace beside those of the small matrix that always has a place there."""

    @classmethod
    def of(cls, batch: int, large: int, small: int, segments: int) -> GramRoom:
        """For matrices of `large` elements whose Gram matrices have `small`. Half of the batch at a time, where that takes less
        of much; they end in their own memory after an even number of segments, where they began, or begin in the workspace."""

        def room(part: int) -> GramRoom:
            free = (batch if part == batch else batch - part) * large
            fitting = min(GRAM_OTHERS, free // (batch * small))
            away = part * large + (GRAM_OTHERS - fitting) * batch * small
            return cls(part, fitting, max(GRAM_OTHERS * batch * small, away))

        whole = room(batch)
        half = room(-(-batch // 2))
        return half if segments % 2 == 0 and whole.numel > max(half.numel, HALVED_FROM) else whole


def newton_schulz_workspace(batch: int, rows: int, cols: int, method: str, steps: int) -> int:
    """Elements that the kernels of a GPU hold for a batch beside its own memory, which becomes that of its result.

    Both forms have another X, and one n x n matrix beside it. The others lie where the next X will be; the Gram form has
    three of them, for which that may be too small, and takes half of a batch at a time where it is too large.

    >>> [newton_schulz_workspace(2, rows, 4, method, 5) for rows, method in ((4, "standard"), (16, "gram"), (8, "gram"))]
    [64, 160, 128]
    >>> newton_schulz_workspace(1, 16, 4, "gram", 5)
    80
    >>> [newton_schulz_workspace(batch, 4096, 1024, "gram", 5) >> 20 for batch in (6, 24)]
    [30, 96]
    """
    numel, square = rows * cols, min(rows, cols) ** 2
    if resolve_method(method, rows, cols) == "gram":
        return batch * square + GramRoom.of(batch, numel, square, len(gram_segments(steps))).numel
    return batch * (numel + square)
