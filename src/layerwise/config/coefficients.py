"""Newton-Schulz coefficient sets, each with its source.

A set is a list of (a, b, c), one triple per step of `X <- a X + (b A + c A^2) X` with `A = X X^T`. What happens when
more steps are asked for than the set has depends on how the set was found: step by step towards 1 (repeat the last
triple), as one step or cycle to be repeated (start again), or for exactly so many steps (refuse).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from layerwise.errors import did_you_mean, shown

Coefficient = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class CoefficientSet:
    """A named schedule of polynomial coefficients."""

    source: str
    triples: tuple[Coefficient, ...]
    past_end: Literal["repeat", "cycle", "refuse"] = "cycle"
    """repeat: the last triple again. cycle: whole rounds only, since the first step of a round undoes the last of the
    one before (quintic with 6 steps leaves singular values near 0.1). refuse: a fifth step of aol turns the update
    around (p(1) = -0.59), which is gradient ascent."""


def _with_safety(triples: Sequence[Coefficient], safety: float) -> tuple[Coefficient, ...]:
    """Shrink the domain of all but the last polynomial by `safety`, so that rounding cannot push a singular value past
    its end."""
    shrunk = [(a / safety, b / safety**3, c / safety**5) for a, b, c in triples[:-1]]
    return (*shrunk, triples[-1])


_JORDAN: Coefficient = (3.4445, -4.7750, 2.0315)

_POLAR_EXPRESS: tuple[Coefficient, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

COEFFICIENT_SETS: dict[str, CoefficientSet] = {
    "simple": CoefficientSet("K. Jordan, Muon (2024): one triple for every step", (_JORDAN,)),
    "quintic": CoefficientSet(
        "F. L. Cesista, Squeezing 1-2 % efficiency gains out of Muon (2025)",
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    ),
    "polar_express": CoefficientSet(
        "Amsel et al., The Polar Express, arXiv 2505.16932, with its safety factor of 1.01",
        _with_safety(_POLAR_EXPRESS, 1.01),
        past_end="repeat",
    ),
    "cans": CoefficientSet(
        "Grishina et al., CANS, arXiv 2506.10935 (Remez, adaptive interval); with a safety factor of 1.01 that the source "
        "does not have: without it bf16 rounding pushes the largest singular value past the interval, where it diverges",
        _with_safety(
            (
                (8.4703, -25.1081, 18.6293),
                (4.1828, -3.1087, 0.5806),
                (3.9619, -2.9541, 0.5630),
                (3.2866, -2.4647, 0.5074),
                (2.2737, -1.6447, 0.4162),
            ),
            1.01,
        ),
        past_end="repeat",
    ),
    "aol": CoefficientSet(
        "Boissin et al., Turbo-Muon, arXiv 2512.04632: four steps, tuned for row-rescaled input, used here after the Frobenius norm",
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        past_end="refuse",
    ),
    "deepseekv4": CoefficientSet(
        "DeepSeek-V4, arXiv 2606.19348: eight fast steps, then two that settle on 1",
        (_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        past_end="repeat",
    ),
    "cubic5": CoefficientSet(
        "How much orthogonalization does Muon need, arXiv 2606.00371: cubic steps (c = 0), so no A^2 product",
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        past_end="refuse",
    ),
}


def check_coefficients(coefficients: str | Sequence[Sequence[float]], steps: int) -> str | None:
    """What is wrong with this choice, as a sentence, or None."""
    if steps < 1:
        return f"steps must be at least 1, got {steps}. Five is usual."
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENT_SETS:
            return f"coefficients {shown(coefficients)} is not a known set." + did_you_mean(
                coefficients, COEFFICIENT_SETS
            )
        return _check_steps(coefficients, COEFFICIENT_SETS[coefficients], steps)
    if len(coefficients) == 0:
        return "coefficients is an empty list: expected at least one (a, b, c)."
    for position, triple in enumerate(coefficients):
        if len(triple) != 3:
            return f"coefficients[{position}] has {len(triple)} numbers: expected (a, b, c)."
        if not all(map(math.isfinite, triple)):
            return f"coefficients[{position}] is {tuple(triple)}: expected finite numbers."
    return None


def _check_steps(name: str, chosen: CoefficientSet, steps: int) -> str | None:
    length = len(chosen.triples)
    if chosen.past_end == "refuse" and steps != length:
        return f"coefficients {name!r} are made for exactly {length} steps, got steps={steps}. Set steps={length}."
    if chosen.past_end == "cycle" and steps > length and steps % length:
        return (
            f"coefficients {name!r} come in rounds of {length} steps, got steps={steps}: a part of a round undoes the one "
            f"before. Use at most {length} or a multiple of it."
        )
    return None


def coefficient_schedule(coefficients: str | Sequence[Sequence[float]], steps: int) -> tuple[Coefficient, ...]:
    """The (a, b, c) of every step, `steps` of them; a custom list repeats its last triple."""
    problem = check_coefficients(coefficients, steps)
    if problem is not None:
        raise ValueError(problem)
    if isinstance(coefficients, str):
        chosen = COEFFICIENT_SETS[coefficients]
        triples, repeat = chosen.triples, chosen.past_end == "repeat"
    else:
        triples, repeat = tuple((float(a), float(b), float(c)) for a, b, c in coefficients), True
    last = len(triples) - 1
    return tuple(triples[min(step, last) if repeat else step % len(triples)] for step in range(steps))
