"""Bandwidth of writing codes on a GPU, beside a device copy of as many bytes in the same run.

    python benchmarks/codec.py
    python benchmarks/codec.py --tiles    # other tiles beside those in use, printed only

Bytes are those of bf16 read once and of codes and scales written once; medians, with a cold cache and the host ahead at every launch.
`of_copy` is the rate over that of a copy that reads and writes as many bytes, `of_large_copy` over that of a copy of
gigabytes. Writes benchmarks/results/codec.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from layerwise.kernels.codec import Codes, encode_by_torch
from layerwise.kernels.encoders import EncoderTile
from layerwise.kernels.encoding import encode_both_into, encode_into
from layerwise.kernels.triton_codec import fused_encode
from layerwise.layout.recipes import FP8_ROWS, FP8_TILES, MX_E4M3, MX_E5M2

RESULTS = Path(__file__).parent / "results" / "codec.json"
FORMATS = {"mx e4m3": MX_E4M3, "mx e5m2": MX_E5M2, "fp8 1x128": FP8_ROWS, "fp8 128x128": FP8_TILES}
CASES = [*((name, True) for name in FORMATS), ("fp8 1x128", False), ("fp8 128x128", False)]
"""Formats, and whether codes of both directions are written. The recipes have MX of weights in both, and blocks of 128 in
one: of inputs by rows, and of weights in tiles that are the same from both sides."""
SHAPES = [(4096, 14336), (8192, 8192), (8, 2048, 2048), (1024, 4096)]


def device_ms(call: Callable[[], object], repeats: int = 50) -> float:
    """Median over launches that find the cache cold and the host ahead: the device sleeps until both are so."""
    call()
    cold = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        cold.zero_()
        torch.cuda._sleep(200_000)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def copy_tb_s(nbytes: int) -> float:
    """The rate of a copy that reads and writes so many bytes together."""
    source = torch.randint(0, 255, (nbytes // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_ms(lambda: target.copy_(source)) / 1e9


def encode_as_defined(x: torch.Tensor, rows: Codes, cols: Codes | None) -> None:
    """The definition, as torch runs it."""
    encode_by_torch(x, rows)
    if cols is not None:
        encode_by_torch(x.mT, cols)


def encode_by_us(x: torch.Tensor, rows: Codes, cols: Codes | None) -> None:
    """As params are encoded: by our own kernel if that has torch's bits here."""
    if cols is None:
        encode_into(x, rows)
    else:
        encode_both_into(x, rows, cols)


def measure(
    name: str, both: bool, shape: tuple[int, ...], large: float, tile: EncoderTile | None = None
) -> dict[str, Any]:
    x, format = torch.randn(shape, device="cuda", dtype=torch.bfloat16), FORMATS[name]
    rows = Codes.empty(shape, format, "cuda")
    cols = Codes.empty(tuple(x.mT.shape), format, "cuda") if both else None
    nbytes = x.nbytes + rows.nbytes + (cols.nbytes if cols is not None else 0)
    encode_by_us(x, rows, cols)
    ms = device_ms(lambda: fused_encode(x, rows, cols, tile) if tile else encode_by_us(x, rows, cols))
    rate, copy = nbytes / ms / 1e9, copy_tb_s(nbytes)
    return {
        "format": name,
        "directions": 2 if both else 1,
        "shape": list(shape),
        "ms": round(ms, 4),
        "torch_ms": round(device_ms(lambda: encode_as_defined(x, rows, cols)), 3),
        "tb_s": round(rate, 3),
        "copy_tb_s": round(copy, 3),
        "of_copy": round(rate / copy, 3),
        "of_large_copy": round(rate / large, 3),
    }


def sweep() -> None:
    """Of tiles and warps, the rate over that of a copy, for every shape."""
    for name, both in CASES:
        block = FORMATS[name].block
        for tall, wide, elements in product((32, 64, 128), (32, 64, 128), (32, 64, 128)):
            warps = tall * wide // elements // 32
            if wide % block[1] or tall % (max(block) if both else block[0]) or not 1 <= warps <= 16:
                continue
            found = [measure(name, both, shape, 1.0, EncoderTile(tall, wide, warps))["of_copy"] for shape in SHAPES]
            print(name, "both" if both else "rows", f"{tall} x {wide}, {warps} warps", found, flush=True)


def main() -> int:
    torch.manual_seed(0)
    if "--tiles" in sys.argv:
        sweep()
        return 0
    large = copy_tb_s(2**33)
    report = {
        "command": "python benchmarks/codec.py",
        "host": {
            "gpu": torch.cuda.get_device_name(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "large_copy_tb_s": round(large, 3),
        "rows": [measure(name, both, shape, large) for name, both in CASES for shape in SHAPES],
        "large_copy_tb_s_after": round(copy_tb_s(2**33), 3),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
