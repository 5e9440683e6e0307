"""In which dtype matrices travel to their homes and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from layerwise.dtypes import DType
from layerwise.layout.work import WorkPlan


def wire_dtypes(works: Iterable[WorkPlan], dtype_by_fqn: Mapping[str, DType]) -> dict[tuple[str, int], DType]:
    """How each (domain, cohort) travels, from the dtype that each param's rule asks for: in fp32 as soon as one of its
    matrices needs that, else in bf16."""
    found: dict[tuple[str, int], DType] = {}
    for work in works:
        wide = {item.cohort for item in work.items if dtype_by_fqn[item.matrix.fqn] is DType.FP32}
        for cohort in range(work.num_cohorts):
            found[work.domain, cohort] = DType.FP32 if cohort in wide else DType.BF16
    return found
