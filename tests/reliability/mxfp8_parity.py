"""S18, mxfp8_parity: weights that are kept as codes train to the same bits as a bf16 replica of which codes are made whenever they are used: losses,
outputs, reduced gradients, momenta, masters and plain params of fifty steps. Codes are those of what masters round to, made once in every step, from bytes
that were gathered once.

With sabotage, the mistakes that another system made with such weights are put in, one after the other, and each must be seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.quantizing import Way, on_and_off
from tests.ranks import RankFailure, run_ranks
from tests.regressions import quantizing as mistakes
from tests.regressions.cases import observe
from tests.reliability import Outcome, tally, tally_control

WORLDS = (2, 3, 4)
LAYOUTS = ("flat", "padded", "compact", "replicated")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"experts": 2},
    "mixed buckets": {"skip": ("blocks.1.down.*", "blocks.0.up.*")},
    "blockwise": {"recipe": "blockwise"},
}
STEPS, QUICK_STEPS = 50, 6

CONTROLS: dict[str, tuple[Callable[[int], Any], Way]] = {
    "masters begin with what codes stand for": (mistakes.dequantised, Way()),
    "a step makes codes of its own": (mistakes.step_makes_codes, Way()),
    "masters of the step before are staged": (mistakes.old_masters, Way("padded")),
    "staging is zeroed with gradients": (mistakes.zeroed_with_gradients, Way()),
    "only the first bucket's codes are made anew": (mistakes.first_bucket_only, Way()),
    "the first param of a bucket decides": (
        mistakes.first_param_decides,
        Way(skip=("blocks.1.down.*", "blocks.0.up.*")),
    ),
    "owners make codes of their masters": (mistakes.owner_knows_better, Way("compact")),
}


def ways(*, quick: bool) -> dict[str, tuple[int, Way]]:
    """Every way to train, by its name, with the number of ranks."""
    found = {}
    for world, layout, overlap, evaluates, model in itertools.product(
        WORLDS, LAYOUTS, (True, False), (False, True), MODELS
    ):
        name = f"{model}, {world} ranks, {layout}{', overlap' if overlap else ''}{', evaluation' if evaluates else ''}"
        found[name] = world, Way(layout, overlap=overlap, evaluates=evaluates, **MODELS[model])
    return dict(itertools.islice(found.items(), 3, None, 23)) if quick else found


def complaint(world: int, way: Way, steps: int, put_in: Callable[[int], Any] | None = None) -> str:
    """What was wrong with one way, on any rank."""
    try:
        answers = run_ranks(world, _observed, way, steps, put_in)
    except RankFailure as failure:
        return str(failure)[-300:]
    return next((text for texts in answers for text in texts), "")


def _observed(rank: int, world: int, way: Way, steps: int, put_in: Callable[[int], Any] | None) -> list[str]:
    return observe(rank, world, lambda rank, world: on_and_off(rank, world, [way], steps), put_in)


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """All ways; with sabotage one for each mistake, all of which must be seen."""
    if sabotage:
        seen = {name: complaint(2, way, 3, put_in) for name, (put_in, way) in CONTROLS.items()}
        return tally_control({}, seen)
    steps = QUICK_STEPS if quick else STEPS
    return tally({name: complaint(world, way, steps) for name, (world, way) in ways(quick=quick).items()})
