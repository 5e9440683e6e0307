"""S6: whatever the params and however many ranks, every element has exactly one owner and nothing overlaps.

Cases come from a seeded generator: odd params (scalars, empty, stacks, row blocks, tied, frozen, several dtypes) and
worlds from 1 to 65,536. What a plan says is first copied into plain data (`Stored`), which six properties then check:
coverage, exactly one owner, no overlap, alignment, padding bound, rank independence. All shards that hold anything are
looked at, and some that hold nothing. The first cases are also planned by a process whose hash seed differs.

With `sabotage` every case gets one bug planted into that copy, one kind per property in turn. The bad count is then
what the properties caught, and zero when any property let through a bug that was meant for it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import layerwise
from layerwise.layout.exchange import Exchange, exchange_for
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.storage import BucketPlan, Placement, Span
from layerwise.layout.work import EVERY_RANK
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable
from layerwise.routing.split import row_blocks
from tests.strategies import named, random_param, random_sizes

FIGURE = "S6 layout_props"
FULL_EXAMPLES, QUICK_EXAMPLES = 10_000, 300
_SEEDS_HASHED = 100
"""Cases that another process, with another order of hashes, plans again."""
_HUGE = (4096, 8191, 10_000, 16_384, 30_000, 49_999, 65_535, 65_536)


@dataclass
class StoredBucket:
    """One bucket as the plan describes it, with the spans of every shard that was looked at."""

    buffer: int
    offset: int
    numel: int
    shard_numels: dict[int, int]
    placements: list[Placement]
    spans: dict[int, list[Span]]


@dataclass
class Stored:
    """What a plan says about storage and homes, as plain data that can be checked and can be damaged."""

    numel_by_fqn: dict[str, int]
    """Trainable params."""
    matrices: list[str]
    num_shards: int
    world: int
    buckets: list[StoredBucket]
    homes: list[tuple[str, int]]
    digests: list[str] = field(default_factory=list)
    """Of the plan, as several ranks make it."""
    tables: list[Exchange] = field(default_factory=list)
    """Exchange tables of some ranks for one cohort, each made on its own."""

    @property
    def divisor(self) -> int:
        return math.lcm(self.num_shards, 128)


def random_world(rng: Random) -> int:
    """Mostly few ranks, where borders cut every param; often many, where ranks outnumber elements."""
    kind = rng.random()
    if kind < 0.7:
        return rng.randint(1, 16)
    return rng.randint(17, 1024) if kind < 0.93 else rng.choice(_HUGE)


def _large_matrix(rng: Random) -> ParamSpec:
    rows, cols = rng.randint(100, 700), rng.randint(100, 700)
    blocks = random_sizes(rng, rows) if rng.random() < 0.5 else ()
    return ParamSpec(
        fqn="",
        shape=(rows, cols),
        module_kind=ModuleKind.LINEAR,
        module_type="Linear",
        split=row_blocks((rows, cols), blocks) if blocks else None,
    )


def random_table(rng: Random, world: int) -> ParamTable:
    """Small params, and with few ranks now and then large ones between them."""
    specs = [random_param(rng) for _ in range(rng.randint(1, 12 if world < 2000 else 4))]
    if world <= 16 and rng.random() < 0.3:
        specs.insert(rng.randrange(len(specs) + 1), _large_matrix(rng))
    return named(specs, rng)


def planned(seed: int) -> Plan:
    """The plan of one case: the same for the same seed, as it must be on every rank."""
    rng = Random(seed)
    world = random_world(rng)
    return make_plan(
        random_table(rng, world),
        world=world,
        layout="flat" if rng.random() < 0.9 else "replicated",
        bucket_numel=rng.choice([1, 64, 300, 1000, 5000, 10**6]),
        cohort_numel=rng.choice([1, 50, 1000, 10**6]),
    )


def shards_to_look_at(bucket: BucketPlan, rng: Random) -> list[int]:
    """Every shard that can hold an element, by arithmetic of our own, and three that may hold none."""
    size = bucket.numel // bucket.num_shards
    found = {rng.randrange(bucket.num_shards) for _ in range(3)}
    for placement in bucket.placements:
        if placement.numel:
            found.update(range(placement.offset // size, (placement.offset + placement.numel - 1) // size + 1))
    return sorted(found)


def stored(plan: Plan, rng: Random) -> Stored:
    """The plan as plain data, with what two ranks make of it."""
    buckets = []
    for bucket in plan.buckets:
        shards = shards_to_look_at(bucket, rng)
        buckets.append(
            StoredBucket(
                buffer=bucket.buffer,
                offset=bucket.offset,
                numel=bucket.numel,
                shard_numels=dict.fromkeys(shards, bucket.shard_numel(0)),
                placements=list(bucket.placements),
                spans={shard: list(bucket.spans(shard)) for shard in shards},
            )
        )
    return Stored(
        numel_by_fqn={param.fqn: param.numel for param in plan.table if param.trainable},
        matrices=[matrix.label for route in plan.routes.values() for matrix in route.matrices],
        num_shards=plan.world if plan.layout == "flat" else 1,
        world=plan.world,
        buckets=buckets,
        homes=[(item.matrix.label, item.home) for work in plan.works for item in work.items],
        digests=[plan.digest],
        tables=exchanges(plan, rng),
    )


def exchanges(plan: Plan, rng: Random) -> list[Exchange]:
    """What two ranks each derive for the same cohort: the home of one of its matrices and an owner of part of it."""
    moving = [(work, item) for work in plan.works for item in work.items if item.home != EVERY_RANK]
    if not moving:
        return []
    work, item = rng.choice(moving)
    buckets = {bucket.index: bucket for bucket in plan.buckets}
    bucket = buckets[item.bucket]
    owners = bucket.shards_holding(bucket.placements[item.placement], item.matrix.flat_start, item.matrix.flat_stop)
    ranks = dict.fromkeys((item.home, rng.choice(owners), rng.randrange(plan.world)))
    return [exchange_for(work, buckets, item.cohort, rank) for rank in ranks]


def coverage(case: Stored) -> str:
    """Every element of every trainable param lies in some span."""
    held: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for bucket in case.buckets:
        for span in itertools.chain.from_iterable(bucket.spans.values()):
            held[span.fqn].append((span.start, span.stop))
    for fqn, numel in case.numel_by_fqn.items():
        cursor = 0
        for start, stop in sorted(held[fqn]):
            if start > cursor:
                return f"element {cursor} of {fqn!r} has no owner"
            cursor = max(cursor, stop)
        if cursor < numel:
            return f"element {cursor} of {fqn!r} has no owner"
    unknown = set(held) - set(case.numel_by_fqn)
    return f"{sorted(unknown)} are stored and not trainable" if unknown else ""


def one_owner(case: Stored) -> str:
    """No element lies in two spans or beyond its param, and every matrix has one home, which is a rank."""
    held: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for bucket in case.buckets:
        for span in itertools.chain.from_iterable(bucket.spans.values()):
            held[span.fqn].append((span.start, span.stop))
    for fqn, spans in held.items():
        ordered = sorted(spans)
        for (_, stop), (start, _) in itertools.pairwise(ordered):
            if start < stop:
                return f"element {start} of {fqn!r} has two owners"
        if ordered[0][0] < 0 or ordered[-1][1] > case.numel_by_fqn.get(fqn, 0):
            return f"a span of {fqn!r} reaches beyond the param"
    if Counter(label for label, _ in case.homes) != Counter(case.matrices):
        return "a matrix has no home, or two"
    allowed = range(case.world) if case.num_shards > 1 else (EVERY_RANK,)
    lost = [label for label, home in case.homes if home not in allowed]
    return f"matrix {lost[0]} is at home nowhere" if lost else ""


def no_overlap(case: Stored) -> str:
    """Buckets, params in a bucket and spans in a shard follow one another, each span where its param's place says."""
    ends: dict[int, int] = defaultdict(int)
    for bucket in sorted(case.buckets, key=lambda bucket: (bucket.buffer, bucket.offset)):
        if bucket.offset != ends[bucket.buffer]:
            return f"a bucket starts at {bucket.offset}, the one before it ends at {ends[bucket.buffer]}"
        ends[bucket.buffer] += bucket.numel
        for left, right in itertools.pairwise([*bucket.placements, Placement("end", bucket.numel, 0)]):
            if left.offset + left.numel > right.offset:
                return f"{left.fqn!r} reaches into {right.fqn!r}"
        offset_by_fqn = {placement.fqn: placement.offset for placement in bucket.placements}
        for shard, spans in bucket.spans.items():
            size, cursor = bucket.shard_numels[shard], 0
            for span in spans:
                if span.shard_offset < cursor:
                    return f"{span.fqn!r} overlaps the span before it in shard {shard}"
                cursor = span.shard_offset + span.numel
                if shard * size + span.shard_offset != offset_by_fqn[span.fqn] + span.start:
                    return f"the span of {span.fqn!r} in shard {shard} is not where its param lies"
            if cursor > size:
                return f"shard {shard} is overfull"
    return ""


def alignment(case: Stored) -> str:
    """Params start on 64 elements, buckets end on the divisor, shards are equal."""
    for bucket in case.buckets:
        if bucket.numel % case.divisor:
            return f"a bucket of {bucket.numel} elements is no multiple of {case.divisor}"
        if set(bucket.shard_numels.values()) != {bucket.numel // case.num_shards}:
            return f"shards of a bucket of {bucket.numel} differ: {sorted(set(bucket.shard_numels.values()))}"
        for placement in bucket.placements:
            if placement.offset % 64:
                return f"{placement.fqn!r} starts at {placement.offset}"
    return ""


def padding_bound(case: Stored) -> str:
    """At most 64 elements for each param and one divisor for each bucket."""
    for bucket in case.buckets:
        padding = bucket.numel - sum(placement.numel for placement in bucket.placements)
        allowed = 64 * len(bucket.placements) + case.divisor
        if not 0 <= padding < allowed:
            return f"a bucket of {bucket.numel} elements has {padding} of padding, allowed {allowed}"
    return ""


def rank_independence(case: Stored) -> str:
    """Ranks that make the plan on their own have the same one, and agree on what travels between them."""
    if len(set(case.digests)) > 1:
        return "two ranks have different plans"
    for sender, receiver in itertools.permutations(case.tables, 2):
        sends = [piece for piece in sender.sends if piece.home == receiver.rank]
        receives = [piece for piece in receiver.receives if piece.owner == sender.rank]
        if sends != receives:
            return f"rank {sender.rank} sends what rank {receiver.rank} does not expect"
        if sender.send_splits[receiver.rank] != receiver.receive_splits[sender.rank]:
            return f"ranks {sender.rank} and {receiver.rank} count what travels between them differently"
    return ""


def _span_of(case: Stored, rng: Random) -> tuple[list[Span], int]:
    """Some span, as the list it is in and its position."""
    lists = [spans for bucket in case.buckets for spans in bucket.spans.values() if spans]
    chosen = rng.choice(lists)
    return chosen, rng.randrange(len(chosen))


def _drop_an_owner(case: Stored, rng: Random) -> None:
    spans, position = _span_of(case, rng)
    del spans[position]


def _give_an_element_two_owners(case: Stored, rng: Random) -> None:
    spans, position = _span_of(case, rng)
    spans.append(spans[position])


def _shift_a_span_by_one(case: Stored, rng: Random) -> None:
    spans, position = _span_of(case, rng)
    spans[position] = replace(spans[position], shard_offset=spans[position].shard_offset + 1)


def _shift_a_param_by_one(case: Stored, rng: Random) -> None:
    bucket = rng.choice(case.buckets)
    bucket.placements[0] = replace(bucket.placements[0], offset=bucket.placements[0].offset + 1)


def _pad_a_bucket_twice(case: Stored, rng: Random) -> None:
    bucket = rng.choice(case.buckets)
    bucket.numel += 64 * len(bucket.placements) + case.divisor


def _let_a_rank_plan_differently(case: Stored, rng: Random) -> None:
    case.digests[-1] = case.digests[-1][::-1]


@dataclass(frozen=True)
class Property:
    check: Callable[[Stored], str]
    plant: Callable[[Stored, Random], None]
    """The bug that this property must catch."""


PROPERTIES = (
    Property(coverage, _drop_an_owner),
    Property(one_owner, _give_an_element_two_owners),
    Property(no_overlap, _shift_a_span_by_one),
    Property(alignment, _shift_a_param_by_one),
    Property(padding_bound, _pad_a_bucket_twice),
    Property(rank_independence, _let_a_rank_plan_differently),
)


def case_of(seed: int) -> Stored:
    """One case, planned by two ranks."""
    case = stored(planned(seed), Random(seed + 1))
    case.digests.append(planned(seed).digest)
    return case


def complaints(case: Stored) -> str:
    return next((found for found in (rule.check(case) for rule in PROPERTIES) if found), "")


def fingerprint() -> str:
    """One digest of the plans of the first cases."""
    return hashlib.sha256("".join(planned(seed).digest for seed in range(_SEEDS_HASHED)).encode()).hexdigest()


def other_process_agrees() -> bool:
    """Whether a process in which sets and dicts of strings hash differently makes the same plans."""
    root, source = Path(__file__).parents[2], Path(layerwise.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(root)]), "PYTHONHASHSEED": "99"}
    program = "from tests.reliability.layout_props import fingerprint; print(fingerprint())"
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip() == fingerprint()


def run(*, quick: bool, sabotage: bool) -> dict[str, Any]:
    """The figure: how many cases, how many broke a property, and the first that did."""
    started = time.perf_counter()
    examples = QUICK_EXAMPLES if quick else FULL_EXAMPLES
    bad, worst, missed = 0, "", ""
    for seed in range(examples):
        case = case_of(seed)
        target = PROPERTIES[seed % len(PROPERTIES)]
        if sabotage and any(numel for numel in case.numel_by_fqn.values()):
            target.plant(case, Random(seed))
            missed = missed or ("" if target.check(case) else f"example {seed}: {target.check.__name__} saw no bug")
        found = complaints(case)
        bad += bool(found)
        worst = worst or (f"example {seed}: {found}" if found else "")
    if not sabotage and not other_process_agrees():
        bad, worst = bad + 1, worst or "a process with another hash seed makes other plans"
    return {
        "figure": FIGURE,
        "n": examples,
        "bad": 0 if missed else bad,
        "worst": missed or worst,
        "seconds": round(time.perf_counter() - started, 1),
    }
