"""A checkpoint of a somewhat different model: everything that does not fit is named at once, on every rank and in the same
words, and nothing is changed, unless the user has said what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.checkpoint import loading, saving
from layerwise.checkpoint.files import Reader
from layerwise.comm.handles import Handle
from layerwise.engine.publisher import Publisher
from layerwise.errors import CheckpointError
from tests.crossings import KINDS, hyper_of
from tests.ranks import raised, run_ranks
from tests.worlds import gradient, hash_everything, put_together


@dataclass(frozen=True)
class Model:
    """What the model is like, and how it is trained."""

    split: tuple[int, ...] = (4, 4, 4)
    up: str = "up"
    tall: str = "tall"
    scale: str = "scale"
    rows: int = 7
    has_ascend: bool = False
    has_down: bool = True
    has_more: bool = False
    gate_is_trained: bool = False
    key_is_trained: bool = True
    out_goes_to: str = "matrix"
    loss_scale: bool = False
    salt: int = 0
    """Other values, and other gradients."""

    def module(self) -> nn.Module:
        module = Net(self.split)
        module.add_module("embed", nn.Embedding(11, 6))
        module.add_module("qkv", nn.Linear(6, 12))
        module.add_module(self.up, nn.Linear(6, 9, bias=False))
        module.add_module(self.tall, nn.Linear(6, self.rows, bias=False))
        module.add_module("out", nn.Linear(6, 6, bias=False))
        module.add_module("gate", nn.Linear(6, 5, bias=False).requires_grad_(self.gate_is_trained))
        module.add_module("key", nn.Linear(6, 4, bias=False).requires_grad_(self.key_is_trained))
        module.add_module("norm", nn.LayerNorm(6))
        if self.has_down:
            module.add_module("down", nn.Linear(9, 6, bias=False))
            module.register_buffer(self.scale, torch.empty(3))
        if self.has_ascend:
            module.add_module("ascend", nn.Linear(6, 9, bias=False))
        if self.has_more:
            module.add_module("more", nn.Linear(6, 3))
            module.register_buffer("shift", torch.empty(2))
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                tensor.copy_(gradient(f"{name} {self.salt}", tensor.shape, 0, 0, 0))
        return module


class Net(nn.Module):
    def __init__(self, split: tuple[int, ...]) -> None:
        super().__init__()
        self.split = split

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": self.split}


SAVED = Model()
OTHER = Model(
    split=(6, 3, 3),
    up="ascend",
    rows=8,
    has_down=False,
    has_more=True,
    gate_is_trained=True,
    key_is_trained=False,
    out_goes_to="other",
    loss_scale=True,
    salt=1,
)

Run = tuple[nn.Module, layerwise.DataParallel, layerwise.Optimizer]


def build(model: Model, steps: int = 1, layout: str = "flat") -> Run:
    """The model, trained for some steps: a run that loads is not new."""
    module = model.module()
    to: Any = model.out_goes_to
    wrapped = layerwise.DataParallel(
        module, layout=layout, rules=[layerwise.RouteRule(pattern="out.weight", to=to)], bucket_mib=0.001
    )
    optimizer = layerwise.Optimizer(
        wrapped,
        matrix=layerwise.NorMuon(lr=0.02),
        other=layerwise.AdamW(lr=0.01),
        loss_scale=layerwise.LossScale() if model.loss_scale else None,
    )
    for step in range(steps):
        take_step(module, optimizer, step + 100 * model.salt)
    return module, wrapped, optimizer


def take_step(module: nn.Module, optimizer: layerwise.Optimizer, step: int) -> None:
    grads = {
        name: gradient(name, param.shape, 0, step, 0)
        for name, param in module.named_parameters()
        if param.requires_grad
    }
    params = dict(module.named_parameters())
    loss = sum(((params[name] * grad).sum() for name, grad in grads.items()), torch.zeros(()))
    (optimizer.scale_loss(loss) if optimizer.stepper.scaler is not None else loss).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------ all at once

PROBLEMS = """\
the checkpoint does not fit the model (13 problems; nothing was changed):
  1. 'qkv.weight' was split into '4 x 6', '4 x 6', '4 x 6', and is into '6 x 6', '3 x 6', '3 x 6' here: homes keep state of others.
  2. 'ascend.weight' is missing in the checkpoint. Did you mean 'down.weight'?
  3. 'tall.weight' has the shape (7, 6) in the checkpoint, expected (8, 6).
  4. 'out.weight' was updated by 'normuon', and is by 'adamw' here: its state is of another kind.
  5. 'gate.weight' has no optimizer state in the checkpoint: it was not trained.
  6. 'key.weight' has optimizer state in the checkpoint (of 'normuon'), and is not trained here.
  7. 'more.weight' is missing in the checkpoint. Did you mean 'down.weight'?
  8. 'more.bias' is missing in the checkpoint. Known: down.weight, scale, up.weight.
  9. 'shift' is missing in the checkpoint. Known: down.weight, scale, up.weight.
  10. 'down.weight' is in the checkpoint, and the model has no such param or buffer.
  11. 'scale' is in the checkpoint, and the model has no such param or buffer.
  12. 'up.weight' is in the checkpoint, and the model has no such param or buffer.
  13. the optimizer has a loss scale, and the checkpoint has none: name 'loss_scale' in reset= to go on all the same.
rename=, missing=, unused= and reset= say what to do about such differences."""


def refused(rank: int, world: int, folder: str) -> list[Any]:
    _, wrapped, optimizer = build(SAVED)
    path = Path(folder) / "saved"
    layerwise.save(path, wrapped, optimizer)
    module, wrapped, optimizer = build(OTHER)
    before = hash_everything(optimizer)
    text = raised(lambda: layerwise.load(path, wrapped, optimizer))
    after = hash_everything(optimizer)
    take_step(module, optimizer, 5)  # and goes on as if nothing had been asked
    module, _, twin = build(OTHER)
    take_step(module, twin, 5)
    return [text, before == after, hash_everything(optimizer) == hash_everything(twin)]


@pytest.mark.parametrize("world", [1, 2])
def test_everything_that_does_not_fit_is_named_at_once_and_nothing_is_changed(tmp_path: Path, world: int) -> None:
    found = run_ranks(world, refused, str(tmp_path))
    assert found == [[f"CheckpointError: {PROBLEMS}", True, True]] * world


# ------------------------------------------------------------------------------------------------ what the user says

Whole = dict[str, Tensor]
"""Masters, state and what is not trained, by name; what homes keep, too."""


def whole(run: Run) -> Whole:
    """Of a single rank."""
    module, _, optimizer = run
    trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
    found = {
        f"{kind} of {name}": tensor.detach().clone()
        for name, param in trained.items()
        for kind, tensor in optimizer.state[param].items()
        if kind != "step"
    }
    others = {name: tensor for name, tensor in module.state_dict().items() if name not in trained}
    return found | {
        f"master of {name}": tensor.detach().clone() for name, tensor in (*trained.items(), *others.items())
    }


def of(name: str, found: Whole) -> Whole:
    return {key.partition(" of ")[0]: tensor for key, tensor in found.items() if key.endswith(f" of {name}")}


def same(one: Whole, two: Whole) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key].flatten(), two[key].flatten()) for key in one)


def is_new(state: Whole) -> bool:
    return all(not tensor.any() for kind, tensor in state.items() if kind != "master")


def weight(found: Whole) -> Tensor:
    return found["master"].flatten()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Whole]:
    run = build(SAVED)
    layerwise.save(tmp_path / "saved", *run[1:])
    return tmp_path / "saved", whole(run)


def load_as(path: Path, model: Model, **policy: Any) -> tuple[Whole, Whole]:
    """What the run had before and has after."""
    run = build(replace(model, salt=1), steps=2)
    before = whole(run)
    loaded = layerwise.load(path, *run[1:], **policy)
    assert loaded.step == run[2].engine.count.steps == 1
    after = whole(run)
    take_step(run[0], run[2], 7)
    return before, after


def test_nothing_is_asked_where_everything_fits(saved: tuple[Path, Whole]) -> None:
    _, after = load_as(saved[0], SAVED)
    assert same(after, saved[1])


def test_what_has_another_name_goes_on_with_all_it_had(saved: tuple[Path, Whole]) -> None:
    path, had = saved
    for rename in ({"up": "ascend"}, {"up.weight": "ascend.weight"}, {"up.": "ascend."}):
        _, after = load_as(path, Model(up="ascend"), rename=rename)
        assert same(of("ascend.weight", after), of("up.weight", had))
        assert same(of("tall.weight", after), of("tall.weight", had))


def test_names_can_change_places(saved: tuple[Path, Whole]) -> None:
    path, had = saved
    rename = {"up": "tall", "tall": "up"}
    with pytest.raises(CheckpointError) as refused:
        load_as(path, SAVED, rename=rename)
    assert "'up.weight' has the shape (7, 6) in the checkpoint, expected (9, 6)" in str(refused.value)
    assert "'tall.weight' has the shape (9, 6) in the checkpoint, expected (7, 6)" in str(refused.value)
    _, after = load_as(path, Model(up="tall", tall="up"), rename=rename)
    assert same(of("tall.weight", after), of("up.weight", had))
    assert same(of("up.weight", after), of("tall.weight", had))


def test_what_has_another_name_is_not_taken_under_the_old_one_too(saved: tuple[Path, Whole]) -> None:
    path, had = saved
    with pytest.raises(CheckpointError, match=r"'up\.weight' is missing in the checkpoint"):
        load_as(path, Model(has_ascend=True), rename={"up": "ascend"})
    before, after = load_as(path, Model(has_ascend=True), rename={"up": "ascend"}, missing=["up.weight"])
    assert same(of("ascend.weight", after), of("up.weight", had))
    assert torch.equal(weight(of("up.weight", after)), weight(of("up.weight", before)))


TWICE = {
    "both are renamed": ({"up": "wide", "tall": "wide"}, "'tall.weight' and 'up.weight' would both be 'wide.weight'"),
    "one has the name already": ({"up": "tall"}, "'tall.weight' and 'up.weight' would both be 'tall.weight'"),
    "a buffer and a param": ({"scale": "up.weight"}, "'scale' and 'up.weight' would both be 'up.weight'"),
    "several at once": (
        {"norm": "qkv"},
        "'norm.bias' and 'qkv.bias' would both be 'qkv.bias', 'norm.weight' and 'qkv.weight' would both be 'qkv.weight'",
    ),
}


@pytest.mark.parametrize("case", TWICE)
def test_two_names_of_the_checkpoint_are_not_made_one(saved: tuple[Path, Whole], case: str) -> None:
    """And nothing else is said: what is missing or left over would be said of names that mean two things."""
    rename, said = TWICE[case]
    run = build(SAVED, steps=2)
    before = whole(run)
    with pytest.raises(CheckpointError) as refused:
        layerwise.load(saved[0], *run[1:], rename=rename, unused=["*"], missing=["*"])
    assert str(refused.value) == (
        f"rename= gives one name to two things of the checkpoint: {said}. Nothing was changed. Give each a name of its own. To leave one "
        "out, rename it to what the model does not have, and list it in unused=."
    )
    assert same(whole(run), before)


def test_of_two_that_would_have_one_name_the_other_can_be_left_out(saved: tuple[Path, Whole]) -> None:
    path, had = saved
    policy: dict[str, Any] = {"rename": {"up": "tall", "tall": "left"}, "unused": ["tall.*"], "missing": ["up.weight"]}
    _, after = load_as(path, Model(rows=9), **policy)
    assert same(of("tall.weight", after), of("up.weight", had))


def test_two_names_of_one_weight_may_be_made_one(tmp_path: Path) -> None:
    tied = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    tied["head"].weight = tied["embed"].weight
    layerwise.save(tmp_path / "saved", layerwise.DataParallel(tied))
    single = nn.ModuleDict({"token": nn.Embedding(6, 4)})
    layerwise.load(tmp_path / "saved", single, rename={"embed": "token", "head": "token"})
    assert torch.equal(single["token"].weight, tied["embed"].weight)


def two_in_one(rank: int, world: int, folder: str, stages: bool) -> tuple[str, bool]:
    model: nn.Module
    if stages:
        run = KINDS["stages"].build(rank, world, 0, torch.float32, hyper_of("muon"))
        model, optimizer, rename = run.model, run.optimizer, {"blocks.0.out": "blocks.0.qkv"}
    else:
        _, model, optimizer = build(SAVED)
        rename = {"up": "tall"}
    layerwise.save(f"{folder}/saved", model, optimizer)
    before = hash_everything(optimizer)
    said = raised(lambda: layerwise.load(f"{folder}/saved", model, optimizer, rename=rename))
    return said, hash_everything(optimizer) == before


@pytest.mark.parametrize("stages", [False, True])
def test_two_names_that_are_made_one_are_an_error_on_every_rank(tmp_path: Path, stages: bool) -> None:
    first, second = run_ranks(2, two_in_one, str(tmp_path), stages)
    assert first == second
    assert first[0].startswith("CheckpointError: rename= gives one name to two things of the checkpoint: ")
    assert first[1]


def test_buffers_are_renamed_with_their_modules(saved: tuple[Path, Whole]) -> None:
    path, had = saved
    _, after = load_as(path, Model(scale="factor"), rename={"scale": "factor"})
    assert same(of("factor", after), of("scale", had))


def test_what_may_be_missing_keeps_its_values_and_has_new_state(saved: tuple[Path, Whole]) -> None:
    path, had = saved
    before, after = load_as(path, Model(has_more=True), missing=["more.*", "shift"])
    for name in ("more.weight", "more.bias", "shift"):
        assert torch.equal(weight(of(name, after)), weight(of(name, before)))
        assert is_new(of(name, after))
    assert not is_new(of("more.weight", before))
    assert same(of("qkv.weight", after), of("qkv.weight", had))


def test_what_has_another_shape_may_be_missing_too(saved: tuple[Path, Whole]) -> None:
    path, had = saved
    before, after = load_as(path, Model(rows=8), missing=["tall.weight"])
    assert torch.equal(weight(of("tall.weight", after)), weight(of("tall.weight", before)))
    assert is_new(of("tall.weight", after))
    assert same(of("up.weight", after), of("up.weight", had))


def test_what_may_be_missing_is_taken_where_it_is_there(saved: tuple[Path, Whole]) -> None:
    _, after = load_as(saved[0], SAVED, missing=["*"])
    assert same(after, saved[1])


def test_what_is_unused_is_left_alone(saved: tuple[Path, Whole]) -> None:
    path, had = saved
    _, after = load_as(path, Model(has_down=False), unused=["down.*", "scale"])
    assert same(
        after, {key: tensor for key, tensor in had.items() if not key.endswith((" of down.weight", " of scale"))}
    )


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Model(split=(6, 3, 3)), "qkv.weight"),
        (Model(out_goes_to="other"), "out.weight"),
        (Model(gate_is_trained=True), "gate.weight"),
        (Model(), "up.weight"),
    ],
    ids=["another split", "another rule", "trained from now on", "on a whim"],
)
def test_state_that_is_reset_starts_anew_under_the_weights_of_the_checkpoint(
    saved: tuple[Path, Whole], model: Model, name: str
) -> None:
    path, had = saved
    before, after = load_as(path, model, reset=[name])
    assert torch.equal(weight(of(name, after)), weight(of(name, had)))
    assert is_new(of(name, after))
    assert not is_new(of(name, before))
    assert same(of("tall.weight", after), of("tall.weight", had))


def test_what_is_frozen_from_now_on_lets_go_of_its_state(saved: tuple[Path, Whole]) -> None:
    path, had = saved
    _, after = load_as(path, Model(key_is_trained=False), reset=["key.weight"])
    assert same(of("key.weight", after), {"master": of("key.weight", had)["master"]})


@pytest.mark.parametrize("has", [True, False])
def test_a_loss_scale_on_one_side_starts_anew_on_request(tmp_path: Path, *, has: bool) -> None:
    run = build(Model(loss_scale=not has))
    layerwise.save(tmp_path / "saved", *run[1:])
    with pytest.raises(CheckpointError, match=r"has a loss scale, and the (checkpoint|optimizer) has none"):
        load_as(tmp_path / "saved", Model(loss_scale=has))
    _, after = load_as(tmp_path / "saved", Model(loss_scale=has), reset=["loss_scale"])
    assert same(after, whole(run))


def test_a_loss_scale_on_both_sides_goes_on(tmp_path: Path) -> None:
    run = build(Model(loss_scale=True))
    scaler = run[2].stepper.scaler
    assert scaler is not None
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
    layerwise.save(tmp_path / "saved", *run[1:])
    other = build(Model(loss_scale=True, salt=1))
    layerwise.load(tmp_path / "saved", *other[1:])
    assert other[2].stepper.scaler is not None
    assert other[2].stepper.scaler.state_dict() == scaler.state_dict()


def test_weights_alone_start_every_state_anew_on_request(tmp_path: Path) -> None:
    run = build(SAVED)
    layerwise.save(tmp_path / "saved", run[1])
    with pytest.raises(CheckpointError, match="has no optimizer state in the checkpoint: it was saved without an opt"):
        load_as(tmp_path / "saved", SAVED)
    _, after = load_as(tmp_path / "saved", SAVED, reset=["*"])
    assert is_new(after | {key: tensor * 0 for key, tensor in after.items() if key.startswith("master ")})
    assert all(torch.equal(after[key], tensor) for key, tensor in whole(run).items() if key.startswith("master "))


def test_a_buffer_that_becomes_a_param_has_no_state_to_go_on_from(tmp_path: Path) -> None:
    _, wrapped, optimizer = build(SAVED)
    layerwise.save(tmp_path / "saved", wrapped, optimizer)
    other = SAVED.module()
    del other.scale
    other.register_parameter("scale", nn.Parameter(torch.zeros(3)))
    wrapped = layerwise.DataParallel(other)
    optimizer = layerwise.Optimizer(wrapped, matrix=layerwise.NorMuon(lr=0.02), other=layerwise.AdamW(lr=0.01))
    with pytest.raises(CheckpointError, match=r"'scale' has no optimizer state in the checkpoint: it was not trained"):
        layerwise.load(tmp_path / "saved", wrapped, optimizer)
    layerwise.load(tmp_path / "saved", wrapped, optimizer, reset=["scale"])
    layerwise.save(tmp_path / "again", wrapped, optimizer)
    _, wrapped, optimizer = build(SAVED)
    with pytest.raises(
        CheckpointError, match=r"'scale' has optimizer state in the checkpoint \(of 'adamw'\), and is not"
    ):
        layerwise.load(tmp_path / "again", wrapped, optimizer)


EVERYTHING: dict[str, Any] = {
    "rename": {"up": "ascend"},
    "missing": ["tall.weight", "more.*", "shift"],
    "unused": ["down.*", "scale"],
    "reset": ["qkv.weight", "out.weight", "gate.weight", "key.weight", "loss_scale"],
}


def all_policies(rank: int, world: int, folder: str, layout: str) -> tuple[Whole, str]:
    run = build(SAVED, layout=layout)
    layerwise.save(f"{folder}/saved {layout} {world}", *run[1:])
    run = build(OTHER, layout=layout)
    layerwise.load(f"{folder}/saved {layout} {world}", *run[1:], **EVERYTHING)
    take_step(run[0], run[2], 7)
    found = {name: tensor for name, tensor in put_together(run[1]).items() if not name.startswith("gradient")}
    return found, hash_everything(run[2])


@pytest.mark.parametrize("layout", ["flat", "compact"])
def test_every_policy_at_once_is_the_same_on_any_number_of_ranks(tmp_path: Path, layout: str) -> None:
    ((alone, _),) = run_ranks(1, all_policies, str(tmp_path), "flat")
    for found, _ in run_ranks(2, all_policies, str(tmp_path), layout):
        assert same(found, alone)


# ------------------------------------------------------------------------------------------------ stages


def stages(rank: int, world: int, folder: str) -> list[str]:
    run = KINDS["stages"].build(rank, world, 0, torch.float32, hyper_of("muon"))
    path = Path(folder) / "saved"
    layerwise.save(path, run.model, run.optimizer)
    rename = {"blocks.0.out": "blocks.0.other"}
    return [
        raised(lambda: layerwise.load(path, run.model, run.optimizer, rename=rename)),
        raised(lambda: layerwise.load(path, run.model, run.optimizer, rename=rename, missing=["blocks.0.out.weight"])),
        raised(
            lambda: layerwise.load(
                path,
                run.model,
                run.optimizer,
                rename=rename,
                missing=["blocks.0.out.weight"],
                unused=["blocks.0.out.*"],
            )
        ),
    ]


def test_what_no_stage_has_is_named_and_what_another_has_is_not(tmp_path: Path) -> None:
    first, second = run_ranks(2, stages, str(tmp_path))
    assert "'blocks.0.out.weight' is missing in the checkpoint." in first[0]
    extra = "'blocks.0.out.weight' is in the checkpoint, and the model has no such param or buffer."
    assert extra in first[1]
    assert extra in second[1]
    assert "(1 problem;" in first[1]
    assert "(1 problem;" in second[1]
    assert first[2] == second[2] == "nothing was raised"


# ------------------------------------------------------------------------------------------------ ranks that fail alone


def unpublished(rank: int, world: int, folder: str) -> list[str]:
    """Weights do not follow masters after loading, on any rank."""
    _, wrapped, optimizer = build(SAVED)
    layerwise.save(f"{folder}/saved", wrapped, optimizer)
    _, wrapped, optimizer = build(replace(SAVED, salt=1))
    nothing = lambda self, replica, message, op: Handle("a gather of nothing", replica.landing)  # noqa: E731
    with mock.patch.object(Publisher, "_start", nothing):
        text = raised(lambda: layerwise.load(f"{folder}/saved", wrapped, optimizer))
    return [text, raised(optimizer.step), raised(lambda: layerwise.save(f"{folder}/again", wrapped, optimizer))]


def test_weights_that_are_not_what_masters_round_to_stop_every_rank_for_good(tmp_path: Path) -> None:
    for text, step, save in run_ranks(2, unpublished, str(tmp_path)):
        assert text == "CheckpointError: ranks 0 and 1 have different weights after loading."
        assert step == save
        assert step.startswith("StateError: loading ended half way")


def fail(rank: int, world: int, folder: str, wrong: str) -> list[Any]:
    """Something goes wrong on the last rank alone."""
    _, wrapped, optimizer = build(SAVED)
    path = Path(folder) / wrong
    layerwise.save(path, wrapped, optimizer)
    module, wrapped, optimizer = build(replace(SAVED, salt=1))
    before = hash_everything(optimizer)
    seen: list[str] = []

    def unread(real: Callable[..., None]) -> Callable[..., None]:
        def read(*given: Any) -> None:
            seen.append(given[1])
            if len(seen) > 3:
                raise OSError(5, "Input/output error")
            real(*given)

        return read

    def other_file(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda folder: real(folder / "nowhere")

    owner, name, change = {
        "manifest": (loading, "read_manifest", other_file),
        "data": (Reader, "_fill", unread),
    }[wrong]
    wrongly = mock.patch.object(owner, name, change(getattr(owner, name))) if rank == world - 1 else nullcontext()
    with wrongly:
        text = raised(lambda: layerwise.load(path, wrapped, optimizer))
    found: list[Any] = [text]
    if wrong == "manifest":
        found += [hash_everything(optimizer) == before]
        take_step(module, optimizer, 3)
    else:
        again = Path(folder) / "again"
        found += [raised(optimizer.step), raised(lambda: layerwise.save(again, wrapped, optimizer)), again.exists()]
    layerwise.load(path, wrapped, optimizer)  # all of it, after which all is well
    _, _, twin = build(SAVED)
    return [*found, hash_everything(optimizer) == hash_everything(twin)]


def test_a_manifest_that_one_rank_cannot_read_stops_all_of_them(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail, str(tmp_path), "manifest")
    assert first[0].startswith("PlanMismatchError: rank 1 failed where others did not: CheckpointError: ")
    assert second[0].startswith("CheckpointError: ")
    assert "nowhere is no folder" in second[0]
    assert first[1:] == second[1:] == [True, True]


def test_a_rank_that_cannot_read_on_leaves_no_rank_that_goes_on(tmp_path: Path) -> None:
    found = run_ranks(2, fail, str(tmp_path), "data")
    first, second = found
    assert first[0].startswith("PlanMismatchError: rank 1 failed where others did not: OSError: ")
    assert second[0].startswith("OSError: [Errno 5]")
    for _, step, save, is_there, is_healed in found:
        assert step.startswith("StateError: loading ended half way, by an exception: some masters are new and some old")
        assert save == step
        assert not is_there
        assert is_healed


def saved_whole(rank: int, world: int, path: str) -> None:
    _, wrapped, optimizer = build(SAVED)
    layerwise.save(path, wrapped, optimizer)


def gone(rank: int, world: int, path: str) -> list[str]:
    """The data file of the first rank is gone, and nobody has looked."""
    _, wrapped, optimizer = build(SAVED)
    texts = [raised(lambda: layerwise.load(path, wrapped, optimizer))]
    texts.append("goes on" if raised(optimizer.bring_up_to_date) == "nothing was raised" else "refuses")
    texts.append(raised(lambda: layerwise.load(path, wrapped, optimizer, verify=False)))
    texts.append("goes on" if raised(optimizer.bring_up_to_date) == "nothing was raised" else "refuses")
    return texts


def test_a_file_that_is_gone_is_found_before_anything_is_written_unless_nobody_looks(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    run_ranks(2, saved_whole, str(path))
    (path / "__0_0.distcp").unlink()
    # On as many ranks random numbers are read first, and it would be found by that.
    for checked, after, unchecked, then in run_ranks(3, gone, str(path)):
        assert "__0_0.distcp cannot be read: No such file" in checked
        assert "Nothing was loaded" in checked
        assert after == "goes on"
        assert "__0_0.distcp cannot be read: No such file" in unchecked
        assert then == "refuses"


def apart(rank: int, world: int, folder: str) -> str:
    _, wrapped, optimizer = build(replace(SAVED, salt=0))
    layerwise.save(f"{folder}/0", wrapped, optimizer)
    take_step(_, optimizer, 9)
    layerwise.save(f"{folder}/1", wrapped, optimizer)
    return raised(lambda: layerwise.load(f"{folder}/{rank}", wrapped, optimizer))


def test_ranks_that_load_different_checkpoints_are_told_so(tmp_path: Path) -> None:
    found = run_ranks(2, apart, str(tmp_path))
    assert found[0] == found[1]
    assert found[0].startswith("PlanMismatchError: ")
    assert "digest" in found[0]


def of_two_minds(rank: int, world: int, folder: str) -> list[str]:
    """One rank asks for something that the other does not."""
    _, wrapped, optimizer = build(replace(SAVED, salt=0))
    layerwise.save(f"{folder}/0", wrapped, optimizer)
    before = hash_everything(optimizer)
    asked: list[dict[str, Any]] = [
        {"reset": ["*"]},
        {"rename": {"up": "tall", "tall": "up"}},
        {"missing": ["up.*"]},
        {"unused": ["up.*"]},
        {"verify": False},
    ]
    found = []
    for more in asked:
        given = more if rank == 1 else {}
        found.append(raised(lambda given=given: layerwise.load(f"{folder}/0", wrapped, optimizer, **given)))  # type: ignore[misc]
    return [*found, str(hash_everything(optimizer) == before)]


def test_ranks_that_load_with_different_arguments_are_told_so(tmp_path: Path) -> None:
    first, second = run_ranks(2, of_two_minds, str(tmp_path))
    assert first == second
    *found, is_unchanged = first
    for name, said in zip(("reset", "rename", "missing", "unused", "verify"), found, strict=True):
        assert said.startswith("PlanMismatchError: ")
        assert name in said
    assert is_unchanged == "True"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"reset": ["model.up.*"]}, "reset= has 'model.up.*', which matches no param"),
        ({"rename": {"model.up": "tall"}}, "rename= has 'model.up', and nothing in the checkpoint is called so"),
    ],
)
def test_what_is_asked_for_in_vain_is_said(saved: tuple[Path, Whole], asked: dict[str, Any], said: str) -> None:
    path, _ = saved
    with pytest.raises(CheckpointError, match=said.replace("*", r"\*")):
        load_as(path, Model(), **asked)


@pytest.mark.parametrize("name", ["missing", "unused", "reset"])
def test_a_pattern_is_no_list_of_patterns(saved: tuple[Path, Whole], name: str) -> None:
    path, _ = saved
    given: Any = {name: "up.weight"}
    with pytest.raises(TypeError, match=f"{name} must be a list of patterns, got 'up.weight'"):
        load_as(path, Model(), **given)


def test_what_another_process_wrote_under_the_same_name_is_not_of_this_save(tmp_path: Path) -> None:
    _, wrapped, optimizer = build(replace(SAVED, salt=0))
    real = saving._write_share

    def and_somebody_else(share: saving.Share, rank: int, partial: Path) -> None:
        real(share, rank, partial)
        told = partial / saving._share_name(rank)
        told.write_text(told.read_text().replace(share.number, "another"))

    said = "has what another process wrote there while rank 0 of this one did"
    with mock.patch.object(saving, "_write_share", and_somebody_else), pytest.raises(CheckpointError, match=said):
        layerwise.save(tmp_path / "one", wrapped, optimizer)
    assert not (tmp_path / "one").exists()
    layerwise.save(tmp_path / "one", wrapped, optimizer)
