"""Forward hooks: what they cost, the order they learn, and models that are compiled, shared, checkpointed or broken.

On one rank bf16 replicas are written from fp32 masters, so whoever reads them too early reads the step before.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import layerwise
from layerwise.engine.publisher import Publisher
from tests import seams
from tests.ranks import run_ranks
from tests.regressions.transports import late_gathers
from tests.worlds import Hyper, Net, rules

BF16 = torch.bfloat16
STEPS = 5

Forward = Callable[[Tensor], Tensor]


class Training:
    """A small network in bf16, every param in a bucket of its own."""

    def __init__(self, build: Callable[[], nn.Module] = Net, **options: Any) -> None:
        torch.manual_seed(3)
        self.module = build().to(BF16)
        self.model = seams.data_parallel(self.module, layout="flat", bucket_mib=1e-5, **options)
        self.optimizer = layerwise.Optimizer(self.model, **rules(Hyper()))
        self.replicas = self.model.engine.storage.replicas

    def step(self, number: int, forward: Forward | None = None) -> float:
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(3, width, generator=generator).to(BF16) for width in (6, 5))
        loss = ((self.model if forward is None else forward)(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.module.parameters()]


def sync(build: Callable[[], nn.Module] = Net) -> Training:
    """The twin that gathers in step()."""
    return Training(build, overlap_param_gather=False)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


class Counted:
    """How often weights were brought up to date, by whoever asked."""

    def __init__(self) -> None:
        self.times = 0

    def __enter__(self) -> Counted:
        real = Publisher.ensure

        def ensure(publisher: Publisher, replica: Any) -> None:
            self.times += 1
            real(publisher, replica)

        self._patch = mock.patch.object(Publisher, "ensure", ensure)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


# ------------------------------------------------------------------------------------------------ hooks


def test_the_scene_can_be_stale() -> None:
    run = Training(prefetch=0)
    run.step(0)
    replica = run.replicas[0]
    master = replica.shard.master
    assert replica.version != replica.shard.version
    assert not torch.equal(replica.weights[: master.numel()], master.to(BF16))
    run.model.ensure()
    assert torch.equal(replica.weights[: master.numel()], master.to(BF16))


@pytest.mark.parametrize("prefetch", [None, 0, 1])
def test_a_fresh_bucket_costs_no_call(prefetch: int | None) -> None:
    run = Training(prefetch=prefetch)
    run.step(0)
    with Counted() as counted:
        run.model(torch.ones(1, 6, dtype=BF16))
        assert counted.times == len(run.replicas)
        counted.times = 0
        for _ in range(3):
            run.model(torch.ones(1, 6, dtype=BF16))
        assert counted.times == 0


def test_without_overlap_there_are_no_hooks() -> None:
    run = sync()
    assert not any(module._forward_pre_hooks for module in run.module.modules())


def test_who_asks_for_the_order_goes_when_it_is_known() -> None:
    run = Training()
    owners = [run.module.first, run.module.shared, run.module.norm, run.module.last]
    assert [len(module._forward_pre_hooks) for module in owners] == [2, 2, 2, 2]
    run.step(0)
    assert [len(module._forward_pre_hooks) for module in owners] == [1, 1, 1, 1]
    assert not run.module._forward_pre_hooks, "a module without params of its own has no hook"


def test_only_the_first_microbatch_gathers() -> None:
    run, twin = Training(prefetch=1), sync()
    for step in range(2):
        for one in (run, twin):
            with Counted() as counted, one.model.no_sync():
                one.model(torch.ones(2, 6, dtype=BF16)).sum().backward()
            first = counted.times
            with Counted() as counted:
                one.step(step)
            if one is run and step:
                assert (first, counted.times) == (len(run.replicas), 0)
    assert same(run.weights(), twin.weights())


# ------------------------------------------------------------------------------------------------ the order of forward


class Stack(nn.Module):
    """Layers that run in the order they were registered in, or against it."""

    def __init__(self, *, backwards: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(3)])
        self.head = nn.Linear(6, 5, bias=False)
        self.backwards = backwards

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers) if self.backwards else self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_order_is_that_of_the_first_forward(backwards: bool) -> None:
    run, twin = Training(lambda: Stack(backwards=backwards), prefetch=0), sync(lambda: Stack(backwards=backwards))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            assert run.step(step) == twin.step(step)
    told = [
        str(warning.message)
        for warning in caught
        if "another order than they were registered in" in str(warning.message)
    ]
    assert len(told) == backwards
    numbers = [2, 1, 0] if backwards else [0, 1, 2]
    names = [*(f"layers.{number}.weight" for number in numbers), "head.weight"]
    if told:
        assert f"{names[0]!r}" in told[0]
    order = [run.replicas[index].plan.placements[0].fqn for index in run.model.engine.publisher.order.sequence]
    assert order == names
    assert same(run.weights(), twin.weights())


def test_a_reader_starts_as_many_as_it_was_told_to() -> None:
    run = Training(lambda: Stack(backwards=False), prefetch=1)
    run.step(0)
    stale = lambda: [replica.plan.placements[0].fqn for replica in run.replicas if replica.launched_version == 0]  # noqa: E731
    assert sorted(stale()) == ["head.weight", "layers.1.weight", "layers.2.weight"], "one is on its way"
    run.module.layers[0](torch.ones(1, 6, dtype=BF16))
    assert sorted(stale()) == ["head.weight", "layers.2.weight"], "one is read, and the next is on its way"


# ------------------------------------------------------------------------------------------------ unusual modules


class Tied(nn.Module):
    """One weight in two modules, and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.copy = nn.Linear(6, 6)
        self.copy.weight = self.first.weight
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.copy(torch.tanh(self.again(torch.tanh(self.first(x))))))


class Functional(Net):
    """Reads weights of modules that it does not call."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, self.first.weight, bias=self.first.bias)
        return super().forward(x[:, :6]) + nn.functional.linear(input=x, weight=self.last.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "shared and tied": Tied,
    "weights read from outside": Functional,
    "reentrant checkpoints": lambda: Net(checkpointing="reentrant"),
    "checkpoints without reentry": lambda: Net(checkpointing="non-reentrant"),
}


@pytest.mark.broad
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"prefetch": 1}, {"overlap_param_gather": "by chunk"}], ids=str
)
def test_overlap_changes_no_bit(name: str, options: dict[str, Any]) -> None:
    run, twin = Training(MODELS[name], **options), sync(MODELS[name])
    for step in range(STEPS):
        assert run.step(step) == twin.step(step)
    assert same(run.weights(), twin.weights())


def test_recomputation_after_another_gather_reads_the_same_weights() -> None:
    """Backward runs the hooks of what it computes again: everything is fresh by then."""
    run = Training(lambda: Net(checkpointing="reentrant"), prefetch=1)
    run.step(0)
    out = run.model(torch.ones(2, 6, dtype=BF16))
    with Counted() as counted:
        out.sum().backward()
    assert counted.times == 0


class Failing(Net):
    fails = False

    def _block(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("half way")
        return super()._block(x)


@pytest.mark.parametrize("prefetch", [None, 0, 1])
def test_a_forward_that_raises_leaves_nothing_behind(prefetch: int | None) -> None:
    run, twin = Training(Failing, prefetch=prefetch), sync(Failing)
    for step in range(3):
        assert run.step(step) == twin.step(step)
        run.module.fails = True
        with pytest.raises(ArithmeticError):
            run.step(step)
        run.module.fails = False
    assert same(run.weights(), twin.weights())


def test_transforms_of_a_watched_module_read_new_weights() -> None:
    run, twin = Training(prefetch=0), sync()
    found = []
    for one in (run, twin):
        one.step(0)

        def loss(params: dict[str, Tensor], one: Training = one) -> Tensor:
            return functional_call(one.module, params, torch.ones(2, 6, dtype=BF16)).sum()

        found.append(list(grad(loss)(dict(one.module.named_parameters())).values()))
    assert same(found[0], found[1])


def test_a_transform_over_inputs_reads_new_weights() -> None:
    run, twin = Training(prefetch=0), sync()
    found = []
    for one in (run, twin):
        one.step(0)
        weight = one.module.first.weight
        found.append([vmap(lambda x, weight=weight: weight @ x)(torch.ones(2, 6, dtype=BF16))])
    assert same(found[0], found[1])


# ------------------------------------------------------------------------------------------------ compiled


def compiled_in_place(module: nn.Module, how: dict[str, Any]) -> nn.Module:
    module.compile(**how)
    return module


def part_in_place(module: nn.Module, how: dict[str, Any]) -> nn.Module:
    module.get_submodule("shared").compile(**how)
    return module


def part(module: nn.Module, how: dict[str, Any]) -> nn.Module:
    module.shared = torch.compile(module.shared, **how)
    return module


Prepare = Callable[[nn.Module, dict[str, Any]], nn.Module]
BEFORE: dict[str, Prepare] = {
    "the module": lambda module, how: torch.compile(module, **how),
    "the module in place": compiled_in_place,
    "a part": part,
    "a part in place": part_in_place,
}


def in_place_after(model: layerwise.DataParallel, how: dict[str, Any]) -> Forward:
    return compiled_in_place(model.module, how)


def called_as_a_whole(model: layerwise.DataParallel, how: dict[str, Any]) -> Forward:
    compiled_in_place(model.module, how)
    return model


def part_after(model: layerwise.DataParallel, how: dict[str, Any]) -> Forward:
    part_in_place(model.module, how)
    return model


def nested(model: layerwise.DataParallel, how: dict[str, Any]) -> Forward:
    return compiled_in_place(part_in_place(model.module, how), how)


AFTER: dict[str, Callable[[layerwise.DataParallel, dict[str, Any]], Forward]] = {
    "the module": lambda model, how: torch.compile(model.module, **how),
    "the module in place": in_place_after,
    "the module in place, called through the model": called_as_a_whole,
    "a part in place": part_after,
    "both in place": nested,
    "the model in place": compiled_in_place,
}


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def check_compiled(run: Training, forward: Forward | None) -> None:
    """Six steps with the losses and weights of the twin, and no graph that was not there after three."""
    twin = sync()
    counts = []
    torch._dynamo.utils.counters.clear()
    for step in range(6):
        assert run.step(step, forward) == twin.step(step), step
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert same(run.weights(), twin.weights())
    assert counts[0] > 0, "nothing was compiled"
    assert counts[2] == counts[-1], f"graphs after each step: {counts}"


WAYS = [
    pytest.param({"backend": "eager", "fullgraph": True}, 0, id="eager, prefetch=0", marks=pytest.mark.slow),
    pytest.param({"backend": "aot_eager", "fullgraph": True}, None, id="aot_eager"),
]


@pytest.mark.broad
@pytest.mark.parametrize(("how", "prefetch"), WAYS)
@pytest.mark.parametrize("what", BEFORE)
def test_compiled_before_it_is_wrapped(what: str, prefetch: int | None, how: dict[str, Any]) -> None:
    check_compiled(Training(lambda: BEFORE[what](Net().to(BF16), how), prefetch=prefetch), None)


@pytest.mark.broad
@pytest.mark.parametrize(("how", "prefetch"), WAYS)
@pytest.mark.parametrize("what", AFTER)
def test_compiled_after_it_is_wrapped(what: str, prefetch: int | None, how: dict[str, Any]) -> None:
    run = Training(prefetch=prefetch)
    check_compiled(run, AFTER[what](run.model, how))


@pytest.mark.parametrize(("how", "prefetch"), WAYS)
def test_a_compiled_model(prefetch: int | None, how: dict[str, Any]) -> None:
    """Its own forward is no part of the graph: it is where the weights are brought up to date."""
    run = Training(prefetch=prefetch)
    check_compiled(run, torch.compile(run.model, backend=how["backend"]))


ASKED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "dtype": lambda module, x: module(x.to(next(module.parameters()).dtype)),
    "device": lambda module, x: module(x.to(next(module.parameters()).device)),
    "dtype of a weight": lambda module, x: module(x.to(module.first.weight.dtype)),
    "requires_grad": lambda module, x: module(x) if module.first.weight.requires_grad else x,
    "number of elements": lambda module, x: module(x / sum(param.numel() for param in module.parameters())),
    "dtype, then values": lambda module, x: module(x.to(module.last.weight.dtype) + module.last.weight.sum()),
    "values, then modules": lambda module, x: module(x + sum(param.sum() for param in module.parameters())),
}
"""What compiled code may ask params before it runs their modules."""


@pytest.mark.parametrize("is_whole", [True, False], ids=["fullgraph", ""])
@pytest.mark.parametrize("since", [0, 1], ids=["compiled at the start", "compiled after a step"])
@pytest.mark.parametrize("what", ASKED)
def test_compiled_code_that_asks_stale_params_first(what: str, since: int, is_whole: bool) -> None:
    run, twin = Training(prefetch=0), sync()
    compiled = torch.compile(ASKED[what], backend="eager", fullgraph=is_whole)
    counts = []
    torch._dynamo.utils.counters.clear()
    for step in range(6):
        ask = compiled if step >= since else ASKED[what]
        found = run.step(step, lambda x, ask=ask: ask(run.module, x))
        assert found == twin.step(step, lambda x: ASKED[what](twin.module, x)), step
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert same(run.weights(), twin.weights())
    assert counts[since + 2] == counts[-1] > 0, f"graphs after each step: {counts}"


class AsksItself(Net):
    """A model whose own forward asks, as those of Hugging Face do."""

    def forward(self, x: Tensor) -> Tensor:
        own = next(self.parameters())
        return super().forward(x.to(own.device, own.dtype))


@pytest.mark.parametrize("what", [*AFTER, "the model"])
@pytest.mark.parametrize("since", [0, 1], ids=["compiled at the start", "compiled after a step"])
def test_a_compiled_model_that_asks_itself(what: str, since: int) -> None:
    run = Training(AsksItself, prefetch=0)
    twin = sync()
    how = {"backend": "eager"}
    forward: Forward | None = None
    for step in range(5):
        if step == since:
            forward = torch.compile(run.model, **how) if what == "the model" else AFTER[what](run.model, how)
        assert run.step(step, forward) == twin.step(step), step
    assert same(run.weights(), twin.weights())


def test_a_compiled_function_over_weights() -> None:
    """No module of theirs is entered: dynamo meets stale params themselves."""
    run, twin = Training(prefetch=0), sync()

    def forward_of(module: Any) -> Forward:
        def inner(x: Tensor) -> Tensor:
            return nn.functional.linear(x, module.first.weight) @ module.shared.weight

        compiled = torch.compile(inner, backend="eager") if module is run.module else inner
        return lambda x: module.last(compiled(x))

    for step in range(STEPS):
        assert run.step(step, forward_of(run.module)) == twin.step(step, forward_of(twin.module))
    assert same(run.weights(), twin.weights())


def whole_step(run: Training) -> Callable[[int], float]:
    """Forward, two backwards, clipping, step and zero_grad, as one function."""

    def step(number: int) -> float:
        with run.model.no_sync():
            loss_of(run, number + 100).backward()
        loss = loss_of(run, number)
        loss.backward()
        run.model.clip_grad_norm_(0.5)
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.item()

    return step


def loss_of(run: Training, number: int) -> Tensor:
    x, y = (torch.arange(3 * width).view(3, width).to(BF16).add(number).sin() for width in (6, 5))
    return (run.model(x) - y).square().mean()


def test_a_compiled_train_step_has_the_bits_of_an_eager_one() -> None:
    """Steps, hooks and collectives are never traced: dynamo would give up in the middle of them, with an error."""
    run, twin = Training(prefetch=0), sync()
    compiled, eager = torch.compile(whole_step(run), backend="aot_eager"), whole_step(twin)
    assert [compiled(number) for number in range(4)] == [eager(number) for number in range(4)]
    assert same(run.weights(), twin.weights())


def test_a_compiled_step_of_the_optimizer_has_the_bits_of_an_eager_one() -> None:
    run, twin = Training(), sync()
    step = torch.compile(lambda: run.optimizer.step(), backend="aot_eager")
    for number in range(3):
        loss_of(run, number).backward()
        step()
        loss_of(twin, number).backward()
        twin.optimizer.step()
    assert same(run.weights(), twin.weights())


FRESH = """
import sys
from tests.unit.parallel.test_watch import Training, same, sync, torch, whole_step

assert "torch._dynamo" not in sys.modules
torch.set_num_threads(1)
run, twin = Training(prefetch=0), sync()
compiled, eager = torch.compile(whole_step(run), backend="aot_eager"), whole_step(twin)
assert [compiled(number) for number in range(3)] == [eager(number) for number in range(3)]
assert same(run.weights(), twin.weights())
"""


@pytest.mark.slow
def test_the_first_step_of_a_process_may_be_compiled() -> None:
    """What loads the compiler at its first call is called by compiled code first."""
    command = [sys.executable, "-W", "ignore", "-c", FRESH]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _compiled_on_two_ranks(rank: int, world: int) -> list[str]:
    found = []
    run, twin = Training(prefetch=1), sync()
    compiled, eager = torch.compile(whole_step(run), backend="eager"), whole_step(twin)
    for number in range(3):
        theirs = eager(number)
        with late_gathers():
            if compiled(number) != theirs:
                found.append(f"rank {rank}, a compiled train step: loss of step {number}")
    how = {"backend": "eager", "fullgraph": True}
    for where in ("before", "after"):
        twin = sync()
        build = (lambda: compiled_in_place(Net().to(BF16), how)) if where == "before" else Net
        run = Training(build, prefetch=1)
        forward = torch.compile(run.module, **how) if where == "after" else None
        for step in range(4):
            theirs = twin.step(step)
            with late_gathers():
                if run.step(step, forward) != theirs:
                    found.append(f"rank {rank}, compiled {where} wrapping: loss of step {step}")
        with late_gathers():
            if not same(run.weights(), twin.weights()):
                found.append(f"rank {rank}, compiled {where} wrapping: weights")
    return found


def test_compiled_modules_on_two_ranks_wait_for_what_they_read() -> None:
    assert run_ranks(2, _compiled_on_two_ranks) == [[], []]
