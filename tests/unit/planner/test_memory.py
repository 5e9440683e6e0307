"""Planned memory, against numbers worked out by hand. Real runs are counted in tests/distributed/test_planned_bytes.py."""

from __future__ import annotations

import time
from typing import Any

import pytest

from layerwise.config.rules import AdaMuon, AdamW, Lion, Muon, NorMuon
from layerwise.dtypes import DType
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.layout.quantizing import quantized_table
from layerwise.planner.codes import codes_of
from layerwise.planner.memory import Memory, memory_by_rank
from layerwise.planner.presets import preset
from layerwise.planner.rules import Rules, schedule_for, wire_dtypes_for
from layerwise.routing.rules import RouteRule
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable, table_of


def planned(
    table: ParamTable,
    rules: Rules | None = None,
    *,
    world: int,
    worlds: dict[str, int] | None = None,
    **options: Any,
) -> list[Memory]:
    rules = rules or Rules()
    plan = make_plan(table, Options(**options), world=world, worlds=worlds)
    return memory_by_rank(plan, schedule_for(plan, rules), rules)


TWO = table_of([("a.weight", (64, 64)), ("b.weight", (64, 64))])
"""8192 bf16 elements; on two ranks a matrix for each."""


def test_a_small_model_by_hand() -> None:
    first, second = planned(TWO, world=2, layout="flat")
    assert first == second
    assert (first.params, first.grads, first.masters, first.state) == (8192 * 2, 8192 * 4, 4096 * 4, 4096 * 4)
    assert first.slots == 2 * 4096 * 2  # its matrix, and what became of it
    assert first.workspace == 4096 * 2  # another matrix and a polynomial, but what became of it lies in its place
    assert first.total == 8192 * 6 + 4096 * 14


def test_fp32_params_are_their_own_masters() -> None:
    table = table_of([("a.weight", (64, 64)), ("b.weight", (64, 64))], dtype=DType.FP32)
    assert {memory.masters for memory in planned(table, world=2, layout="flat")} == {0}


@pytest.mark.parametrize(
    ("options", "grads"),
    [
        ({}, 8192 * 4),
        ({"grad_dtype": DType.BF16}, 8192 * 2 + 4096 * 4),  # and an fp32 copy of the shard
        ({"reducer": "ordered"}, 8192 * 4),
        ({"reducer": "ordered", "grad_dtype": DType.BF16}, 8192 * 2 + 4096 * 4),  # the sum is fp32 already
        ({"shard_grads": True}, 8192 * 4 + 4096 * 4),  # one bucket: one slot
        ({"shard_grads": True, "bucket_numel": 4096}, 2 * 4096 * 4 + 4096 * 4),  # two slots
        ({"shard_grads": True, "grad_dtype": DType.BF16}, 8192 * 2 + 4096 * 2 + 4096 * 4),
    ],
)
def test_gradients_by_hand(options: dict[str, object], grads: int) -> None:
    assert {memory.grads for memory in planned(TWO, world=2, layout="flat", **options)} == {grads}


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        (Muon(lr=0.0), 4096 * 4),
        (NorMuon(lr=0.0), 4096 * 4 + 64 * 4),
        (AdaMuon(lr=0.0), 4096 * 4 + 4096 * 4),
        (AdamW(lr=0.0), 4096 * 8),
        (Lion(lr=0.0), 4096 * 4),
    ],
)
def test_state_by_hand(rule: Muon | AdamW | Lion, state: int) -> None:
    found = planned(TWO, Rules(matrix=rule), world=2, layout="flat")
    assert {memory.state for memory in found} == {state}
    assert all((memory.slots > 0) == rule.is_matrix_rule for memory in found)


def test_an_ordered_sum_receives_as_much_as_it_sends() -> None:
    rules = Rules(matrix=AdamW(lr=0.0))
    plain, ordered, narrow = (
        planned(TWO, rules, world=2, layout="flat", **options)[0].slots
        for options in ({}, {"reducer": "ordered"}, {"reducer": "ordered", "grad_dtype": DType.BF16})
    )
    assert (plain, ordered, narrow) == (0, 8192 * 4, 8192 * 2)


def test_owners_of_uneven_shards_hold_uneven_masters() -> None:
    table = table_of([("a.weight", (64, 64)), ("b.weight", (64, 8))])
    found = planned(table, world=2, layout="compact")
    assert sorted(memory.masters for memory in found) == [512 * 4, 4096 * 4]
    assert len({memory.params for memory in found}) == 1


def test_frozen_params_count_as_params_and_as_nothing_else() -> None:
    frozen = ParamSpec(fqn="c", shape=(100,), dtype=DType.FP32, trainable=False, module_kind=ModuleKind.NORM)
    without, with_it = planned(TWO, world=2)[0], planned(ParamTable((*TWO, frozen)), world=2)[0]
    assert with_it.params == without.params + 400
    assert with_it.total == without.total + 400


@pytest.mark.parametrize("gather", ["quantized", "bf16"])
def test_a_param_that_was_quantised_and_then_frozen_has_codes_and_values(gather: str) -> None:
    frozen = ParamSpec(fqn="c", shape=(64, 64), dtype=DType.BF16, trainable=False, recipe="mxfp8", codes_nbytes=8448)
    without, with_it = (planned(table, world=2, param_gather=gather)[0] for table in (TWO, ParamTable((*TWO, frozen))))
    assert with_it.params == without.params + 4096 * 2 + 2 * (4096 + 128)
    assert with_it.at_rest == without.at_rest + 4096 * 2 + 2 * (4096 + 128)


@pytest.mark.parametrize("layout", ["flat", "padded", "compact"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_shards_add_up_to_the_whole(layout: str, world: int) -> None:
    plan = make_plan(preset("gpt2"), Options(layout=layout), world=world)
    found = memory_by_rank(plan, schedule_for(plan, Rules()), Rules())
    numel = sum(buffer.numel for buffer in plan.buffers)
    assert sum(memory.masters for memory in found) == 4 * numel
    assert {memory.params for memory in found} == {2 * numel}


def test_experts_are_held_by_the_ranks_of_their_domain() -> None:
    """Two copies of each expert on four ranks: neighbours hold different experts, so they share a place in the domain."""
    expert = ParamSpec(fqn="experts", shape=(3, 64, 64), dtype=DType.BF16, domain="expert")
    table = ParamTable((*TWO, expert))
    found = planned(table, world=4, worlds={"expert": 2}, layout="compact")
    assert [memory.masters // 4 for memory in found] == [4096 + 3 * 4096, 4096 + 3 * 4096, 0, 0]


def test_a_cohort_travels_in_fp32_as_soon_as_one_matrix_needs_that() -> None:
    rule = RouteRule(pattern="a.weight", to="matrix", options={"ns_dtype": "fp32"})
    plan = make_plan(TWO, Options(rules=[rule], cohort_numel=2048), world=2)
    assert wire_dtypes_for(plan, Rules()) == {("dense", 0): DType.BF16, ("dense", 1): DType.FP32}  # backward order
    assert set(wire_dtypes_for(plan, Rules(matrix=Muon(lr=0.0, ns_dtype="fp16"))).values()) == {DType.FP32}
    assert set(wire_dtypes_for(plan, Rules(matrix=AdamW(lr=0.0))).values()) == {DType.BF16}


# -- the pipeline of cohorts ---------------------------------------------------------------------


def test_one_cohort_holds_a_matrix_its_update_and_what_travels() -> None:
    """Two matrices of different sizes on two ranks: each is cut in the middle of the bucket, so something moves."""
    table = table_of([("a.weight", (64, 64)), ("b.weight", (64, 32))])
    first, second = planned(table, world=2, layout="flat")
    # Shards of 3072: b and a quarter of a before the border, the rest of a after it; only that quarter travels.
    assert first.slots == 2 * 2048 * 2 + 1024 * 2
    assert second.slots == 2 * 4096 * 2 + 1024 * 2


def test_many_cohorts_of_what_every_rank_does_cost_no_time() -> None:
    """As many cohorts as matrices, on thousands of ranks: nothing may be made for each pair of them."""
    table = table_of([(f"{number}.weight", (64, 64)) for number in range(300)])
    started = time.process_time()
    found = planned(table, world=5000, layout="replicated", cohort_numel=1)
    assert time.process_time() - started < 2.0
    assert {memory.slots for memory in found} == {2 * 4096 * 2}


# -- weights that are kept as codes --------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "params"),
    [("mxfp8", 2 * 64 * (64 + 2) + 4096 * 2), ("blockwise", 128 * 128 + 4)],  # 2 directions, a scale for 32
)
def test_codes_by_hand(recipe: str, params: int) -> None:
    skip = ["b.weight"] if recipe == "mxfp8" else []
    table = TWO if recipe == "mxfp8" else table_of([("a.weight", (128, 128))])
    kept = quantized_table(table, recipe, skip)
    plain, found = planned(table, world=2, layout="flat")[0], planned(kept, world=2, layout="flat")[0]
    assert found.params == params
    assert (found.grads, found.masters, found.state, found.slots) == (
        plain.grads,
        plain.masters,
        plain.state,
        plain.slots,
    )
    assert planned(kept, world=2, layout="flat", param_gather="bf16") == planned(table, world=2, layout="flat")


@pytest.mark.parametrize(("bucket_numel", "slots"), [(None, 1), (4096, 2), (1024, 2)])
def test_gathers_that_no_gradient_is_lent_to_have_two_slots(bucket_numel: int | None, slots: int) -> None:
    options: dict[str, Any] = {"layout": "flat", "shard_grads": True, "bucket_numel": bucket_numel}
    three = table_of([(f"{name}.weight", (64, 64)) for name in "abc"]) if bucket_numel == 1024 else TWO
    plain = planned(three, world=2, **options)[0]
    found = planned(quantized_table(three, "mxfp8"), world=2, **options)[0]
    longest = 8192 if bucket_numel is None else 4096
    assert found.slots == plain.slots + slots * longest * 2


def test_a_preset_with_codes_is_what_its_line_says() -> None:
    table = quantized_table(preset("llama3-8b"), "blockwise")
    codes = codes_of(table)
    assert codes is not None
    plain, found = (planned(one, world=8, layout="flat")[0].params for one in (preset("llama3-8b"), table))
    assert plain - found == pytest.approx(codes.bf16_nbytes - codes.nbytes, rel=1e-5)  # but for padding
