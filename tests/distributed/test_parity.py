"""Every layout == single-process oracle, bitwise: gradients, momenta, masters, replicas, norms, zero counts and bytes sent.

Gradients are exact in any order of summation (`tests.worlds`), so no tolerance is needed anywhere. Controls at the end show that the comparison can fail.
Experts, stages, chunks, ties and reducers are in `test_layouts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from tests.distributed.jobs import (
    Action,
    Setting,
    follow,
    nested_blocks,
    owned,
    real_network_against_oracle,
)
from tests.marks import sampled
from tests.ranks import run_ranks
from tests.worlds import Case, train_and_compare, wrap

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ("flat", "padded", "compact", "replicated")

# (world, case): models, dtypes, accumulation, missing gradients, bucket sizes.
WORLDS: dict[str, tuple[int, Case]] = {
    "1 rank, fp32": (1, Case()),
    "1 rank, bf16 params and gradients, accumulation 3": (
        1,
        Case(dtype=BF16, grad_dtype=BF16, accumulation=3, steps=3),
    ),
    "2 ranks, tied, bf16 params, accumulation 3": (2, Case(model="tied", dtype=BF16, accumulation=3)),
    "2 ranks, fp16 params, missing gradients": (2, Case(dtype=FP16, missing=True)),
    "3 ranks, fp32, one bucket a buffer": (3, Case(bucket_mib=None)),
    "3 ranks, tied, bf16 params and gradients": (3, Case(model="tied", dtype=BF16, grad_dtype=BF16)),
    "3 ranks, fp16 params, accumulation 3, missing gradients": (
        3,
        Case(dtype=FP16, accumulation=3, missing=True, steps=3),
    ),
    "3 ranks, fp32 params, bf16 gradients, missing gradients": (3, Case(grad_dtype=BF16, missing=True)),
    "3 ranks, bf16 params with fp32 norms, accumulation 3": (
        3,
        Case(model="mixed", dtype=BF16, accumulation=3, steps=3),
    ),
    "3 ranks, many cohorts": (3, Case(cohort_numel=16)),
    "4 ranks, fp16 params and gradients, many cohorts": (
        4,
        Case(dtype=FP16, grad_dtype=FP16, cohort_numel=40, steps=3),
    ),
    "4 ranks, fp32, missing gradients": (4, Case(missing=True)),
    "4 ranks, tied, fp32, accumulation 3, one bucket a buffer": (
        4,
        Case(model="tied", accumulation=3, bucket_mib=None),
    ),
    "4 ranks, fewer params than ranks, bf16": (4, Case(model="few", dtype=BF16)),
    "8 ranks, bf16": (8, Case(dtype=BF16, steps=2, bucket_mib=0.002)),
    "8 ranks, tied, accumulation 3, missing gradients": (
        8,
        Case(model="tied", accumulation=3, missing=True, steps=2, bucket_mib=None),
    ),
    "8 ranks, fewer params than ranks": (8, Case(model="few", steps=3)),
}

# Every matrix rule, other rule, scale, decay mode, clip scope and Newton-Schulz dtype at least once, most of them against several others.
RULES: dict[str, dict[str, Any]] = {
    "muon, decoupled decay on both, clip all": {
        "weight_decay": 0.1,
        "other_weight_decay": 0.1,
        "clip": 0.5,
    },
    "muon with lion, spectral, independent decay, clip other-only": {
        "other": "lion",
        "scale": "spectral",
        "weight_decay": 0.01,
        "weight_decay_mode": "independent",
        "other_weight_decay": 0.1,
        "other_weight_decay_mode": "decoupled",
        "clip": 0.5,
        "clip_scope": "other-only",
    },
    "muon without nesterov, no scale, extra scale, coupled decay, a clip that is never reached": {
        "nesterov": False,
        "scale": "none",
        "extra_scale": 0.5,
        "weight_decay": 0.1,
        "weight_decay_mode": "coupled",
        "other_weight_decay": 0.01,
        "other_weight_decay_mode": "independent",
        "clip": 1e6,
    },
    "muon in fp32, shape scale, clip switched off": {
        "ns_dtype": FP32,
        "scale": "shape",
        "clip": None,
    },
    "muon in fp16, unit rms": {"ns_dtype": FP16, "scale": "unit_rms", "momentum": 0.9},
    "normuon, shape scale, coupled decay": {
        "matrix": "normuon",
        "scale": "shape",
        "weight_decay": 0.1,
        "weight_decay_mode": "coupled",
        "other_weight_decay": 0.1,
        "other_weight_decay_mode": "coupled",
    },
    "normuon in fp32 with lion, clip all": {
        "matrix": "normuon",
        "other": "lion",
        "ns_dtype": FP32,
        "clip": 0.25,
        "other_weight_decay": 0.1,
        "other_weight_decay_mode": "coupled",
    },
    "adamuon, independent decay, clip other-only": {
        "matrix": "adamuon",
        "weight_decay": 0.01,
        "weight_decay_mode": "independent",
        "clip": 0.25,
        "clip_scope": "other-only",
    },
    "adamuon in fp16 without nesterov, spectral": {
        "matrix": "adamuon",
        "ns_dtype": FP16,
        "nesterov": False,
        "scale": "spectral",
    },
    "normuon in many dtypes and lrs, a norm group apart, clip all": {
        "matrix": "normuon",
        "clip": 0.25,
        "norm_groups": {"experts": "experts", "gain": "gain"},
        "overrides": {
            "tall.weight": {"lr": 0.5, "ns_dtype": FP32},
            "experts": {"momentum": 0.5, "weight_decay": 0.1},
            "qkv.weight": {"ns_dtype": FP16, "scale": "spectral"},
            "embed.weight": {"other_lr": 0.25},
        },
    },
    "lion for matrices too, coupled decay": {
        "matrix": "lion",
        "other": "lion",
        "weight_decay": 0.1,
        "weight_decay_mode": "coupled",
    },
    "adamw for matrices too, clip all": {
        "matrix": "adamw",
        "weight_decay": 0.1,
        "other_weight_decay": 0.1,
        "clip": 0.5,
    },
}


# What schedulers change between steps. No number is what it was before, and none is neutral.
LIVE: tuple[dict[str, Any], ...] = (
    {},
    {
        "lr": 0.013,
        "other_lr": 0.0021,
        "momentum": 0.8,
        "betas": (0.7, 0.85),
        "beta2": 0.7,
        "weight_decay": 0.3,
        "other_weight_decay": 0.2,
    },
    {
        "lr": 0.031,
        "other_lr": 0.0007,
        "momentum": 0.6,
        "betas": (0.8, 0.99),
        "beta2": 0.9,
        "eps": 1e-4,
        "matrix_eps": 1e-3,
        "extra_scale": 0.7,
        "weight_decay": 0.05,
        "other_weight_decay": 0.4,
    },
)


def assert_bitwise(world: int, case: Case, layouts: Sequence[str] = LAYOUTS) -> None:
    """All layouts side by side on the same ranks, each of them against the same oracle."""
    found = [text for texts in run_ranks(world, train_and_compare, case, layouts) for text in texts]
    assert not found, "\n".join(found[:10])


@pytest.mark.broad
@pytest.mark.parametrize(
    "name",
    sampled(
        WORLDS,
        "1 rank, bf16 params and gradients, accumulation 3",
        "2 ranks, tied, bf16 params, accumulation 3",
        "3 ranks, fp16 params, accumulation 3, missing gradients",
        "3 ranks, fp32 params, bf16 gradients, missing gradients",
        "4 ranks, fp16 params and gradients, many cohorts",
        "4 ranks, fewer params than ranks, bf16",
    ),
)
def test_every_world_and_dtype_matches_the_oracle_bitwise(name: str) -> None:
    world, case = WORLDS[name]
    # Eight ranks take their time on two cores: half of the layouts each.
    half = LAYOUTS[:: 2 if case.missing else -2]
    assert_bitwise(world, case, LAYOUTS if world < 8 else half)


@pytest.mark.broad
@pytest.mark.parametrize(
    "name",
    sampled(
        RULES,
        "muon, decoupled decay on both, clip all",
        "muon with lion, spectral, independent decay, clip other-only",
        "muon without nesterov, no scale, extra scale, coupled decay, a clip that is never reached",
        "normuon in many dtypes and lrs, a norm group apart, clip all",
        "adamuon, independent decay, clip other-only",
        "lion for matrices too, coupled decay",
    ),
)
def test_every_rule_and_option_matches_the_oracle_bitwise_also_when_it_changes(name: str) -> None:
    assert_bitwise(3, Case(hyper=RULES[name], schedule=LIVE, steps=len(LIVE), bucket_mib=0.002))


@pytest.mark.slow
def test_sixty_steps_with_bf16_newton_schulz_match_the_oracle_bitwise() -> None:
    shapes = [(6, 4), (5, 9), (8, 8), (1, 7)]
    case = Case(shapes=shapes, steps=60, bucket_mib=None, hyper={"weight_decay": 0.1, "clip": 1.0})
    assert_bitwise(3, case, ("flat", "compact"))


@pytest.mark.parametrize("matrix", ["normuon", "adamuon"])
def test_second_moments_of_equal_shapes_in_different_cohorts_stay_apart(matrix: str) -> None:
    shapes = [(6, 10)] * 4 + [(4, 4)] * 3
    assert_bitwise(2, Case(shapes=shapes, cohort_numel=16, hyper={"matrix": matrix}))


def test_a_layout_of_each_buffer_matches_the_oracle_bitwise() -> None:
    assert_bitwise(3, Case(dtype=BF16, steps=2), ("mixed others",))


def test_checked_collectives_change_nothing() -> None:
    assert_bitwise(3, Case(options={"check_collectives": True}, steps=2))


def test_small_cohorts_are_really_many() -> None:
    case = Case(cohort_numel=16)
    assert wrap(case, case.build()).plan.works[0].num_cohorts >= 4


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_ranks_that_own_nothing_and_are_home_to_nothing_exist_in_these_tests(layout: str) -> None:
    owners = run_ranks(8, owned, Case(model="few", layout=layout))
    assert any(numel == 0 for numel, _ in owners)
    assert any(homed == 0 for _, homed in owners)
    assert any(numel > 0 for numel, _ in owners)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("checkpointing", sampled(["none", "plain", "reentrant"], "reentrant"))
def test_a_reused_layer_under_real_backward_matches_the_oracle_bitwise(checkpointing: str, overlap: bool) -> None:
    setting = Setting(checkpointing=checkpointing, overlap=overlap)
    found = [text for texts in run_ranks(2, real_network_against_oracle, setting, 2) for text in texts]
    assert not found, "\n".join(found[:10])


def train(steps: range) -> list[Action]:
    return [action for step in steps for action in (("backward", step), ("step",))]


def outcomes(actions: list[Action], world: int = 3, **setting: Any) -> list[list[str]]:
    """What each rank saw; ranks must agree on which steps were taken."""
    seen = run_ranks(world, follow, actions, Setting(**setting))
    assert len({tuple(text.split()[0] for text in texts) for texts in seen}) == 1
    return seen


def finals(seen: list[list[str]]) -> list[str]:
    return [texts[-1] for texts in seen]


@pytest.mark.parametrize(
    ("layout", "checkpointing"),
    sampled(
        [
            ("flat", "none"),
            ("flat", "reentrant"),
            ("padded", "plain"),
            ("compact", "reentrant"),
            ("replicated", "none"),
        ],
        ("flat", "reentrant"),
        ("padded", "plain"),
    ),
)
def test_reduction_during_backward_gives_the_same_bits_as_reduction_after_it(layout: str, checkpointing: str) -> None:
    actions = train(range(5))
    overlapped = outcomes(actions, layout=layout, checkpointing=checkpointing)
    assert overlapped == outcomes(actions, layout=layout, checkpointing=checkpointing, overlap=False)


def test_one_bucket_a_buffer_gives_the_same_bits_with_and_without_overlap() -> None:
    actions = train(range(3))
    assert outcomes(actions, bucket_mib=None) == outcomes(actions, bucket_mib=None, overlap=False)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_second_backward_without_no_sync_accumulates(overlap: bool) -> None:
    twice = [*train(range(2)), ("backward", 2, 0), ("backward", 2, 1), ("step",), *train(range(3, 5))]
    accumulated = [*train(range(2)), ("accumulate", 2, 0), ("backward", 2, 1), ("step",), *train(range(3, 5))]
    assert outcomes(twice, overlap=overlap) == outcomes(accumulated, overlap=overlap)


def test_no_sync_for_every_microbatch_still_reduces_in_step() -> None:
    never = [*train(range(2)), ("accumulate", 2, 0), ("accumulate", 2, 1), ("step",), *train(range(3, 4))]
    last = [*train(range(2)), ("accumulate", 2, 0), ("backward", 2, 1), ("step",), *train(range(3, 4))]
    assert outcomes(never) == outcomes(last)


@pytest.mark.parametrize("wrapping", [{}, {"shard_grads": True}], ids=["kept gradients", "released gradients"])
def test_a_block_within_a_block_changes_neither_bits_nor_bytes(wrapping: dict[str, Any]) -> None:
    setting = Setting(wrapping=tuple(wrapping.items()))
    nested, flat = (run_ranks(2, nested_blocks, setting, nested) for nested in (True, False))
    assert not [text for texts in nested for text in texts if "bytes" in text]
    assert nested == flat


@pytest.mark.parametrize("forget", sampled(["zero_grad", "model.zero_grad"], "zero_grad"))
@pytest.mark.parametrize("failure", ["failing forward", "failing backward"])
def test_a_retry_after_an_exception_gives_the_bits_of_a_run_without_it(failure: str, forget: str) -> None:
    failed = outcomes([*train(range(2)), (failure, 2), (forget,), *train(range(2, 4))])
    assert all("failed" in texts for texts in failed)
    assert finals(failed) == finals(outcomes(train(range(4))))


def test_a_failure_in_the_very_first_backward_leaves_nothing_behind() -> None:
    failed = outcomes([("failing backward", 0), ("zero_grad",), *train(range(3))])
    assert finals(failed) == finals(outcomes(train(range(3))))


def test_a_second_step_without_gradients_is_skipped_and_changes_nothing() -> None:
    for texts in outcomes([*train(range(2)), ("step",)]):
        stepped, again = texts[-2:]
        assert stepped.replace("stepped", "skipped") == again


def test_zero_grad_before_step_makes_it_a_skipped_step_that_changes_nothing() -> None:
    for texts in outcomes([*train(range(2)), ("backward", 2), ("zero_grad",), ("step",)]):
        stepped, again = texts[-2:]
        assert stepped.replace("stepped", "skipped") == again


def test_eval_between_steps_reads_fresh_weights_and_changes_nothing() -> None:
    interrupted = [("eval",), *train(range(2)), ("eval",), ("backward", 2), ("eval",), ("step",), ("eval",)]
    assert outcomes(interrupted) == outcomes(train(range(3)))


def test_gradients_missing_on_some_ranks_do_not_change_the_order_of_collectives() -> None:
    partial = [*train(range(2)), ("partial", 2), ("step",), *train(range(3, 4))]
    assert outcomes(partial) == outcomes(partial, overlap=False)


def test_ranks_without_data_wait_for_nobody() -> None:
    idle = [*train(range(2)), ("idle", 2), ("step",), ("idle", 3), ("backward", 4), ("step",), *train(range(5, 6))]
    assert outcomes(idle) == outcomes(idle, overlap=False)


def test_a_users_all_reduce_between_backward_and_step_meets_its_own_kind() -> None:
    with_metric = [*train(range(2)), ("partial", 2), ("metric",), ("step",), ("metric",)]
    assert outcomes(with_metric) == outcomes([*train(range(2)), ("partial", 2), ("step",)])


def test_zero_grad_after_gradients_missing_on_some_ranks_starts_afresh() -> None:
    dropped = [*train(range(2)), ("partial", 2), ("zero_grad",), *train(range(3, 5))]
    assert outcomes(dropped) == outcomes([*train(range(2)), *train(range(3, 5))])


def test_a_second_backward_that_reaches_some_params_on_some_ranks_only_accumulates() -> None:
    twice = [*train(range(2)), ("backward", 2), ("partial", 3), ("step",), *train(range(4, 5))]
    accumulated = [*train(range(2)), ("accumulate", 2), ("partial", 3), ("step",), *train(range(4, 5))]
    assert outcomes(twice) == outcomes(accumulated)


def test_a_second_backward_does_not_wait_for_ranks_that_have_not_reduced_yet() -> None:
    twice = [
        *train(range(2)),
        ("partial", 2),
        ("partial", 3),
        ("metric",),
        ("backward", 4),
        ("metric",),
        ("step",),
        *train(range(5, 6)),
    ]
    assert outcomes(twice) == outcomes(twice, overlap=False)


KINDS = [
    "backward",
    "backward",
    "accumulate",
    "partial",
    "eval",
    "metric",
    "zero_grad",
    "failing forward",
    "failing backward",
    "step",
    "step",
]
MORE_KINDS = [*KINDS, "accumulate", "partial accumulate", "idle accumulate", "failing accumulate"]


def random_actions(seed: int, kinds: list[str], length: int = 14) -> list[Action]:
    """Microbatches, failures, forgotten gradients, evaluations and steps in any order; after a failure gradients are forgotten, as they must be."""
    random = Random(seed)
    actions: list[Action] = [("backward", 0), ("step",)]
    for number in range(1, length):
        kind = random.choice(kinds)
        takes_data = kind not in ("eval", "metric", "zero_grad", "step")
        actions.append((kind, number) if takes_data else (kind,))
        if kind.startswith("failing"):
            actions.append((random.choice(["zero_grad", "model.zero_grad"]),))
    return [*actions, ("backward", length), ("step",)]


@pytest.mark.parametrize("seed", sampled(range(4), 0))
def test_any_sequence_of_actions_gives_the_same_bits_with_and_without_overlap(seed: int) -> None:
    actions = random_actions(seed, KINDS)
    layout = LAYOUTS[seed % len(LAYOUTS)]
    assert outcomes(actions, layout=layout) == outcomes(actions, layout=layout, overlap=False)


# What a run may be asked for without a change of bits, in turn.
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("flat", {"shard_grads": True}),
    ("compact", {"reducer": "ordered"}),
    ("padded", {"shard_grads": True}),
    ("compact", {"shard_grads": True, "reducer": "ordered"}),
    ("flat", {"shard_grads": True, "reducer": "ordered"}),
    ("padded", {"reducer": "ordered"}),
]


@pytest.mark.parametrize("seed", sampled(range(len(WAYS)), 2, 5))
def test_any_sequence_of_actions_gives_the_same_bits_in_any_layout_and_by_any_reducer(seed: int) -> None:
    actions = random_actions(100 + seed, MORE_KINDS)
    layout, wrapping = WAYS[seed]
    expected = outcomes(actions, layout="replicated", overlap=False, whole=True)
    assert outcomes(actions, layout=layout, wrapping=tuple(wrapping.items()), whole=True) == expected


@pytest.mark.parametrize("sabotage", ["momentum", "gradient"])
def test_control_one_ulp_in_the_library_run_is_seen_in_every_layout(sabotage: str) -> None:
    case = Case(sabotage=sabotage, steps=2)
    found = [text for texts in run_ranks(2, train_and_compare, case, LAYOUTS) for text in texts]
    for layout in LAYOUTS:
        assert any(sabotage in text and f" {layout}:" in text for text in found), found
