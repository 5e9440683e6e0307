"""What returned directions are multiplied with before they are taken off the masters, and what is left of those."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from layerwise.config.rules import update_scale
from layerwise.engine.algorithms import LiveOptions, kept_of, number


class Factors:
    """One factor for every region of a cohort, from the live options of its param group and the shape of its matrix.

    Few matrices differ in both, so factors are computed once for each kind, and a step only deals them out.
    """

    def __init__(self, regions: Iterable[tuple[int, tuple[int, int]]]) -> None:
        """`regions` are (param group, shape that the matrix is scaled by), in order."""
        numbers: dict[tuple[int, tuple[int, int]], int] = {}
        self._kind_of = [numbers.setdefault(region, len(numbers)) for region in regions]
        self._kinds = tuple(numbers)

    def under(self, options: Sequence[LiveOptions]) -> list[float]:
        """The factors that the param groups ask for now."""
        found = []
        for group, shape in self._kinds:
            live = options[group]
            found.append(number(live, "lr") * update_scale(str(live["scale"]), *shape) * number(live, "extra_scale"))
        return list(map(found.__getitem__, self._kind_of))

    def keeps_under(self, options: Sequence[LiveOptions]) -> list[float]:
        """What their weight decay leaves of the masters."""
        found = [kept_of(options[group]) for group, _ in self._kinds]
        return list(map(found.__getitem__, self._kind_of))
