import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layerwise
from layerwise.dtypes import DType
from layerwise.layout.plan import Plan, first_difference, make_plan, resolve_layout
from layerwise.layout.storage import plan_storage
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


def small_plan(**changes: object) -> Plan:
    settings: dict[str, object] = {"world": 4, "layout": "flat", "bucket_numel": 3000, **changes}
    return make_plan(small_table(), **settings)  # type: ignore[arg-type]


def test_equal_input_gives_an_equal_plan_and_digest() -> None:
    assert small_plan() == small_plan()
    assert small_plan().digest == small_plan().digest


@LIGHT
@given(plans())
def test_a_plan_made_again_from_a_copy_of_its_table_is_equal(plan: Plan) -> None:
    copies = [
        make_plan(ParamTable(tuple(replace(param) for param in plan.table)), world=plan.world, bucket_numel=200)
        for _ in range(2)
    ]
    assert copies[0] == copies[1]
    assert copies[0].digest == copies[1].digest


@LIGHT
@given(plans(), st.randoms(use_true_random=False))
def test_homes_and_places_do_not_depend_on_the_order_of_routes_or_buffers(plan: Plan, rng: Random) -> None:
    shuffled_routes = dict(rng.sample(sorted(plan.routes.items()), len(plan.routes)))
    shuffled_buffers = rng.sample(plan.buffers, len(plan.buffers))
    worlds = {param.domain: plan.world for param in plan.table}
    storage = [
        plan_storage(plan.table, routes, world_by_domain=worlds, layout="flat", bucket_numel=300)
        for routes in (plan.routes, shuffled_routes)
    ]
    assert storage[0] == storage[1]
    for domain in worlds:
        settings = {"domain": domain, "world": plan.world, "cohort_numel": 200}
        assert plan_work(plan.buffers, plan.routes, **settings) == plan_work(
            shuffled_buffers, shuffled_routes, **settings
        )


@pytest.mark.parametrize(
    "changed",
    [
        lambda: small_plan(layout="replicated"),
        lambda: small_plan(world=5),
        lambda: small_plan(bucket_numel=6000),
        lambda: small_plan(cohort_numel=64),
        lambda: small_plan(grad_dtype=DType.BF16),
        lambda: small_plan(rules=[RouteRule(pattern="blocks.0.out.*", to="other")]),
        lambda: small_plan(rules=[RouteRule(pattern="blocks.0.out.*", to="matrix", options={"lr": 0.1})]),
        lambda: small_plan(rules=[RouteRule(pattern="blocks.0.qkv.*", to="matrix", row_blocks=(16, 32, 16))]),
        lambda: make_plan(ParamTable(small_table().params[::-1]), world=4, bucket_numel=3000),
        lambda: make_plan(ParamTable(small_table().params[:-1]), world=4, bucket_numel=3000),
        lambda: make_plan(
            ParamTable(tuple(replace(p, dtype=DType.FP32) for p in small_table())), world=4, bucket_numel=3000
        ),
    ],
    ids=[
        "layout",
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
    ],
)
def test_any_change_changes_the_digest_and_the_difference_is_named(changed: Callable[[], Plan]) -> None:
    mine, theirs = small_plan(), changed()
    assert mine.digest != theirs.digest
    assert first_difference(mine.to_json(), theirs.to_json()) != "the plans are equal"


def test_homes_and_digest_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tests.unit.layout.test_plan import small_plan; from layerwise.planner.presets import preset; "
        "from layerwise.layout.plan import make_plan; "
        "print(small_plan().digest, make_plan(preset('gpt2'), world=7).digest)"
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
    theirs = make_plan(ParamTable(small_table().params[:-1]), world=4, layout="flat", bucket_numel=3000)
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


def test_auto_chooses_for_every_buffer_and_says_why() -> None:
    assert resolve_layout("auto") == "auto"
    plan = make_plan(small_table(), world=2)
    assert {choice.buffer.family for choice in plan.choices} == {"matrix", "other"}
    for choice in plan.choices:
        buffer = next(found for found in plan.buffers if found.key.family == choice.buffer.family)
        assert buffer.key.layout == choice.layout
    assert "chose" in plan.describe()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout": "falt"}, "layout 'falt' is unknown. Did you mean 'flat'?"),
        (
            {"layout": "zero"},
            "layout 'zero' is unknown. Known: auto, compact, flat, padded, padded:reference, padded:reference-numel, replicated.",
        ),
        ({"world": 0}, "world must be at least 1, got 0."),
        ({"bucket_numel": 0}, "the bucket size must be at least one element, got 0."),
    ],
)
def test_a_plan_that_cannot_be_says_why(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        small_plan(**changes)


def test_a_model_without_trainable_params_has_an_empty_plan() -> None:
    table = ParamTable((ParamSpec(fqn="w", shape=(4, 4), trainable=False),))
    plan = make_plan(table, world=2)
    assert (plan.buckets, plan.works, plan.padding_ratio) == ((), (), 0.0)
    assert "1 params over 2 ranks" in plan.describe()
