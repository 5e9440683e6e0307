"""`chain.cu`: compiled by NVRTC, which comes with torch, when it is first asked for, and launched through the driver, both by
ctypes. What is missing for that is said by `why_none`."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerwise.kernels.products import CHAIN_TILE, teams_of
from layerwise.kernels.tables import multiprocessors, stream_on
from layerwise.kernels.triton_products import Product, tiles_of

_DEPTH, _BOX = 64, 64
_THREADS = 384
_STAGES, _STAGE_NBYTES, _STAGING_NBYTES, _BARRIERS_NBYTES, _ALIGNMENT = 4, 32768, 49152, 1024, 1024
_SHARED_NBYTES = _STAGES * _STAGE_NBYTES + 2 * _STAGING_NBYTES + _BARRIERS_NBYTES + _ALIGNMENT
_MAPS, MOST_PRODUCTS = 8, 20
"""As in chain.cu, all of them."""
_MAP_NBYTES = 128
_WIDE, _TALL, _PLAIN = range(3)
_DTYPES = {torch.float16: 6, torch.bfloat16: 9}
"""As the driver numbers what a map describes."""
_SWIZZLE_128B, _PROMOTION_128B = 3, 2
_MAX_DYNAMIC_SHARED = 8


class ChainUnavailable(RuntimeError):
    """There is no such kernel here."""


class Counted(NamedTuple):
    """What the counters of a batch are at: those of its matrices, and the one of tasks."""

    tiles: int = 0
    tasks: int = 0


def launch_chain(products: Sequence[Product], counters: Tensor, before: Counted) -> Counted:
    """Launch them on the current stream.

    `counters` are an int32 for each matrix and one more, and are at `before`; returns what they will be at. All have rows that
    begin at multiples of 16 bytes.
    """
    batch = products[0].out.shape[0]
    device, dtype = products[0].out.device, products[0].left[0].dtype
    counts = [_tiles_of(product).numel() for product in products]
    with torch.cuda.device(device):
        function = _function(device, dtype)
        arguments = _arguments(products, counters, before)
        programs = min(batch * max(counts), multiprocessors(device))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        sizes = map(ctypes.c_uint32, (programs, 1, 1, _THREADS, 1, 1, _SHARED_NBYTES))
        stream = ctypes.c_void_p(stream_on(device))
        _driver().call("cuLaunchKernel", function, *sizes, stream, pointers, None)
    # Every program asks once for a task that there is not.
    tiles = sum(counts)
    return Counted(before.tiles + tiles, before.tasks + batch * tiles + programs)


def _tiles_of(product: Product) -> Tensor:
    return tiles_of(*product.out.shape[1:], CHAIN_TILE, product.out.device, lower=product.is_symmetric)


def why_none(device: torch.device, dtype: torch.dtype) -> str:
    """Why there are no chains on this device; empty if there are. Compiles the kernel at its first call."""
    try:
        with torch.cuda.device(device):
            torch.empty(1, device=device)  # from here on there is a context
            _function(device, dtype)
    except ChainUnavailable as error:
        return str(error)
    return ""


class _Product(ctypes.Structure):
    """`Product` of chain.cu."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("left", "right", "out", "first", "second", "kind", "steps", "part")),
        *((name, ctypes.c_float) for name in ("alpha", "beta", "gamma", "diagonal")),
        *((name, ctypes.c_int64) for name in ("tiles", "scales")),
        *((name, ctypes.c_int32) for name in ("num_tiles", "tiles_before", "is_symmetric", "is_bf16")),
    ]


class _Chain(ctypes.Structure):
    """`Chain` of chain.cu."""

    _fields_ = [
        ("maps", ctypes.c_byte * (_MAPS * _MAP_NBYTES)),
        ("products", _Product * MOST_PRODUCTS),
        *((name, ctypes.c_int64) for name in ("counters", "next")),
        ("first_number", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("num_products", "batch", "teams", "tiles_of_matrix", "tiles_done")),
        ("unused", ctypes.c_byte * 24),  # up to a multiple of 64
    ]


def _arguments(products: Sequence[Product], counters: Tensor, before: Counted) -> _Chain:
    """What the kernel is launched with."""
    batch, size, _ = products[0].out.shape
    if counters.numel() != batch + 1:
        # A chain that counts some matrices only would leave the next one of the others waiting for ever.
        raise ValueError(f"{batch} matrices need {batch + 1} counters, got {counters.numel()}")
    if len(products) > MOST_PRODUCTS:
        raise ValueError(f"a chain has at most {MOST_PRODUCTS} products, got {len(products)}")
    # The driver writes maps to multiples of 64 bytes, in newer headers of 128.
    memory = ctypes.create_string_buffer(ctypes.sizeof(_Chain) + _MAP_NBYTES)
    arguments = _Chain.from_buffer(memory, -ctypes.addressof(memory) % _MAP_NBYTES)
    places: dict[tuple[int, ...], int] = {}

    def map_of(x: Tensor) -> int:
        key = (x.data_ptr(), *x.shape, *x.stride())
        if key not in places:
            if len(places) == _MAPS:
                raise ValueError(f"a chain reads and writes at most {_MAPS} memories")
            _encode(ctypes.addressof(arguments) + len(places) * _MAP_NBYTES, x)
            places[key] = len(places)
        return places[key]

    tiles_before = 0
    for product, into in zip(products, arguments.products, strict=False):
        left = product.left[0]
        rows, cols = left.shape[1:]
        into.kind = _PLAIN if product.right is not None else _TALL if rows > cols else _WIDE
        into.steps = -(-(rows if into.kind == _TALL else cols) // _DEPTH)
        into.left = map_of(left)
        into.part = batch
        if len(product.left) > 1:
            into.part = left.shape[0]
            if len(product.left) > 2 or map_of(product.left[1]) != into.left + 1:
                raise ValueError("only the first operand of a chain may lie in two memories")
        into.right = into.left if product.right is None else map_of(product.right)
        into.out = map_of(product.out)
        into.alpha, into.diagonal, into.is_symmetric = product.alpha, product.diagonal, product.is_symmetric
        into.is_bf16 = product.out.dtype == torch.bfloat16
        into.first = into.second = -1
        if product.addends:
            first, into.beta = product.addends[0]
            into.first = map_of(first)
        if len(product.addends) > 1:
            second, into.gamma = product.addends[1]
            into.second = map_of(second)
        if product.scales is not None:
            into.scales = product.scales.data_ptr()
        tiles = _tiles_of(product)
        into.tiles, into.num_tiles, into.tiles_before = tiles.data_ptr(), tiles.numel(), tiles_before
        tiles_before += into.num_tiles
    arguments.counters, arguments.next = counters.data_ptr(), counters[-1:].data_ptr()
    arguments.tiles_done, arguments.first_number = before
    arguments.num_products, arguments.batch, arguments.teams = len(products), batch, teams_of(batch, size)
    arguments.tiles_of_matrix = tiles_before
    return arguments


def _encode(into: int, x: Tensor) -> None:
    """The map of a batch, in boxes of 64 x 64; beyond its edges it reads zeros and writes nothing."""
    batch, rows, cols = x.shape
    stride_batch, stride_row = (stride * x.element_size() for stride in x.stride()[:2])
    _driver().call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(into),
        ctypes.c_int(_DTYPES[x.dtype]),
        ctypes.c_uint32(3),
        ctypes.c_void_p(x.data_ptr()),
        (ctypes.c_uint64 * 3)(cols, rows, batch),
        (ctypes.c_uint64 * 2)(stride_row, stride_batch),
        (ctypes.c_uint32 * 3)(_BOX, _BOX, 1),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_PROMOTION_128B),
        ctypes.c_int(0),
    )


class _Library:
    """A C library whose functions return 0."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise ChainUnavailable(f"there is no {name} here: the driver or NVRTC is too old")
        code = function(*arguments)
        if code != 0:
            raise ChainUnavailable(f"{name} failed with error {code}")


@cache
def _driver() -> _Library:
    try:
        return _Library(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise ChainUnavailable(f"there is no driver: {error}") from error


@cache
def _nvrtc() -> _Library:
    for name in _nvrtc_names():
        try:
            return _Library(ctypes.CDLL(name))
        except OSError:
            continue
    raise ChainUnavailable("there is no NVRTC (libnvrtc.so) beside torch or on the system")


def _nvrtc_names() -> Iterator[str]:
    own = str(torch.version.cuda).partition(".")[0]  # what this torch's driver understands
    names = sorted(("libnvrtc.so.13", "libnvrtc.so.12"), key=lambda name: not name.endswith(own))
    yield from names
    packages = Path(torch.__file__).resolve().parent.parent
    for folder in ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "torch/lib"):
        yield from (str(packages / folder / name) for name in names)
    found = ctypes.util.find_library("nvrtc")
    if found is not None:
        yield found


@cache
def _cubin(dtype: torch.dtype) -> bytes:
    """chain.cu, compiled."""
    nvrtc = _nvrtc()
    try:
        source = Path(__file__).with_name("chain.cu").read_bytes()
    except OSError as error:
        raise ChainUnavailable(f"its source is not there: {error}") from error
    options = [b"--gpu-architecture=sm_90a", b"-std=c++17", b"-DFP16=%d" % (dtype == torch.float16)]
    program = ctypes.c_void_p()
    nvrtc.call("nvrtcCreateProgram", ctypes.byref(program), source, b"chain.cu", 0, None, None)
    try:
        try:
            nvrtc.call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        except ChainUnavailable as error:
            nbytes = ctypes.c_size_t()
            nvrtc.call("nvrtcGetProgramLogSize", program, ctypes.byref(nbytes))
            log = ctypes.create_string_buffer(nbytes.value)
            nvrtc.call("nvrtcGetProgramLog", program, log)
            raise ChainUnavailable(f"chain.cu does not compile: {log.value.decode(errors='replace')}") from error
        nbytes = ctypes.c_size_t()
        nvrtc.call("nvrtcGetCUBINSize", program, ctypes.byref(nbytes))
        found = ctypes.create_string_buffer(nbytes.value)
        nvrtc.call("nvrtcGetCUBIN", program, found)
        return found.raw
    finally:
        nvrtc.call("nvrtcDestroyProgram", ctypes.byref(program))


@cache
def _function(device: torch.device, dtype: torch.dtype) -> ctypes.c_void_p:
    """The kernel on a device, which is the current one. Not while a stream is recorded."""
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(module), _cubin(dtype))
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, b"run_chain")
    driver.call("cuFuncSetAttribute", function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(_SHARED_NBYTES))
    return function
