"""S14, overlap_fuzz: gathers that run on under whatever comes next change no bit of it, whatever that is and whoever is late.

Random sequences of forward, backward, step, eval, save, load, reads and failures on 2 and 3 ranks, in every layout and with every way to launch gathers.
Ranks are late at random, memory that nobody wrote holds NaN, and in half of the cases so does a replica from when its gather is launched until that was
waited for. Every loss and every weight that is read, and masters and state after every step, are compared with a run that has replicas, all-reduced
gradients and nothing overlapped. With sabotage, mistakes are put in that must be seen, each of them.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from random import Random
from typing import Any
from unittest import mock

import torch

from layerwise.engine.publisher import Publisher
from layerwise.memory.shards import Shard
from layerwise.memory.stale import StaleGuard
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome
from tests.walks import Action, Walk, Way, difference, transport

FULL, QUICK, PER_RUN = 2000, 12, 25
CAP_S = 120.0
"""What one case may take before its rank is ended."""

LAYOUTS = ("flat", "padded", "compact", "replicated")
NAMES = (
    *("backward", "backward", "backward", "forward", "accumulate", "other modules", "idle and step", "idle block"),
    *("step", "step", "step", "step", "step twice", "overflow and step", "zero grad", "zero grad", "scheduler"),
    *("raise in forward", "raise in backward", "raise in block", "raise alone and step", "late backward"),
    *("other settings and step", "load nothing"),
    *("eval", "eval", "ensure", "hash", "read", "read", "read", "foreach", "copy", "metric", "free", "free"),
    *("save", "save", "load", "resume", "edit", "edit behind"),
)


def actions_of(seed: int, length: int = 11) -> list[Action]:
    """Any actions in any order, between a step that makes weights stale and one whose outcome is looked at."""
    random = Random(f"actions {seed}")
    middle = [(random.choice(NAMES), number) for number in random.sample(range(1000), length)]
    actions = [("backward", 1000), ("step", 1000), *middle, ("backward", 1001), ("step", 1001), ("hash", 1001)]
    return [*actions, ("edit alone and step", seed)] if way_of(seed).compared else actions


def way_of(seed: int) -> Way:
    """Any way that can be."""
    random = Random(f"way {seed}")
    world = 3 if seed % 4 == 3 else 2
    layout = random.choice(LAYOUTS)
    reducer = "collective" if layout == "replicated" else random.choice(("collective", "ordered"))
    # What cannot be combined is refused, and no case here.
    can_release = layout != "replicated" and not (layout == "compact" and reducer == "collective")
    releases = can_release and random.random() < 0.3
    chunks = random.choice((1, 1, 2))
    return Way(
        world=world,
        layout=layout,
        prefetch=random.choice((None, None, 0, 1, 3)),
        aligned=chunks == 2 and random.random() < 0.5,
        reducer=reducer,
        shard_grads=releases,
        grad_overlap=random.random() < 0.8,
        checked=random.random() < 0.1,
        compared=random.random() < 0.1,
        dtype=random.choice((torch.float32, torch.bfloat16)),
        ep=world if random.random() < 0.3 else 1,
        chunks=chunks,
        matrix=random.choice(("muon", "muon", "adamw")),
        checkpointing=random.random() < 0.2,
        shuffled=random.random() < 0.3,
        nonfinite=random.choice(("skip", "raise")),
        bucket_mib=random.choice((0.0003, 0.001)),
        late=random.random() < 0.5,
    )


def _pauses(rank: int, seed: int) -> Callable[[], None]:
    """Now and then a moment on one rank and not on another, and rarely a long one."""
    random = Random(f"pauses {seed} {rank}")

    def pause() -> None:
        if random.random() < 0.1:
            time.sleep(random.choice((0.0, 0.001, 0.003, 0.006)) if random.random() < 0.98 else 0.05)

    return pause


_begin = Publisher.begin


def _not_marked(self: Publisher) -> None:
    """The first bucket is not told that its master has moved."""
    with mock.patch.object(self._storage, "shards", self._storage.shards[1:]):
        _begin(self)


def _zeroed(self: Shard) -> None:
    """What this rank is about to send is zeroed."""
    self.weight.zero_()


SABOTAGES: dict[str, dict[str, Any]] = {
    "one wait is dropped": {"drop": 3},
    "a bucket is not marked stale": {"target": Publisher, "attribute": "begin", "new": _not_marked},
    "params are not guarded": {"target": StaleGuard, "attribute": "arm", "new": lambda self: None},
    "the shard is zeroed before its gather": {"target": Shard, "attribute": "round_master", "new": _zeroed},
}


def play_case(rank: int, seed: int, sabotage: str = "") -> tuple[str, Counter[str]]:
    """One case beside its reference: what differs on this rank, and what was met."""
    way, actions = way_of(seed), actions_of(seed)
    if sabotage:
        way = replace(way, late=True, layout="flat", ep=1)
        actions = [("backward", 1), ("step", 1), ("hash", 2), *actions]
    pause, mistake = _pauses(rank, seed), dict(SABOTAGES.get(sabotage, {}))
    with transport(late=way.late, pause=pause, drop=mistake.pop("drop", None)), ExitStack() as patches:
        if mistake:
            patches.enter_context(mock.patch.object(mistake["target"], mistake["attribute"], mistake["new"]))
        walk = Walk(rank, way, pause)
        walk.take(actions)
    reference = Walk(rank, way.plain())
    reference.take(actions)
    return difference(walk.seen, reference.seen), walk.met


def play(rank: int, world: int, seeds: Sequence[int], sabotage: str = "") -> tuple[dict[int, str], Counter[str]]:
    """Several cases one after the other; a rank that takes too long over one is ended."""
    warnings.filterwarnings("ignore", message="modules run in another order")
    complaints, met = {}, Counter[str]()
    for seed in seeds:
        faulthandler.dump_traceback_later(CAP_S, exit=True)
        complaints[seed], more = play_case(rank, seed, sabotage)
        faulthandler.cancel_dump_traceback_later()
        met += more
    return complaints, met


def complaints_of(seeds: Sequence[int], sabotage: str = "") -> tuple[dict[int, str], Counter[str]]:
    """What went wrong in each case, and what was met in all of them. Where ranks fail, cases are tried one by one to find which."""
    world = way_of(seeds[0]).world
    try:
        answers = run_ranks(
            world, play, seeds, sabotage, timeout_s=CAP_S * (len(seeds) + 1), pg_timeout_s=CAP_S - 5.0, poisoned=True
        )
    except RankFailure as failure:
        if len(seeds) == 1:
            return {seeds[0]: f"{str(failure)[-300:]}"}, Counter()
        alone = [complaints_of([seed], sabotage) for seed in seeds]
        return {seed: text for found, _ in alone for seed, text in found.items()}, sum(
            (met for _, met in alone), Counter()
        )
    found = {
        seed: "; ".join(f"rank {rank}: {texts[seed]}" for rank, (texts, _) in enumerate(answers) if texts[seed])
        for seed in seeds
    }
    return found, sum((met for _, met in answers), Counter())


WANTED = (
    "buckets stale after a step",
    "buckets in flight after a step",
    "reads of stale weights",
    "failures",
    "named errors",
    "skipped steps",
)


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Thousands of cases; with sabotage a few cases for each mistake, all of which must be seen."""
    if sabotage:
        return _run_controls()
    count = QUICK if quick else FULL
    complaints: dict[int, str] = {}
    met: Counter[str] = Counter()
    batches = [
        seeds[start : start + PER_RUN]
        for world in (2, 3)
        for seeds in ([seed for seed in range(count) if way_of(seed).world == world],)
        for start in range(0, len(seeds), PER_RUN)
    ]
    for found, more in _each(batches):
        complaints.update(found)
        met += more
    bad = [f"{describe(seed)}: {text}" for seed, text in complaints.items() if text]
    for text in bad:
        print(text, file=sys.stderr)
    bad += [f"no case had {name}: nothing was tested" for name in WANTED if not met[name]]
    return Outcome(n=len(complaints), bad=len(bad), worst=bad[0][:400] if bad else "")


def _each(batches: Sequence[Sequence[int]]) -> Iterator[tuple[dict[int, str], Counter[str]]]:
    """Batches one after the other, or several at once where there are cores for their ranks."""
    workers = min(len(batches), (os.cpu_count() or 1) // 3)
    if workers < 2:
        yield from map(complaints_of, batches)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(complaints_of, batches)


def _run_controls() -> Outcome:
    seen = {name: complaints_of([seed], name)[0][seed] for seed, name in zip((0, 1, 2, 4), SABOTAGES, strict=True)}
    missed = [name for name, text in seen.items() if not text]
    if missed:
        return Outcome(n=len(seen), bad=0, worst=f"not seen: {', '.join(missed)}")
    worst = next(f"{name}: {text}" for name, text in seen.items())
    return Outcome(n=len(seen), bad=len(seen), worst=worst[:400])


def describe(seed: int) -> str:
    """A case in words, and how to repeat it."""
    return f"python -m tests.reliability.overlap_fuzz {seed}: {way_of(seed)}, {actions_of(seed)}"


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        print(describe(number), complaints_of([number])[0][number] or "nothing differs", sep="\n")
