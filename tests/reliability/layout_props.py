"""S6: whatever the params, the layout and however many ranks, every element has exactly one owner and nothing overlaps.

Cases come from a seeded generator: odd params (scalars, empty, stacks, row blocks, tied, frozen, several dtypes, chunks)
in every layout and by every reducer, and worlds from 1 to 65,536. What a plan says is first copied into plain data
(`Stored`), which eight properties then check: coverage, exactly one owner, no overlap, wholeness, alignment, padding
bound, no mixed reduce groups, rank independence. All shards that hold anything are looked at, and some that hold nothing.
The first cases are also planned by a process whose hash seed differs.

With `sabotage` every case gets one bug planted into that copy, one kind per property in turn. The bad count is then
what the properties caught, and zero when any property let through a bug that was meant for it.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import layerwise
from layerwise.layout.buckets import BucketPlan, Placement
from layerwise.layout.exchange import Exchange, exchange_for
from layerwise.layout.intervals import Uneven
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.spans import Span
from layerwise.layout.storage import REDUCERS
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable
from layerwise.routing.split import row_blocks
from tests.strategies import divisors, named, random_param, random_sizes

FIGURE = "S6 layout_props"
FULL_EXAMPLES, QUICK_EXAMPLES = 10_000, 200
_SEEDS_HASHED = 100
"""Cases that another process, with another order of hashes, plans again."""
_HUGE = (4096, 8191, 10_000, 16_384, 30_000, 49_999, 65_535, 65_536)


@dataclass
class StoredBucket:
    """One bucket as the plan describes it, with the spans of every shard that was looked at. A shard's number is that of
    the first rank that has it."""

    index: int
    buffer: int
    layout: str
    domain: str
    collective: str
    is_matrix: bool
    world: int
    num_shards: int
    """Different ones: all ranks, or one where every rank has everything."""
    offset: int
    numel: int
    shard_starts: dict[int, int]
    shard_numels: dict[int, int]
    placements: list[Placement]
    spans: dict[int, list[Span]]
    copies: dict[int, Sequence[int]]
    """Who has each of these shards."""

    @property
    def divisor(self) -> int:
        return math.lcm(self.num_shards, 128)

    @property
    def keeps_whole(self) -> bool:
        """Whether its layout promises that no param of it is cut."""
        return self.is_matrix and self.layout in ("padded", "compact")

    @property
    def allowed_padding(self) -> int:
        """One more than the elements that may belong to no param."""
        if self.layout == "compact":
            return 1
        if self.layout == "padded":
            fullest = max(max((span.part.stop for span in spans), default=0) for spans in self.spans.values())
            shard = fullest + math.lcm(64, self.divisor // self.num_shards)
            return shard * self.num_shards - sum(placement.numel for placement in self.placements)
        return 64 * len(self.placements) + self.divisor


class Home(NamedTuple):
    """Where a matrix is orthogonalised."""

    label: str
    fqn: str
    ranks: Sequence[int]
    world: int
    num_shards: int
    """Over how many its bucket is spread."""


@dataclass
class Stored:
    """What a plan says about storage and homes, as plain data that can be checked and can be damaged."""

    numel_by_fqn: dict[str, int]
    """Trainable params."""
    matrices: list[str]
    buckets: list[StoredBucket]
    homes: list[Home]
    reduce_groups: list[list[int]]
    owners: list[dict[str, int]] = field(default_factory=list)
    """Who owns each param that is kept whole without padding, by this plan and by that of the same params in another
    order."""
    digests: list[str] = field(default_factory=list)
    """Of the plan, as several ranks make it."""
    tables: list[Exchange] = field(default_factory=list)
    """Exchange tables of some ranks for one cohort, each made on its own."""


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


_LAYOUTS = (*["flat"] * 8, *["padded"] * 5, *["compact"] * 4, "replicated", "mixed", "mixed")


def planned(seed: int, *, reordered: bool = False) -> Plan:
    """The plan of one case: the same for the same seed, as it must be on every rank. `reordered` has its params in another
    order, which changes the plan, but not everything in it."""
    rng = Random(seed)
    world = random_world(rng)
    table = random_table(rng, world)
    layout: str | dict[str, str] = rng.choice(_LAYOUTS)
    if layout == "mixed":
        keys = ("matrix", "other", *(["expert/matrix"] if any(param.domain == "expert" for param in table) else []))
        layout = {key: rng.choice(("flat", "padded", "compact")) for key in keys}
    if world > 1000 and layout not in ("flat", "compact") and rng.random() < 0.85:
        layout = "compact"  # to pack for so many takes its time
    reducer = rng.choice(REDUCERS) if layout != "replicated" else "collective"
    worlds = {"expert": rng.choice(divisors(world)) if world < 2000 else world}
    options = Options(
        layout=layout,
        reducer=reducer,
        bucket_numel=rng.choice([1, 64, 300, 1000, 5000, 10**6]),
        cohort_numel=rng.choice([1, 50, 1000, 10**6]),
    )
    if reordered:
        table = ParamTable(tuple(rng.sample(table.params, len(table))))
    return make_plan(table, options, world=world, worlds=worlds)


def num_shards_of(plan: Plan, bucket: BucketPlan) -> int:
    """Over how many ranks a bucket is spread, by its layout's name."""
    is_copied = plan.buffers[bucket.buffer].key.layout == "replicated"
    return 1 if is_copied else plan.world_by_domain[bucket.domain]


def borders_of(bucket: BucketPlan, num_shards: int) -> list[int]:
    """Where each shard starts, and the end, by arithmetic of our own."""
    if isinstance(bucket.shards, Uneven):
        return list(bucket.shards.borders)
    return [shard * bucket.numel // num_shards for shard in range(num_shards + 1)]


def shards_to_look_at(bucket: BucketPlan, num_shards: int, rng: Random) -> list[int]:
    """Every shard that can hold an element, and three that may hold none."""
    found = {rng.randrange(num_shards) for _ in range(3)}
    borders = borders_of(bucket, num_shards)
    for placement in bucket.placements:
        if placement.numel:
            first = bisect.bisect_right(borders, placement.offset) - 1
            last = bisect.bisect_left(borders, placement.offset + placement.numel)
            found.update(range(first, last))
    return sorted(found)


def stored(plan: Plan, rng: Random) -> Stored:
    """The plan as plain data, with what two ranks make of it."""
    buckets = []
    for bucket in plan.buckets:
        num_shards = num_shards_of(plan, bucket)
        shards = shards_to_look_at(bucket, num_shards, rng)
        key = plan.buffers[bucket.buffer].key
        buckets.append(
            StoredBucket(
                index=bucket.index,
                buffer=bucket.buffer,
                layout=key.layout,
                domain=bucket.domain,
                collective=bucket.reducer,
                is_matrix=key.family == "matrix",
                world=plan.world_by_domain[bucket.domain],
                num_shards=num_shards,
                offset=bucket.offset,
                numel=bucket.numel,
                shard_starts={shard: bucket.shards.start(shard) for shard in shards},
                shard_numels={shard: bucket.shard_numel(shard) for shard in shards},
                placements=list(bucket.placements),
                spans={shard: list(bucket.spans(shard)) for shard in shards},
                copies={shard: bucket.shards.copies(shard) for shard in shards},
            )
        )
    return Stored(
        numel_by_fqn={param.fqn: param.numel for param in plan.table if param.trainable},
        matrices=[matrix.label for route in plan.routes.values() for matrix in route.matrices],
        buckets=buckets,
        homes=[
            Home(
                item.matrix.label,
                item.matrix.fqn,
                item.homes,
                work.world,
                num_shards_of(plan, plan.buckets[item.shard]),
            )
            for work in plan.works
            for item in work.items
        ],
        reduce_groups=[list(group.buckets) for group in plan.reduce_groups],
        owners=[owners_in(buckets)],
        digests=[plan.digest],
        tables=exchanges(plan, rng),
    )


def owners_in(buckets: list[StoredBucket]) -> dict[str, int]:
    return {
        span.fqn: shard
        for bucket in buckets
        if bucket.layout == "compact"
        for shard, spans in bucket.spans.items()
        for span in spans
    }


def exchanges(plan: Plan, rng: Random) -> list[Exchange]:
    """What two ranks each derive for the same cohort: the home of one of its matrices and an owner of part of it."""
    moving = [(work, item) for work in plan.works for item in work.items if len(item.homes) < work.world]
    if not moving:
        return []
    work, item = rng.choice(moving)
    buckets = {bucket.index: bucket for bucket in plan.buckets}
    owners = buckets[item.shard].ranks_of(item.matrix)
    ranks = dict.fromkeys((item.homes[0], rng.choice(owners), rng.randrange(work.world)))
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
    """No element lies in two spans or beyond its param, copies aside, and every matrix has one home, which is a rank, or
    all ranks where all have it."""
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
    if Counter(home.label for home in case.homes) != Counter(case.matrices):
        return "a matrix has no home, or two"
    for bucket in case.buckets:
        for shard, copies in bucket.copies.items():
            if list(copies) != ([shard] if bucket.num_shards > 1 else list(range(bucket.world))):
                return f"shard {shard} of {bucket.num_shards} has copies on {copies}"
    for home in case.homes:
        is_one = len(home.ranks) == 1 and 0 <= home.ranks[0] < home.num_shards
        if not (is_one if home.num_shards > 1 else list(home.ranks) == list(range(home.world))):
            return f"matrix {home.label} is at home nowhere"
    return ""


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
            start, size, cursor = bucket.shard_starts[shard], bucket.shard_numels[shard], 0
            for span in spans:
                if span.shard_offset < cursor:
                    return f"{span.fqn!r} overlaps the span before it in shard {shard}"
                cursor = span.shard_offset + span.numel
                if start + span.shard_offset != offset_by_fqn[span.fqn] + span.start:
                    return f"the span of {span.fqn!r} in shard {shard} is not where its param lies"
            if cursor > size:
                return f"shard {shard} is overfull"
    return ""


def wholeness(case: Stored) -> str:
    """Where a layout keeps params whole, each lies in one shard, and its matrices are at home there."""
    holder: dict[str, int] = {}
    for bucket in case.buckets:
        for shard, spans in bucket.spans.items() if bucket.keeps_whole else ():
            for span in spans:
                if holder.setdefault(span.fqn, shard) != shard:
                    return f"{span.fqn!r} crosses a shard of a bucket in layout {bucket.layout}"
    for home in case.homes:
        if home.num_shards > 1 and holder.get(home.fqn, home.ranks[0]) != home.ranks[0]:
            return f"matrix {home.label} lies whole on rank {holder[home.fqn]} and is at home on rank {home.ranks[0]}"
    return ""


def alignment(case: Stored) -> str:
    """Params start on 64 elements, buckets end on the divisor, shards are equal; in compact nothing is aligned and shards
    follow one another."""
    for bucket in case.buckets:
        if bucket.layout == "compact":
            cursor = 0
            for placement in bucket.placements:
                if placement.offset != cursor:
                    return f"{placement.fqn!r} starts at {placement.offset}, the param before it ends at {cursor}"
                cursor += placement.numel
            continue
        if bucket.numel % bucket.divisor:
            return f"a bucket of {bucket.numel} elements is no multiple of {bucket.divisor}"
        if set(bucket.shard_numels.values()) != {bucket.numel // bucket.num_shards}:
            return f"shards of a bucket of {bucket.numel} differ: {sorted(set(bucket.shard_numels.values()))}"
        for placement in bucket.placements:
            if placement.offset % 64:
                return f"{placement.fqn!r} starts at {placement.offset}"
    return ""


def padding_bound(case: Stored) -> str:
    """flat: at most 64 elements for each param and one divisor for each bucket. padded: what the fullest shard makes
    necessary. compact: none."""
    for bucket in case.buckets:
        padding = bucket.numel - sum(placement.numel for placement in bucket.placements)
        if not 0 <= padding < bucket.allowed_padding:
            return f"a bucket of {bucket.numel} elements has {padding} of padding, allowed {bucket.allowed_padding - 1}"
    return ""


def one_collective(case: Stored) -> str:
    """Every bucket is launched once, in order, and never together with one that is reduced differently or by others."""
    by_index = {bucket.index: bucket for bucket in case.buckets}
    if sorted(itertools.chain(*case.reduce_groups)) != sorted(by_index):
        return "a bucket is launched twice, or never"
    for group in case.reduce_groups:
        if len({(by_index[index].domain, by_index[index].collective) for index in group}) > 1:
            return f"buckets {group} are launched together and reduced differently"
        if group != sorted(group):
            return f"buckets {group} are launched out of order"
    return ""


def rank_independence(case: Stored) -> str:
    """Ranks that make the plan on their own have the same one, and agree on what travels between them; who owns a param
    does not depend on the order in which params were found."""
    if len(set(case.digests)) > 1:
        return "two ranks have different plans"
    if any(owners != case.owners[0] for owners in case.owners):
        return "params in another order have other owners"
    for sender, receiver in itertools.permutations(case.tables, 2):
        there = [parcel for parcel in sender.there.sends if parcel.home == receiver.rank]
        back = [parcel for parcel in sender.back.sends if parcel.holder == receiver.rank]
        for way, sends, leaving, arriving in (
            ("there", there, sender.there, receiver.there),
            ("back", back, sender.back, receiver.back),
        ):
            receives = [
                parcel
                for parcel in arriving.receives
                if (parcel.holder if way == "there" else parcel.home) == sender.rank
            ]
            if sends != receives:
                return f"rank {sender.rank} sends {way} what rank {receiver.rank} does not expect"
            if leaving.send_splits[receiver.rank] != arriving.receive_splits[sender.rank]:
                return f"ranks {sender.rank} and {receiver.rank} count what travels {way} between them differently"
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
    spans[position] = spans[position]._replace(shard_offset=spans[position].shard_offset + 1)


def _cut_a_whole_param(case: Stored, rng: Random) -> None:
    lists = [
        (bucket, shard)
        for bucket in case.buckets
        if bucket.keeps_whole and bucket.num_shards > 1
        for shard, spans in bucket.spans.items()
        if any(span.numel > 1 for span in spans)
    ]
    if not lists:
        raise NothingToBreak
    bucket, shard = rng.choice(lists)
    position = next(number for number, span in enumerate(bucket.spans[shard]) if span.numel > 1)
    span = bucket.spans[shard][position]
    bucket.spans[shard][position] = span._replace(stop=span.stop - 1)
    other = (shard + 1) % bucket.num_shards
    bucket.shard_starts.setdefault(other, 0)
    bucket.shard_numels.setdefault(other, bucket.numel)
    bucket.spans.setdefault(other, []).append(span._replace(start=span.stop - 1, shard_offset=0))


def _shift_a_param_by_one(case: Stored, rng: Random) -> None:
    bucket = rng.choice(case.buckets)
    bucket.placements[0] = replace(bucket.placements[0], offset=bucket.placements[0].offset + 1)


def _pad_a_bucket_twice(case: Stored, rng: Random) -> None:
    bucket = rng.choice(case.buckets)
    bucket.numel += bucket.allowed_padding


def _mix_two_reduce_groups(case: Stored, rng: Random) -> None:
    by_index = {bucket.index: bucket for bucket in case.buckets}
    pairs = [
        (one, other)
        for one, other in itertools.combinations(case.reduce_groups, 2)
        if (by_index[one[0]].domain, by_index[one[0]].collective)
        != (by_index[other[0]].domain, by_index[other[0]].collective)
    ]
    if not pairs:
        raise NothingToBreak
    one, other = rng.choice(pairs)
    case.reduce_groups.remove(other)
    one.extend(other)
    one.sort()


def _let_a_rank_plan_differently(case: Stored, rng: Random) -> None:
    if len(case.owners) > 1 and rng.random() < 0.5:
        fqn = rng.choice(sorted(case.owners[-1]))
        case.owners[-1][fqn] += 1
    else:
        case.digests[-1] = case.digests[-1][::-1]


class NothingToBreak(Exception):
    """A case has nothing that this bug could be in."""


@dataclass(frozen=True)
class Property:
    check: Callable[[Stored], str]
    plant: Callable[[Stored, Random], None]
    """The bug that this property must catch."""


PROPERTIES = (
    Property(coverage, _drop_an_owner),
    Property(one_owner, _give_an_element_two_owners),
    Property(no_overlap, _shift_a_span_by_one),
    Property(wholeness, _cut_a_whole_param),
    Property(alignment, _shift_a_param_by_one),
    Property(padding_bound, _pad_a_bucket_twice),
    Property(one_collective, _mix_two_reduce_groups),
    Property(rank_independence, _let_a_rank_plan_differently),
)


def case_of(seed: int) -> Stored:
    """One case, planned by two ranks."""
    case = stored(planned(seed), Random(seed + 1))
    case.digests.append(planned(seed).digest)
    if case.owners[0]:
        other_order = planned(seed, reordered=True)
        if other_order.options.layout == "compact":  # the cost model may come to another choice
            case.owners.append(stored(other_order, Random(seed + 2)).owners[0])
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
    planted: Counter[str] = Counter()
    for seed in range(examples):
        case = case_of(seed)
        target = PROPERTIES[seed % len(PROPERTIES)]
        if sabotage and any(numel for numel in case.numel_by_fqn.values()):
            try:
                target.plant(case, Random(seed))
            except NothingToBreak:
                continue
            planted[target.check.__name__] += 1
            missed = missed or ("" if target.check(case) else f"example {seed}: {target.check.__name__} saw no bug")
        found = complaints(case)
        bad += bool(found)
        worst = worst or (f"example {seed}: {found}" if found else "")
    idle = [rule.check.__name__ for rule in PROPERTIES if not planted[rule.check.__name__]]
    if sabotage and idle:
        missed = missed or f"no bug was planted for {', '.join(idle)}"
    if not sabotage and not other_process_agrees():
        bad, worst = bad + 1, worst or "a process with another hash seed makes other plans"
    return {
        "figure": FIGURE,
        "n": examples,
        "bad": 0 if missed else bad,
        "worst": missed or worst,
        "seconds": round(time.perf_counter() - started, 1),
    }
