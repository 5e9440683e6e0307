"""What is allowed works, in any order: legal sequences of actions in every layout, reducer and arrangement give the bits of a plain reference.

The reference is the same arrangement with replicas, all-reduced gradients and nothing overlapped. Gradients are exact in any order of summation
(`tests.worlds`). Tests that are expected to fail, strictly, are legal uses that do not work yet.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerwise
from layerwise.engine.reducer import GradReducer
from layerwise.errors import StateError
from tests import arrangements, seams
from tests.arrangements import Arrangement
from tests.marks import sampled
from tests.ranks import run_ranks
from tests.reference.oracle import Hyper
from tests.reliability.misuse import Moe, Small, Stage, mesh_of, on_stages, optimizer_of, small
from tests.reliability.refusals import short_waits
from tests.worlds import gradient, hash_everything, hash_of, hash_tensors, rules

BF16, FP32 = torch.bfloat16, torch.float32
Action = tuple[str, int]
"""What happens next, with the number of the data that it uses."""

KINDS = (
    "backward",
    "backward",
    "partial",
    "overflow",
    "idle and step",
    "accumulate",
    "accumulate partial",
    "twice in a block",
    "nested blocks",
    "empty block",
    "step in a block",
    "failing block",
    "failing",
    "metric",
    "zero_grad",
    "model.zero_grad",
    "edit",
    "edit behind torch's back",
    "load weights",
    "load state",
    "scheduler",
    "step",
    "step",
    "step",
)
CONSUMING = ("step", "idle and step", "step in a block")


def random_actions(seed: int, length: int = 14) -> list[Action]:
    """Any actions in any order."""
    random = Random(seed)
    middle = [(random.choice(KINDS), number) for number in range(1, length - 1)]
    return [("backward", 0), ("step", 0), *middle, ("backward", length), ("step", length)]


class Player:
    """Carries out actions on one model of one rank."""

    def __init__(self, rank: int, world: int, arrangement: Arrangement) -> None:
        self.rank, self.world = rank, world
        stage, _ = list(arrangement.places(world))[rank]
        torch.manual_seed(7 + stage)
        modules = arrangement.stage_modules(stage)
        with torch.no_grad():
            for module in modules:
                for param in module.parameters():
                    param.copy_(torch.randn(param.shape) * 0.1)
                module.to(arrangement.dtype)
        mesh = arrangements.mesh_of(arrangement, world)
        self.model = arrangements.wrap_stage(arrangement, modules, arrangement.layouts[0], mesh)
        self.optimizer = layerwise.Optimizer(self.model, **rules(Hyper(**arrangement.hyper)), count_zeros=True)
        self.seen: list[str] = []

    def play(self, actions: list[Action]) -> Iterator[bool]:
        """One action after the other; says of each whether a step was tried."""
        for kind, number in actions:
            self._act(kind, number)
            if kind in CONSUMING:
                stats = self.optimizer.stats
                self.seen.append(repr(replace(stats, bytes_by_collective={})))
            yield kind in CONSUMING

    def _act(self, kind: str, number: int) -> None:
        match kind:
            case "backward":
                self._backward(number)
            case "partial":
                self._backward(number, partial=True)
            case "overflow":
                self._backward(number, factor=float("inf") if self.rank == self.world - 1 else 1.0)
            case "idle and step":
                if self.rank % 2 == 0:
                    self._backward(number)
                self.optimizer.step()
            case "accumulate" | "accumulate partial":
                with self.model.no_sync():
                    self._backward(number, partial=kind.endswith("partial"))
            case "twice in a block":
                with self.model.no_sync():
                    self._backward(number)
                    self._backward(number + 100, partial=True)
            case "nested blocks":
                with self.model.no_sync():
                    with self.model.no_sync():
                        self._backward(number, partial=True)
                    self._backward(number + 100)
            case "empty block":
                with self.model.no_sync():
                    pass
            case "step in a block":
                with self.model.no_sync():
                    self._backward(number, partial=True)
                    self.optimizer.step()
            case "failing block" | "failing":
                self._fail(number, in_block=kind == "failing block")
            case "metric":
                total = torch.full((5,), float(self.rank + 1))
                dist.all_reduce(total)
                self.seen.append(f"the user's all-reduce came out as {total.unique().tolist()}")
            case "zero_grad":
                self.optimizer.zero_grad()
            case "model.zero_grad":
                self.model.zero_grad()
            case "edit":
                with torch.no_grad():
                    for param in self.model.parameters():
                        param.mul_(0.5)
            case "edit behind torch's back":
                for param in self.model.parameters():
                    param.data.mul_(0.5)
                self.optimizer.pull_from_replicas()
            case "load weights":
                weights = {name: tensor * 0.5 for name, tensor in self.model.state_dict().items()}
                self.model.load_state_dict(weights)
            case "load state":
                self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict(part=True)))
            case "scheduler":
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.5
            case "step":
                self.optimizer.step()

    def _backward(self, number: int, *, partial: bool = False, factor: float = 1.0) -> None:
        """A loss whose gradients are exact numbers; a partial one reaches other params on every rank."""
        terms = []
        for fqn, param in self.model.engine.storage.params.items():
            if not partial or (hash_of(f"{fqn} {number}") + self.rank) % 3:
                grad = gradient(fqn, param.shape, self.rank, number, 0)
                terms.append((param * (grad * (factor if fqn.endswith("norm.bias") else 1.0)).to(param.dtype)).sum())
        sum(terms, torch.zeros(())).backward()

    def _fail(self, number: int, *, in_block: bool) -> None:
        """A backward that stops half way, on every rank at another param."""
        try:
            if in_block:
                with self.model.no_sync():
                    self._backward(number, partial=True)
                    raise FloatingPointError("injected")
            self._backward(number, partial=True)
            raise FloatingPointError("injected")
        except FloatingPointError:
            self.optimizer.zero_grad()


def differences(player: Player, reference: Player) -> list[str]:
    """What the library's run holds that the reference's does not: replicas, masters, state."""
    whole = {
        span.fqn: (shard, span) for shard in reference.model.engine.storage.shards for span in shard.spans
    }  # every rank holds all of them
    found = [
        f"replica of {fqn}"
        for fqn, param in player.model.engine.storage.params.items()
        if not torch.equal(param, reference.model.engine.storage.params[fqn])
    ]
    for shard in player.model.engine.storage.shards:
        for span in shard.spans:
            other, place = whole[span.fqn]
            part = slice(place.shard_offset + span.start, place.shard_offset + span.stop)
            if not torch.equal(shard.master[span.part], other.master[part]):
                found.append(f"master of {span.fqn}")
            found += [
                f"{name} of {span.fqn}"
                for name in shard.state
                if not torch.equal(shard.state[name][span.part], other.state[name][part])
            ]
    return found


def play_beside_reference(rank: int, world: int, cases: list[tuple[Arrangement, int]]) -> list[str]:
    """Every case beside its reference; what differs, with the actions that led there."""
    found = []
    with short_waits(seconds=20.0):
        for arrangement, seed in cases:
            actions = random_actions(seed)
            plain = replace(arrangement, layouts=("replicated",), options={"overlap_grad_reduce": False})
            player, reference = Player(rank, world, arrangement), Player(rank, world, plain)
            for at, stepped in enumerate(zip(player.play(actions), reference.play(actions), strict=True)):
                unlike = differences(player, reference) if any(stepped) else []
                if player.seen != reference.seen:
                    unlike.append(f"saw {player.seen[-1:]} against {reference.seen[-1:]}")
                if unlike:
                    found.append(f"{arrangement} after {actions[: at + 1]}: {unlike[:3]}")
                    break
    return found


def arrangement(layout: str, reducer: str = "collective", *, zero2: bool = False, **fields: Any) -> Arrangement:
    options = {"reducer": reducer, "shard_grads": zero2, **fields.pop("options", {})}
    hyper = {"clip": 0.5, "weight_decay": 0.1, "matrix": fields.pop("matrix", "muon")}
    return Arrangement(layouts=(layout,), options=options, hyper=hyper, **fields)


CHECKED = {"check_collectives": True}

# Every layout with every reducer, with and without released gradients; experts, stages, ties, chunks, dtypes and rules spread over them.
ARRANGED: dict[int, list[Arrangement]] = {
    2: [
        arrangement("flat", dtype=BF16, chunks=2),
        arrangement("flat", "ordered", ep=2, options=CHECKED),
        arrangement("flat", "ordered", matrix="normuon", chunks=2),
        arrangement("flat", zero2=True, ep=2, dtype=BF16),
        arrangement("padded", zero2=True, chunks=2, matrix="normuon"),
        arrangement("compact", "ordered", zero2=True, matrix="adamw"),
        arrangement("mixed experts", pp=2, tied="embedding", zero2=True, dtype=BF16),
        arrangement("replicated", ep=2, dtype=BF16, matrix="normuon"),
        arrangement("padded", "ordered", pp=2, tied="matrix", chunks=2),
    ],
    3: [
        arrangement("flat", "ordered", zero2=True, dtype=BF16, matrix="normuon"),
        arrangement("padded", "ordered", ep=3, chunks=2),
        arrangement("compact", "ordered", dtype=BF16),
        arrangement("compact", ep=3, matrix="adamw", options=CHECKED),
        arrangement("mixed experts", "ordered", zero2=True, chunks=2),
        arrangement("padded", zero2=True, options=CHECKED),
    ],
    4: [
        arrangement("flat", zero2=True, pp=2, tied="embedding", ep=2, dtype=BF16),
        arrangement("padded", pp=2, ep=2, tied="matrix", matrix="normuon"),
        arrangement("compact", "ordered", pp=2, tied="matrix", chunks=2),
        arrangement("flat", "ordered", zero2=True, ep=2, options=CHECKED),
        arrangement("padded", "ordered", zero2=True, pp=2, experts=False, chunks=2, dtype=BF16),
    ],
}
SEEDS = 1


@pytest.mark.parametrize("world", sampled(ARRANGED, 3))
def test_any_legal_sequence_gives_the_bits_of_a_plain_reference(world: int) -> None:
    cases = [(case, 100 * number + seed) for number, case in enumerate(ARRANGED[world]) for seed in range(SEEDS)]
    found = [text for texts in run_ranks(world, play_beside_reference, cases) for text in texts]
    assert not found, "\n".join(found[:4])


def test_every_layout_meets_every_reducer_it_can_and_both_kinds_of_gradients() -> None:
    met = {
        (case.layouts[0].partition(":")[0], case.options["reducer"], case.options["shard_grads"])
        for cases in ARRANGED.values()
        for case in cases
    }
    for layout in ("flat", "padded", "compact"):
        assert {reducer for name, reducer, _ in met if name == layout} == {"collective", "ordered"}
        assert {zero2 for name, _, zero2 in met if name == layout} == {False, True}


def forget_late_gradients(rank: int, world: int) -> list[str]:
    """A library that loses what comes after a reduction was launched."""
    cases = [(arrangement("flat"), seed) for seed in range(6)]
    with mock.patch.object(GradReducer, "reduce_again", lambda self, fqns: self._forget_late()):
        return play_beside_reference(rank, world, cases)


@pytest.mark.slow
def test_control_a_library_that_loses_late_gradients_is_seen() -> None:
    assert any(run_ranks(2, forget_late_gradients)), "no sequence had a late gradient: the comparison sees nothing"


# ------------------------------------------------------------------------------------------------ state


def resume(rank: int, world: int, cases: list[Arrangement]) -> list[str]:
    """Train four steps at once, and two and two with fresh objects in between; what differs."""
    found = []
    for case in cases:
        first, second = [("backward", 0), ("step", 0)], [("accumulate", 1), ("backward", 2), ("step", 2)]
        player = Player(rank, world, case)
        list(player.play(first))
        weights = {name: tensor.clone() for name, tensor in player.model.state_dict().items()}
        state, saved = copy.deepcopy(player.optimizer.state_dict(part=True)), hash_everything(player.optimizer)
        list(player.play(second))
        fresh = Player(rank, world, case)
        fresh.model.load_state_dict(weights)
        fresh.optimizer.load_state_dict(state)
        if hash_everything(fresh.optimizer) != saved:
            found.append(f"{case}: loaded other state than was saved")
        list(fresh.play(second))
        if hash_everything(fresh.optimizer) != hash_everything(player.optimizer):
            found.append(f"{case}: a resumed run differs")
    return found


@pytest.mark.parametrize("world", sampled([2, 4], 2))
def test_state_goes_out_and_in_again_bitwise_in_every_layout_and_arrangement(world: int) -> None:
    deep = {"pp": 2, "tied": "embedding"} if world == 4 else {}
    cases = [
        arrangement(layout, matrix=matrix, dtype=BF16, ep=2, zero2=layout in ("flat", "padded"), **deep)
        for layout, matrix in (
            ("flat", "normuon"),
            ("padded", "adamuon"),
            ("compact", "normuon"),
            ("replicated", "muon"),
            ("mixed experts", "muon"),
        )
    ]
    found = [text for texts in run_ranks(world, resume, cases) for text in texts]
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------------ odd but right


def test_one_module_given_as_two_chunks_is_one_set_of_params() -> None:
    hashes = []
    for chunks in (1, 2):
        torch.manual_seed(3)
        module = Stage()
        model = layerwise.DataParallel(module if chunks == 1 else [module, module])
        optimizer = optimizer_of(model)
        for _ in range(3):
            module(module(torch.ones(2, 6))).square().sum().backward()
            optimizer.step()
        hashes.append([param.tolist() for param in module.parameters()])
    assert hashes[0] == hashes[1]


def test_a_param_that_two_chunks_share_is_updated_once_and_counted_once() -> None:
    torch.manual_seed(3)
    first, second = Stage(), Stage()
    second.last.weight = first.first.weight
    model = layerwise.DataParallel([first, second], bucket_mib=0.0001)
    optimizer = optimizer_of(model, clip_grad_norm=1.0)
    second(first(torch.ones(2, 6))).square().sum().backward()
    optimizer.step()
    assert len(model.engine.storage.params) == 5
    assert second.last.weight is first.first.weight
    assert model.plan.route("1.last.weight") == model.plan.route("0.first.weight")
    assert not optimizer.stats.missing


def test_a_copy_of_a_wrapped_module_is_a_model_of_its_own() -> None:
    model = layerwise.DataParallel(small())
    optimizer = optimizer_of(model)
    model(torch.ones(2, 6)).sum().backward()
    copied = copy.deepcopy(model.module)
    other = layerwise.DataParallel(copied)
    optimizer_of(other)
    before = [param.clone() for param in copied.parameters()]
    optimizer.step()
    assert not optimizer.stats.skipped
    assert all(torch.equal(one, two) for one, two in zip(copied.parameters(), before, strict=True))


def norms_of_a_stage(rank: int, world: int) -> dict[str, float]:
    module = nn.Sequential(Stage()) if rank else Stage()
    settings = {"gradient_policy": layerwise.GradientPolicy(norm_groups={"heads": "0.last.*"}), "clip_grad_norm": 0.5}
    _, optimizer = on_stages(rank, world, module=module, settings=settings)
    optimizer.step()
    return dict(optimizer.stats.norms)


def test_norm_groups_may_have_members_on_another_stage_only() -> None:
    first, second = run_ranks(2, norms_of_a_stage)
    assert first == second
    assert first["heads"] > 0.0


def ties_in_a_ring(rank: int, world: int) -> tuple[str, str]:
    """Every stage's last weight is the next one's first."""
    torch.manual_seed(rank)
    module = Stage()
    ties = {f"tie {rank}": "first.weight", f"tie {(rank + 1) % world}": "last.weight"}
    model = seams.data_parallel(module, mesh=mesh_of(pp=world), ties=ties, check_collectives=True)
    optimizer = optimizer_of(model, clip_grad_norm=0.1)
    for step in range(2):
        model(torch.linspace(-1.0, 1.0 + rank + step, 12).reshape(2, 6)).square().sum().backward()
        optimizer.step()
    return hash_tensors([module.first.weight]), hash_tensors([module.last.weight])


def test_ties_may_go_round_in_a_ring() -> None:
    found = run_ranks(4, ties_in_a_ring)
    assert [last for _, last in found] == [first for first, _ in (*found[1:], found[0])]
    assert len({first for first, _ in found}) == 4


def hashes_in_a_mesh(rank: int, world: int, dims: tuple[str, str]) -> tuple[str, str]:
    """Dense weights and experts after two steps. Seeds differ, so that only what is spread and averaged is alike."""
    torch.manual_seed(rank)
    module = Moe({"up": "expert"})
    model = layerwise.DataParallel(module, mesh=mesh_of(**dict.fromkeys(dims, 2)))
    optimizer = optimizer_of(model)
    for step in range(2):
        model(torch.linspace(-1.0, 1.0 + rank + step, 12).reshape(2, 6)).square().sum().backward()
        optimizer.step()
    return hash_tensors([module.dense.weight]), hash_tensors([module.up])


@pytest.mark.parametrize("dims", [("dp", "ep"), ("ep", "dp")])
def test_dims_of_a_mesh_may_come_in_any_order(dims: tuple[str, str]) -> None:
    found = run_ranks(4, hashes_in_a_mesh, dims)
    assert len({dense for dense, _ in found}) == 1
    experts = [up for _, up in found]
    same = [(0, 2), (1, 3)] if dims == ("dp", "ep") else [(0, 1), (2, 3)]
    assert all(experts[one] == experts[other] for one, other in same)
    assert len(set(experts)) == 2


# ------------------------------------------------------------------------------------------------ legal, and once broken


def run_shortly(world: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Ranks that are expected to be quick or to hang."""
    return run_ranks(world, _shortly, job, args, timeout_s=60.0, pg_timeout_s=20.0)


def _shortly(rank: int, world: int, job: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with short_waits():
        return job(rank, world, *args)


def ties_in_both_orders(rank: int, world: int) -> list[float]:
    names = ("first.weight", "last.weight")
    ties = dict(zip(("one", "two"), names if rank == 0 else names[::-1], strict=True))
    module, optimizer = on_stages(rank, world, ties=ties)
    optimizer.step()
    tied = dict(module.named_parameters())
    return [float(tied[fqn].double().sum()) for fqn in ties.values()]


def test_two_ties_may_come_in_another_order_on_another_stage() -> None:
    first, second = run_shortly(2, ties_in_both_orders)
    assert first == second


def checked_ties(rank: int, world: int) -> bool:
    _, optimizer = on_stages(
        rank, world, ties={"embedding": ("first.weight", "last.weight")[rank]}, check_collectives=True
    )
    optimizer.step()
    return optimizer.stats.skipped


def test_tied_weights_pass_checked_collectives() -> None:
    assert run_shortly(2, checked_ties) == [False, False]


def exact_backward(model: layerwise.DataParallel, rank: int, number: int) -> None:
    """Gradients for all params, exact numbers."""
    params = model.engine.storage.params.items()
    terms = [(param * gradient(fqn, param.shape, rank, number, 0)).sum() for fqn, param in params]
    sum(terms, torch.zeros(())).backward()


def norm_of_late_and_accumulated(rank: int, world: int, zero2: bool) -> float:
    mesh = mesh_of(dp=1, ep=world)
    model = layerwise.DataParallel(Moe({"up": "expert"}), mesh=mesh, reducer="ordered", shard_grads=zero2)
    optimizer = optimizer_of(model)
    exact_backward(model, rank, 0)
    optimizer.step()
    exact_backward(model, rank, 1)
    with model.no_sync():
        exact_backward(model, rank, 2)
    optimizer.step()
    return optimizer.stats.grad_norm


def test_released_gradients_of_experts_on_one_rank_keep_every_backward() -> None:
    assert run_shortly(2, norm_of_late_and_accumulated, True) == run_shortly(2, norm_of_late_and_accumulated, False)


def metric_after_partial(rank: int, world: int, options: dict[str, bool]) -> float:
    torch.manual_seed(1)
    layers = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(6)))
    model = seams.data_parallel(layers, layout="flat", bucket_mib=0.0001, **options)
    optimizer = optimizer_of(model)
    params = list(model.module.parameters())
    total = torch.ones(1)
    for _ in range(2):
        # The bucket that is reduced first gets no gradient on rank 1.
        sum((param.sum() for param in (params if rank == 0 else params[:-1])), torch.zeros(())).backward()
        dist.all_reduce(total)
        optimizer.step()
    return float(total)


def test_released_gradients_never_wait_inside_backward() -> None:
    assert run_shortly(2, metric_after_partial, {"shard_grads": True}) == [4.0, 4.0]


def test_checked_collectives_never_wait_inside_backward() -> None:
    assert run_shortly(2, metric_after_partial, {"check_collectives": True}) == [4.0, 4.0]


def failure_in_a_block(rank: int, world: int, zero2: bool) -> str:
    torch.manual_seed(1)
    model = layerwise.DataParallel(Small(), shard_grads=zero2, layout="flat", bucket_mib=0.0001)
    optimizer = optimizer_of(model, clip_grad_norm=1.0)

    for number in range(2):
        try:
            with model.no_sync():
                if rank == 1:
                    raise FloatingPointError("injected")
                exact_backward(model, rank, 10 + number)
        except FloatingPointError:
            pass
        optimizer.zero_grad()
        exact_backward(model, rank, number)
        optimizer.step()
    return hash_tensors(model.parameters())


def test_a_block_that_one_rank_leaves_by_an_exception_can_be_forgotten() -> None:
    assert run_shortly(2, failure_in_a_block, True) == run_shortly(2, failure_in_a_block, False)


def failure_while_others_wait(rank: int, world: int) -> str:
    """Rank 1 fails in a block, and rank 0 stays in it until it has heard of that: nobody waits for it on the way out."""
    model = layerwise.DataParallel(small(), shard_grads=True, layout="flat")
    store = dist.distributed_c10d._get_default_store()
    try:
        with model.no_sync():
            if rank == 1:
                raise FloatingPointError("injected")
            store.wait(["heard"], timedelta(seconds=15.0))
    except FloatingPointError:
        store.set("heard", "")
        return "failed"
    return "heard"


def test_a_failure_in_a_block_is_heard_at_once() -> None:
    assert run_shortly(2, failure_while_others_wait) == ["heard", "failed"]


def load_after_partial(rank: int, world: int) -> str:
    model = layerwise.DataParallel(Stage(), layout="flat", bucket_mib=0.0001)
    optimizer = optimizer_of(model)
    exact_backward(model, rank, 0)
    optimizer.step()
    (model.module.first if rank else model)(torch.ones(2, 6)).sum().backward()
    try:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict(part=True)))
    except StateError as error:
        return str(error)
    optimizer.step()
    return f"took step {optimizer.stats.step}"


def test_loading_state_after_a_backward_that_reached_different_params_works_or_is_refused() -> None:
    first, second = run_shortly(2, load_after_partial)
    assert first == second
    assert first == "took step 2" or "zero_grad()" in first


def scale_on_the_last_stage(rank: int, world: int) -> bool:
    torch.manual_seed(1)
    model = layerwise.DataParallel(Stage(), mesh=mesh_of(pp=2, dp=1))
    optimizer = optimizer_of(model, loss_scale=layerwise.LossScale(initial=2.0**4))
    # The first stage gets scaled gradients from the last one, which is the only one that sees a loss.
    loss = model(torch.ones(2, 6)).sum()
    (optimizer.scale_loss(loss) if rank == 1 else 2.0**4 * loss).backward()
    optimizer.step()
    return optimizer.stats.skipped


def test_the_last_stage_scales_the_loss_for_all() -> None:
    assert run_shortly(2, scale_on_the_last_stage) == [False, False]


def test_a_state_dict_after_loading_weights_has_their_masters() -> None:
    weights = {"weight": torch.full((4, 4), 3.0, dtype=BF16)}
    saved: dict[str, Any] = {}
    for number in range(2):
        module = nn.Linear(4, 4, bias=False, dtype=BF16)
        optimizer = optimizer_of(layerwise.DataParallel(module))
        module.load_state_dict(weights)
        if number == 0:
            saved = copy.deepcopy(optimizer.state_dict(part=True))
        else:
            optimizer.load_state_dict(saved)
    assert torch.equal(module.weight, weights["weight"])


class ScaledExperts(nn.Module):
    """Experts with a buffer in a module of theirs."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(2, 6, 6))
        self.quantiser = nn.Module()
        self.quantiser.register_buffer("scale", torch.full((2,), value))

    def param_domains(self) -> dict[str, str]:
        return {"up": "expert"}


def expert_buffers(rank: int, world: int) -> list[float]:
    module = nn.Sequential(small(), ScaledExperts(float(rank)))
    layerwise.DataParallel(module, mesh=mesh_of(dp=1, ep=2))
    scale: list[float] = module[1].quantiser.scale.tolist()
    return scale


def test_buffers_inside_expert_modules_stay_with_their_experts() -> None:
    assert run_shortly(2, expert_buffers) == [[0.0, 0.0], [1.0, 1.0]]


class Mixture(ScaledExperts):
    """Experts beside a frozen router, which is the same on all ranks."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.router = nn.Linear(6, 2).requires_grad_(False)
        nn.init.constant_(self.router.weight, value)
        self.router.register_buffer("loads", torch.full((2,), value))


def router_beside_experts(rank: int, world: int) -> list[float]:
    module = Mixture(float(rank))
    layerwise.DataParallel(module, mesh=mesh_of(dp=1, ep=2))
    return [float(module.router.weight.sum()), float(module.router.loads.sum())]


def test_frozen_params_and_buffers_of_a_router_beside_experts_start_from_the_first_rank() -> None:
    assert run_shortly(2, router_beside_experts) == [[0.0, 0.0]] * 2


def scale_loaded_after_backward(rank: int, world: int) -> tuple[str, float]:
    model = layerwise.DataParallel(small())
    optimizer = optimizer_of(model, loss_scale=layerwise.LossScale(initial=2.0**4))
    saved: dict[str, Any] = copy.deepcopy(optimizer.state_dict(part=True))
    saved["layerwise"]["loss_scale"]["scale"] = 2.0**8
    optimizer.scale_loss(model(torch.ones(2, 6)).sum()).backward()
    try:
        optimizer.load_state_dict(saved)
    except StateError as error:
        return str(error), 0.0
    optimizer.step()
    return "", optimizer.stats.grad_norm


def test_a_loss_scale_that_is_loaded_after_backward_is_refused_or_does_not_change_gradients() -> None:
    model = layerwise.DataParallel(small())
    optimizer = optimizer_of(model)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    for refusal, norm in run_shortly(2, scale_loaded_after_backward):
        assert refusal or norm == pytest.approx(optimizer.stats.grad_norm)


def group_timeouts(rank: int, world: int) -> list[float]:
    groups = layerwise.DataParallel(small()).engine.groups
    found = []
    for group in (groups.training, groups.control):
        if group is not None:
            found.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    return found


def test_groups_wait_as_long_as_the_process_group_does() -> None:
    assert run_ranks(2, group_timeouts, pg_timeout_s=7.0) == [[7.0, 7.0]] * 2


def warnings_as_errors(rank: int, world: int) -> str:
    module = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 8, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            layerwise.DataParallel(module)
        except Exception as error:
            return str(error)
    return "nothing was raised"


def test_a_warning_that_is_an_error_is_one_on_every_rank() -> None:
    for text in run_shortly(2, warnings_as_errors):
        assert "under the matrix rule" in text


class Backwards(nn.Sequential):
    """Runs its modules from the last to the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in reversed(self):
            x = module(x)
        return x


def order_as_an_error(rank: int, world: int) -> tuple[list[str], int]:
    model = layerwise.DataParallel(Backwards(*(nn.Linear(8, 8) for _ in range(3))), bucket_mib=0.0001)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    found = []
    for action in ("error", "ignore"):
        with warnings.catch_warnings():
            warnings.simplefilter(action)  # type: ignore[arg-type]
            try:
                model(torch.ones(1, 8)).sum().backward()
                optimizer.step()
            except Exception as error:
                found.append(str(error))
    return found, optimizer.stats.step


def test_an_order_that_is_an_error_is_one_on_every_rank_and_nothing_has_moved() -> None:
    for found, steps in run_shortly(2, order_as_an_error):
        assert len(found) == 1
        assert "modules run in another order" in found[0]
        assert steps == 1
