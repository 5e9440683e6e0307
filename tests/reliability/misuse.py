"""S15, misuse: every wrong use of the library gets one typed error that names the object and says what to do, with nothing changed and nobody left waiting.

A case is a generator: it sets the scene, yields what must stay as it is (an Optimizer or a module), and then does the wrong thing. Cases for several ranks get their
rank and the number of ranks. No `assert` here: the suite also runs under `python -O`, where they vanish.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import layerwise
from layerwise.buffers.storage import Storage
from layerwise.comm.engine import Engine
from layerwise.errors import NonFiniteError, PlanMismatchError, StateError
from layerwise.optim.optimizer import Optimizer
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally
from tests.worlds import hash_everything, hash_tensors

Scene = Generator[Any, None, None]
SLOWEST_S = 5.0


@dataclass(frozen=True)
class Misuse:
    """One way to use the library wrongly."""

    name: str
    errors: tuple[type[Exception], ...]
    says: tuple[str, ...]
    """What the text must contain: the object's name and the remedy."""
    world: int
    alike: bool
    """Whether all ranks must get the same text; not so where one rank sees its own mistake and the others hear of it."""
    scene: Callable[..., Scene]


CASES: dict[str, Misuse] = {}


def misuse(
    name: str, errors: type[Exception] | tuple[type[Exception], ...], *says: str, world: int = 1, alike: bool = True
) -> Callable[..., Any]:
    def register(scene: Callable[..., Scene]) -> Callable[..., Scene]:
        CASES[name] = Misuse(name, errors if isinstance(errors, tuple) else (errors,), says, world, alike, scene)
        return scene

    return register


# ------------------------------------------------------------------------------------------------ the scenery


class Small(nn.Module):
    """Matrices, vectors, a norm and a frozen layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 5, bias=False)
        self.fixed = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(self.last(self.norm(self.first(x))))


def small(**to: Any) -> Small:
    torch.manual_seed(1)
    return Small().to(**to) if to else Small()


def optimizer_of(model: Any, **settings: Any) -> Optimizer:
    chosen: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.02), "other": layerwise.AdamW(lr=0.003), **settings}
    return layerwise.Optimizer(model, **chosen)


def backward(model: nn.Module, rank: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.linspace(-1.0, 1.0 + rank, 12).reshape(2, 6).to(dtype)
    model(x).float().square().mean().backward()


def trained(
    *, plain: bool = False, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[nn.Module, Small, Optimizer]:
    """A model that has taken a step, its bare module and its optimizer."""
    module = small(dtype=dtype)
    model: nn.Module = module if plain else layerwise.DataParallel(module)
    optimizer = optimizer_of(model, **settings)
    if settings.get("loss_scale") is None:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return model, module, optimizer


def snapshot(kept: Any) -> str:
    """A hash of what must not change."""
    if isinstance(kept, Optimizer):
        return hash_everything(kept)
    if isinstance(kept, nn.Module):
        tensors = [tensor for tensor in kept.state_dict().values() if not tensor.is_meta]
        places = [tensor.data_ptr() for tensor in tensors]
        return f"{hash_tensors(tensors)} {places}"
    return ""


class Taken(NamedTuple):
    """How the library took a misuse."""

    complaint: str
    """What is wrong with that, or nothing."""
    text: str
    """The error's text."""


def take(case: Misuse, *place: int) -> Taken:
    """Play a case."""
    scene = case.scene(*place)
    kept = next(scene, None)
    before = snapshot(kept)
    begin = time.monotonic()
    try:
        next(scene, None)
    except Exception as error:
        caught: Exception | None = error
    else:
        caught = None
    seconds = time.monotonic() - begin
    return Taken(_complaint(case, caught, seconds, snapshot(kept) == before), str(caught))


def _complaint(case: Misuse, caught: Exception | None, seconds: float, unchanged: bool) -> str:
    if caught is None:
        return "nothing was raised"
    if not isinstance(caught, case.errors):
        expected = " or ".join(error.__name__ for error in case.errors)
        return f"raised {type(caught).__name__} ({str(caught)[:120]}), expected {expected}"
    unsaid = [word for word in case.says if word not in str(caught)]
    if unsaid:
        return f"the text does not say {unsaid}: {str(caught)[:240]}"
    if not unchanged:
        return f"state changed although {type(caught).__name__} was raised"
    return f"took {seconds:.1f} s to be noticed" if seconds > SLOWEST_S else ""


def take_on_ranks(rank: int, world: int, names: list[str]) -> dict[str, Taken]:
    return {name: take(CASES[name], rank, world) for name in names}


# ------------------------------------------------------------------------------------------------ wrapping a model


@misuse("unknown layout", ValueError, "layout 'flatt' is unknown", "Did you mean 'flat'?")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, layout="flatt")


@misuse("layout that is no string", (TypeError, ValueError), "layout")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, layout=None)


@misuse("mesh that is none", TypeError, "mesh must be a torch DeviceMesh", "Leave it out")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, mesh=object())


@misuse(
    "overlap of the param gather, which is not built yet", NotImplementedError, "overlap_param_gather", "leave it False"
)
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, overlap_param_gather=True)


@misuse("no trainable param", ValueError, "Small has no trainable param", "Unfreeze")
def _() -> Scene:
    yield (module := small().requires_grad_(False))
    layerwise.DataParallel(module)


@misuse("fp64 params", TypeError, "param 'first.weight'", "torch.float64", ".float()")
def _() -> Scene:
    yield (module := small(dtype=torch.float64))
    layerwise.DataParallel(module)


@misuse("complex params", TypeError, "param 'weight'", "torch.complex64", "expected one of")
def _() -> Scene:
    yield (module := nn.Linear(3, 3, dtype=torch.complex64))
    layerwise.DataParallel(module)


@misuse("params of one buffer on two devices", ValueError, "'last.weight'", "different devices", "Move the module")
def _() -> Scene:
    module = small()
    module.last.to("meta")
    yield module
    layerwise.DataParallel(module)


@misuse("params of different buffers on two devices", ValueError, "different devices", "Move the module")
def _() -> Scene:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4).to("meta"))
    yield module
    layerwise.DataParallel(module)


@misuse("a module without values", ValueError, ".weight'", "meta device", "Materialise")
def _() -> Scene:
    yield (module := small(device="meta"))
    layerwise.DataParallel(module)


@misuse("a DataParallel wrapped again", TypeError, "module is a DataParallel already", "wrap a model once")
def _() -> Scene:
    model, _, optimizer = trained()
    yield optimizer
    layerwise.DataParallel(model)


@misuse("one module wrapped twice", (StateError, ValueError, TypeError), "'first.weight'", "already")
def _() -> Scene:
    _, module, optimizer = trained()
    yield optimizer
    layerwise.DataParallel(module)


@misuse(
    "an optimizer for the plain module of a wrapped model",
    (StateError, ValueError, TypeError),
    "'first.weight'",
    "already",
)
def _() -> Scene:
    _, module, optimizer = trained()
    yield optimizer
    optimizer_of(module)


@misuse("something that is no module", TypeError, "module must be an nn.Module", "dict")
def _() -> Scene:
    yield None
    layerwise.DataParallel({"weight": torch.ones(2, 2)})


@misuse("a bucket size of zero", ValueError, "bucket_mib must be a positive number", "Leave it out")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, bucket_mib=0)


@misuse("a bucket size in words", (TypeError, ValueError), "bucket_mib")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, bucket_mib="big")


@misuse("an integer grad_dtype", TypeError, "grad_dtype", "torch.int32", "expected one of")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, grad_dtype=torch.int32)


# ------------------------------------------------------------------------------------------------ routing


@misuse(
    "a route rule that matches nothing",
    ValueError,
    "route rule 1 ('frist.weight')",
    "matches no param",
    "Did you mean 'first.weight'?",
)
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, rules=[layerwise.RouteRule(pattern="frist.weight", to="other")])


@misuse("a route rule behind a broader one", ValueError, "route rule 2 ('first.*')", "rule 1", "Reorder")
def _() -> Scene:
    yield (module := small())
    rules = [layerwise.RouteRule(pattern="*", to="other"), layerwise.RouteRule(pattern="first.*", to="other")]
    layerwise.DataParallel(module, rules=rules)


@misuse("a route rule to nowhere", ValueError, "route rule 'first.*'", "'matrix' or 'other'", "'muon'")
def _() -> Scene:
    yield None
    layerwise.RouteRule(pattern="first.*", to="muon")


@misuse("a route rule without a pattern", ValueError, "route rule has an empty pattern", "expected a glob")
def _() -> Scene:
    yield None
    layerwise.RouteRule(pattern="", to="other")


@misuse("a vector sent to the matrix rule", ValueError, "param 'first.bias'", "Route it to 'other'")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, rules=[layerwise.RouteRule(pattern="first.bias", to="matrix")])


@misuse("row blocks that do not add up", ValueError, "param 'first.weight'", "(3, 3)", "sum to")
def _() -> Scene:
    yield (module := small())
    rule = layerwise.RouteRule(pattern="first.weight", to="matrix", row_blocks=(3, 3))
    layerwise.DataParallel(module, rules=[rule])


@misuse("row blocks for the other rule", ValueError, "route rule 'first.weight'", "row_blocks=(4, 4)", "to='matrix'")
def _() -> Scene:
    yield None
    layerwise.RouteRule(pattern="first.weight", to="other", row_blocks=(4, 4))


@misuse(
    "a route rule with an option its rule does not have",
    ValueError,
    "'first.weight'",
    "'momentun'",
    "Did you mean 'momentum'?",
)
def _() -> Scene:
    module = small()
    rule = layerwise.RouteRule(pattern="first.weight", to="matrix", options={"momentun": 0.9})
    yield None
    optimizer_of(layerwise.DataParallel(module, rules=[rule]))


@misuse("a route rule with a bad value for an option", ValueError, "'first.weight'", "lr must not be negative")
def _() -> Scene:
    module = small()
    rule = layerwise.RouteRule(pattern="first.weight", to="matrix", options={"lr": -1.0})
    yield None
    optimizer_of(layerwise.DataParallel(module, rules=[rule]))


@misuse("a single route rule instead of a list", (TypeError, ValueError), "rules", "RouteRule")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, rules=layerwise.RouteRule(pattern="*", to="other"))


@misuse("strings instead of route rules", (TypeError, ValueError), "rule", "RouteRule")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, rules=["*.weight"])


class _Splits(nn.Module):
    def __init__(self, splits: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 6)
        self.splits = splits

    def matrix_splits(self) -> Any:
        return self.splits


@misuse(
    "matrix_splits of a param that is not there", ValueError, "_Splits.matrix_splits()", "'kqv.weight'", "Its params"
)
def _() -> Scene:
    yield (module := _Splits({"kqv.weight": (2, 2, 2)}))
    layerwise.DataParallel(module)


@misuse("matrix_splits that do not add up", ValueError, "param 'qkv.weight'", "(2, 2)", "Fix matrix_splits()")
def _() -> Scene:
    yield (module := _Splits({"qkv.weight": (2, 2)}))
    layerwise.DataParallel(module)


@misuse("matrix_splits that return a list", TypeError, "_Splits.matrix_splits()", "list", "expected a dict")
def _() -> Scene:
    yield (module := _Splits([(2, 2, 2)]))
    layerwise.DataParallel(module)


# ------------------------------------------------------------------------------------------------ rules


def _bad_rule(name: str, make: Callable[[], Any], *says: str) -> None:
    def scene() -> Scene:
        yield None
        make()

    misuse(name, (ValueError, TypeError), *says)(scene)


_bad_rule("a negative lr", lambda: layerwise.Muon(lr=-0.1), "Muon: lr", "negative", "-0.1")
_bad_rule("an lr that is NaN", lambda: layerwise.AdamW(lr=math.nan), "AdamW: lr", "finite", "nan")
_bad_rule("an lr in words", lambda: layerwise.Lion(lr="fast"), "Lion: lr", "number", "'fast'")
_bad_rule("a momentum of one", lambda: layerwise.Muon(lr=0.1, momentum=1.0), "Muon: momentum", "[0, 1)", "1.0")
_bad_rule(
    "a negative weight decay", lambda: layerwise.AdamW(lr=0.1, weight_decay=-1), "AdamW: weight_decay", "negative", "-1"
)
_bad_rule("no Newton-Schulz steps", lambda: layerwise.Muon(lr=0.1, steps=0), "Muon: steps", "at least 1", "0")
_bad_rule("half a Newton-Schulz step", lambda: layerwise.Muon(lr=0.1, steps=2.5), "Muon: steps", "integer", "2.5")
_bad_rule(
    "unknown coefficients",
    lambda: layerwise.Muon(lr=0.1, coefficients="polar_expres"),
    "Muon: coefficients 'polar_expres'",
    "Did you mean 'polar_express'?",
)
_bad_rule(
    "coefficients that are no triples",
    lambda: layerwise.Muon(lr=0.1, coefficients=[(1.0, 2.0)]),
    "coefficients[0]",
    "(a, b, c)",
)
_bad_rule("coefficients that are a number", lambda: layerwise.Muon(lr=0.1, coefficients=5), "coefficients", "5")
_bad_rule("no coefficients", lambda: layerwise.Muon(lr=0.1, coefficients=[]), "coefficients", "at least one")
_bad_rule("one beta", lambda: layerwise.AdamW(lr=0.1, betas=(0.9,)), "AdamW: betas", "two numbers", "(0.9,)")
_bad_rule("a beta of one", lambda: layerwise.Lion(lr=0.1, betas=(0.9, 1.0)), "Lion: betas", "[0, 1)", "(0.9, 1.0)")
_bad_rule("a beta2 of one", lambda: layerwise.NorMuon(lr=0.1, beta2=1.0), "NorMuon: beta2", "[0, 1)")
_bad_rule("a negative eps", lambda: layerwise.AdaMuon(lr=0.1, eps=-1e-8), "AdaMuon: eps", "negative")
_bad_rule("an unknown scale", lambda: layerwise.Muon(lr=0.1, scale="big"), "Muon: scale", "rms", "'big'")
_bad_rule(
    "an unknown decay mode",
    lambda: layerwise.AdamW(lr=0.1, weight_decay_mode="l2"),
    "weight_decay_mode",
    "coupled",
    "'l2'",
)
_bad_rule("an unknown ns_dtype", lambda: layerwise.Muon(lr=0.1, ns_dtype="fp8"), "ns_dtype", "bf16", "'fp8'")
_bad_rule("an unknown method", lambda: layerwise.Muon(lr=0.1, method="qr"), "method", "gram", "'qr'")
_bad_rule("a loss scale of zero", lambda: layerwise.LossScale(initial=0.0), "LossScale", "initial")
_bad_rule("an endless loss scale", lambda: layerwise.LossScale(initial=math.inf), "LossScale", "initial")
_bad_rule("a loss scale that never shrinks", lambda: layerwise.LossScale(factor=1.0), "LossScale", "factor")


# ------------------------------------------------------------------------------------------------ building an optimizer


def _bad_setting(name: str, errors: Any, settings: dict[str, Any], *says: str) -> None:
    def scene() -> Scene:
        model = layerwise.DataParallel(small())
        yield model.module
        optimizer_of(model, **settings)

    misuse(name, errors, *says)(scene)


_bad_setting(
    "a matrix rule for everything else",
    ValueError,
    {"other": layerwise.Muon(lr=0.1)},
    "other=Muon",
    "Use AdamW or Lion",
)
_bad_setting(
    "the name of a rule instead of a rule",
    TypeError,
    {"matrix": "muon"},
    "matrix must be a rule",
    "layerwise.Muon(lr=...)",
)
_bad_setting(
    "a torch optimizer as a rule",
    TypeError,
    {"other": torch.optim.AdamW},
    "other must be a rule",
    "layerwise.AdamW(lr=...)",
)
_bad_setting(
    "a clip norm of zero",
    ValueError,
    {"clip_grad_norm": 0.0},
    "clip_grad_norm must be a positive number",
    "None switches it off",
)
_bad_setting(
    "a clip norm that is NaN",
    ValueError,
    {"clip_grad_norm": math.nan},
    "clip_grad_norm must be a positive number",
    "nan",
)
_bad_setting("a clip norm in words", (TypeError, ValueError), {"clip_grad_norm": "1"}, "clip_grad_norm")
_bad_setting("an unknown clip scope", ValueError, {"clip": "matrix"}, "clip must be", "'other-only'", "'matrix'")
_bad_setting(
    "an unknown policy for inf and NaN", ValueError, {"nonfinite": "zero"}, "nonfinite must be", "'skip'", "'zero'"
)
_bad_setting(
    "a negative skip threshold",
    ValueError,
    {"skip_above": -1.0},
    "skip_above must be a positive number",
    "None switches it off",
)
_bad_setting(
    "a norm group that matches nothing",
    ValueError,
    {"norm_groups": {"routers": "frist.weight"}},
    "norm group 'routers'",
    "matches no trainable param",
    "Did you mean 'first.weight'?",
)
_bad_setting(
    "a norm group of frozen params only",
    ValueError,
    {"norm_groups": {"frozen": "fixed.*"}},
    "norm group 'frozen'",
    "no trainable param",
)
_bad_setting(
    "a norm group with a reserved name",
    ValueError,
    {"norm_groups": {"matrix": "*"}},
    "norm group 'matrix'",
    "Choose another",
)
_bad_setting("loss scaling by its name", TypeError, {"loss_scale": "dynamic"}, "loss_scale", "LossScale")


@misuse("a second optimizer for one model", StateError, "has an optimizer already", "Reuse it")
def _() -> Scene:
    model, _, optimizer = trained()
    yield optimizer
    optimizer_of(model)


@misuse("parameters() instead of the model", TypeError, "model must be", "generator", "not its parameters()")
def _() -> Scene:
    yield (module := small())
    optimizer_of(module.parameters())


# ------------------------------------------------------------------------------------------------ stepping


def _bad_option(name: str, errors: Any, option: str, value: Any, *says: str) -> None:
    def scene() -> Scene:
        model, _, optimizer = trained()
        backward(model)
        yield optimizer
        group = next(group for group in optimizer.param_groups if option in group)
        before, group[option] = group[option], value
        try:
            optimizer.step()
        finally:
            group[option] = before

    misuse(name, errors, *says)(scene)


WRONG = (ValueError, TypeError, StateError)
_bad_option(
    "a live lr that is NaN", ValueError, "lr", math.nan, "param group 0 (muon)", "lr must be a finite number", "nan"
)
_bad_option("a live lr below zero", ValueError, "lr", -1.0, "param group 0 (muon)", "lr must not be negative", "-1.0")
_bad_option("a live lr in words", WRONG, "lr", "fast", "param group 0 (muon)", "lr must be a finite number", "'fast'")
_bad_option("a live momentum of 1.5", WRONG, "momentum", 1.5, "param group 0", "momentum", "[0, 1)")
_bad_option("a live weight decay below zero", WRONG, "weight_decay", -1.0, "param group 0", "weight_decay", "negative")
_bad_option("a live scale that is unknown", WRONG, "scale", "big", "scale", "rms", "'big'")
_bad_option(
    "a live decay mode that is unknown", WRONG, "weight_decay_mode", "l2", "weight_decay_mode", "decoupled", "'l2'"
)
_bad_option("live betas of one", WRONG, "betas", (0.9, 1.0), "param group 1", "betas", "[0, 1)")
_bad_option(
    "another ns_dtype after construction",
    StateError,
    "ns_dtype",
    "fp32",
    "ns_dtype was changed",
    "Build a new Optimizer",
)


@misuse("a param group added after construction", StateError, "params cannot be added", "Build the model whole")
def _() -> Scene:
    _, _, optimizer = trained()
    yield optimizer
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@misuse(
    "a param frozen after construction", StateError, "param 'first.weight' was frozen", "Freeze params before wrapping"
)
def _() -> Scene:
    model, module, optimizer = trained()
    backward(model)
    yield optimizer
    module.first.weight.requires_grad_(False)
    try:
        optimizer.step()
    finally:
        module.first.weight.requires_grad_(True)


@misuse("a param unfrozen after construction", StateError, "param 'fixed.weight' was unfrozen", "before wrapping")
def _() -> Scene:
    model, module, optimizer = trained()
    backward(model)
    yield optimizer
    module.fixed.weight.requires_grad_(True)
    try:
        optimizer.step()
    finally:
        module.fixed.weight.requires_grad_(False)


@misuse("a module added after construction", StateError, "'extra.weight'", "wrap")
def _() -> Scene:
    model, module, optimizer = trained()
    backward(model)
    yield optimizer
    module.extra = nn.Linear(2, 2)
    try:
        optimizer.step()
    finally:
        del module.extra


@misuse("a layer replaced after construction", StateError, "'first.weight'", "wrap")
def _() -> Scene:
    model, module, optimizer = trained()
    yield optimizer
    before, module.first = module.first, nn.Linear(6, 8)
    backward(model)
    try:
        optimizer.step()
    finally:
        module.first = before


@misuse(
    "a module converted after wrapping",
    StateError,
    "param 'first.weight' was moved out of its buffer",
    "before it is wrapped",
)
def _() -> Scene:
    model, module, optimizer = trained()
    yield None
    module.to(torch.bfloat16)
    backward(model)
    optimizer.step()


@misuse("param.data replaced after wrapping", StateError, "param 'last.weight' was moved out of its buffer", "copy_()")
def _() -> Scene:
    model, module, optimizer = trained()
    backward(model)
    yield optimizer
    before, module.last.weight.data = module.last.weight.data, module.last.weight.data.clone()
    try:
        optimizer.step()
    finally:
        module.last.weight.data = before


def _sparse(plain: bool) -> Scene:
    module = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    model = module if plain else layerwise.DataParallel(module)
    optimizer = optimizer_of(model)
    yield optimizer
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


@misuse("a sparse gradient", TypeError, "param '0.weight' has a sparse gradient", "sparse=False")
def _() -> Scene:
    yield from _sparse(plain=False)


@misuse("a sparse gradient in a plain module", TypeError, "param '0.weight' has a sparse gradient", "sparse=False")
def _() -> Scene:
    yield from _sparse(plain=True)


@misuse("a gradient set by hand on a wrapped model", StateError, "param 'first.weight'", ".grad")
def _() -> Scene:
    _, module, optimizer = trained()
    module.first.weight.grad = torch.ones_like(module.first.weight)
    yield optimizer
    try:
        optimizer.step()
    finally:
        module.first.weight.grad = None


@misuse("scale_loss without loss scaling", StateError, "scale_loss()", "loss_scale=LossScale()")
def _() -> Scene:
    _, _, optimizer = trained()
    yield optimizer
    optimizer.scale_loss(torch.ones(()))


@misuse("a loss that was not scaled", StateError, "the loss was not scaled", "optimizer.scale_loss(loss).backward()")
def _() -> Scene:
    model, _, optimizer = trained(loss_scale=layerwise.LossScale())
    backward(model)
    yield optimizer
    optimizer.step()


@misuse(
    "a loss that was not scaled after one that was forgotten",
    StateError,
    "the loss was not scaled",
    "optimizer.scale_loss(loss).backward()",
)
def _() -> Scene:
    model, _, optimizer = trained(loss_scale=layerwise.LossScale())
    optimizer.scale_loss(model(torch.ones(2, 6)).sum()).backward()
    optimizer.zero_grad()
    backward(model)
    yield optimizer
    optimizer.step()


@misuse(
    "an unused param under strict_grads",
    StateError,
    "first.weight (1 of 1 ranks)",
    "strict_grads=True",
    "Freeze what is unused",
)
def _() -> Scene:
    _, module, optimizer = trained(strict_grads=True)
    module.last.weight.sum().backward()
    yield optimizer
    optimizer.step()


@misuse("NaN under nonfinite='raise'", NonFiniteError, "'first.weight'", "inf or NaN", "nothing was changed")
def _() -> Scene:
    _, module, optimizer = trained(nonfinite="raise")
    (module.first.weight * math.nan).sum().backward()
    yield optimizer
    optimizer.step()


# ------------------------------------------------------------------------------------------------ copies


@misuse("a deep copy of a wrapped model", TypeError, "DataParallel cannot be copied", "before wrapping")
def _() -> Scene:
    model, _, optimizer = trained()
    yield optimizer
    copy.deepcopy(model)


@misuse("a pickle of a wrapped model", TypeError, "DataParallel cannot be pickled", "state_dict()")
def _() -> Scene:
    model, _, optimizer = trained()
    yield optimizer
    pickle.dumps(model)


@misuse("a deep copy of an optimizer", TypeError, "Optimizer cannot be copied")
def _() -> Scene:
    _, _, optimizer = trained()
    yield optimizer
    copy.deepcopy(optimizer)


@misuse("a pickle of an optimizer", TypeError, "Optimizer cannot be pickled", "state_dict()")
def _() -> Scene:
    _, _, optimizer = trained()
    yield optimizer
    pickle.dumps(optimizer)


# ------------------------------------------------------------------------------------------------ loading state


def _bad_state(name: str, change: Callable[[dict[str, Any]], Any], *says: str) -> None:
    def scene() -> Scene:
        model, _, optimizer = trained(dtype=torch.bfloat16)
        saved = copy.deepcopy(optimizer.state_dict())
        backward(model)
        optimizer.step()
        yield optimizer
        optimizer.load_state_dict(change(saved) or saved)

    misuse(name, ValueError, *says)(scene)


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["layerwise"].pop(key) and None


def _reshape(state: dict[str, Any]) -> None:
    state["state"][0]["momentum"] = torch.zeros(3)


def _of_another_model() -> dict[str, Any]:
    return optimizer_of(nn.Linear(3, 3)).state_dict()


_bad_state(
    "a state dict of torch",
    lambda state: state.pop("layerwise") and None,
    "no 'layerwise'",
    "layerwise.Optimizer.state_dict()",
)
_bad_state(
    "a state dict without param groups",
    lambda state: state.pop("param_groups") and None,
    "no 'param_groups'",
    "state_dict()",
)
_bad_state("a state dict of another model", lambda _: _of_another_model(), "another layout", "same plan")
_bad_state("a state dict without a step count", _without("step"), "'step'")
_bad_state("a state dict without spans", _without("spans"), "'spans'")
_bad_state("a state dict with fewer param groups", lambda state: state["param_groups"].pop() and None, "param groups")
_bad_state("a state dict with a tensor of another shape", _reshape, "'momentum'", "'first.weight'", "expected")
_bad_state(
    "a state dict that lacks a tensor",
    lambda state: state["state"][0].pop("momentum") is None or None,
    "'momentum'",
    "'first.weight'",
)
_bad_state(
    "a state dict with a tensor too many",
    lambda state: state["state"][0].update(bogus=torch.ones(1)),
    "'bogus'",
    "'first.weight'",
)
_bad_state(
    "a state dict of another rule",
    lambda state: state["param_groups"][0].update(rule="normuon"),
    "param group 0",
    "another 'rule'",
)
_bad_state(
    "a state dict of another ns_dtype",
    lambda state: state["param_groups"][0].update(ns_dtype="fp32"),
    "ns_dtype",
    "'fp32'",
)
_bad_state(
    "a state dict with an lr that is NaN", lambda state: state["param_groups"][0].update(lr=math.nan), "lr", "nan"
)
_bad_state(
    "a state dict with loss scaling",
    lambda state: state["layerwise"].update(loss_scale={"scale": 1.0}),
    "loss scaling",
    "alike",
)


# ------------------------------------------------------------------------------------------------ several ranks


@misuse("another width on one rank", PlanMismatchError, "ranks 0 and 1", "first.", "shape", "same model", world=2)
def _(rank: int, world: int) -> Scene:
    torch.manual_seed(1)
    yield (module := Small(width=8 + 2 * rank))
    layerwise.DataParallel(module)


@misuse(
    "another layout on one rank", PlanMismatchError, "ranks 0 and 1", "layout", "'flat' against 'replicated'", world=2
)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, layout=("flat", "replicated")[rank])


@misuse("another bucket size on one rank", PlanMismatchError, "ranks 0 and 1", "bucket", "same settings", world=2)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, bucket_mib=(None, 0.0001)[rank])


@misuse(
    "another grad_dtype on one rank", PlanMismatchError, "ranks 0 and 1", "grad_dtype", "'fp32' against 'bf16'", world=2
)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, grad_dtype=(torch.float32, torch.bfloat16)[rank])


@misuse("params of another dtype on one rank", PlanMismatchError, "ranks 0 and 1", "fp32", "bf16", world=2)
def _(rank: int, world: int) -> Scene:
    yield (module := small(dtype=(torch.float32, torch.bfloat16)[rank]))
    layerwise.DataParallel(module)


@misuse("other route rules on one rank", PlanMismatchError, "ranks 0 and 1", "first.weight", "family", world=2)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, rules=[layerwise.RouteRule(pattern="first.weight", to=("matrix", "other")[rank])])


@misuse(
    "a param frozen on one rank before wrapping", PlanMismatchError, "ranks 0 and 1", "first.weight", "family", world=2
)
def _(rank: int, world: int) -> Scene:
    module = small()
    module.first.weight.requires_grad_(rank == 0)
    yield module
    layerwise.DataParallel(module)


@misuse("buffers that one rank does not have", PlanMismatchError, "ranks 0 and 1", "running", world=2)
def _(rank: int, world: int) -> Scene:
    module = small()
    if rank == 0:
        module.register_buffer("running", torch.ones(3))
    yield module
    layerwise.DataParallel(module)


@misuse("a bad route rule on one rank", (ValueError, PlanMismatchError), "'nope'", world=2, alike=False)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, rules=[layerwise.RouteRule(pattern=("first.weight", "nope")[rank], to="other")])


@misuse("a plain module on two ranks", ValueError, "plain Small on 2 ranks", "layerwise.DataParallel(module)", world=2)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    optimizer_of(module)


def _settings_of_ranks(name: str, settings: tuple[dict[str, Any], dict[str, Any]], *says: str) -> None:
    def scene(rank: int, world: int) -> Scene:
        model = layerwise.DataParallel(small())
        yield model.module
        optimizer_of(model, **settings[rank])

    misuse(name, PlanMismatchError, "ranks 0 and 1", "same settings", *says, world=2)(scene)


_settings_of_ranks(
    "another lr on one rank", ({}, {"matrix": layerwise.Muon(lr=0.03)}), "param group 0", "lr", "0.02", "0.03"
)
_settings_of_ranks("another rule on one rank", ({}, {"matrix": layerwise.NorMuon(lr=0.02)}), "param group 0")
_settings_of_ranks(
    "another clip norm on one rank", ({"clip_grad_norm": 1.0}, {"clip_grad_norm": 2.0}), "clip", "1.0 against 2.0"
)
_settings_of_ranks("loss scaling on one rank", ({}, {"loss_scale": layerwise.LossScale()}), "loss scale", "65536")
_settings_of_ranks(
    "another norm group on one rank", ({}, {"norm_groups": {"first": "first.*"}}), "norm groups", "first"
)


@misuse(
    "an lr changed on one rank later", PlanMismatchError, "ranks 0 and 1", "param group 0", "lr", "0.02", "0.5", world=2
)
def _(rank: int, world: int) -> Scene:
    model, _, optimizer = trained()
    backward(model, rank)
    yield optimizer
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def _on_one_rank(name: str, change: Callable[[Small, Optimizer], Any], *says: str) -> None:
    """A mistake that only rank 1 makes and can see: rank 0 must not be left waiting for it."""

    def scene(rank: int, world: int) -> Scene:
        model, module, optimizer = trained()
        backward(model, rank)
        yield None
        if rank == 1:
            change(module, optimizer)
        optimizer.step()

    misuse(name, (*WRONG, PlanMismatchError), *says, world=2, alike=False)(scene)


_on_one_rank(
    "an lr that is NaN on one rank",
    lambda _, optimizer: optimizer.param_groups[0].update(lr=math.nan),
    "param group 0",
    "nan",
)
_on_one_rank(
    "a param frozen on one rank",
    lambda module, _: module.first.weight.requires_grad_(False),
    "'first.weight'",
    "frozen",
)
_on_one_rank(
    "a param moved on one rank",
    lambda module, _: setattr(module.first.weight, "data", module.first.weight.data.clone()),
    "'first.weight'",
    "moved",
)


@misuse(
    "a gradient missing on one rank under strict_grads",
    StateError,
    "first.weight (1 of 2 ranks)",
    "Freeze what is unused",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    model, module, optimizer = trained(strict_grads=True)
    if rank == 0:
        backward(model)
    else:
        sum(
            param.sum() for fqn, param in module.named_parameters() if fqn != "first.weight" and param.requires_grad
        ).backward()
    yield optimizer
    optimizer.step()


@misuse(
    "NaN on one rank under nonfinite='raise'",
    NonFiniteError,
    "'last.weight'",
    "inf or NaN",
    "nothing was changed",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    model, module, optimizer = trained(nonfinite="raise")
    backward(model, rank)
    if rank == 1:
        (module.last.weight * math.nan).sum().backward()
    yield optimizer
    optimizer.step()


def _swapped_states(rank: int, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The state dicts of both ranks, as files would bring them."""
    import torch.distributed as dist

    states: list[Any] = [None, None]
    folder = tempfile.gettempdir()
    name = os.path.join(folder, f"layerwise-misuse-{os.getppid()}-{rank}.pt")
    torch.save(optimizer.state_dict(), name)
    dist.barrier()
    for other in range(2):
        states[other] = torch.load(
            os.path.join(folder, f"layerwise-misuse-{os.getppid()}-{other}.pt"), weights_only=True
        )
    dist.barrier()
    os.remove(name)
    return states


@misuse(
    "the state dict of another rank", ValueError, "state dict belongs to another", "same rank", world=2, alike=False
)
def _(rank: int, world: int) -> Scene:
    model, _, optimizer = trained()
    states = _swapped_states(rank, optimizer)
    backward(model, rank)
    optimizer.step()
    yield optimizer
    optimizer.load_state_dict(states[1 - rank])


@misuse(
    "the state dict of another rank on one rank only",
    (ValueError, PlanMismatchError),
    "state dict",
    world=2,
    alike=False,
)
def _(rank: int, world: int) -> Scene:
    model, _, optimizer = trained()
    states = _swapped_states(rank, optimizer)
    backward(model, rank)
    optimizer.step()
    yield optimizer
    optimizer.load_state_dict(states[0])


# ------------------------------------------------------------------------------------------------ the figure


@contextmanager
def _guards_removed() -> Any:
    """The sabotage: a library that does not look."""
    removed = [(Engine, "check_trainables"), (Storage, "check_aliases"), (Optimizer, "_preflight")]
    before = [(owner, name, getattr(owner, name)) for owner, name in removed]
    for owner, name in removed:
        setattr(owner, name, lambda *_: None)
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def complaints(*, ranks: bool = True) -> dict[str, str]:
    """Every case with what is wrong about it."""
    found = {case.name: take(case).complaint for case in CASES.values() if case.world == 1}
    if ranks:
        found.update(complaints_on_ranks([case.name for case in CASES.values() if case.world == 2]))
    return found


def complaints_on_ranks(names: list[str]) -> dict[str, str]:
    """All together, or one by one when a rank does not come back."""
    try:
        answers = run_ranks(2, take_on_ranks, names, pg_timeout_s=SLOWEST_S)
    except RankFailure as failure:
        if len(names) == 1:
            return {names[0]: str(failure)[-300:]}
        return {name: text for one in names for name, text in complaints_on_ranks([one]).items()}
    found = {}
    for name in names:
        texts = [
            f"rank {rank}: {answer[name].complaint}" for rank, answer in enumerate(answers) if answer[name].complaint
        ]
        if not texts and CASES[name].alike and answers[0][name].text != answers[1][name].text:
            texts = [f"ranks got different texts: {[answer[name].text[:120] for answer in answers]}"]
        found[name] = "; ".join(texts)
    return found


def _complaints_without_asserts() -> dict[str, str]:
    """The suite in a `python -O` of its own, where `assert` does nothing."""
    command = [sys.executable, "-O", "-W", "ignore", "-m", "tests.reliability.misuse"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=root)
    if done.returncode != 0:
        return {"python -O": done.stderr[-300:]}
    answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {f"{name} (python -O)": text for name, text in answer.items()}


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every case under `python -O`, and in the full profile without it too; with sabotage, single-process cases against a library whose checks were taken
    out."""
    if sabotage:
        with _guards_removed():
            return tally(complaints(ranks=False))
    return tally({**({} if quick else complaints()), **_complaints_without_asserts()})


if __name__ == "__main__":
    print(json.dumps(complaints()))
