"""The cases whose bits and bytes are recorded, by topic: what the engine can be asked for, on one to four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import layerwise
from tests.distributed.goldens import Steps
from tests.worlds import MIXED

BF16, FP16 = torch.bfloat16, torch.float16
LAYOUTS = ("flat", "padded", "compact", "replicated")
SHARDED = ("flat", "padded", "compact")

MATRIX_RULES: dict[str, dict[str, Any]] = {
    "normuon": {"matrix": "normuon"},
    "adamuon": {"matrix": "adamuon"},
    "lion": {"matrix": "lion", "other": "lion"},
    "muon and lion": {"other": "lion", "nesterov": False, "scale": "spectral", "weight_decay_mode": "independent"},
    "adamw": {"matrix": "adamw", "weight_decay_mode": "coupled"},
    "muon in fp32": {"ns_dtype": torch.float32, "scale": "shape", "extra_scale": 0.5},
    "two dtypes": {"overrides": {"tall.weight": {"ns_dtype": torch.float32}, "norm.bias": {"other_lr": 0.01}}},
}


def _layouts() -> Iterator[tuple[str, Steps]]:
    for world in (1, 2, 3, 4):
        for layout in LAYOUTS:
            base = Steps(world=world, layout=layout)
            yield f"{layout} fp32", base
            yield f"{layout} bf16", replace(base, dtype=BF16, missing=True)
    for world in (2, 3, 4):
        for layout in LAYOUTS:
            yield f"{layout} fewer params than ranks", Steps(world=world, layout=layout, model="few", dtype=BF16)
    for layout in SHARDED:
        yield f"{layout} tied", Steps(world=3, layout=layout, model="tied", accumulation=2, missing=True)
        yield f"{layout} mixed dtypes", Steps(world=2, layout=layout, model="mixed", dtype=BF16, accumulation=2)
        yield f"{layout} late gradients", Steps(world=2, layout=layout, late=True)


def _reducers() -> Iterator[tuple[str, Steps]]:
    for world in (1, 2, 3, 4):
        for layout in SHARDED if world > 1 else ("flat",):
            base = Steps(world=world, layout=layout, wrapping={"reducer": "ordered"})
            yield f"{layout} ordered", replace(base, grads="gaussian", hyper={"clip": None})
    for layout in LAYOUTS:
        yield f"{layout} gaussian", Steps(layout=layout, grads="gaussian", hyper={"clip": None})
    yield "flat ordered bf16 gradients", Steps(world=3, dtype=BF16, grad_dtype=BF16, wrapping={"reducer": "ordered"})


def _memory() -> Iterator[tuple[str, Steps]]:
    for world in (1, 2, 3, 4):
        released: dict[str, Any] = {"shard_grads": True}
        for layout in ("flat", "padded"):
            yield f"{layout} shard_grads", Steps(world=world, layout=layout, wrapping=released, accumulation=2)
        for layout in ("flat", "compact"):
            more = {**released, "reducer": "ordered"}
            yield (
                f"{layout} shard_grads ordered",
                Steps(world=world, layout=layout, wrapping=more, dtype=BF16, missing=True, accumulation=2),
            )
    for world in (2, 3):
        yield "flat one cohort", Steps(world=world, cohort_numel=None, dtype=BF16)
        yield "flat one bucket", Steps(world=world, model="net", stepping={"check_replicas": True})


def _dtypes() -> Iterator[tuple[str, Steps]]:
    for world in (1, 2, 3, 4):
        for layout in LAYOUTS if world > 1 else ("flat",):
            yield f"{layout} bf16 gradients", Steps(world=world, layout=layout, grad_dtype=BF16, accumulation=2)
            yield f"{layout} all bf16", Steps(world=world, layout=layout, dtype=BF16, grad_dtype=BF16)
    for layout in ("flat", "padded"):
        released: dict[str, Any] = {"shard_grads": True}
        yield f"{layout} bf16 released", Steps(world=3, layout=layout, grad_dtype=BF16, wrapping=released)


def _rules() -> Iterator[tuple[str, Steps]]:
    for name, hyper in MATRIX_RULES.items():
        for world, layouts in ((1, ("flat",)), (2, ("padded", "compact")), (3, LAYOUTS), (4, ("flat",))):
            for layout in layouts:
                dtype = BF16 if world == 4 else torch.float32
                yield f"{layout} {name}", Steps(world=world, layout=layout, hyper=hyper, dtype=dtype, steps=4)


def _clipping() -> Iterator[tuple[str, Steps]]:
    scaled: dict[str, Any] = {
        "loss_scale": layerwise.LossScale(initial=2.0**8, growth_interval=2, hysteresis=1),
    }
    groups: dict[str, Any] = {
        "gradient_policy": layerwise.GradientPolicy(norm_groups={"stack": "experts", "attention": "qkv.*"})
    }
    for world in (2, 3):
        for layout in ("flat", "padded", "replicated"):
            base = Steps(world=world, layout=layout, steps=4)
            yield f"{layout} norm groups", replace(base, stepping=groups, hyper={"clip": 0.25})
            yield f"{layout} loss scale", replace(base, dtype=FP16, stepping=scaled, overflow=True)
        base = Steps(world=world)
        yield "flat clips others only", replace(base, hyper={"clip": 0.25, "clip_scope": "other-only"})
        above = {
            "gradient_policy": layerwise.GradientPolicy(skip_above=7.9 if world == 2 else 6.4)
        }  # two of four steps
        yield "flat skips above", replace(base, stepping=above, hyper={"clip": None}, steps=4)
        yield "flat no clipping", replace(base, hyper={"clip": None}, overflow=True, dtype=BF16)
    yield "flat loss scale", Steps(world=1, steps=4, dtype=FP16, stepping=scaled, overflow=True)


def _overlap() -> Iterator[tuple[str, Steps]]:
    apart: dict[str, Any] = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    for world in (1, 2, 3, 4):
        for layout in SHARDED if world > 1 else ("flat",):
            base = Steps(world=world, layout=layout, model="net", steps=4, accumulation=2)
            yield f"{layout} overlap", base
            yield f"{layout} no overlap", replace(base, wrapping=apart)
    for layout in ("flat", "compact"):
        base = Steps(world=3, layout=layout, model="net", steps=4, dtype=BF16)
        yield f"{layout} one ahead", replace(base, wrapping={"prefetch": 1})
        yield f"{layout} aligned", replace(base, wrapping={"overlap_param_gather": "by chunk"})
        yield f"{layout} released", replace(base, wrapping={"shard_grads": True, "reducer": "ordered"})


def _heads() -> Iterator[tuple[str, Steps]]:
    for world in (1, 2, 3, 4):
        for layout in ("flat", "padded", "compact", "replicated") if world in (2, 3) else ("flat", "padded"):
            base = Steps(world=world, layout=layout, model="heads", steps=5, accumulation=2)
            yield f"{layout} heads", base
            yield f"{layout} heads bf16", replace(base, dtype=BF16, wrapping={"overlap_param_gather": False})


def _experts() -> Iterator[tuple[str, Steps]]:
    for world, ep in ((1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4)):
        for layout in (*LAYOUTS, *MIXED) if world in (2, 4) else LAYOUTS:
            base = Steps(world=world, layout=layout, model="stages", spread={"ep": ep}, missing=world == 3)
            yield f"{layout} experts on {ep}", base
    for layout in ("flat", "padded", "compact"):
        base = Steps(world=4, layout=layout, model="stages", spread={"ep": 2}, dtype=BF16, accumulation=2)
        yield f"{layout} experts ordered", replace(base, wrapping={"reducer": "ordered"})
        yield f"{layout} experts adamuon", replace(base, hyper={"matrix": "adamuon"}, grad_dtype=BF16)
        yield f"{layout} experts normuon", replace(base, hyper={"matrix": "normuon"})
        released: dict[str, Any] = {"shard_grads": True, "reducer": "ordered"}
        yield f"{layout} experts released", replace(base, wrapping=released)


def _stages() -> Iterator[tuple[str, Steps]]:
    arranged: dict[str, tuple[int, dict[str, Any]]] = {
        "2 stages": (2, {"pp": 2}),
        "2 stages tied": (2, {"pp": 2, "tied": "embedding"}),
        "2 stages, a matrix tied": (2, {"pp": 2, "tied": "matrix"}),
        "3 stages tied": (3, {"pp": 3, "tied": "embedding"}),
        "3 stages, a matrix tied": (3, {"pp": 3, "tied": "matrix"}),
        "2 stages of 2, tied": (4, {"pp": 2, "tied": "embedding"}),
        "2 stages of 2, a matrix tied": (4, {"pp": 2, "ep": 2, "tied": "matrix"}),
        "2 stages of 2, two chunks, tied": (4, {"pp": 2, "chunks": 2, "tied": "embedding"}),
        "two chunks tied": (2, {"chunks": 2, "tied": "matrix"}),
        "three chunks": (3, {"chunks": 3, "ep": 3}),
        "two chunks alone": (1, {"chunks": 2, "tied": "embedding"}),
    }
    for name, (world, spread) in arranged.items():
        for layout in LAYOUTS:
            base = Steps(world=world, layout=layout, model="stages", spread=spread, accumulation=2)
            yield f"{layout} {name}", replace(base, dtype=BF16 if layout == "compact" else torch.float32)
    tied = Steps(world=4, model="stages", spread={"pp": 2, "tied": "matrix"}, missing=True)
    for layout in ("flat", "padded"):
        base = replace(tied, layout=layout)
        yield f"{layout} stages ordered", replace(base, wrapping={"reducer": "ordered"}, dtype=BF16)
        yield f"{layout} stages released", replace(base, wrapping={"shard_grads": True})
        yield f"{layout} stages normuon", replace(base, hyper={"matrix": "normuon"})
        groups: dict[str, Any] = {"gradient_policy": layerwise.GradientPolicy(norm_groups={"expert": "*experts.*"})}
        yield f"{layout} stages norm groups", replace(base, stepping=groups, hyper={"clip": 0.25})


def _plain() -> Iterator[tuple[str, Steps]]:
    base = Steps(world=1, plain=True, accumulation=2)
    yield "fp32", base
    yield "bf16", replace(base, dtype=BF16, missing=True)
    yield "tied", replace(base, model="tied", missing=True)
    yield "mixed dtypes", replace(base, model="mixed", dtype=BF16)
    yield "net", replace(base, model="net", steps=4)
    yield "net bf16", replace(base, model="net", steps=4, dtype=BF16)
    yield "few", replace(base, model="few")
    for name, hyper in MATRIX_RULES.items():
        if name != "two dtypes":  # a plain module's options come from no rules here
            yield name, replace(base, hyper=hyper, steps=4)
    scale = layerwise.LossScale(initial=2.0**8, growth_interval=2, hysteresis=1)
    yield "loss scale", replace(base, dtype=FP16, stepping={"loss_scale": scale}, overflow=True, steps=4)
    yield (
        "norm groups",
        replace(
            base,
            stepping={"gradient_policy": layerwise.GradientPolicy(norm_groups={"stack": "experts"})},
            hyper={"clip": 0.25},
        ),
    )


_TOPICS = {
    "layouts": _layouts,
    "reducers": _reducers,
    "memory": _memory,
    "dtypes": _dtypes,
    "rules": _rules,
    "clipping": _clipping,
    "overlap": _overlap,
    "heads": _heads,
    "experts": _experts,
    "stages": _stages,
    "plain": _plain,
}


def _all_cases() -> dict[str, dict[str, Steps]]:
    """Cases by topic and world, as many as one group of ranks takes one after the other."""
    found: dict[str, dict[str, Steps]] = {}
    for topic, cases in _TOPICS.items():
        for name, case in cases():
            label = f"{topic}, world {case.world}"
            full = f"{label}: {name}"
            if full in found.setdefault(label, {}):
                raise ValueError(f"two cases are called {full!r}.")
            found[label][full] = case
    return dict(sorted(found.items()))


BATCHES = _all_cases()
CASES = {name: case for batch in BATCHES.values() for name, case in batch.items()}
