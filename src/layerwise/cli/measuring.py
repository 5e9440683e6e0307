"""How long something takes on a device, and what the device could do: for `layerwise bench` and the benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn


def wait_for(device: torch.device) -> None:
    """Return when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(
    call: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
    *,
    device: torch.device,
    repeats: int | None = None,
    before: Callable[[], object] = lambda: None,
) -> float:
    """The median time of a call from its beginning to the end of all that the device does for it. `prepare` comes before
    each and is not counted, nor is `before`, which a GPU is still at when the call begins. On a GPU the first few are not,
    either: kernels are compiled and recorded then."""
    warm_up = 5 if device.type == "cuda" else 1
    repeats = repeats or (15 if device.type == "cuda" else 3)
    times = []
    for _ in range(warm_up + repeats):
        prepare()
        wait_for(device)
        before()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            wait_for(device)
            times.append(float(begin.elapsed_time(end)))
        else:
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[warm_up:])


def host_ms(
    call: Callable[[], object], prepare: Callable[[], object] = lambda: None, *, device: torch.device, repeats: int = 7
) -> float:
    """How long the host is busy with a call, the waiting for what it reads back included."""
    times = []
    for _ in range(repeats):
        prepare()
        wait_for(device)
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    wait_for(device)
    return statistics.median(times)


def large_product(device: torch.device) -> Callable[[], torch.Tensor]:
    """A product of torch's that has the device busy: bf16 on a GPU, fp32 on a CPU."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right


def product_tflops(device: torch.device) -> float:
    """What such a product reaches at the moment."""
    product = large_product(device)
    return 2 * len(product()) ** 3 / median_ms(product, device=device) / 1e9


def ceilings(device: torch.device) -> dict[str, float]:
    """What such a product and a large copy reach."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    return {
        "tflops": round(product_tflops(device), 3),
        "copy_gb_s": round(2 * source.nbytes / median_ms(lambda: target.copy_(source), device=device) / 1e6, 1),
    }


def gpt_matrices(width: int, layers: int, device: torch.device) -> nn.Module:
    """The matrices of a GPT: no forward, only what an optimizer updates."""
    shapes = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    return nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(cols, rows, bias=False, device=device) for name, (rows, cols) in shapes.items()})
        for _ in range(layers)
    )
