"""Strategies for the pure layers: small tables with every odd param in them, their plans, matrices cut in every way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from layerwise.config.layouts import LAYOUTS, WorkPolicy
from layerwise.dtypes import DType
from layerwise.layout.boxes import Boxes, BoxShards
from layerwise.layout.buckets import BucketPlan
from layerwise.layout.intervals import Copied, Equal, Intervals, Uneven
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.shards import Held, Ranks, ShardPlan
from layerwise.layout.spans import Span
from layerwise.layout.storage import REDUCERS, plan_storage
from layerwise.layout.work import WorkPlan, plan_work
from layerwise.routing.geometry import Box, collapse
from layerwise.routing.matrices import Matrix
from layerwise.routing.rules import Route, route_params
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable
from layerwise.routing.split import row_blocks

LIGHT = settings(max_examples=50)
"""Examples that each plan a whole model."""
MANY = settings(max_examples=100)
"""Examples that are arithmetic on a few integers."""

worlds = st.integers(1, 9)
"""Ranks: with 3, 5, 6, 7 and 9, shard borders fall where powers of two never put them."""

SHARDED = tuple(layout for layout in LAYOUTS if layout != "replicated")

_DTYPES = (DType.FP32, DType.BF16, DType.FP16)


def random_sizes(rng: Random, total: int, max_parts: int = 4) -> tuple[int, ...]:
    """Positive sizes that sum to `total`."""
    cuts = sorted(rng.sample(range(1, total), min(rng.randrange(max_parts), total - 1)))
    return tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, total]))


def _random_matrix(rng: Random) -> ParamSpec:
    rows, cols = rng.randint(1, 24), rng.randint(1, 24)
    blocks = random_sizes(rng, rows) if rng.random() < 0.5 else ()
    return ParamSpec(
        fqn="",
        shape=(rows, cols),
        module_kind=ModuleKind.LINEAR,
        module_type="Linear",
        split=row_blocks((rows, cols), blocks) if blocks else None,
    )


def _random_oddity(rng: Random) -> ParamSpec:
    match rng.choice(["scalar", "empty", "vector", "vector", "stack", "stack", "conv", "table"]):
        case "scalar":
            return ParamSpec(fqn="", shape=())
        case "empty":
            return ParamSpec(fqn="", shape=rng.choice([(0,), (0, 4), (3, 0, 2)]))
        case "vector":
            return ParamSpec(fqn="", shape=(rng.randint(1, 300),), module_kind=ModuleKind.NORM, module_type="LayerNorm")
        case "stack":
            shape = (rng.randint(1, 4), rng.randint(1, 8), rng.randint(1, 8))
            return ParamSpec(fqn="", shape=shape, module_type="GroupedExperts", domain="expert")
        case "conv":
            shape = (rng.randint(1, 8), rng.randint(1, 4), 3, 3)
            return ParamSpec(fqn="", shape=shape, module_kind=ModuleKind.CONV, module_type="Conv2d")
    return ParamSpec(fqn="", shape=(40, 6), module_kind=ModuleKind.EMBEDDING, module_type="Embedding", tie="embedding")


def random_param(rng: Random) -> ParamSpec:
    """One param without a name: half are matrices, a tenth are frozen, a fifth tied across stages."""
    spec = _random_matrix(rng) if rng.random() < 0.5 else _random_oddity(rng)
    return replace(
        spec,
        dtype=rng.choice(_DTYPES),
        trainable=rng.random() < 0.9,
        tie=spec.tie or ("tie" if rng.random() < 0.2 else ""),
    )


def named(specs: Sequence[ParamSpec], rng: Random) -> ParamTable:
    """A table whose names do not sort in the order of registration; half of all tables have one dtype only, a third two
    or three chunks."""
    names = [f"layer{number}.weight" for number in range(len(specs))]
    rng.shuffle(names)
    one_dtype = rng.random() < 0.5
    borders = sorted(rng.sample(range(len(specs)), min(len(specs), rng.choice([0, 0, 0, 0, 1, 2]))))
    return ParamTable(
        tuple(
            replace(
                spec,
                fqn=name,
                dtype=specs[0].dtype if one_dtype else spec.dtype,
                tie=spec.tie and f"{spec.tie} {number}",
                chunk=sum(number >= border for border in borders if border),
            )
            for number, (name, spec) in enumerate(zip(names, specs, strict=True))
        )
    )


def tables(max_params: int = 10) -> st.SearchStrategy[ParamTable]:
    """A model. Every param has a seed of its own: quick to draw, and a failing table still shrinks param by param."""
    seeds = st.lists(st.integers(0, 2**16), min_size=1, max_size=max_params)
    return seeds.map(lambda found: named([random_param(Random(seed)) for seed in found], Random(found[0])))


def divisors(world: int) -> list[int]:
    """Sizes that a domain inside a world may have."""
    return [size for size in range(1, world + 1) if world % size == 0]


@st.composite
def plans(draw: st.DrawFn, *layouts: str) -> Plan:
    """A plan in one of these layouts, or in any, with buckets and cohorts small enough that there are several of each,
    and with all ways to reduce. Experts live on all ranks or on some."""
    world, layout = draw(worlds), draw(st.sampled_from(layouts or LAYOUTS))
    reducer = draw(st.sampled_from(REDUCERS if layout != "replicated" else REDUCERS[:1]))
    return make_plan(
        draw(tables()),
        Options(
            layout=layout,
            grad_dtype=draw(st.sampled_from([DType.FP32, DType.BF16])),
            bucket_numel=draw(st.sampled_from([1, 64, 200, 500, 2000])),
            cohort_numel=draw(st.sampled_from([1, 32, 200, 10_000])),
            reducer=reducer,
        ),
        world=world,
        worlds={"expert": draw(st.sampled_from(divisors(world)))},
    )


def matrix_of(fqn: str, index: int, rows: int, cols: int, grid: tuple[int, ...], box: Box) -> Matrix:
    """A matrix from any box of any grid over a param."""
    small_grid, small_box = collapse(grid, box)
    return Matrix(fqn=fqn, index=index, rows=rows, cols=cols, grid=small_grid, box=small_box)


def column_blocks(fqn: str, rows: int, widths: tuple[int, ...]) -> tuple[Matrix, ...]:
    """A (rows, sum(widths)) weight cut into blocks of columns."""
    found, start, grid = [], 0, (rows, sum(widths))
    for index, width in enumerate(widths):
        found.append(matrix_of(fqn, index, rows, width, grid, Box((0, start), (rows, start + width))))
        start += width
    return tuple(found)


def interleaved_blocks(fqn: str, groups: int, sizes: tuple[int, ...], cols: int) -> tuple[Matrix, ...]:
    """Megatron's fused QKV: in every group `sizes[k]` rows of matrix k, so that no matrix is contiguous."""
    found, start, grid = [], 0, (groups, sum(sizes), cols)
    for index, size in enumerate(sizes):
        box = Box((0, start, 0), (groups, start + size, cols))
        found.append(matrix_of(fqn, index, groups * size, cols, grid, box))
        start += size
    return tuple(found)


def random_cut(rng: Random) -> tuple[ParamSpec, tuple[Matrix, ...]]:
    """A param and matrices that partition it: columns, interleaved rows, or what routing makes of it."""
    match rng.choice(["columns", "interleaved", "routed"]):
        case "columns":
            rows, cols = rng.randint(1, 12), rng.randint(1, 16)
            spec = ParamSpec(fqn="w", shape=(rows, cols), module_kind=ModuleKind.LINEAR, module_type="Linear")
            return spec, column_blocks("w", rows, random_sizes(rng, cols))
        case "interleaved":
            groups, cols, sizes = rng.randint(1, 5), rng.randint(1, 7), random_sizes(rng, rng.randint(1, 6))
            spec = ParamSpec(
                fqn="w", shape=(groups * sum(sizes), cols), module_kind=ModuleKind.LINEAR, module_type="Linear"
            )
            return spec, interleaved_blocks("w", groups, sizes, cols)
    while True:
        spec = replace(random_param(rng), fqn="w", trainable=True)
        route = route_params(ParamTable((spec,)))["w"]
        if route.matrices:
            return spec, route.matrices


def cut_params() -> st.SearchStrategy[tuple[ParamSpec, tuple[Matrix, ...]]]:
    """`random_cut`, by seed."""
    return st.integers(0, 2**16).map(lambda seed: random_cut(Random(seed)))


@dataclass(frozen=True)
class Worked:
    """Shards and the work of one domain, as far as an exchange needs them."""

    table: ParamTable
    shards: tuple[ShardPlan, ...]
    work: WorkPlan

    @property
    def is_copied(self) -> bool:
        """Whether every rank has all of it."""
        return all(isinstance(plan, BucketPlan) and isinstance(plan.shards, Copied) for plan in self.shards)

    @property
    def by_index(self) -> dict[int, ShardPlan]:
        return {plan.index: plan for plan in self.shards}


def _cut_model(cuts: Sequence[tuple[ParamSpec, tuple[Matrix, ...]]]) -> tuple[ParamTable, dict[str, Route]]:
    """Params with names, and their matrices as they were cut."""
    specs, routes = [], {}
    for number, (spec, matrices) in enumerate(cuts):
        fqn = f"w{number}"
        specs.append(replace(spec, fqn=fqn, domain="dense", dtype=DType.BF16))
        routes[fqn] = Route(
            family="matrix", reason="cut by hand", matrices=tuple(replace(matrix, fqn=fqn) for matrix in matrices)
        )
    return ParamTable(tuple(specs)), routes


def _worked(
    table: ParamTable, routes: dict[str, Route], shards: Sequence[ShardPlan], world: int, cohort_numel: int
) -> Worked:
    work = plan_work(shards, routes, domain="dense", world=world, cohort_numel=cohort_numel)
    return Worked(table, tuple(shards), work)


_COHORTS = st.sampled_from([1, 50, 10_000])


@st.composite
def worked(draw: st.DrawFn, *layouts: str) -> Worked:
    """Params cut in every way, also in ways that no default rule makes, stored in any layout and assigned over a few
    ranks."""
    world = draw(worlds)
    table, routes = _cut_model(draw(st.lists(cut_params(), min_size=1, max_size=5)))
    buffers = plan_storage(
        table,
        routes,
        world_by_domain={"dense": world},
        layout=draw(st.sampled_from(layouts or LAYOUTS)),
        bucket_numel=draw(st.sampled_from([1, 200, 1000])),
    )
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    return _worked(table, routes, buckets, world, draw(_COHORTS))


def random_borders(rng: Random, size: int, parts: int) -> list[int]:
    """Where each of some parts of an axis begins, and where the last one ends. Parts may be empty."""
    if rng.random() < 0.5:  # as torch cuts: the first parts are full, the last ones get what is left
        each = -(-size // parts)
        return [min(part * each, size) for part in range(parts + 1)]
    return [0, *sorted(rng.randint(0, size) for _ in range(parts - 1)), size]


def random_boxes(rng: Random, shape: tuple[int, ...], world: int) -> tuple[Box, ...]:
    """A box of a param for every rank: cut along none, one or two dims of a mesh, in copies along another; in every order
    of the mesh's dims."""
    first = rng.choice(divisors(world))
    second = rng.choice(divisors(world // first))
    sizes = [first, second, world // first // second]
    cut = dict(zip(rng.sample(range(len(shape)), min(2, len(shape))), rng.sample(range(3), 2), strict=False))
    borders = {dim: random_borders(rng, shape[dim], sizes[axis]) for dim, axis in cut.items()}
    boxes = []
    for place in itertools.product(*map(range, sizes)):
        ranges = [
            (borders[dim][place[cut[dim]]], borders[dim][place[cut[dim]] + 1]) if dim in cut else (0, size)
            for dim, size in enumerate(shape)
        ]
        boxes.append(Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges)))
    return tuple(boxes)


POLICIES: tuple[WorkPolicy, ...] = ("stay", "balance", "repeat")


@st.composite
def boxed(draw: st.DrawFn) -> Worked:
    """Params that somebody else has cut into boxes, with copies, and every policy of work."""
    world, rng = draw(worlds), Random(draw(st.integers(0, 2**16)))
    table, routes = _cut_model(draw(st.lists(cut_params(), min_size=1, max_size=4)))
    shards = [
        BoxShards(
            index, "dense", spec.fqn, Boxes(spec.shape, random_boxes(rng, spec.shape, world)), rng.choice(POLICIES)
        )
        for index, spec in enumerate(table)
    ]
    return _worked(table, routes, shards, world, draw(_COHORTS))


def _random_intervals(rng: Random, bucket: BucketPlan) -> Intervals:
    kinds: list[Intervals] = [bucket.shards, Copied(bucket.numel, bucket.world)]
    kinds.append(Uneven((0, *sorted(rng.randint(0, bucket.numel) for _ in range(bucket.world - 1)), bucket.numel)))
    if bucket.numel % bucket.world == 0:
        kinds.append(Equal(bucket.numel, bucket.world))
    return rng.choice(kinds)


@st.composite
def dealt(draw: st.DrawFn) -> Worked:
    """Buckets of any layout with intervals and policies of work that their layout does not have."""
    case, rng = draw(worked()), Random(draw(st.integers(0, 2**16)))
    shards = [
        replace(bucket, shards=_random_intervals(rng, bucket), work=rng.choice(POLICIES))
        for bucket in case.shards
        if isinstance(bucket, BucketPlan)
    ]
    routes = {
        fqn: Route(
            family="matrix",
            reason="cut by hand",
            matrices=tuple(item.matrix for item in case.work.items if item.matrix.fqn == fqn),
        )
        for fqn in (param.fqn for param in case.table)
    }
    return _worked(case.table, routes, shards, case.work.world, draw(_COHORTS))


@dataclass(frozen=True)
class Scattered:
    """One param in pieces: each lies with some ranks, whichever, and every rank has its own in an order of its own. No
    layout is like it: it has everything that a shard plan may have."""

    index: int
    fqn: str
    pieces: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(start, stop, ranks) of the param's elements, in order."""
    orders: tuple[tuple[int, ...], ...]
    """Of every rank: in which order it has its pieces."""
    work: WorkPolicy
    domain: str = "dense"
    tie: str = ""

    @property
    def label(self) -> str:
        return f"param {self.fqn!r}"

    @property
    def world(self) -> int:
        return len(self.orders)

    @property
    def fqns(self) -> tuple[str, ...]:
        return (self.fqn,)

    def to_json(self) -> dict[str, object]:
        return {"label": self.label, "pieces": self.pieces, "orders": self.orders, "work": self.work}

    def param_numel(self, fqn: str) -> int:
        return self.pieces[-1][1]

    def shard_numel(self, rank: int) -> int:
        return sum(span.numel for span in self.spans(rank))

    def spans(self, rank: int) -> tuple[Span, ...]:
        found, cursor = [], 0
        for number in self.orders[rank]:
            start, stop, ranks = self.pieces[number]
            if rank in ranks:
                found.append(Span(self.fqn, None, start, stop, cursor))
                cursor += stop - start
        return tuple(found)

    def spans_of(self, fqn: str, rank: int) -> Sequence[Span]:
        return self.spans(rank)

    def copies(self, span: Span, rank: int) -> Ranks:
        return next(ranks for start, _, ranks in self.pieces if start == span.start)

    def ranks_of(self, matrix: Matrix) -> Ranks:
        return tuple(first for first, *_ in self.holders(matrix))

    def holders(self, matrix: Matrix) -> list[Held]:
        numels = [
            sum(matrix.numel_within(start, stop) for start, stop, ranks in self.pieces if rank in ranks)
            for rank in range(self.world)
        ]
        return [(rank, rank + 1, numel, 1) for rank, numel in enumerate(numels) if numel]


def _scatter(rng: Random, index: int, spec: ParamSpec, world: int) -> Scattered:
    borders = list(itertools.accumulate(random_sizes(rng, spec.numel, max_parts=7), initial=0))
    pieces = tuple(
        (start, stop, tuple(sorted(rng.sample(range(world), rng.randint(1, world)))))
        for start, stop in itertools.pairwise(borders)
    )
    orders = tuple(tuple(rng.sample(range(len(pieces)), len(pieces))) for _ in range(world))
    return Scattered(index, spec.fqn, pieces, orders, rng.choice(POLICIES))


@st.composite
def scattered(draw: st.DrawFn) -> Worked:
    """Params in pieces that lie anywhere, and matrices whose homes are any ranks."""
    world, rng = draw(worlds), Random(draw(st.integers(0, 2**16)))
    table, routes = _cut_model(draw(st.lists(cut_params(), min_size=1, max_size=4)))
    case = _worked(
        table, routes, [_scatter(rng, index, spec, world) for index, spec in enumerate(table)], world, draw(_COHORTS)
    )
    return case if rng.random() < 0.5 else anywhere(case, rng)


def anywhere(case: Worked, rng: Random) -> Worked:
    """The same with homes that no policy chose: any ranks, one or several."""
    items = [
        item._replace(homes=tuple(sorted(rng.sample(range(case.work.world), rng.randint(1, case.work.world)))))
        for item in case.work.items
    ]
    return replace(case, work=replace(case.work, items=tuple(items)))
