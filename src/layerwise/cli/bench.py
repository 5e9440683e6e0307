"""`layerwise bench`: how fast Newton-Schulz and a whole optimizer step are on this machine, beside what the machine could
do, in one run."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from layerwise._version import __version__
from layerwise.cli import peers
from layerwise.cli.measuring import ceilings, gpt_matrices, host_ms, median_ms
from layerwise.config.coefficients import coefficient_schedule
from layerwise.config.rules import AdamW, Muon, Rule
from layerwise.kernels.facts import products_in_words
from layerwise.kernels.recorded import Recorder
from layerwise.layout.cost import fewest_flops, resolve_method
from layerwise.optim.optimizer import Optimizer
from layerwise.routing.rules import RouteRule

_STEPS = 5
_SHAPES = [(24, 1024, 1024), (24, 1024, 4096), (1, 4096, 4096), (1, 4096, 14336), (32, 7168, 2048), (16, 768, 3072)]
_SMALL_SHAPES = [(4, 64, 64), (2, 64, 256)]
"""For a machine without a GPU."""
_WHOLE = RouteRule(pattern="*.qkv.weight", to="matrix", split="whole")
"""A fused weight as one matrix, as torch.optim.Muon has it."""


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What was asked for."""

    what: Literal["ns", "step"]
    width: int | None = None
    layers: int | None = None
    as_json: bool = False


def run(request: BenchRequest) -> int:
    """Measure and print; returns the exit code."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    found = ceilings(device)
    report: dict[str, Any] = {
        "command": f"layerwise bench {request.what}",
        "host": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "layerwise": __version__,
        },
        "products": products_in_words(device, torch.bfloat16, torch.bfloat16),
        "ceilings": found,
    }
    if request.what == "ns":
        shapes = _SHAPES if device.type == "cuda" else _SMALL_SHAPES
        report["rows"] = [_newton_schulz(shape, device, found["tflops"]) for shape in shapes]
    else:
        width, layers = (1024, 24) if device.type == "cuda" else (64, 2)
        report["rows"] = _steps(request.width or width, request.layers or layers, device)
    if request.as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0


def _newton_schulz(shape: tuple[int, int, int], device: torch.device, tflops: float) -> dict[str, Any]:
    """One batch as a step orthogonalises it: again and again in the same memory."""
    values = torch.randn(shape, device=device).bfloat16()
    place, recorder = torch.empty_like(values), Recorder()
    schedule = coefficient_schedule("polar_express", _STEPS)
    found = median_ms(
        lambda: recorder.orthogonalize(place, schedule=schedule, dtype=torch.bfloat16),
        lambda: place.copy_(values),
        device=device,
    )
    others = {
        f"{name}, ms": round(median_ms(partial(call, values), device=device), 3)
        for name, call in peers.newton_schulz(schedule).items()
    }
    batch, rows, cols = shape
    floor = batch * fewest_flops(rows, cols, _STEPS) / tflops / 1e9
    return {
        "matrices": f"{batch} of {rows} x {cols}",
        "form": resolve_method("auto", rows, cols),
        "ms": round(found, 3),
        "floor_ms": round(floor, 3),
        "over_floor": round(found / floor, 2),
        **others,
    }


def _steps(width: int, layers: int, device: torch.device) -> list[dict[str, Any]]:
    """Whole steps of our own optimizer and of others, over the same matrices."""

    def own(module: nn.Module, matrix: Rule) -> torch.optim.Optimizer:
        return Optimizer(module, matrix=matrix, other=AdamW(lr=1e-3), rules=[_WHOLE])

    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "layerwise Muon": lambda module: own(module, Muon(lr=1e-3)),
        "layerwise AdamW": lambda module: own(module, AdamW(lr=1e-3)),
        "torch AdamW, fused": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True),
        **peers.optimizers(),
    }
    return [{"optimizer": name, **_step(make, width, layers, device)} for name, make in makers.items()]


def _step(
    make: Callable[[nn.Module], torch.optim.Optimizer], width: int, layers: int, device: torch.device
) -> dict[str, Any]:
    module = gpt_matrices(width, layers, device)
    params = list(module.parameters())
    optimizer = make(module)

    def prepare() -> None:
        for param in params:
            param.grad = torch.randn_like(param)

    whole = median_ms(optimizer.step, prepare, device=device)
    return {
        "matrices": f"{layers} layers of width {width}",
        "ms": round(whole, 3),
        "host_ms": round(host_ms(optimizer.step, prepare, device=device, repeats=3), 3),
    }


def _print(report: dict[str, Any]) -> None:
    from layerwise.cli.console import print_table

    rows: Sequence[dict[str, Any]] = report["rows"]
    names = {"ms": "ms", "host_ms": "host, ms", "floor_ms": "floor, ms", "over_floor": "over floor"}
    header = tuple(names.get(name, name) for name in rows[0])
    print(f"{report['host']['device']}, torch {report['host']['torch']}; {report['products']}")
    print("a large product reaches {tflops} TFLOP/s, a large copy {copy_gb_s} GB/s".format(**report["ceilings"]))
    print_table("", header, [tuple(map(str, row.values())) for row in rows])
