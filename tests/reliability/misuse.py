"""S15, misuse: every wrong use of the library gets one typed error that names the object and says what to do, with nothing changed and nobody left waiting.

`tests.reliability.refusals` says what a case is; those of models that torch has cut or copied are in `tests.reliability.sharded_misuse`. No `assert` here: the suite also
runs under `python -O`, where they vanish.
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
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import layerwise
from layerwise.engine import measure as measuring
from layerwise.engine.engine import Engine
from layerwise.errors import ContractError, NonFiniteError, PlanMismatchError, StateError
from layerwise.memory.storage import Storage
from layerwise.optim.optimizer import Optimizer
from tests import seams
from tests.reliability import Outcome, tally, tally_control
from tests.reliability.refusals import (
    CASES,
    WORLDS,
    Scene,
    Taken,
    complaints_on_ranks,
    misuse,
    settled,
    take,
    take_on_ranks,
)
from tests.reliability.sharded_misuse import UNGUARDED

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


@misuse("gathers by the layer", ValueError, "overlap_param_gather", "True, False or 'by chunk'", "'by layer'")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, overlap_param_gather="by layer")  # type: ignore[arg-type]


@misuse(
    "gathers by chunk on one rank", PlanMismatchError, "ranks 0 and 1", "overlap_param_gather", "True against", world=2
)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    layerwise.DataParallel(module, overlap_param_gather=True if rank == 0 else "by chunk")


@misuse(
    "a debug check that there is not",
    ValueError,
    "LAYERWISE_DEBUG",
    "'collective'",
    "Did you mean 'collectives'?",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    with mock.patch.dict(os.environ, LAYERWISE_DEBUG="collective"):
        layerwise.DataParallel(module)


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


def _bad_argument(name: str, errors: Any, arguments: dict[str, Any], *says: str, instead: str = "") -> None:
    def scene() -> Scene:
        yield (module := small())
        layerwise.DataParallel(module, **arguments)

    misuse(name, errors, *says, instead=instead)(scene)


_bad_argument(
    "a layout that is none of padded's kinds", ValueError, {"layout": "padded:best"}, "'padded:best'", "Did you mean"
)
_bad_argument(
    "an unknown reducer", ValueError, {"reducer": "orderd"}, "reducer must be one of", "Did you mean 'ordered'?"
)
_bad_argument("no reducer at all", ValueError, {"reducer": None}, "reducer must be one of collective", "None")
_bad_argument("a list of reducers", ValueError, {"reducer": ["ordered"]}, "reducer must be one of", "['ordered']")
_bad_argument("a bucket size that is NaN", ValueError, {"bucket_mib": math.nan}, "bucket_mib", "positive number", "nan")
_bad_argument(
    "a bucket size without end",
    ValueError,
    {"bucket_mib": math.inf},
    "bucket_mib must be",
)
_bad_argument("a grad_dtype by name", TypeError, {"grad_dtype": "fp32"}, "grad_dtype", "fp32", "expected one of")
_bad_argument("a mesh by name", TypeError, {"mesh": "dp"}, "mesh must be a torch DeviceMesh", "str", "Leave it out")
_bad_argument(
    "ties without pipeline stages",
    ValueError,
    {"ties": {"embedding": "first.weight"}},
    "'first.weight'",
    "without pipeline stages",
    "a dim 'pp'",
)
_bad_argument(
    "a reducer of earlier versions",
    ValueError,
    {"reducer": "ordered_bf16"},
    "reducer must be one of",
    "write reducer='ordered'",
)
for _words in (["first.weight"], "first.weight", 3):
    _bad_argument(
        f"ties that are a {type(_words).__name__}",
        TypeError,
        {"ties": _words},
        "ties must be",
        repr(_words),
    )
for _switch in ("shard_grads", "overlap_grad_reduce", "strict"):
    _bad_argument(
        f"{_switch} in words",
        TypeError,
        {_switch: "no"},
        _switch,
        "True or False",
        "'no'",
    )


# ------------------------------------------------------------------------------------------------ chunks


@misuse("an empty list of chunks", ValueError, "module is an empty list", "expected the chunks")
def _() -> Scene:
    yield None
    layerwise.DataParallel([])


@misuse("a chunk that is no module", TypeError, "module must be an nn.Module or a list of them")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel([module, "head"])


@misuse("a generator of chunks", TypeError, "module must be an nn.Module or a list of them", "generator")
def _() -> Scene:
    yield (module := small())
    layerwise.DataParallel(chunk for chunk in [module])


@misuse("a chunk that is wrapped already", TypeError, "chunk 1", "already", "wrap a model once")
def _() -> Scene:
    model, _, optimizer = trained()
    yield optimizer
    layerwise.DataParallel([small(), model])


@misuse("a wrapped model inside another", StateError, "'0.module.first.weight'", "already", "Wrap a model once")
def _() -> Scene:
    model, _, optimizer = trained()
    yield optimizer
    layerwise.DataParallel(nn.Sequential(model))


def chunked(**settings: Any) -> tuple[layerwise.DataParallel, Optimizer]:
    """Two chunks that have taken a step."""
    model = layerwise.DataParallel([small(), Small(width=4)], bucket_mib=0.0001, **settings)
    optimizer = optimizer_of(model)
    for chunk in model.module:
        backward(chunk)
    optimizer.step()
    return model, optimizer


@misuse("a forward through all chunks at once", StateError, "the model is 2 chunks", "model.module[i]")
def _() -> Scene:
    model, optimizer = chunked()
    yield optimizer
    model(torch.ones(2, 6))


@misuse(
    "a param of the second chunk frozen after construction", StateError, "param '1.first.weight' was frozen", "before"
)
def _() -> Scene:
    model, optimizer = chunked()
    for chunk in model.module:
        backward(chunk)
    yield optimizer
    model.module[1].first.weight.requires_grad_(False)
    try:
        optimizer.step()
    finally:
        model.module[1].first.weight.requires_grad_(True)


@misuse(
    "the second chunk converted after wrapping", StateError, "param '1.first.weight' was moved", "before it is wrapped"
)
def _() -> Scene:
    model, optimizer = chunked(shard_grads=True)
    yield None
    model.module[1].to(torch.bfloat16)
    optimizer.step()


@misuse("a gradient set by hand on the second chunk", StateError, "param '1.first.weight'", ".grad")
def _() -> Scene:
    model, optimizer = chunked()
    weight = model.module[1].first.weight
    weight.grad = torch.ones_like(weight)
    yield optimizer
    try:
        optimizer.step()
    finally:
        weight.grad = None


@misuse("weights assigned instead of copied", StateError, "'first.weight' was replaced", "would never be updated")
def _() -> Scene:
    model, module, optimizer = trained()
    yield None
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)
    backward(model)
    optimizer.step()


@misuse("a state dict of the same chunks as one model", ValueError, "state dict belongs to another", "same plan")
def _() -> Scene:
    _, optimizer = chunked()
    yield optimizer
    optimizer.load_state_dict(optimizer_of(layerwise.DataParallel(small())).state_dict())


# ------------------------------------------------------------------------------------------------ experts


class Moe(nn.Module):
    """A dense layer and stacked experts, which say what `domains` says."""

    def __init__(self, domains: Any, experts: int = 2) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6, bias=False)
        self.up = nn.Parameter(torch.linspace(-1.0, 1.0, experts * 36).reshape(experts, 6, 6))
        self.domains = domains

    def param_domains(self) -> Any:
        return self.domains

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->bo", self.dense(x), self.up)


def _bad_domains(name: str, errors: Any, domains: Any, *says: str) -> None:
    def scene() -> Scene:
        yield (module := nn.Sequential(Moe(domains)))
        layerwise.DataParallel(module)

    misuse(name, errors, "Moe.param_domains()", *says)(scene)


_bad_domains("domains of a list of names", TypeError, ["up"], "returned list", "expected a dict")
_bad_domains("domains that are None", TypeError, None, "returned NoneType", "expected a dict")
_bad_domains(
    "a domain for a param that is not there", ValueError, {"upp": "expert"}, "'upp'", "Its params: dense.weight"
)
_bad_domains("a domain that is unknown", ValueError, {"up": "experts"}, "'up'", "'experts'", "'dense', 'expert'")
_bad_domains("a domain that is no name", ValueError, {"up": None}, "'up'", "None", "'dense', 'expert'")


@misuse(
    "domains in an attribute instead of a method",
    TypeError,
    "param_domains",
    "expected a method",
)
def _() -> Scene:
    module = small()
    module.param_domains = {"first.weight": "expert"}
    yield module
    layerwise.DataParallel(module)


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
_bad_rule("a loss scale of zero", lambda: layerwise.LossScale(initial=0.0), "LossScale", "initial")
_bad_rule("an endless loss scale", lambda: layerwise.LossScale(initial=math.inf), "LossScale", "initial")
_bad_rule("a loss scale that never shrinks", lambda: layerwise.LossScale(factor=1.0), "LossScale", "factor")


# ------------------------------------------------------------------------------------------------ building an optimizer


def _bad_setting(name: str, errors: Any, settings: dict[str, Any], *says: str, instead: str = "") -> None:
    def scene() -> Scene:
        model = layerwise.DataParallel(small())
        yield model.module
        optimizer_of(model, **settings)

    misuse(name, errors, *says, instead=instead)(scene)


def _bad_policy(name: str, errors: Any, fields: dict[str, Any], *says: str) -> None:
    def scene() -> Scene:
        model = layerwise.DataParallel(small())
        yield model.module
        optimizer_of(model, gradient_policy=layerwise.GradientPolicy(**fields))

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
_bad_policy("an unknown clip scope", ValueError, {"clip": "matrix"}, "clip must be", "'other-only'", "'matrix'")
_bad_policy(
    "an unknown policy for inf and NaN", ValueError, {"nonfinite": "zero"}, "nonfinite must be", "'skip'", "'zero'"
)
_bad_policy(
    "a negative skip threshold",
    ValueError,
    {"skip_above": -1.0},
    "skip_above must be a positive number",
    "None switches it off",
)
_bad_policy(
    "several bad fields of a gradient policy",
    TypeError,
    {"nonfinite": "zero", "norm_groups": ["*"], "strict_grads": "yes", "max_skipped": -1},
    "nonfinite must be",
    "norm_groups must be",
    "strict_grads must be",
    "max_skipped must be",
)
_bad_setting(
    "a dict as a gradient policy",
    TypeError,
    {"gradient_policy": {"skip_above": 1.0}},
    "gradient_policy must be a layerwise.GradientPolicy",
)
_bad_policy(
    "a norm group that matches nothing",
    ValueError,
    {"norm_groups": {"routers": "frist.weight"}},
    "norm group 'routers'",
    "matches no trainable param",
    "Did you mean 'first.weight'?",
)
_bad_policy(
    "a norm group of frozen params only",
    ValueError,
    {"norm_groups": {"frozen": "fixed.*"}},
    "norm group 'frozen'",
    "no trainable param",
)
_bad_policy(
    "a norm group with a reserved name",
    ValueError,
    {"norm_groups": {"matrix": "*"}},
    "norm group 'matrix'",
    "Choose another",
)
_bad_setting("loss scaling by its name", TypeError, {"loss_scale": "dynamic"}, "loss_scale", "LossScale")
for _groups in (["first.*"], "first.*", {"first": 3}, {1: "first.*"}):
    _bad_policy(
        f"norm groups as {_groups!r}",
        TypeError,
        {"norm_groups": _groups},
        "norm_groups",
    )


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
_bad_option(
    "another tp_mode after construction",
    StateError,
    "tp_mode",
    "blockwise",
    "tp_mode was changed",
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


def _sparse(plain: bool, **settings: Any) -> Scene:
    module = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    model = module if plain else layerwise.DataParallel(module, **settings)
    optimizer = optimizer_of(model)
    yield optimizer
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


@misuse("a sparse gradient", TypeError, "param '0.weight' has a sparse gradient", "sparse=False")
def _() -> Scene:
    yield from _sparse(plain=False)


@misuse("a sparse gradient where gradients are sharded", TypeError, "param '0.weight' has a sparse", "sparse=False")
def _() -> Scene:
    yield from _sparse(plain=False, shard_grads=True)


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
    _, module, optimizer = trained(gradient_policy=layerwise.GradientPolicy(strict_grads=True))
    module.last.weight.sum().backward()
    yield optimizer
    optimizer.step()


@misuse("NaN under nonfinite='raise'", NonFiniteError, "'first.weight'", "inf or NaN", "nothing was changed")
def _() -> Scene:
    _, module, optimizer = trained(gradient_policy=layerwise.GradientPolicy(nonfinite="raise"))
    (module.first.weight * math.nan).sum().backward()
    yield optimizer
    optimizer.step()


# ------------------------------------------------------------------------------------------------ copies


@misuse("a deep copy of a wrapped model", TypeError, "DataParallel cannot be copied", "copy.deepcopy(model.module)")
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
        saved = copy.deepcopy(optimizer.state_dict(part=True))
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
    "a state dict of another tp_mode",
    lambda state: state["param_groups"][0].update(tp_mode="blockwise"),
    "tp_mode",
    "'blockwise'",
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
    "another norm group on one rank",
    ({}, {"gradient_policy": layerwise.GradientPolicy(norm_groups={"first": "first.*"})}),
    "norm_groups",
    "first",
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
    model, module, optimizer = trained(gradient_policy=layerwise.GradientPolicy(strict_grads=True))
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
    model, module, optimizer = trained(gradient_policy=layerwise.GradientPolicy(nonfinite="raise"))
    backward(model, rank)
    if rank == 1:
        (module.last.weight * math.nan).sum().backward()
    yield optimizer
    optimizer.step()


def _arguments_of_ranks(
    name: str, arguments: tuple[dict[str, Any], dict[str, Any]], *says: str, instead: str = ""
) -> None:
    """Arguments that are right, but not the same on both ranks."""

    def scene(rank: int, world: int) -> Scene:
        yield (module := small())
        seams.data_parallel(module, **arguments[rank])

    misuse(name, PlanMismatchError, "ranks 0 and 1", "same settings", *says, world=2, instead=instead)(scene)


_arguments_of_ranks(
    "padded on one rank", ({"layout": "flat"}, {"layout": "padded"}), "layout", "'flat' against 'padded'"
)
_arguments_of_ranks("compact on one rank", ({"layout": "compact"}, {"layout": "flat"}), "layout", "'compact' against")
_arguments_of_ranks("another reducer on one rank", ({}, {"reducer": "ordered"}), "reducer", "'ordered'")
_arguments_of_ranks(
    "sharded gradients on one rank", ({"layout": "flat"}, {"layout": "flat", "shard_grads": True}), "shard_grads"
)
_arguments_of_ranks(
    "checked collectives on one rank", ({}, {"check_collectives": True}), "LAYERWISE_DEBUG", "collectives"
)
_arguments_of_ranks(
    "overlap on one rank",
    ({}, {"overlap_grad_reduce": False}),
    "overlap_grad_reduce",
)


def _combination(name: str, arguments: dict[str, Any], *says: str, on_one_rank: dict[str, Any] | None = None) -> None:
    """Arguments that do not go together; on one rank only, if the other one has better ones."""

    def scene(rank: int, world: int) -> Scene:
        yield (module := small())
        layerwise.DataParallel(module, **(arguments if rank == 1 or on_one_rank is None else on_one_rank))

    errors = (ValueError, PlanMismatchError) if on_one_rank is not None else ValueError
    misuse(name, errors, *says, world=2, alike=on_one_rank is None)(scene)


_combination(
    "an ordered sum for replicas",
    {"reducer": "ordered", "layout": "replicated"},
    "reducer='ordered' with layout 'replicated'",
    "Use layout='flat'",
)
_combination(
    "sharded gradients for replicas",
    {"shard_grads": True, "layout": "replicated"},
    "shard_grads=True with layout 'replicated'",
    "Use layout='flat'",
)
_combination(
    "sharded gradients that are all-reduced",
    {"shard_grads": True, "layout": "compact"},
    "shard_grads=True with layout 'compact'",
    "reducer='ordered' with 'compact'",
)
_combination(
    "sharded gradients that are all-reduced on one rank",
    {"shard_grads": True, "layout": "compact"},
    "shard_grads=True with layout 'compact'",
    on_one_rank={"shard_grads": True, "layout": "flat"},
)
_combination(
    "an unknown reducer on one rank",
    {"reducer": "orderd"},
    "Did you mean 'ordered'?",
    on_one_rank={"reducer": "ordered"},
)


@misuse(
    "no chunk list on one rank",
    PlanMismatchError,
    "ranks 0 and 1",
    "is only on one of them",
    "same model",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    layerwise.DataParallel([module, small()] if rank else module)


@misuse(
    "a chunk that is no module on one rank",
    (TypeError, PlanMismatchError),
    "module must be an nn.Module or a list of them",
    world=2,
    alike=False,
)
def _(rank: int, world: int) -> Scene:
    yield (module := small())
    layerwise.DataParallel([module, small() if rank == 0 else "head"])


@misuse(
    "route rules for the optimizer of a wrapped model on one rank",
    (ValueError, PlanMismatchError),
    "pass them to DataParallel",
    world=2,
    alike=False,
)
def _(rank: int, world: int) -> Scene:
    model = layerwise.DataParallel(small())
    yield model.module
    optimizer_of(model, rules=[layerwise.RouteRule(pattern="first.weight", to="other")] if rank else None)


@misuse(
    "more no_sync blocks on one rank where each is reduced",
    ContractError,
    "was stopped on all ranks",
    "same collectives in the same order",
    world=2,
    alike=False,
)
def _(rank: int, world: int) -> Scene:
    model = seams.data_parallel(small(), shard_grads=True, layout="flat", check_collectives=True)
    optimizer = optimizer_of(model)
    yield optimizer
    for _ in range(1 + rank):
        with model.no_sync():
            backward(model, rank)
    backward(model, rank)
    optimizer.step()


# ------------------------------------------------------------------------------------------------ meshes


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _bad_mesh(
    name: str,
    errors: Any,
    make: Callable[[int], Any],
    *says: str,
    world: int = 2,
    alike: bool = True,
    instead: str = "",
) -> None:
    def scene(rank: int, world: int) -> Scene:
        mesh = make(rank)
        yield (module := small())
        layerwise.DataParallel(module, mesh=mesh)

    misuse(name, errors, *says, world=world, alike=alike, instead=instead)(scene)


_bad_mesh("a mesh without names", ValueError, lambda _: init_device_mesh("cpu", (2,)), "mesh has the dims None", "'pp'")
_bad_mesh("a mesh for tensor parallelism", ValueError, lambda _: mesh_of(tp=2), "dims ('tp',)", "'pp', 'dp', 'ep'")
_bad_mesh(
    "a part of a mesh",
    ValueError,
    lambda _: mesh_of(pp=2, dp=1)["dp"],
    "mesh has the ranks",
    "expected every rank once",
    "over all of them",
    alike=False,
)
_bad_mesh(
    "a mesh on one rank only",
    PlanMismatchError,
    lambda rank: mesh_of(dp=2) if rank else None,
    "ranks 0 and 1",
    "mesh: None against",
    "same settings",
)
_bad_mesh(
    "something else than a mesh on one rank",
    (TypeError, PlanMismatchError),
    lambda rank: None if rank else (1, 2),
    "mesh must be a torch DeviceMesh, got tuple",
    alike=False,
)


def _either(rank: int, one: DeviceMesh, other: DeviceMesh, last: int) -> DeviceMesh:
    """Making a mesh takes all ranks: every one makes both, and the last takes the other."""
    return other if rank == last else one


_bad_mesh(
    "a mesh of other sizes on one rank",
    PlanMismatchError,
    lambda rank: _either(rank, mesh_of(dp=2, ep=1), mesh_of(dp=1, ep=2), last=1),
    "ranks 0 and 1",
    "mesh",
    "2 against 1",
)
_bad_mesh(
    "a mesh with its dims in another order on one rank",
    PlanMismatchError,
    lambda rank: _either(rank, mesh_of(dp=2, ep=2), mesh_of(ep=2, dp=2), last=3),
    "ranks 0 and 3",
    "mesh",
    world=4,
)
_bad_mesh(
    "a mesh with its ranks in another order on one rank",
    (ValueError, PlanMismatchError),
    lambda rank: _either(
        rank,
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "ep")),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "ep")),
        last=3,
    ),
    "[0, 2, 1, 3]",
    "ascending order",
    world=4,
    alike=False,
)


def _bad_experts(name: str, errors: Any, make: Callable[[int], nn.Module], *says: str, alike: bool = True) -> None:
    def scene(rank: int, world: int) -> Scene:
        mesh = mesh_of(dp=1, ep=2)
        yield (module := make(rank))
        layerwise.DataParallel(module, mesh=mesh)

    misuse(name, errors, *says, world=2, alike=alike)(scene)


_bad_experts(
    "experts on one rank that are dense params on the other",
    PlanMismatchError,
    lambda rank: Moe({"up": "expert"} if rank else {}),
    "ranks 0 and 1",
    "'expert' is only on one of them",
)
_bad_experts(
    "more experts on one rank",
    PlanMismatchError,
    lambda rank: Moe({"up": "expert"}, experts=2 + rank),
    "ranks 0 and 1",
    "up, shape[0]: 2 against 3",
)
_bad_experts(
    "a domain that is unknown on one rank",
    (ValueError, PlanMismatchError),
    lambda rank: Moe({"up": "expert" if rank == 0 else "experts"}),
    "Moe.param_domains()",
    "'experts'",
    alike=False,
)


# ------------------------------------------------------------------------------------------------ pipeline stages


class Stage(nn.Module):
    """Three layers of one shape, so that each may be tied to any other."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.middle = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def stage_of(rank: int, world: int) -> int:
    return rank // (world // 2)


def on_stages(
    rank: int, world: int, *, module: nn.Module | None = None, settings: dict[str, Any] | None = None, **wrapping: Any
) -> tuple[Stage, Optimizer]:
    """A pipeline of two stages that has run backward, and is about to step."""
    torch.manual_seed(1)
    stage = Stage() if module is None else module
    mesh = mesh_of(pp=2, dp=world // 2)
    model = seams.data_parallel(stage, mesh=mesh, **{"layout": "flat", "bucket_mib": 0.0001, **wrapping})
    optimizer = optimizer_of(model, **(settings or {}))
    model(torch.linspace(-1.0, 1.0 + rank, 12).reshape(2, 6)).square().mean().backward()
    return stage, optimizer


def _bad_stage(
    name: str,
    errors: Any,
    make: Callable[[int, int], tuple[nn.Module, dict[str, Any]]],
    *says: str,
    world: int = 2,
    alike: bool = True,
    instead: str = "",
) -> None:
    """Stages that cannot be wrapped: `make(stage, rank)` gives a module and how to wrap it."""

    def scene(rank: int, world: int) -> Scene:
        mesh = mesh_of(pp=2, dp=world // 2)
        torch.manual_seed(1)
        module, arguments = make(stage_of(rank, world), rank)
        yield module
        seams.data_parallel(module, mesh=mesh, **{"layout": "flat", "bucket_mib": 0.0001, **arguments})

    misuse(name, errors, *says, world=world, alike=alike, instead=instead)(scene)


FAILED_ELSEWHERE = (ValueError, TypeError, PlanMismatchError)

_bad_stage(
    "an unknown layout on one stage",
    FAILED_ELSEWHERE,
    lambda stage, _: (Stage(), {"layout": ("flat", "flatt")[stage]}),
    "layout 'flatt' is unknown",
    world=4,
    alike=False,
)
_bad_stage(
    "a combination that is refused on one stage",
    FAILED_ELSEWHERE,
    lambda stage, _: (Stage(), {"layout": ("flat", "compact")[stage], "shard_grads": True}),
    "shard_grads=True with layout 'compact'",
    world=4,
    alike=False,
)
_bad_stage(
    "stages with nothing to train",
    ValueError,
    lambda _stage, _rank: (Stage().requires_grad_(False), {}),
    "no trainable param",
)
_bad_stage(
    "another layout on one rank of one stage",
    PlanMismatchError,
    lambda _, rank: (Stage(), {"layout": "compact" if rank == 3 else "flat"}),
    "ranks 2 and 3",
    "layout",
    "'flat' against 'compact'",
    world=4,
)
_bad_stage(
    "checked collectives on one stage",
    PlanMismatchError,
    lambda stage, _: (Stage(), {"check_collectives": stage == 1}),
    "ranks 0 and 1",
    "LAYERWISE_DEBUG",
)
_bad_stage(
    "a tie of a param that is not there",
    FAILED_ELSEWHERE,
    lambda stage, _: (Stage(), {"ties": {"embedding": ("frist.weight", "last.weight")[stage]}}),
    "tie 'embedding'",
    "'frist.weight'",
    "Did you mean 'first.weight'?",
    alike=False,
)
_bad_stage(
    "a tie on one stage only",
    ValueError,
    lambda stage, _: (Stage(), {"ties": {} if stage else {"embedding": "first.weight"}}),
    "tie 'embedding' is on stage 0 only",
    "'first.weight'",
    "ties= of both",
)
_bad_stage(
    "a tie of different shapes",
    ValueError,
    lambda stage, _: (Stage(width=(6, 8)[stage]), {"ties": {"embedding": "first.weight"}}),
    "tie 'embedding' has shape [6, 6] on stage 0",
    "[8, 8] on stage 1",
    "must be alike",
)
_bad_stage(
    "a tie of different dtypes",
    ValueError,
    lambda stage, _: (Stage().to((torch.float32, torch.bfloat16)[stage]), {"ties": {"embedding": "first.weight"}}),
    "tie 'embedding' has dtype torch.float32 on stage 0",
    "torch.bfloat16 on stage 1",
    "must be alike",
)


def _half_frozen(stage: int) -> Stage:
    module = Stage()
    module.first.requires_grad_(stage == 0)
    return module


_bad_stage(
    "a tie of a frozen param",
    FAILED_ELSEWHERE,
    lambda stage, _: (_half_frozen(stage), {"ties": {"embedding": "first.weight"}}),
    "tie 'embedding' names 'first.weight'",
    "frozen",
    alike=False,
)
_bad_stage(
    "a tie between two layouts",
    PlanMismatchError,
    lambda stage, _: (Stage(), {"layout": ("flat", "padded")[stage], "ties": {"embedding": "first.weight"}}),
    "tie 'embedding'",
    "padded",
    "flat",
    "same layout",
    world=4,
)
_bad_stage(
    "a tie that one rank of a stage does not know",
    PlanMismatchError,
    lambda _, rank: (Stage(), {"ties": {} if rank == 1 else {"embedding": "first.weight"}}),
    "ranks 0 and 1",
    "embedding",
    world=4,
)
_bad_stage(
    "a tie that names another param on one rank of a stage",
    PlanMismatchError,
    lambda _, rank: (Stage(), {"ties": {"embedding": "middle.weight" if rank == 1 else "first.weight"}}),
    "ranks 0 and 1",
    "embedding",
    world=4,
)
_bad_stage(
    "two ties of one param",
    ValueError,
    lambda _, __: (Stage(), {"ties": {"embedding": "first.weight", "head": "first.weight"}}),
    "'first.weight'",
    "'embedding'",
    "'head'",
)
_bad_stage(
    "a tie to nothing",
    TypeError,
    lambda _, __: (Stage(), {"ties": {"embedding": None}}),
    "ties",
    "None",
)
_bad_stage(
    "a list of ties on one rank",
    FAILED_ELSEWHERE,
    lambda stage, _: (Stage(), {"ties": ["first.weight"] if stage else {"embedding": "first.weight"}}),
    "ties must be",
    alike=False,
)
_bad_stage(
    "a tie that is routed differently",
    PlanMismatchError,
    lambda stage, _: (
        Stage(),
        {
            "ties": {"embedding": "first.weight"},
            "rules": [layerwise.RouteRule(pattern="first.weight", to="other")] if stage else None,
        },
    ),
    "tie 'embedding'",
    "same",
)
_bad_stage(
    "a tie with options on one stage",
    PlanMismatchError,
    lambda stage, _: (
        Stage(),
        {
            "ties": {"embedding": "first.weight"},
            "rules": [layerwise.RouteRule(pattern="first.weight", to="matrix", options={"lr": 0.5})] if stage else None,
        },
    ),
    "tie 'embedding'",
    "same",
)


@misuse(
    "ties in a pipeline of one stage",
    ValueError,
    "'first.weight'",
    "without pipeline stages",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    mesh = mesh_of(pp=1, dp=2)
    yield (module := Stage())
    layerwise.DataParallel(module, mesh=mesh, ties={"embedding": "first.weight"})


@misuse(
    "a pipeline schedule that divides gradients",
    ValueError,
    "scale_grads=True, which is torch's default",
    "'first.weight'",
    "Pass scale_grads=False",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh, module = mesh_of(pp=2, dp=1), Stage()
    optimizer = optimizer_of(layerwise.DataParallel(module, mesh=mesh, layout="flat"))
    stage = PipelineStage(module, rank, world, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda out, _: out.square().mean())
    yield optimizer
    x = torch.linspace(-1.0, 1.0, 24).reshape(4, 6)
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == world - 1 else {}))


def _settings_of_stages(
    name: str,
    errors: Any,
    settings: tuple[dict[str, Any], dict[str, Any]],
    *says: str,
    ties: tuple[str, str] | None = None,
    alike: bool = True,
    instead: str = "",
) -> None:
    """Arguments of the Optimizer that differ between stages; `ties` names the two copies of a weight."""

    def scene(rank: int, world: int) -> Scene:
        mesh = mesh_of(pp=2, dp=1)
        torch.manual_seed(1)
        model = layerwise.DataParallel(
            Stage(), mesh=mesh, layout="flat", ties={"embedding": ties[rank]} if ties else None
        )
        yield model.module
        optimizer_of(model, **settings[rank])

    misuse(name, errors, *says, world=2, alike=alike, instead=instead)(scene)


_settings_of_stages(
    "another clip norm on one stage",
    PlanMismatchError,
    ({"clip_grad_norm": 1.0}, {"clip_grad_norm": 2.0}),
    "ranks 0 and 1",
    "clip_grad_norm: 1.0 against 2.0",
)
_settings_of_stages(
    "another policy for NaN on one stage",
    PlanMismatchError,
    ({}, {"gradient_policy": layerwise.GradientPolicy(nonfinite="raise")}),
    "nonfinite",
    "'raise'",
)
_settings_of_stages(
    "strict_grads on one stage",
    PlanMismatchError,
    ({}, {"gradient_policy": layerwise.GradientPolicy(strict_grads=True)}),
    "strict_grads",
)
_settings_of_stages("zeros counted on one stage", PlanMismatchError, ({}, {"count_zeros": True}), "count zeros")
_settings_of_stages(
    "loss scaling on one stage", PlanMismatchError, ({}, {"loss_scale": layerwise.LossScale()}), "loss scale"
)
_settings_of_stages(
    "norm groups of one stage",
    PlanMismatchError,
    (
        {"gradient_policy": layerwise.GradientPolicy(norm_groups={"first": "first.*"})},
        {"gradient_policy": layerwise.GradientPolicy(norm_groups={"one": "first.*"})},
    ),
    "norm_groups",
    "'first' against 'one'",
)
_settings_of_stages(
    "a bad clip norm on one stage",
    FAILED_ELSEWHERE,
    ({"clip_grad_norm": 1.0}, {"clip_grad_norm": 0.0}),
    "clip_grad_norm must be a positive number",
    alike=False,
)
_settings_of_stages(
    "a norm group that matches on no stage",
    ValueError,
    ({"gradient_policy": layerwise.GradientPolicy(norm_groups={"heads": "head.*"})},) * 2,
    "norm group 'heads'",
    "matches no trainable param",
)
_settings_of_stages(
    "another lr for one copy of a tied weight",
    PlanMismatchError,
    ({}, {"matrix": layerwise.Muon(lr=0.5)}),
    "tie 'embedding'",
    "lr",
    ties=("first.weight", "first.weight"),
)
_settings_of_stages(
    "a norm group of one copy of a tied weight",
    (ValueError, PlanMismatchError),
    ({"gradient_policy": layerwise.GradientPolicy(norm_groups={"first": "first.*"})},) * 2,
    "tie 'embedding'",
    "first",
    ties=("first.weight", "last.weight"),
)


def _at_step(
    name: str,
    errors: Any,
    change: Callable[[int, Stage, Optimizer], Any],
    *says: str,
    world: int = 2,
    alike: bool = True,
    instead: str = "",
    **wrapping: Any,
) -> None:
    """A mistake between backward and step: `change(rank, module, optimizer)`. No stage may step while another raises."""

    def scene(rank: int, world: int) -> Scene:
        module, optimizer = on_stages(rank, world, **wrapping)
        yield optimizer
        before = [dict(group) for group in optimizer.param_groups]
        change(rank, module, optimizer)
        try:
            optimizer.step()
        finally:
            for group, options in zip(optimizer.param_groups, before, strict=True):
                group.update(options)

    misuse(name, errors, *says, world=world, alike=alike, instead=instead)(scene)


def _set_lr(lr: float, *ranks: int) -> Callable[[int, Stage, Optimizer], Any]:
    return lambda rank, _, optimizer: rank in ranks and optimizer.param_groups[0].update(lr=lr)


_at_step(
    "an lr that is NaN on one rank of one stage",
    FAILED_ELSEWHERE,
    _set_lr(math.nan, 3),
    "lr must be a finite number, got nan",
    world=4,
    alike=False,
)
_at_step(
    "an lr changed on one rank of one stage",
    PlanMismatchError,
    _set_lr(0.5, 2),
    "ranks 2 and 3",
    "param group 0, lr",
    world=4,
)
_at_step(
    "an lr that is NaN on all ranks of one stage",
    FAILED_ELSEWHERE,
    _set_lr(math.nan, 2, 3),
    "lr must be a finite number, got nan",
    world=4,
    alike=False,
)
_at_step(
    "a gradient set by hand on one stage",
    (StateError, PlanMismatchError),
    lambda rank, module, _: rank and setattr(module.first.weight, "grad", torch.ones(6, 6)),
    "param 'first.weight' has a .grad",
    alike=False,
)
_at_step(
    "an lr changed for one copy of a tied weight",
    PlanMismatchError,
    _set_lr(0.5, 1),
    "tie 'embedding'",
    "lr",
    ties={"embedding": "first.weight"},
)


@misuse(
    "no gradient on one stage under strict_grads",
    StateError,
    "first.weight of stage 1 (2 of 2 ranks)",
    "strict_grads=True",
    world=4,
)
def _(rank: int, world: int) -> Scene:
    module, optimizer = on_stages(
        rank, world, settings={"gradient_policy": layerwise.GradientPolicy(strict_grads=True)}
    )
    if stage_of(rank, world):
        optimizer.zero_grad()
        module.last.weight.sum().backward()
    yield optimizer
    optimizer.step()


@misuse(
    "NaN on one rank of one stage under nonfinite='raise'",
    NonFiniteError,
    "'middle.weight of stage 1'",
    "nothing was changed",
    world=4,
)
def _(rank: int, world: int) -> Scene:
    module, optimizer = on_stages(
        rank, world, settings={"gradient_policy": layerwise.GradientPolicy(nonfinite="raise")}
    )
    if rank == 3:
        (module.middle.weight * math.nan).sum().backward()
    yield optimizer
    optimizer.step()


@misuse(
    "NaN in the experts of one rank under nonfinite='raise'", NonFiniteError, "'up'", "nothing was changed", world=2
)
def _(rank: int, world: int) -> Scene:
    torch.manual_seed(1)
    module = Moe({"up": "expert"})
    model = layerwise.DataParallel(module, mesh=mesh_of(dp=1, ep=2))
    optimizer = optimizer_of(model, gradient_policy=layerwise.GradientPolicy(nonfinite="raise"))
    model(torch.ones(2, 6)).sum().backward()
    if rank == 1:
        (module.up * math.nan).sum().backward()
    yield optimizer
    optimizer.step()


# ------------------------------------------------------------------------------------------------ state of several ranks


def _swapped_states(rank: int, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The state dicts of both ranks, as files would bring them."""
    import torch.distributed as dist

    states: list[Any] = [None, None]
    folder = tempfile.gettempdir()
    name = os.path.join(folder, f"layerwise-misuse-{os.getppid()}-{rank}.pt")
    torch.save(optimizer.state_dict(part=True), name)
    dist.barrier()
    for other in range(2):
        states[other] = torch.load(
            os.path.join(folder, f"layerwise-misuse-{os.getppid()}-{other}.pt"), weights_only=True
        )
    dist.barrier()
    os.remove(name)
    return states


@misuse(
    "the state dict of another rank", ValueError, "state dict is the part of rank", "same rank", world=2, alike=False
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


def _state_of_another_layout(saved: str, loading: str) -> None:
    def scene(rank: int, world: int) -> Scene:
        # Wide enough that a flat shard ends inside a weight.
        optimizers = [
            optimizer_of(layerwise.DataParallel(Small(width=24), layout=layout)) for layout in (saved, loading)
        ]
        yield optimizers[1]
        optimizers[1].load_state_dict(optimizers[0].state_dict(part=True))

    name = f"a state dict of layout {saved} for layout {loading}"
    misuse(name, ValueError, "state dict belongs to another layout", "same plan", world=2, alike=False)(scene)


for _saved, _loading in (
    ("flat", "padded"),
    ("flat", "compact"),
    ("flat", "replicated"),
    ("replicated", "flat"),
    ("compact", "flat"),
    ("compact", "padded"),
):
    _state_of_another_layout(_saved, _loading)


@misuse(
    "a state dict of other experts on one rank", (ValueError, PlanMismatchError), "state dict", world=2, alike=False
)
def _(rank: int, world: int) -> Scene:
    optimizers = []
    for dims in ({"dp": 2, "ep": 1}, {"dp": 1, "ep": 2}):
        torch.manual_seed(1)
        optimizers.append(optimizer_of(layerwise.DataParallel(Moe({"up": "expert"}), mesh=mesh_of(**dims))))
    yield optimizers[0]
    optimizers[0].load_state_dict(optimizers[rank].state_dict(part=True))


@misuse(
    "the state dict of another pipeline stage",
    ValueError,
    "state dict",
    "stage",
    world=2,
    alike=False,
)
def _(rank: int, world: int) -> Scene:
    _, optimizer = on_stages(rank, world)
    optimizer.step()
    states = _swapped_states(rank, optimizer)
    yield optimizer
    optimizer.load_state_dict(states[1 - rank])


@misuse(
    "the state dict of other experts",
    ValueError,
    "state dict",
    "same rank",
    world=2,
    alike=False,
)
def _(rank: int, world: int) -> Scene:
    torch.manual_seed(rank)
    model = layerwise.DataParallel(Moe({"up": "expert"}), mesh=mesh_of(dp=1, ep=2), layout="replicated")
    optimizer = optimizer_of(model)
    model(torch.linspace(-1.0, 1.0 + rank, 12).reshape(2, 6)).square().mean().backward()
    optimizer.step()
    states = _swapped_states(rank, optimizer)
    yield optimizer
    optimizer.load_state_dict(states[1 - rank])


@misuse(
    "state dicts of different steps on two stages",
    PlanMismatchError,
    "derived different states",
    "step",
    world=2,
)
def _(rank: int, world: int) -> Scene:
    _, optimizer = on_stages(rank, world)
    saved = copy.deepcopy(optimizer.state_dict(part=True))
    optimizer.step()
    yield optimizer
    optimizer.load_state_dict(saved if rank else copy.deepcopy(optimizer.state_dict(part=True)))


# ------------------------------------------------------------------------------------------------ the figure


@contextmanager
def _guards_removed() -> Any:
    """The sabotage: a library that does not look."""
    removed: list[tuple[Any, str]] = [
        (Engine, "check_trainables"),
        (Storage, "check_aliases"),
        (measuring.Measure, "_preflight"),
        (measuring, "check_copies"),
        (measuring, "check_gradients"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name in removed]
    for owner, name in removed:
        setattr(owner, name, lambda *_: None)
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def take_unguarded(rank: int, world: int, names: Sequence[str]) -> dict[str, Taken]:
    """Cases for several ranks against a library that does not look."""
    with _guards_removed():
        return take_on_ranks(rank, world, list(names))


def complaints(*, ranks: bool = True, every: int = 1) -> dict[str, str]:
    """Every case, or every so many of a single process, with what is wrong about it."""
    found = {name: take(CASES[name]).complaint for name in settled(world=1)[::every]}
    for world in WORLDS if ranks else ():
        found.update(complaints_on_ranks(settled(world)))
    return found


def tell(*, quick: bool) -> None:
    """Print complaints as one line of JSON."""
    print(json.dumps(complaints(ranks=False, every=4) if quick else complaints()))


def _complaints_without_asserts(*, quick: bool) -> dict[str, str]:
    """The suite in a `python -O` of its own, where `assert` does nothing."""
    told = f"from tests.reliability import misuse; misuse.tell(quick={quick})"
    command = [sys.executable, "-O", "-W", "ignore", "-c", told]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=root)
    if done.returncode != 0:
        return {"python -O": done.stderr[-300:]}
    answer: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {f"{name} (python -O)": text for name, text in answer.items()}


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every case with and without `python -O`; in the quick profile some of a single process with it and some of sharded models, since the suite has all
    of them without. With sabotage, single-process cases and those of sharded models against a library whose checks were taken out."""
    if sabotage:
        with _guards_removed():
            alone = complaints(ranks=False)
        return tally_control(alone, complaints_on_ranks(list(UNGUARDED), take_unguarded))
    found = complaints_on_ranks(list(UNGUARDED)) if quick else complaints()
    return tally({**found, **_complaints_without_asserts(quick=quick)})
