"""What benchmarks/quantized_memory.py counts and compares; the figures of a GPU are taken there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import quantized_memory as benchmark
from benchmarks.quantized_memory import MODES, SHAPE, SMALL, Found, Setting
from benchmarks.tables import quantized_memory
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.layout.quantizing import quantized_table
from layerwise.models.table import param_table
from layerwise.planner.codes import codes_of
from layerwise.planner.memory import Memory
from layerwise.planner.presets import preset
from layerwise.train.model import GPT
from tests.ranks import run_ranks

TINY = Setting(shape=replace(SMALL, n_layers=1, vocab_size=256), device="cpu", bucket_mib=1.0)
EXACT = 4096
"""Bytes of vectors that are no part of a plan: statistics, a learning rate."""


def counted_once(rank: int, world: int) -> int:
    kept = torch.zeros(1000)
    before = benchmark.held_nbytes()
    parts = [kept[:10], kept.view(10, 100), torch.zeros(25)]
    after = benchmark.held_nbytes()
    assert len(parts) == 3
    return after - before


def test_what_overlaps_is_counted_once() -> None:
    assert run_ranks(1, counted_once) == [100]
    assert benchmark.union_nbytes([(100, 200), (150, 160), (199, 201), (300, 301)]) == 102


def held_and_hoarded(rank: int, world: int, mode: benchmark.Mode) -> tuple[Found, Found, int]:
    """What a run holds; and, for the control, what one holds in which what was given is kept beside its codes."""
    hoarded = []
    quantize = benchmark.layerwise.quantize

    def hoarding(module: torch.nn.Module, recipe: str) -> torch.nn.Module:
        hoarded.extend(param.detach() for param in module.parameters() if param.dim() == 2)
        return quantize(module, recipe)

    with mock.patch.object(benchmark, "STEPS", 1):
        found = benchmark.measure(mode, TINY)
        with mock.patch.object(benchmark.layerwise, "quantize", hoarding):
            more = benchmark.measure(mode, TINY)
    return found, more, sum(tensor.nbytes for tensor in hoarded)


@pytest.mark.parametrize("mode", [MODES[1], pytest.param(MODES[2], marks=pytest.mark.slow)])
def test_a_run_holds_what_is_planned_at_rest_and_a_tensor_more_is_seen(mode: benchmark.Mode) -> None:
    """In a process of its own: all tensors of a process are counted, and other tests have some."""
    ((found, more, hoarded),) = run_ranks(1, held_and_hoarded, mode)
    assert 0 <= found.at_rest - found.planned.at_rest < EXACT
    assert benchmark.misses(benchmark.rows_of([more])) != []
    assert more.at_rest - found.at_rest == hoarded > 0


def test_the_model_has_a_sixteenth_of_the_weights_in_every_part() -> None:
    with torch.device("meta"):
        small = quantized_table(param_table(GPT(SHAPE).bfloat16()), "mxfp8")
    whole = quantized_table(preset("llama3-8b"), "mxfp8")
    codes, codes_of_whole = codes_of(small), codes_of(whole)
    assert codes is not None
    assert codes_of_whole is not None
    assert (16 * codes.elements, 16 * codes.nbytes) == (codes_of_whole.elements, codes_of_whole.nbytes)
    others, others_of_whole = (
        sum(param.numel for param in table if not param.recipe and len(param.shape) == 2) for table in (small, whole)
    )
    assert 16 * others == others_of_whole
    buckets = make_plan(small, Options(layout="flat"), world=1).buckets
    assert sum(bucket.is_staged for bucket in buckets) > 2  # more than there are slots


def found_of(mode: str, at_rest: int, planned: int) -> Found:
    memory = Memory(params=planned, grads=0, masters=0, state=0, slots=10, workspace=5, passing=10)
    return Found(mode=mode, at_rest=at_rest, peak=at_rest + 15, rounding=0, planned=memory)


def test_rows_say_what_is_saved_and_what_is_too_far_off() -> None:
    rows = benchmark.rows_of([found_of("bf16", 1001 * 2**20, 1000 * 2**20), found_of("codes", 530 << 20, 500 << 20)])
    assert [(row["saved_mib"], row["planned_saved_mib"]) for row in rows] == [(0.0, 0.0), (471.0, 500.0)]
    assert benchmark.misses(rows) == ["codes: at_rest_ratio 1.06", "codes: peak_ratio 1.06"]


def test_the_table_has_a_line_for_each_mode() -> None:
    rows = benchmark.rows_of([found_of(mode.name, 1000 << 20, 1000 << 20) for mode in MODES])
    parts: list[dict[str, Any]] = [
        {
            "ranks": ranks,
            "shard_grads": ranks > 1,
            "rows": rows,
            "llama3_8b": benchmark.planned_preset("llama3-8b", TINY, 1),
        }
        for ranks in (1, 2)
    ]
    lines = quantized_memory({"parts": parts}).splitlines()
    assert len(lines) == 2 + 2 * len(MODES)
    assert lines[4].endswith("| 6654 |")  # blockwise
