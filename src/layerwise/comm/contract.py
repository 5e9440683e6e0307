"""The collective contract: before data moves, all ranks agree on what is about to happen, or all of them raise.

Costs one small exchange per collective, so it is a debugging mode. gloo and NCCL notice few of these mistakes
themselves: a wrong dtype, a swapped order or another reduction come out as wrong numbers or as a hang.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass

import torch.distributed as dist

from layerwise.comm.facts import gather_facts
from layerwise.errors import ContractError


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a rank is about to do."""

    label: str
    kind: str
    reduce: str
    root: int | None
    dtype: str
    numel: int | None
    send_splits: tuple[int, ...] | None
    receive_splits: tuple[int, ...] | None
    parts: list[list[int]] | None
    """(source, elements) of each part, where a collective is made of several."""
    problem: str | None
    """What this rank alone can see to be wrong."""


_COMPARED = ("label", "kind", "reduce", "root", "dtype", "numel", "parts")


class Contract:
    """Compares fingerprints over a control group."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        self.control = control
        self.sequence = 0

    def check(self, mine: Fingerprint) -> None:
        """Raise on every rank if any two ranks differ or any rank sees a problem."""
        self.sequence += 1
        gathered = gather_facts({**asdict(mine), "sequence": self.sequence}, self.control)
        complaint = self._complaint(gathered)
        if complaint is not None:
            raise ContractError(
                f"collective {self.sequence} ({mine.label}) was stopped on all ranks before any data moved: {complaint}"
            )

    @staticmethod
    def _complaint(gathered: list[dict[str, object]]) -> str | None:
        for rank, entry in enumerate(gathered):
            if entry["problem"] is not None:
                return f"rank {rank}: {entry['problem']}"
        for field in ("sequence", *_COMPARED):
            ranks_by_value: dict[str, list[int]] = defaultdict(list)
            for rank, entry in enumerate(gathered):
                ranks_by_value[repr(entry[field])].append(rank)
            if len(ranks_by_value) > 1:
                views = "; ".join(
                    f"{value} on rank{'s' if len(ranks) > 1 else ''} {_join(ranks)}"
                    for value, ranks in ranks_by_value.items()
                )
                return f"{field} differs: {views}. All ranks must issue the same collectives in the same order."
        return _split_complaint(gathered)


def _split_complaint(gathered: list[dict[str, object]]) -> str | None:
    for source, entry in enumerate(gathered):
        sends = entry["send_splits"]
        if not isinstance(sends, list):
            continue
        for target, sent in enumerate(sends):
            receives = gathered[target]["receive_splits"]
            if isinstance(receives, list) and receives[source] != sent:
                return f"splits differ: rank {source} sends {sent} elements to rank {target}, which expects {receives[source]}."
    return None


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
