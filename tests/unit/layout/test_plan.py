import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layerwise
from layerwise.dtypes import DType
from layerwise.layout.difference import first_difference
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, compare_plans, make_plan
from layerwise.layout.storage import plan_storage, resolve_layout
from layerwise.layout.work import plan_work
from layerwise.routing.rules import RouteRule
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable, table_of
from layerwise.routing.split import row_blocks
from tests.strategies import LIGHT, plans

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "plan_small.txt"


def small_table() -> ParamTable:
    """Two blocks of a small GPT with a tied head, a stack of experts and a frozen weight."""
    params = [
        ParamSpec(
            fqn="wte.weight",
            shape=(100, 32),
            module_kind=ModuleKind.EMBEDDING,
            module_type="Embedding",
            aliases=("head.weight",),
        )
    ]
    for layer in ("blocks.0", "blocks.1"):
        params += [
            ParamSpec(fqn=f"{layer}.norm.weight", shape=(32,), module_kind=ModuleKind.NORM, module_type="RMSNorm"),
            ParamSpec(
                fqn=f"{layer}.qkv.weight",
                shape=(64, 32),
                module_kind=ModuleKind.LINEAR,
                module_type="Linear",
                split=row_blocks((64, 32), (32, 16, 16)),
            ),
            ParamSpec(fqn=f"{layer}.out.weight", shape=(32, 32), module_kind=ModuleKind.LINEAR, module_type="Linear"),
        ]
    params.append(
        ParamSpec(fqn="blocks.1.experts.w1", shape=(3, 24, 32), module_type="GroupedExperts", domain="expert")
    )
    params.append(
        ParamSpec(fqn="old.weight", shape=(8, 8), module_kind=ModuleKind.LINEAR, module_type="Linear", trainable=False)
    )
    return ParamTable(tuple(replace(param, dtype=DType.BF16) for param in params))


def small_plan(
    params: tuple[ParamSpec, ...] | None = None,
    *,
    world: int = 4,
    worlds: dict[str, int] | None = None,
    ranks: int | None = None,
    **changes: Any,
) -> Plan:
    options = Options(**{"layout": "flat", "bucket_numel": 3000, **changes})
    return make_plan(ParamTable(params or small_table().params), options, world=world, worlds=worlds, ranks=ranks)


def test_equal_input_gives_an_equal_plan_and_digest() -> None:
    assert small_plan() == small_plan()
    assert small_plan().digest == small_plan().digest


@LIGHT
@given(plans())
def test_a_plan_made_again_from_a_copy_of_its_table_is_equal(plan: Plan) -> None:
    copies = [
        make_plan(
            ParamTable(tuple(replace(param) for param in plan.table)),
            Options(layout=plan.options.layout, bucket_numel=200),
            world=plan.world,
        )
        for _ in range(2)
    ]
    assert copies[0] == copies[1]
    assert copies[0].digest == copies[1].digest


@LIGHT
@given(plans(), st.randoms(use_true_random=False))
def test_homes_and_places_do_not_depend_on_the_order_of_routes_or_shards(plan: Plan, rng: Random) -> None:
    shuffled_routes = dict(rng.sample(sorted(plan.routes.items()), len(plan.routes)))
    shuffled_shards = rng.sample(plan.shards, len(plan.shards))
    shuffled_worlds = dict(rng.sample(sorted(plan.world_by_domain.items()), len(plan.world_by_domain)))
    storage = [
        plan_storage(plan.table, routes, world_by_domain=worlds, layout=plan.options.layout, bucket_numel=300)
        for routes, worlds in ((plan.routes, plan.world_by_domain), (shuffled_routes, shuffled_worlds))
    ]
    assert storage[0] == storage[1]
    for domain, world in plan.world_by_domain.items():
        settings = {"domain": domain, "world": world, "cohort_numel": 200}
        assert plan_work(plan.shards, plan.routes, **settings) == plan_work(
            shuffled_shards, shuffled_routes, **settings
        )


@pytest.mark.parametrize(
    "changed",
    [
        lambda: small_plan(layout="replicated"),
        lambda: small_plan(layout="padded"),
        lambda: small_plan(layout="compact"),
        lambda: small_plan(reducer="ordered"),
        lambda: small_plan(shard_grads=True),
        lambda: small_plan(worlds={"expert": 2}),
        lambda: small_plan(ranks=8),
        lambda: small_plan(world=5),
        lambda: small_plan(bucket_numel=6000),
        lambda: small_plan(cohort_numel=64),
        lambda: small_plan(grad_dtype=DType.BF16),
        lambda: small_plan(rules=[RouteRule(pattern="blocks.0.out.*", to="other")]),
        lambda: small_plan(rules=[RouteRule(pattern="blocks.0.out.*", to="matrix", options={"lr": 0.1})]),
        lambda: small_plan(rules=[RouteRule(pattern="blocks.0.qkv.*", to="matrix", row_blocks=(16, 32, 16))]),
        lambda: small_plan(small_table().params[::-1]),
        lambda: small_plan(small_table().params[:-1]),
        lambda: small_plan(tuple(replace(param, dtype=DType.FP32) for param in small_table())),
        lambda: small_plan((replace(small_table().params[0], tie="embedding"), *small_table().params[1:])),
        lambda: small_plan((*small_table().params[:4], *(replace(p, chunk=1) for p in small_table().params[4:]))),
    ],
    ids=[
        "layout replicated",
        "layout padded",
        "layout compact",
        "reducer",
        "sharded gradients",
        "expert world",
        "ranks",
        "world",
        "bucket size",
        "cohort size",
        "grad dtype",
        "route",
        "options",
        "row blocks",
        "order",
        "params",
        "dtype",
        "tie",
        "chunk",
    ],
)
def test_any_change_changes_the_digest_and_the_difference_is_named(changed: Callable[[], Plan]) -> None:
    mine, theirs = small_plan(), changed()
    assert mine.digest != theirs.digest
    assert first_difference(mine.to_json(), theirs.to_json()) != "the plans are equal"


def test_homes_and_digest_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tests.unit.layout.test_plan import small_plan; from layerwise.planner.presets import preset; "
        "from layerwise.layout.plan import compare_plans; "
        "plans = compare_plans(preset('gpt2'), ['padded', 'compact', 'flat'], world=7); "
        "print(small_plan().digest, *(plan.digest for plan in plans.values()))"
    )
    path = os.pathsep.join([str(Path(layerwise.__file__).parents[1]), str(ROOT)])
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(printed) == 1
    assert small_plan().digest in printed.pop()


def test_the_first_difference_names_the_bucket_and_the_field() -> None:
    mine, theirs = small_plan().to_json(), small_plan(bucket_numel=6000).to_json()
    assert first_difference(mine, theirs) == "bucket 1, numel: 3072 against 6144"


def test_the_first_difference_names_the_param_whose_route_differs() -> None:
    theirs = small_plan(rules=[RouteRule(pattern="blocks.0.out.*", to="other")])
    expected = "plan, routes, blocks.0.out.weight, family: 'matrix' against 'other'"
    assert first_difference(small_plan().to_json(), theirs.to_json()) == expected


def test_the_first_difference_names_a_param_that_one_rank_lacks() -> None:
    theirs = small_plan(small_table().params[:-1])
    assert (
        first_difference(small_plan().to_json(), theirs.to_json())
        == "plan, routes: 'old.weight' is only on one of them"
    )
    assert (
        first_difference(theirs.to_json(), small_plan().to_json())
        == "plan, routes: 'old.weight' is only on one of them"
    )


def test_the_first_difference_names_the_domain_whose_cohorts_differ() -> None:
    found = first_difference(small_plan().to_json(), small_plan(cohort_numel=64).to_json())
    assert re.fullmatch(r"work of domain dense, items\[\d+\]\[3\]: 0 against 1", found)


def test_the_first_difference_counts_what_one_side_has_more_of() -> None:
    assert first_difference({"buckets": [1]}, {"buckets": [1, 2]}) == "plan, buckets: 1 entries against 2"


def test_equal_plans_have_no_difference() -> None:
    assert first_difference(small_plan().to_json(), small_plan().to_json()) == "the plans are equal"


def test_describe_is_what_it_was() -> None:
    assert small_plan().describe() + "\n" == GOLDEN.read_text()


def test_describe_counts_idle_ranks() -> None:
    text = make_plan(table_of([("w", (64, 64))]), world=4).describe()
    assert "1 matrices in 1 cohort, imbalance 4.00, 3 of 4 ranks have no matrix" in text


@LIGHT
@given(plans())
def test_a_plan_round_trips_through_json(plan: Plan) -> None:
    assert json.loads(json.dumps(plan.to_json())) == plan.to_json()


@LIGHT
@given(plans())
def test_every_trainable_param_has_a_bucket_and_the_padding_ratio_counts_the_rest(plan: Plan) -> None:
    trainable = [param for param in plan.table if param.trainable]
    assert set(plan.bucket_of) == {param.fqn for param in trainable}
    numel = sum(param.numel for param in trainable)
    stored = sum(bucket.numel for bucket in plan.buckets)
    assert plan.padding_ratio == (pytest.approx((stored - numel) / numel) if numel else 0.0)


def test_a_route_is_found_under_an_alias() -> None:
    plan = small_plan()
    assert plan.route("head.weight") is plan.route("wte.weight")


def test_flat_is_the_default() -> None:
    plan = make_plan(small_table(), world=2)
    assert (plan.options.layout, plan.layout_label) == ("flat", "flat")
    assert {buffer.key.layout for buffer in plan.buffers} == {"flat"}


def layouts_of(plan: Plan) -> dict[str, str]:
    return {f"{buffer.key.domain}/{buffer.key.family}": buffer.key.layout for buffer in plan.buffers}


@pytest.mark.parametrize(
    ("layout", "expected", "label"),
    [
        ({}, {}, "flat"),
        ({"matrix": "padded"}, {"dense/matrix": "padded", "expert/matrix": "padded"}, "padded"),
        ({"expert/matrix": "compact"}, {"expert/matrix": "compact"}, "compact + flat"),
        ({"other": "replicated"}, {"dense/other": "replicated"}, "flat"),
        (
            {"matrix": "padded", "dense/matrix": "flat", "other": "compact"},
            {"expert/matrix": "padded", "dense/other": "compact"},
            "flat + padded",
        ),
    ],
)
def test_a_mapping_gives_each_buffer_its_layout_and_flat_where_it_names_none(
    layout: dict[str, str], expected: dict[str, str], label: str
) -> None:
    plan = small_plan(layout=layout)
    found = layouts_of(plan)
    assert set(found) == {"dense/matrix", "expert/matrix", "dense/other"}
    assert found == {**dict.fromkeys(found, "flat"), **expected}
    assert plan.layout_label == label


def test_a_mapping_of_one_layout_is_the_plan_of_its_name() -> None:
    mapped, named = (small_plan(layout=layout) for layout in ({"matrix": "padded"}, "padded"))
    assert (mapped.buffers, mapped.works, mapped.digest) == (named.buffers, named.works, named.digest)


def test_a_mapping_with_wrong_buffers_and_names_is_one_error() -> None:
    with pytest.raises(ValueError) as caught:
        small_plan(layout={"experts/matrix": "padded", "other": "falt", "matrix": "auto", 3: 4})
    assert str(caught.value) == (
        "layout={'experts/matrix': 'padded', 'other': 'falt', 'matrix': 'auto', 3: 4}: "
        "'experts/matrix' is no buffer, expected one of matrix, other, dense/matrix, expert/matrix. "
        "'other': layout 'falt' is unknown. Did you mean 'flat'? "
        "'matrix': layout 'auto' is unknown. Earlier versions had layout='auto': leave it out, since 'flat' is the "
        "default; layerwise plan says which layout is best. "
        "3 is no buffer, expected one of matrix, other, dense/matrix, expert/matrix. "
        "3: layout must be one of flat, padded, compact, replicated, or a mapping from buffers to these, got 4."
    )


def test_a_mapping_may_name_a_domain_of_another_pipeline_stage() -> None:
    table = table_of([("a.weight", (8, 8))])
    options = Options(layout={"expert/matrix": "padded"})
    assert layouts_of(make_plan(table, options, world=2, worlds={"expert": 1}, ranks=4)) == {"dense/matrix": "flat"}
    with pytest.raises(ValueError, match="'expert/matrix' is no buffer, expected one of matrix, other, dense/matrix"):
        make_plan(table, options, world=2, worlds={"expert": 1})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout": "falt"}, "layout 'falt' is unknown. Did you mean 'flat'?"),
        (
            {"layout": "zero"},
            "layout 'zero' is unknown. Known: compact, flat, padded, replicated.",
        ),
        ({"world": 0}, "world must be at least 1, got 0."),
        ({"worlds": {"expert": 0}}, "world of domain 'expert' must be at least 1, got 0."),
        (
            {"worlds": {"expert": 3}},
            "domain 'expert' has 3 ranks, the dense params have 4: expected a number that divides theirs, so that every rank "
            "holds an equal part of it.",
        ),
        (
            {"reducer": "order"},
            "reducer must be one of collective, ordered, got 'order'. Did you mean 'ordered'?",
        ),
        ({"bucket_numel": 0}, "the bucket size must be at least one element, got 0."),
    ],
)
def test_a_plan_that_cannot_be_says_why(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        small_plan(**changes)


def test_a_layout_that_is_no_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"layout must be one of flat, .*, got 3"):
        resolve_layout(3)


REFUSED = [
    (
        {"layout": "replicated", "reducer": "ordered"},
        "reducer='ordered' with layout 'replicated' (buffer dense/matrix/bf16/replicated): an ordered sum arrives at the one rank "
        "that owns a shard, and here every rank needs it. Use layout='flat', or reducer='collective'.",
    ),
    (
        {"layout": "compact", "shard_grads": True},
        "shard_grads=True with layout 'compact' (buffer dense/matrix/bf16/compact): its gradients are all-reduced, so every rank "
        "keeps all of them. Use layout='flat' or 'padded', or reducer='ordered' with 'compact'.",
    ),
    (
        {"layout": "replicated", "shard_grads": True},
        "shard_grads=True with layout 'replicated' (buffer dense/matrix/bf16/replicated): its gradients are all-reduced",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED, ids=lambda value: " ".join(value) if value else "")
def test_what_cannot_be_combined_is_refused_with_an_alternative(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        small_plan(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "flat", "reducer": "ordered"},
        {"layout": "flat", "shard_grads": True},
        {"layout": "compact", "shard_grads": True, "reducer": "ordered"},
        {"layout": "replicated", "reducer": "ordered", "world": 1},
        {"layout": "compact", "shard_grads": True, "world": 1},
        {"reducer": "ordered", "grad_dtype": DType.BF16},
    ],
    ids=str,
)
def test_the_alternatives_that_refusals_name_are_accepted_and_one_rank_may_combine_all(
    changes: dict[str, Any],
) -> None:
    assert small_plan(**changes).buckets


def test_plans_compared_at_once_are_the_plans_made_one_by_one() -> None:
    layouts = ["flat", "padded", "compact", "replicated"]
    together = compare_plans(small_table(), layouts, Options(bucket_numel=3000), world=4)
    assert list(together) == layouts
    for layout, plan in together.items():
        assert plan == small_plan(layout=layout)


@pytest.mark.parametrize(
    ("layout", "leased"), [("flat", {"matrix", "other"}), ("padded", {"matrix", "other"}), ("replicated", set())]
)
def test_full_gradients_are_leased_where_gradients_are_sharded_and_that_was_asked_for(
    layout: str, leased: set[str]
) -> None:
    for shard_grads in (True, False):
        plan = small_plan(layout=layout, shard_grads=shard_grads and layout != "replicated", worlds={"expert": 1})
        found = {(buffer.key.domain, buffer.key.family) for buffer in plan.buffers if plan.leases_grads(buffer)}
        assert found == ({("dense", family) for family in leased} if shard_grads else set())


def test_a_model_without_trainable_params_has_an_empty_plan() -> None:
    table = ParamTable((ParamSpec(fqn="w", shape=(4, 4), trainable=False),))
    plan = make_plan(table, world=2)
    assert (plan.buckets, plan.works, plan.padding_ratio) == ((), (), 0.0)
    assert "1 params over 2 ranks" in plan.describe()
