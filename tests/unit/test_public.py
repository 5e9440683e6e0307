"""What a user sees of the public names: their help, what tab completion shows, and what they say to habits from other
libraries."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

import layerwise
from layerwise.engine.totals import StepStats


def public_classes() -> list[type]:
    """Those whose `__init__` is this library's: torch's planners keep torch's, and a protocol has none."""
    found = [getattr(layerwise, name) for name in layerwise.__all__]
    return [
        kind
        for kind in found
        if inspect.isclass(kind) and getattr(kind.__init__, "__module__", "").startswith("layerwise.")
    ]


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: kind.__name__)
def test_help_of_a_class_names_every_argument(kind: type) -> None:
    _, _, section = inspect.getdoc(kind).partition("\nArgs:\n")  # type: ignore[union-attr]
    told = [name for names in re.findall(r"^    (\w[\w, ]*): \S", section, re.MULTILINE) for name in names.split(", ")]
    assert told == [name for name in inspect.signature(kind).parameters if not name.startswith("_")]


def test_every_public_class_of_ours_was_looked_at() -> None:
    assert {kind.__name__ for kind in public_classes()} == {
        *("AdaMuon", "AdamW", "Lion", "Muon", "NorMuon", "RouteRule", "Split", "AttentionHeads", "QKClip", "LossScale"),
        "GradientPolicy",
        *("DataParallel", "Optimizer", "Checkpoints"),
    }


def test_tab_completion_shows_the_public_names() -> None:
    shown = dir(layerwise)
    assert [name for name in shown if not name.startswith("__")] == [
        name for name in sorted(layerwise.__all__) if name != "__version__"
    ]
    assert {"__version__", "__name__", "__file__", "__doc__", "__all__"} <= set(shown)


@pytest.mark.parametrize(
    ("name", "meant"), [("Optimiser", "Optimizer"), ("muon", "Muon"), ("Dataparallel", "DataParallel")]
)
def test_a_misspelt_name_gets_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'. Did you mean '{meant}'\\?$"):
        getattr(layerwise, name)
    assert not hasattr(layerwise, "__wrapped__")


@pytest.mark.parametrize(
    "name", ["TrainState", "SavePlanner", "LoadPlanner", "adopt", "register_quantized", "QuantizedStorage", "Saving"]
)
def test_a_name_that_has_moved_says_where(name: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"layerwise\.{name} has moved: write `from layerwise\.(\S+) import {name}`"
    ) as caught:
        getattr(layerwise, name)
    module = re.search(r"from (\S+) import", str(caught.value))
    assert module is not None
    assert hasattr(importlib.import_module(module[1]), name)


def test_public_modules_are_imported_when_they_are_named() -> None:
    code = "import sys, layerwise; before = 'torch' in sys.modules; layerwise.quant.adopt, layerwise.trace.follow; sys.exit(before)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_at_most_20_names_are_public() -> None:
    assert len(layerwise.__all__) <= 20


# ------------------------------------------------------------------------------------------------ habits

OTHERS: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.01), "other": layerwise.AdamW(lr=0.01)}


def layer() -> nn.Module:
    return nn.Linear(4, 4)


def muon(*args: Any, **options: Any) -> Callable[[], object]:
    return lambda: layerwise.Muon(*args, **options)


def wrapped(*args: Any, **options: Any) -> Callable[[], object]:
    return lambda: layerwise.DataParallel(layer(), *args, **options)


def stepped(*args: Any, **options: Any) -> Callable[[], object]:
    return lambda: layerwise.Optimizer(layer(), *args, **options)


HABITS: list[tuple[Callable[[], object], str]] = [
    (muon(0.02), "Muon() takes its options by name: write Muon(lr=0.02)."),
    (muon(0.02, nesterov=False), "Muon() takes its options by name: write Muon(lr=0.02, ...)."),
    (muon(iter(()), lr=0.02), "Muon() takes its options by name: write Muon(lr=..., ...)."),
    (muon(), "Muon() lacks 'lr': write lr=."),
    (muon(lr=0.02, ns_steps=6), "Muon() has no argument 'ns_steps': write steps=."),
    (muon(lr=0.02, betas=(0.9, 0.95)), "Muon() has no argument 'betas': write momentum= for the first of them"),
    (muon(lr=0.02, eps=1e-7), "Muon() has no argument 'eps': leave it out"),
    (muon(lr=0.02, adjust_lr_fn="match_rms_adamw"), "'adjust_lr_fn': write scale='rms' for 'match_rms_adamw'"),
    (muon(lr=0.02, ns_coefficients=(1, 2, 3)), "'ns_coefficients': write coefficients="),
    (muon(lr=0.02, momentun=0.9), "Muon() has no argument 'momentun'. Did you mean 'momentum'?"),
    (lambda: layerwise.NorMuon(lr=0.1, betas=(0.9, 0.9)), "write momentum= for the first of them and beta2="),  # type: ignore[call-arg]
    (lambda: layerwise.AdamW(1e-3), "write AdamW(lr=0.001)."),  # type: ignore[misc, call-arg]
    (lambda: layerwise.AdamW(lr=1e-3, fused=True), "AdamW() has no argument 'fused': leave it out"),  # type: ignore[call-arg]
    (lambda: layerwise.RouteRule("x", "matrix"), "write RouteRule(pattern='x', to='matrix')."),  # type: ignore[misc, call-arg]
    (lambda: layerwise.RouteRule(pattern="x"), "RouteRule() lacks 'to': write to='matrix' or to='other'."),  # type: ignore[call-arg]
    (lambda: layerwise.RouteRule(pattern="x", to="other", lr=1.0), "'lr': write options={'lr': ...}."),  # type: ignore[call-arg]
    (lambda: layerwise.Split((4, 4), "rc"), "write Split(grid=..., roles='rc')."),  # type: ignore[misc, call-arg]
    (lambda: layerwise.QKClip(50.0), "write QKClip(threshold=50.0)."),  # type: ignore[misc, call-arg]
    (lambda: layerwise.LossScale(init_scale=4.0), "'init_scale': write initial=."),  # type: ignore[call-arg]
    (wrapped(device_ids=[0]), "DataParallel() has no argument 'device_ids': leave it out; layerwise.init() takes"),
    (wrapped(bucket_cap_mb=25), "'bucket_cap_mb': write bucket_mib=."),
    (lambda: layerwise.DataParallel(), "DataParallel() lacks 'module'"),  # type: ignore[call-arg]
    (stepped(**OTHERS, lr=0.1), "Optimizer() has no argument 'lr': give it to the rules"),
    (stepped(*OTHERS.values()), "write Optimizer(model, matrix=..., other=...)."),
    (stepped(matrix=OTHERS["matrix"]), "Optimizer() lacks 'other': write other=layerwise.AdamW(lr=...)."),
]


@pytest.mark.parametrize(("call", "said"), HABITS, ids=[said[:60] for _, said in HABITS])
def test_a_call_as_another_library_has_it_says_what_to_write(call: Callable[[], object], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert said in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert "__init__" not in str(caught.value)


def arguments(kind: Any) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name not in ("params", "module", "args", "kwargs")]


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (layerwise.Muon, torch.optim.Muon),
        (layerwise.AdamW, torch.optim.AdamW),
        (layerwise.DataParallel, nn.DataParallel),
        (layerwise.LossScale, torch.amp.GradScaler),
    ],
)
def test_every_argument_of_torchs_class_is_here_or_is_told_of(ours: Any, torchs: Any) -> None:
    required = {"lr": 0.1} if issubclass(ours, layerwise.Muon | layerwise.AdamW) else {}
    given = [layer()] if ours is layerwise.DataParallel else []
    known = set(arguments(ours))
    for name in set(arguments(torchs)) - known - {"device", "growth_interval"}:
        with pytest.raises(TypeError, match=f"has no argument '{name}': (write|leave)"):
            ours(*given, **required, **{name: None})


DDP_HABITS = ("output_device", "find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "static_graph")


@pytest.mark.parametrize("name", [*DDP_HABITS, "bucket_cap_mb", "device_mesh", "mixed_precision", "init_sync"])
def test_what_ddp_is_told_is_no_argument_here(name: str) -> None:
    with pytest.raises(TypeError, match=f"has no argument '{name}': (write|leave)"):
        layerwise.DataParallel(layer(), **{name: True})


def test_a_signature_is_what_it_was() -> None:
    assert list(inspect.signature(layerwise.QKClip).parameters) == ["threshold", "balance"]
    assert inspect.signature(layerwise.Muon).parameters["lr"].kind is inspect.Parameter.KEYWORD_ONLY


TORCHS: dict[str, tuple[Callable[[], object], str]] = {
    "an optimizer": (
        lambda: torch.optim.AdamW(layer().parameters(), lr=0.25, weight_decay=0.5),
        "other must be a rule such as layerwise.AdamW(lr=0.25, weight_decay=0.5, betas=(0.9, 0.999), eps=1e-08), got a torch.optim.",
    ),
    "another optimizer": (
        lambda: torch.optim.SGD([nn.Parameter(torch.zeros(3))] * 1, lr=0.25),
        "other must be a rule such as layerwise.AdamW(lr=...), got a torch.optim.sgd.SGD.",
    ),
    "a class of torch's": (lambda: torch.optim.AdamW, "got the class torch.optim.adamw.AdamW."),
    "a class of ours": (
        lambda: layerwise.Lion,
        "such as layerwise.Lion(lr=...), got the class layerwise.config.rules.Lion.",
    ),
    "a number": (lambda: 0.1, "other must be a rule such as layerwise.AdamW(lr=...), got 0.1."),
}


@pytest.mark.parametrize("what", TORCHS)
def test_what_is_no_rule_is_named_in_short_with_the_rule_to_write(what: str) -> None:
    make, said = TORCHS[what]
    with pytest.raises(TypeError) as caught:
        layerwise.Optimizer(layer(), matrix=layerwise.Muon(lr=0.1), other=make())  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert len(str(caught.value)) < 200


CYCLING: dict[str, Callable[..., LRScheduler]] = {
    "OneCycleLR": lambda optimizer, **more: OneCycleLR(optimizer, max_lr=0.1, total_steps=4, **more),
    "CyclicLR": lambda optimizer, **more: CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, **more),
}


@pytest.mark.parametrize("name", CYCLING)
def test_a_scheduler_that_cycles_momentum_says_what_to_pass(name: str) -> None:
    optimizer = layerwise.Optimizer(layer(), **OTHERS)
    with pytest.raises(ValueError, match=f"^{name} was built over .* Pass cycle_momentum=False.$"):
        CYCLING[name](optimizer)
    CYCLING[name](optimizer, cycle_momentum=False)
    assert "momentum" not in optimizer.defaults


# ------------------------------------------------------------------------------------------------ one line


class Deep(nn.Module):
    """Many params."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(72))
        self.table = nn.Embedding(3, 4).requires_grad_(False)


def test_plans_and_models_print_as_one_line() -> None:
    model = layerwise.DataParallel(Deep(), layout="flat")
    digest = model.plan.digest[:12]
    assert repr(model.plan) == f"Plan(flat, 1 rank, 72 matrices, 72 other params, 1 frozen, digest {digest})"
    assert str(model.plan) == repr(model.plan)
    assert repr(model) == f"DataParallel(Deep, flat, 1 rank, 72 matrices, 72 other params, 1 frozen, digest {digest})"
    assert str(nn.ModuleDict({"inner": model})).count("\n") == 2


def trained(**options: Any) -> layerwise.Optimizer:
    model = layerwise.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    optimizer = layerwise.Optimizer(model, **OTHERS, **options)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def test_stats_print_as_one_line_with_what_is_unusual() -> None:
    assert re.fullmatch(r"step 1, grad_norm [\d.]+, 0 B sent", str(trained().stats))
    clipped = trained(clip_grad_norm=1e-3, gradient_policy=layerwise.GradientPolicy(norm_groups={"head": "1.*"}))
    assert re.search(r"^step 1, .*, head clipped x[\d.e-]+, matrix clipped x", str(clipped.stats))
    skipped = StepStats(step=3, skipped=True, skip_reason="a gradient is inf", nonfinite=("a", "b"), missing={"c": 2})
    assert str(skipped) == "step 3, grad_norm nan, skipped: a gradient is inf, missing 1, nonfinite 2, 0 B sent"
    assert "\n" not in str(StepStats())


def test_stats_as_a_dict_are_flat_and_plain_under_the_same_keys_at_every_step() -> None:
    optimizer = trained(count_zeros=True, gradient_policy=layerwise.GradientPolicy(norm_groups={"head": "1.*"}))
    first = optimizer.stats.as_dict()
    assert {type(value) for value in first.values()} <= {int, float, bool, str}
    assert {
        "step",
        "grad_norm",
        "norms/matrix",
        "norms/other",
        "norms/head",
        "num_zeros",
        "skipped",
        "bytes_sent",
    } <= set(first)
    assert (first["step"], first["missing"], first["skip_reason"], first["loss_scale"]) == (1, 0, "", 1.0)
    assert not {"max_logit", "products"} & set(first)
    with pytest.warns(UserWarning, match="no param has a gradient"):
        optimizer.step()
    second = optimizer.stats.as_dict()
    assert second.keys() == first.keys()
    assert second["skipped"] is True
    assert second["missing"] == 4


# ------------------------------------------------------------------------------------------------ imports


def test_naming_the_classes_loads_no_compiler() -> None:
    code = (
        "import sys, layerwise; layerwise.DataParallel; layerwise.Optimizer; layerwise.load; "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
