"""New weights on every rank: uneven shards, owners of nothing, domains of one rank, two rules in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import layerwise
from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.engine.engine import Engine
from layerwise.engine.publisher import Publisher
from layerwise.engine.step import Stepper
from layerwise.engine.step_plan import Live
from layerwise.engine.update import Update
from layerwise.layout.intervals import Uneven
from layerwise.layout.plan import Plan
from layerwise.layout.schedule import CommOp
from layerwise.memory.replicas import Replica
from layerwise.memory.shards import Shard
from tests import worlds
from tests.arrangements import Arrangement, Stage
from tests.regressions.cases import (
    Case,
    Mistake,
    both_ways,
    collectives_noted,
    compared,
    differ_between_ranks,
    in_place_of,
    key_of,
)
from tests.worlds import deliver, gradient, hash_tensors, rules

BF16 = torch.bfloat16
SHARDED = ("flat", "padded", "compact")

# ------------------------------------------------------------------------------------------------ uneven shards

POINT_TO_POINT = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def uneven_shards(rank: int, world: int) -> list[str]:
    """Ranks own different numbers of elements of a bucket. There, collectives that want equal sizes corrupted the
    weights, and point-to-point messages beside collectives on one communicator could deadlock.

    Here every rank issues the same broadcasts, whose sizes are the bucket's, and there is no point-to-point message
    anywhere.
    """
    calls: list[str] = []

    def noted(name: str) -> Callable[[Any], Any]:
        def note(real: Any) -> Any:
            def call(*given: Any, **more: Any) -> Any:
                calls.append(name)
                return real(*given, **more)

            return call

        return note

    def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        sizes = [bucket.shard_numels() for bucket in model.plan.buckets]
        found = [] if any(len(set(numels)) > 1 for numels in sizes) else ["the scene has no uneven shards"]
        return found + [f"a point-to-point call: {name}" for name in sorted(set(calls))]

    shapes = [(4, 4), (5, 3), (7, 5), (6, 9), (3, 3)]
    with ExitStack() as stack:
        for name in POINT_TO_POINT:
            stack.enter_context(in_place_of(dist, name, noted(name)))
        case = worlds.Case(
            shapes=shapes, layout="compact", bucket_mib=2e-4, options={"check_collectives": True}, steps=2
        )
        return compared(rank, world, case, also)


def equal_sizes(rank: int) -> Any:
    def gather(self: Communicator, op: CommOp, full: Tensor, numels: tuple[int, ...]) -> Handle:
        size = max(numels)
        mine, everyone = full.new_zeros(size), full.new_zeros(size * self.world)
        mine[: numels[self.rank]] = torch.split(full, list(numels))[self.rank]
        dist.all_gather(list(everyone.split(size)), mine, group=self.group)
        full.copy_(everyone[: full.numel()])
        return Handle(op.label, full)

    return mock.patch.object(Communicator, "uneven_all_gather", gather)


def point_to_point(rank: int) -> Any:
    def gather(self: Communicator, op: CommOp, full: Tensor, numels: tuple[int, ...]) -> Handle:
        parts = torch.split(full, list(numels))
        peers = [peer for peer in range(self.world) if peer != self.rank]
        sent = [dist.isend(parts[self.rank], group=self.group, group_dst=peer) for peer in peers if numels[self.rank]]
        got = [dist.irecv(parts[peer], group=self.group, group_src=peer) for peer in peers if numels[peer]]
        return Handle(op.label, full, (full,), [work for work in (*sent, *got) if work is not None])

    return mock.patch.object(Communicator, "uneven_all_gather", gather)


def owners_only(rank: int) -> Any:
    def skipping(real: Callable[..., Handle]) -> Callable[..., Handle]:
        def start(self: Publisher, replica: Replica, message: Tensor, op: CommOp) -> Handle:
            return real(self, replica, message, op) if replica.shard.spans else Handle(op.label, replica.weights)

        return start

    return in_place_of(Publisher, "_start", skipping)


# ------------------------------------------------------------------------------------------------ owners of nothing


def owners_of_nothing(rank: int, world: int) -> list[str]:
    """A rank that owned nothing in a bucket made its empty message in the dtype of gradients (fp32) instead of that of
    params: unequal byte counts, a hang.

    Here dtype and size of a message are the bucket's, in the schedule, and every call is compared with its entry.
    """

    def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        idle = [bucket for bucket in model.plan.buckets if not all(bucket.spans(shard) for shard in range(world))]
        return [] if len(idle) == len(model.plan.buckets) else ["in the scene every rank owns some of a bucket"]

    for layout in ("compact", "flat"):
        case = worlds.Case(model="few", dtype=BF16, layout=layout, options={"check_collectives": True}, steps=2)
        if found := compared(rank, world, case, also):
            return found
    return []


def message_in_grad_dtype(rank: int) -> Any:
    def widened(real: Callable[..., Handle]) -> Callable[..., Handle]:
        def start(self: Publisher, replica: Replica, message: Tensor, op: CommOp) -> Handle:
            if not replica.shard.spans:
                replica, message = replace(replica, weights=replica.weights.float()), message.float()
            return real(self, replica, message, op)

        return start

    return in_place_of(Publisher, "_start", widened)


def first_owns_nothing(rank: int, world: int) -> list[str]:
    """The first entry of a list of owners was taken for all of them: rank 0 without a param meant that nobody had any
    (expert params were then never sent), and where its dtype was asked for there was an IndexError.

    Here there are no such lists: borders of shards are in the plan, an empty one is two equal borders, and no rank is
    asked on behalf of others.
    """

    def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        numels = [bucket.shard_numels() for bucket in model.plan.buckets if isinstance(bucket.shards, Uneven)]
        return [] if any(sizes[0] == 0 for sizes in numels) else ["in the scene rank 0 owns some of every bucket"]

    case = worlds.Case(shapes=[(4, 4), (4, 5), (4, 6)], layout="compact", bucket_mib=1e-5, steps=2)
    return compared(rank, world, case, also)


def first_speaks_for_all(rank: int) -> Any:
    def guessing(real: Callable[..., Handle]) -> Callable[..., Handle]:
        def gather(self: Communicator, op: CommOp, full: Tensor, numels: tuple[int, ...]) -> Handle:
            return real(self, op, full, numels) if numels[0] else Handle(op.label, full)

        return gather

    return in_place_of(Communicator, "uneven_all_gather", guessing)


# ------------------------------------------------------------------------------------------------ domains of one rank


def _fresh(domain: str) -> Callable[[layerwise.DataParallel, layerwise.Optimizer], list[str]]:
    def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        replicas = [replica for replica in model.engine.storage.replicas if replica.plan.domain == domain]
        found = [f"the scene has several ranks in domain {domain}" for replica in replicas if replica.plan.world > 1]
        found += [
            f"{replica.plan.label} is not marked fresh"
            for replica in replicas
            if replica.version != replica.shard.version
        ]
        return found if replicas else [f"the scene has no params of domain {domain}"]

    return also


def alone_with_experts(rank: int, world: int) -> list[str]:
    """An expert domain of one rank has nobody to send to. There the lists that a gather needs were never made, and the
    step crashed.

    Here one rank is the same path with handles that are complete at once: the replica is written from the master and
    marked fresh.
    """
    scenes = [Arrangement(ep=world, layouts=(layout,), dtype=BF16, steps=2) for layout in SHARDED]
    return both_ways(rank, world, scenes, _fresh("expert"))


def alone_with_everything(rank: int, world: int) -> list[str]:
    """The same for dense params: data parallelism of one rank, as on pipeline stages of one rank each.

    Here it is the same path as on any number of ranks.
    """
    scenes = [
        Arrangement(pp=world, layouts=(layout,), dtype=BF16, steps=2, experts=False)
        for layout in (*SHARDED, "replicated")
    ]
    return both_ways(rank, world, scenes, _fresh("dense"))


def _for_one_rank(owner: Any, name: str, instead: Callable[..., Any] = lambda real, *given: None) -> Any:
    """Another method for buckets of domains of one rank: one that does nothing, or `instead`."""

    def made(real: Callable[..., Any]) -> Callable[..., Any]:
        def method(*given: Any) -> Any:
            one = given[-1]  # of the publisher's methods, or the replica's or shard's own
            return instead(real, *given) if one.plan.world == 1 else real(*given)

        return method

    return in_place_of(owner, name, made)


@contextmanager
def alone_so_nothing(rank: int) -> Iterator[None]:
    with (
        _for_one_rank(Shard, "round_master"),
        _for_one_rank(Replica, "launch"),
        _for_one_rank(Publisher, "_land"),
    ):
        yield


def alone_never_fresh(rank: int) -> Any:
    def instead(real: Callable[..., None], replica: Replica) -> None:
        real(replica)
        replica.version -= 1

    return _for_one_rank(Replica, "land", instead)


def alone_so_fresh(rank: int) -> Any:
    return _for_one_rank(Shard, "round_master")


# ------------------------------------------------------------------------------------------------ two rules in one step


def one_sync(rank: int, world: int) -> list[str]:
    """Two optimizers shared buckets, and each gathered all of them: twice the bytes in every step.

    Here no rule gathers anything. One pass after all rules brings up to date what is stale, and what is fresh stays as
    it is.
    """
    with collectives_noted() as names:

        def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
            times = Counter(name.split(" of ")[1] for name in names if name.startswith("publish"))
            names.clear()
            families = {buffer.key.family for buffer in model.plan.buffers}
            found = [] if families == {"matrix", "other"} else ["the scene has one rule only"]
            return found + [
                f"{bucket.label} was published {times[bucket.label]} times in a step"
                for bucket in model.plan.buckets
                if times[bucket.label] != 1
            ]

        return both_ways(rank, world, [worlds.Case(layout="padded", steps=2)], also)


def each_rule_gathers(rank: int) -> Any:
    def twice(real: Callable[..., None]) -> Callable[..., None]:
        def begin(self: Publisher) -> None:
            real(self)
            self.ensure_all()
            real(self)  # the second rule knows nothing of the first one's gathers

        return begin

    return in_place_of(Publisher, "begin", twice)


def after_all_rules(rank: int, world: int) -> list[str]:
    """Later chunks of a pipeline launch all their buckets together, those of matrices and others. The optimizer of the
    matrices gathered the whole group before the other one had stepped.

    Here masters get a new version when all rules have stepped, and only then is anything stale.
    """
    return both_ways(rank, world, [Arrangement(chunks=2, layouts=("padded",), steps=2)])


def replicas_of_later_chunks(rank: int, world: int) -> list[str]:
    """The same as a defect that was live: whose group of buckets it is was asked of one bucket. Where the first param
    of a later chunk was a matrix, the other params of that chunk were never sent after their update, and replicas
    drifted apart without a word.

    Here being stale is a property of each bucket. Replicas are compared between ranks, without an oracle.
    """
    torch.manual_seed(3)
    chunks = [Stage(chunk, has_experts=False, has_embedding=not chunk, has_head=bool(chunk)) for chunk in range(2)]
    for param in (param for chunk in chunks for param in chunk.parameters()):
        torch.nn.init.normal_(param, std=0.1)
    model = layerwise.DataParallel(chunks, layout="padded", bucket_mib=0.001)
    optimizer = layerwise.Optimizer(model, **rules(worlds.Hyper()))
    families = [{_is_matrices(model.plan, index) for index in group.buckets} for group in model.plan.reduce_groups]
    if {True, False} not in families:
        return ["the scene has no reduce group of both families"]
    params = model.engine.storage.params
    for step in range(2):
        deliver(model, {fqn: gradient(fqn, param.shape, rank, step, 0) for fqn, param in params.items()}, sync=True)
        optimizer.step()
        optimizer.zero_grad()
        if found := differ_between_ranks("replicas", {fqn: hash_tensors([param]) for fqn, param in params.items()}):
            return found
    return []


def published_early(chosen: Callable[[Engine], list[int]], name: str, is_later: Callable[..., bool]) -> Any:
    """Calls of the update's method `name` that are for later are put off; the chosen buckets are published before them,
    and all others afterwards."""

    def early(real: Callable[..., None]) -> Callable[..., None]:
        def step(self: Stepper, live: Live) -> None:
            update, publisher, first = self.update, self._engine.publisher, chosen(self._engine)
            method, orthogonalise, begin = getattr(update, name), update.orthogonalise, publisher.begin
            left = [index for index in publisher.order.sequence if index not in first]
            later: list[tuple[Any, ...]] = []

            def put_off(*args: Any) -> None:
                later.append(args) if is_later(update, *args) else method(*args)

            def orthogonalise_and_publish(*given: Any) -> None:
                with mock.patch.object(update, name, put_off):
                    orthogonalise(*given)
                _publish_only(publisher, first, begin)
                publisher.ensure_all()
                with update.slots.open():
                    for args in later:
                        method(*args)

            with (
                mock.patch.object(update, "orthogonalise", orthogonalise_and_publish),
                mock.patch.object(publisher, "begin", partial(_publish_only, publisher, left, begin)),
            ):
                real(self, live)

        return step

    return in_place_of(Stepper, "step", early)


def _publish_only(publisher: Publisher, buckets: list[int], begin: Callable[[], None]) -> None:
    storage = publisher._storage
    with mock.patch.object(storage, "shards", tuple(storage.shards[index] for index in buckets)):
        _in_order(publisher, buckets, begin)


def _in_order(publisher: Publisher, order: list[int], action: Callable[[], None]) -> None:
    """Do something while the publisher knows no other buckets than these."""
    before = publisher.order.sequence
    publisher.order.set(order)
    action()
    publisher.order.set(before)
    publisher._launched = len(before)


def before_the_second_rule(rank: int) -> Any:
    return published_early(every_bucket, "_elementwise", _is_for_others)


def every_bucket(engine: Engine) -> list[int]:
    return [bucket.index for bucket in engine.plan.buckets]


def _is_for_others(update: Update, index: int, *rest: Any) -> bool:
    return not update._groups[update._bunches[index].group].rule.is_matrix_rule


def _is_matrices(plan: Plan, index: int) -> bool:
    return key_of(plan, plan.buckets[index]).family == "matrix"


def asked_of_one_bucket(rank: int) -> Any:
    def chosen(engine: Engine) -> list[int]:
        plan = engine.plan
        # The last bucket that is due holds the param that was registered first.
        mine = [group for group in plan.reduce_groups if _is_matrices(plan, group.buckets[-1])]
        return [index for group in mine for index in group.buckets]

    return published_early(chosen, "_elementwise", _is_for_others)


CASES = (
    Case(
        name="R4",
        title="ranks own different numbers of elements of a bucket",
        world=3,
        check=uneven_shards,
        mistakes=(
            Mistake(
                what="shards are gathered as if they were equal",
                put_in=equal_sizes,
                seen_as="replica of layer",
            ),
            Mistake(
                what="shards are sent point to point",
                put_in=point_to_point,
                seen_as="a point-to-point call: isend",
            ),
            Mistake(
                what="a rank that owns nothing of a bucket stays out of its gather",
                put_in=owners_only,
                seen_as="ContractError: .*label differs",
            ),
        ),
    ),
    Case(
        name="R5",
        title="a rank that owns nothing sends the right dtype",
        world=4,
        check=owners_of_nothing,
        mistakes=(
            Mistake(
                what="the message of a rank that owns nothing takes its dtype from the gradient",
                put_in=message_in_grad_dtype,
                seen_as="ContractError: .*the schedule has dtype bf16, the tensor torch.float32",
            ),
        ),
    ),
    Case(
        name="R10",
        title="expert domains of one rank",
        world=2,
        check=alone_with_experts,
        mistakes=(
            Mistake(
                what="a domain of one rank publishes nothing",
                put_in=alone_so_nothing,
                seen_as=("overlapped: .*replica of experts", r"in step\(\): .*replica of experts"),
            ),
            Mistake(
                what="a domain of one rank is never marked fresh",
                put_in=alone_never_fresh,
                seen_as=("overlapped: .*is not marked fresh", r"in step\(\): .*is not marked fresh"),
            ),
        ),
    ),
    Case(
        name="R11",
        title="data parallelism of one rank",
        world=2,
        check=alone_with_everything,
        mistakes=(
            Mistake(
                what="a domain of one rank is marked fresh and left as it is",
                put_in=alone_so_fresh,
                seen_as=("overlapped: .*replica of tall.weight", r"in step\(\): .*replica of tall.weight"),
            ),
        ),
    ),
    Case(
        name="R15",
        title="rank 0 owns nothing of a bucket",
        world=3,
        check=first_owns_nothing,
        mistakes=(
            Mistake(
                what="nothing on rank 0 is taken for nothing anywhere",
                put_in=first_speaks_for_all,
                seen_as="replica of layer",
            ),
        ),
    ),
    Case(
        name="R18",
        title="every bucket is published once in a step",
        world=2,
        check=one_sync,
        mistakes=(
            Mistake(
                what="each of two rules gathers all buckets",
                put_in=each_rule_gathers,
                seen_as=("overlapped: .*was published 2 times", r"in step\(\): .*was published 2 times"),
            ),
        ),
    ),
    Case(
        name="R19",
        title="buckets are published after all rules have stepped",
        world=2,
        check=after_all_rules,
        mistakes=(
            Mistake(
                what="all buckets are published before the second rule has stepped",
                put_in=before_the_second_rule,
                seen_as=(r"overlapped: .*replica of 1\.norm", r"in step\(\): .*replica of 1\.norm"),
            ),
        ),
    ),
    Case(
        name="D4",
        title="replicas of later chunks do not drift",
        world=2,
        check=replicas_of_later_chunks,
        mistakes=(
            Mistake(
                what="one bucket decides which rule publishes its reduce group",
                put_in=asked_of_one_bucket,
                seen_as="replicas differ between ranks",
            ),
        ),
    ),
)
