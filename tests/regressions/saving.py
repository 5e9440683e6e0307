"""Checkpoints: what is in them, whatever wrote it; what goes on from them, and at which rate."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import layerwise
from layerwise.checkpoint import loading, rates, saving
from layerwise.checkpoint.contents import Contents
from layerwise.checkpoint.disk import read_manifest
from layerwise.comm.handles import Handle
from layerwise.engine.publisher import Publisher
from layerwise.optim.optimizer import Optimizer
from layerwise.routing.geometry import Box
from tests.crossings import KINDS, Run, Wrapped, constants_of, filled, new_oracle, take_step
from tests.reference.oracle import Hyper, Oracle
from tests.regressions.cases import Case, Mistake, in_place_of
from tests.worlds import anywhere, gradient

BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 2


@contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """A folder that all ranks know, for as long as all of them need it."""
    told: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(told)
    try:
        yield Path(told[0])
    finally:
        shutil.rmtree(told[0], ignore_errors=True)


def trained(rank: int, world: int, kind: Wrapped, hyper: Hyper, dtype: torch.dtype) -> tuple[Run, Oracle]:
    """A run of two steps, and its oracle."""
    run, oracle = kind.build(rank, world, 0, dtype, hyper), new_oracle(hyper, dtype)
    for step in range(STEPS):
        run.step(step)
        take_step(oracle, step, run.votes)
    return run, oracle


def differs(run: Run, oracle: Oracle, dtype: torch.dtype, number: int = STEPS) -> list[str]:
    """What a run that has loaded has not as the oracle has it, now and one step later."""
    constants = constants_of(filled(0, dtype))
    found = run.differences(oracle, constants)
    run.step(number)
    take_step(oracle, number, run.votes)
    return found + [f"one step later: {text}" for text in run.differences(oracle, constants, stepped=True)]


def wrapped(layout: str) -> Wrapped:
    kind = KINDS[layout]
    assert isinstance(kind, Wrapped)
    return kind


# ------------------------------------------------------------------------------------------------ one format

STATE_OF = {"muon": ("momentum",), "normuon": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",)}


def by_hand(hyper: Hyper, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shapes and dtypes of all that belongs into a checkpoint of the model."""
    model = filled(0, dtype)
    matrices, name_of = model.matrices(), {FP32: "float32", BF16: "bfloat16", torch.int64: "int64"}
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    expected = {key: (tuple(tensor.shape), name_of[tensor.dtype]) for key, tensor in found.items()}
    for name, param in model.named_parameters():
        if param.requires_grad:
            kinds = STATE_OF[hyper.matrix if name in matrices else hyper.other]
            for kind in (*kinds, *(("master",) if dtype != FP32 else ())):
                expected[f"optimizer.state.{name}.{kind}"] = (tuple(param.shape), "float32")
    if hyper.matrix == "normuon":
        for name, blocks in matrices.items():
            shape = model.get_parameter(name).shape
            rows = [shape[1]] * shape[0] if blocks is None else [stop - start for start, stop in blocks]  # type: ignore[misc]
            expected |= {f"optimizer.state.{name}.row_moment.{i}": ((rows[i],), "float32") for i in range(len(rows))}
    return expected


def unlike(path: Path, expected: dict[str, tuple[tuple[int, ...], str]]) -> list[str]:
    """Tensors of a checkpoint that are not what they should be."""
    entries = read_manifest(path).entries
    found = {
        key: (entry.shape, entry.dtype) for key, entry in entries.items() if not key.startswith(("rng.", "extra."))
    }
    return [
        f"{path.name}: {key} is {found.get(key, 'missing')}, expected {expected.get(key, 'nothing')}"
        for key in sorted({*found, *expected})
        if found.get(key) != expected.get(key)
    ]


def one_format(rank: int, world: int) -> list[str]:
    """With matrices owned whole and everything else cut by bytes, the checkpoint of the others was to say how it was cut.
    The flag that decides it had been cleared while arguments were read, and a format was written that nobody could load.

    Here there is one format, of whole tensors by name. No flag goes into it: the layouts of a model, mixed as they are
    (matrices whole, the others by bytes), write the same tensors, and each loads what the others wrote.
    """
    hyper, layouts = Hyper(matrix="normuon", clip=0.75), ("flat", "padded", "compact", "replicated")
    found = []
    with shared_folder(rank) as folder:
        oracles = {}
        for layout in layouts:
            run, oracles[layout] = trained(rank, world, wrapped(layout), hyper, BF16)
            layerwise.save(folder / layout, run.model, run.optimizer)
            found += unlike(folder / layout, by_hand(hyper, BF16))
        if anywhere(found):
            return found
        for layout, other in zip(layouts, (*layouts[1:], layouts[0]), strict=True):
            run = wrapped(other).build(rank, world, 1, BF16, hyper)
            layerwise.load(folder / layout, run.model, run.optimizer)
            found += [f"{layout} to {other}: {text}" for text in differs(run, oracles[layout], BF16)]
    return found


def others_as_they_lie(rank: int) -> Any:
    def flat(real: Callable[..., Any]) -> Callable[..., Any]:
        def of_shard(self: Contents, key: str, fqn: str, shard: Any, tensor: Tensor) -> Any:
            for part in real(self, key, fqn, shard, tensor):
                if self.engine.plan.route(fqn).family == "matrix" or len(part.shape) == 1:
                    yield part
                    continue
                numel = torch.Size(part.shape).numel()
                first = sum(a * b for a, b in zip(part.box.starts, (*part.shape[1:], 1), strict=True))
                yield part._replace(
                    shape=(numel,), box=Box((first,), (first + part.tensor.numel(),)), tensor=part.tensor.reshape(-1)
                )

        return of_shard

    return in_place_of(Contents, "_of_shard", flat)


def others_left_out(rank: int) -> Any:
    def matrices_alone(real: Callable[..., Any]) -> Callable[..., Any]:
        def state(self: Contents) -> Any:
            return (part for part in real(self) if not part.key.endswith((".exp_avg", ".exp_avg_sq")))

        return state

    return in_place_of(Contents, "state", matrices_alone)


# ------------------------------------------------------------------------------------------------ what is empty


class Sparse(nn.Module):
    """One matrix and one vector for four ranks, and what has no elements at all."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(3, 5, bias=False)
        self.norm = nn.LayerNorm(2)
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(0, 3))


EMPTY: dict[str, Any] = {"list": [], "dict": {}, "tuple": (), "deep": [[], {"a": ()}], "tensor": torch.zeros(0, 2)}


def what_is_empty(rank: int, world: int) -> list[str]:
    """Lists of masters and of state that were empty on a rank were dropped by what wrote them, and came back with another
    length: masters went to the wrong params, or loading failed.

    Here nothing is in lists: tensors go by name, ranks that have nothing say so, tensors without elements are there, and
    what users put beside them comes back as it was, empty or not.
    """
    found = []
    with shared_folder(rank) as folder:
        for layout in ("compact", "flat"):
            runs = []
            for salt in (0, 1):
                module = Sparse().bfloat16()
                with torch.no_grad():
                    for name, param in module.named_parameters():
                        param.copy_(gradient(f"{name} {salt}", param.shape, 0, 0, 0))
                model = layerwise.DataParallel(module, layout=layout)
                optimizer = layerwise.Optimizer(model, matrix=layerwise.NorMuon(lr=0.02), other=layerwise.Lion(lr=0.01))
                runs.append((module, model, optimizer))

            def step(run: Any, number: int) -> None:
                for name, param in run[0].named_parameters():
                    if param.requires_grad:
                        (param * gradient(name, param.shape, 0, number, 0).bfloat16()).sum().backward()
                run[2].step()
                run[2].zero_grad()

            step(runs[0], 0)
            layerwise.save(folder / layout, *runs[0][1:], extra=EMPTY)
            loaded = layerwise.load(folder / layout, *runs[1][1:])
            if repr(loaded.extra) != repr(EMPTY):
                found.append(f"{layout}: extra came back as {loaded.extra}")
            keys = set(read_manifest(folder / layout).entries)
            found += [
                f"{layout}: {key} is missing in the file"
                for key in ("model.nothing", "model.frozen")
                if key not in keys
            ]
            for number in (1, 2):
                found += [
                    f"{layout}: {kind} of {name} before step {number}"
                    for (name, one), other in zip(runs[0][0].named_parameters(), runs[1][0].parameters(), strict=True)
                    for kind in ("weight", *runs[0][2].state[one])
                    if not torch.equal(
                        *(
                            (one, other)
                            if kind == "weight"
                            else (runs[0][2].state[one][kind], runs[1][2].state[other][kind])
                        )
                    )
                ]
                for run in runs:
                    step(run, number)
    return found


def empty_is_dropped(rank: int) -> Any:
    def full(real: Callable[..., Any]) -> Callable[..., Any]:
        def to_plain(value: Any, *rest: Any) -> Any:
            if isinstance(value, dict):
                value = {key: part for key, part in value.items() if not isinstance(part, list | dict | tuple) or part}
            return real(value, *rest)

        return to_plain

    return in_place_of(saving, "to_plain", full)


def ranks_with_nothing_say_nothing(rank: int) -> Any:
    def silent(real: Callable[..., Any]) -> Callable[..., Any]:
        def write_share(share: saving.Share, *rest: Any) -> None:
            parts = list(share.parts)
            if any(not part.key.startswith(saving.RNG) for part in parts):
                real(share._replace(parts=parts), *rest)

        return write_share

    return in_place_of(saving, "_write_share", silent)


def tensors_without_elements_are_dropped(rank: int) -> Any:
    def full(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: (part for part in real(self) if part.tensor.numel())

    return in_place_of(Contents, "constants", full)


# ------------------------------------------------------------------------------------------------ rates

RATES = {"blocks.0.up.weight": (0.05, 0.3), "blocks.0.down.weight": (0.01, 0.0), "embed.weight": (0.002, 0.2)}
"""Params with an lr and a decay of their own."""
PLACES = {"blocks.0.up.weight": 0.5, "blocks.0.down.weight": 0.25, "embed.weight": 0.75}
"""How far the schedule of each has come: of all others it is at 0.875."""


def _routes(names: Sequence[str]) -> tuple[layerwise.RouteRule, ...]:
    return tuple(
        layerwise.RouteRule(
            pattern=name,
            to="other" if name == "embed.weight" else "matrix",
            options={"lr": RATES[name][0], "weight_decay": RATES[name][1]},
        )
        for name in names
    )


def _scheduled(optimizer: Optimizer) -> LambdaLR:
    """Every group by a schedule of its own, which stays where it is."""
    places = [PLACES.get(group["fqns"][0], 0.875) for group in optimizer.param_groups]
    return LambdaLR(optimizer, [lambda step, place=place: place if step else 1.0 for place in places])


def rates_of_groups(rank: int, world: int) -> list[str]:
    """Param groups of a checkpoint were found again by some of their options. Where those were the same, groups fell
    together, and params went on at the rate of others without a word.

    Here options are those of the run that loads, and how far a schedule has come is found by the params of a group. Tested
    with groups of their own schedules, which the second run has in another order.
    """
    overrides = {
        name: {
            ("other_" if name == "embed.weight" else "") + key: value
            for key, value in (("lr", lr), ("weight_decay", decay))
        }
        for name, (lr, decay) in RATES.items()
    }
    hyper = Hyper(weight_decay=0.1, other_weight_decay=0.01, clip=0.75, overrides=overrides)
    names = list(RATES)
    with shared_folder(rank) as folder:
        first = replace(wrapped("flat"), routes=_routes(names))
        run, oracle = first.build(rank, world, 0, FP32, hyper), new_oracle(hyper, FP32)
        run.step(0)
        take_step(oracle, 0, run.votes)
        _scheduled(run.optimizer).step()
        layerwise.save(folder / "saved", run.model, run.optimizer)
        second = replace(wrapped("compact"), routes=_routes(names[::-1]))
        run = second.build(rank, world, 1, FP32, hyper)
        _scheduled(run.optimizer)
        layerwise.load(folder / "saved", run.model, run.optimizer)
    oracle.hyper = replace(
        hyper,
        lr=hyper.lr * 0.875,
        other_lr=hyper.other_lr * 0.875,
        overrides={
            name: {key: value * PLACES[name] if key.endswith("lr") else value for key, value in given.items()}
            for name, given in overrides.items()
        },
    )
    found = []
    for group in run.optimizer.param_groups:
        of = oracle.of(run.name_of(group["fqns"][0]))
        expected = (of.lr, of.weight_decay) if group["rule"] == "muon" else (of.other_lr, of.other_weight_decay)
        if (group["lr"], group["weight_decay"]) != expected:
            found.append(f"{group['fqns'][0]} goes on at {group['lr']}, {group['weight_decay']}: expected {expected}")
    return found + differs(run, oracle, FP32, 1)


def _by_name(saved: Sequence[Any], group: Any) -> list[Any]:
    return [one for one in saved if one["name"] == group["name"]]


def groups_by_name(rank: int) -> Any:
    def by_name(real: Callable[..., Any]) -> Callable[..., Any]:
        def rates_of(contents: Contents, saved: Sequence[Any], names: Any) -> dict[str, float]:
            groups = contents.optimizer.param_groups if contents.optimizer is not None else []
            return {group["name"]: one["lr"] for group in groups for one in _by_name(saved, group)}

        return rates_of

    return in_place_of(loading, "rates_of", by_name)


def options_come_from_the_file(rank: int) -> Any:
    def all_of_them(real: Callable[..., Any]) -> Callable[..., Any]:
        def rates_of(contents: Contents, saved: Sequence[Any], names: Any) -> dict[str, float]:
            for group in contents.optimizer.param_groups if contents.optimizer is not None else []:
                for one in _by_name(saved, group):
                    group["weight_decay"] = one["weight_decay"]
            return dict(real(contents, saved, names))

        return rates_of

    return in_place_of(loading, "rates_of", all_of_them)


def places_are_forgotten(rank: int) -> Any:
    return in_place_of(rates, "_rate", lambda real: lambda *given: None)


# ------------------------------------------------------------------------------------------------ torch's own way


def one_file_for_all_rules(rank: int, world: int) -> list[str]:
    """To save in torch's own format, the optimizer was asked for a method that only the one for matrices had: with a chain
    of two there was an error, and no place for the state of the other.

    Here one optimizer has the state of all rules. `torch.save()` of its state dict on every rank goes on, in every layout,
    and so does a checkpoint.
    """
    hyper, found = Hyper(matrix="normuon", clip=0.75), list[str]()
    with shared_folder(rank) as folder:
        for layout in ("padded", "compact", "flat"):
            kind = wrapped(layout)
            run, _ = trained(rank, world, kind, hyper, BF16)
            written = io.BytesIO()
            torch.save([run.chunks[0].state_dict(), run.optimizer.state_dict(part=True)], written)
            layerwise.save(folder / layout, run.model, run.optimizer)
            for way in ("torch", "ours"):
                run = kind.build(rank, world, 1, BF16, hyper)
                if way == "torch":
                    weights, state = torch.load(io.BytesIO(written.getvalue()), weights_only=True)
                    run.chunks[0].load_state_dict(weights)
                    run.optimizer.load_state_dict(state)
                else:
                    layerwise.load(folder / layout, run.model, run.optimizer)
                own = new_oracle(hyper, BF16)
                for step in range(STEPS):
                    take_step(own, step, run.votes)
                found += [f"{layout} {way}: {text}" for text in differs(run, own, BF16)]
                if anywhere(found):
                    return found
    return found


def state_of_matrices_alone(rank: int) -> Any:
    def of_matrices(real: Callable[..., Any]) -> Callable[..., Any]:
        def state_dict(self: Optimizer, *, part: bool = False) -> Any:
            saved = real(self, part=part)
            state = {key: kept for key, kept in saved["state"].items() if "exp_avg" not in kept}
            return {**saved, "state": state}

        return state_dict

    return in_place_of(Optimizer, "state_dict", of_matrices)


# ------------------------------------------------------------------------------------------------ names of state

PAIRS = [
    ("muon", "lion"),
    ("normuon", "lion"),
    ("adamuon", "lion"),
    ("adamuon", "adamw"),
    ("lion", "adamw"),
    ("adamw", "lion"),
]


def state_of_every_rule(rank: int, world: int) -> list[str]:
    """Which state an optimizer has was asked of its name, and one name was known: of every other Muon, and of Lion, the
    checkpoint looked for the state of Adam.

    Here a rule says what it keeps. Tested with pairs of all rules, which go on to the bit.
    """
    found = []
    with shared_folder(rank) as folder:
        for matrix, other in PAIRS:
            hyper = Hyper(matrix=matrix, other=other, clip=0.75)
            run, oracle = trained(rank, world, wrapped("flat"), hyper, FP32)
            path = folder / f"{matrix} {other}"
            layerwise.save(path, run.model, run.optimizer)
            run = wrapped("compact").build(rank, world, 1, FP32, hyper)
            layerwise.load(path, run.model, run.optimizer)
            found += [f"{matrix} and {other}: {text}" for text in differs(run, oracle, FP32)]
    return found


def state_of_adam(rank: int) -> Any:
    def of_adam(real: Callable[..., Any]) -> Callable[..., Any]:
        known = (".master", ".exp_avg", ".exp_avg_sq")
        return lambda self: (
            part for part in real(self) if self.optimizer.param_groups[0]["rule"] == "muon" or part.key.endswith(known)
        )

    return in_place_of(Contents, "state", of_adam)


def homes_are_forgotten(rank: int) -> Any:
    return in_place_of(Contents, "home_state", lambda real: lambda self: iter(()))


# ------------------------------------------------------------------------------------------------ another model


def same_model(rank: int, world: int) -> list[str]:
    """A resumed run silently went on from another model than the one that was saved: the gather after loading went over a
    list that was empty, so every rank had its own part of the new weights and all others as they had been. The loss looked
    normal.

    Here weights are pulled from masters by versions, and after every load each rank's weights are compared with what the
    masters round to, and with those of the other ranks.
    """
    hyper, found = Hyper(clip=0.75), list[str]()
    with shared_folder(rank) as folder:
        for layout, dtype in (("flat", BF16), ("compact", FP32)):
            run, oracle = trained(rank, world, wrapped(layout), hyper, dtype)
            layerwise.save(folder / layout, run.model, run.optimizer)
            run = wrapped(layout).build(rank, world, 1, dtype, hyper)
            layerwise.load(folder / layout, run.model, run.optimizer)
            found += [f"{layout}: {text}" for text in differs(run, oracle, dtype)]
    return found


@contextmanager
def from_loading_on(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """A mistake of the publisher that begins when a checkpoint is read: training is as it should be until then."""
    with ExitStack() as stack:

        def wrong(real: Callable[..., Any]) -> Callable[..., Any]:
            def replacing(*given: Any) -> Any:
                stack.enter_context(in_place_of(Publisher, name, make))
                return real(*given)

            return replacing

        stack.enter_context(in_place_of(loading, "_replacing", wrong))
        yield


def nothing_is_gathered(rank: int) -> Any:
    return from_loading_on(
        "_start", lambda real: lambda self, replica, message, op: Handle("a gather of nothing", replica.landing)
    )


def nothing_is_published(rank: int) -> Any:
    return from_loading_on("begin", lambda real: lambda self: None)


CASES = (
    Case(
        name="R46",
        title="a load leaves the model that was saved, on every rank",
        world=2,
        check=same_model,
        mistakes=(
            Mistake(
                what="after loading nothing is gathered",
                put_in=nothing_is_gathered,
                seen_as=tuple(
                    f"rank {rank}: CheckpointError: ranks 0 and 1 have different weights" for rank in range(2)
                ),
            ),
            Mistake(
                what="loading does not publish",
                put_in=nothing_is_published,
                seen_as=(
                    "rank 0: CheckpointError: .* has weights that its masters do not round to",
                    "rank 1: .*CheckpointError: .* has weights that its masters do not round to",
                ),
            ),
        ),
    ),
    Case(
        name="R21",
        title="one format, whatever the layouts are",
        world=3,
        check=one_format,
        mistakes=(
            Mistake(
                what="what no matrix rule updates is written as it lies",
                put_in=others_as_they_lie,
                seen_as=r"model.embed.weight is \(\(104,\), 'bfloat16'\), expected \(\(13, 8\)",
            ),
            Mistake(
                what="state of what no matrix rule updates is left out",
                put_in=others_left_out,
                seen_as=r"optimizer.state.embed.weight.exp_avg is missing",
            ),
        ),
    ),
    Case(
        name="R22",
        title="what is empty comes back empty",
        world=4,
        check=what_is_empty,
        mistakes=(
            Mistake(what="what is empty is dropped", put_in=empty_is_dropped, seen_as="extra came back as"),
            Mistake(
                what="ranks that have nothing to write say nothing",
                put_in=ranks_with_nothing_say_nothing,
                seen_as=r"share_\d.json",
            ),
            Mistake(
                what="tensors without elements are dropped",
                put_in=tensors_without_elements_are_dropped,
                seen_as="'nothing' is missing in the checkpoint",
            ),
        ),
    ),
    Case(
        name="R45",
        title="every param goes on at its own rate",
        world=2,
        check=rates_of_groups,
        mistakes=(
            Mistake(
                what="groups are found again by their names",
                put_in=groups_by_name,
                seen_as="blocks.0.up.weight goes on at 0.0015, 0.3",
            ),
            Mistake(
                what="options come from the file",
                put_in=options_come_from_the_file,
                seen_as="blocks.0.up.weight goes on at 0.025, 0.2",
            ),
            Mistake(
                what="how far schedules have come is forgotten",
                put_in=places_are_forgotten,
                seen_as="blocks.0.up.weight goes on at 0.05, 0.3",
            ),
        ),
    ),
    Case(
        name="D7",
        title="torch's own files hold the state of all rules",
        world=2,
        check=one_file_for_all_rules,
        mistakes=(
            Mistake(
                what="the state dict has the state of matrices alone",
                put_in=state_of_matrices_alone,
                seen_as="exp_avg",
            ),
        ),
    ),
    Case(
        name="D8",
        title="a rule says which state it has",
        world=2,
        check=state_of_every_rule,
        mistakes=(
            Mistake(
                what="any rule but Muon is taken for Adam",
                put_in=state_of_adam,
                seen_as="'optimizer.state.blocks.0.qkv.weight.momentum' is missing in the checkpoint",
            ),
            Mistake(what="what homes keep is not saved", put_in=homes_are_forgotten, seen_as="row_moment.0 of"),
        ),
    ),
)
