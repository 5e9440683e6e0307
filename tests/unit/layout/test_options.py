"""Options: every one is checked where it is written. tests/unit/parallel/test_arguments.py follows them to the plan."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from layerwise.dtypes import DType
from layerwise.layout.options import Options, bucket_numel_of
from layerwise.routing.rules import RouteRule


def test_rules_cannot_be_changed_from_behind() -> None:
    rules = [RouteRule(pattern="weight", to="matrix")]
    options = Options(rules=rules)
    rules.clear()
    assert options.rules == (RouteRule(pattern="weight", to="matrix"),)
    with pytest.raises(FrozenInstanceError):
        options.layout = "flat"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "error", "expected"),
    [
        ({"layout": "falt"}, ValueError, "layout 'falt' is unknown. Did you mean 'flat'?"),
        (
            {"layout": None},
            TypeError,
            "layout must be one of flat, padded, compact, replicated, or a mapping from buffers to these, got None",
        ),
        ({"strict": 1}, TypeError, "strict must be True or False, got 1."),
        ({"shard_grads": "yes"}, TypeError, "shard_grads must be True or False, got 'yes'."),
        (
            {"grad_dtype": DType.FP64},
            TypeError,
            "grad_dtype is torch.float64: expected one of fp32, bf16, fp16.",
        ),
        ({"bucket_numel": 0}, ValueError, "the bucket size must be at least one element, got 0."),
        ({"cohort_numel": 0}, ValueError, "the cohort size must be at least one element, got 0."),
        (
            {"reducer": "orderd"},
            ValueError,
            "reducer must be one of collective, ordered, got 'orderd'. Did you mean 'ordered'?",
        ),
        (
            {"reducer": ["ordered"]},
            ValueError,
            "reducer must be one of collective, ordered, got ['ordered'].",
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused_where_it_is_written(
    given: dict[str, Any], error: type[Exception], expected: str
) -> None:
    with pytest.raises(error, match=re.escape(expected)):
        Options(**given)


@pytest.mark.parametrize("mib", [0, -1.0, float("nan"), float("inf"), "4"])
def test_a_bucket_has_a_size(mib: Any) -> None:
    with pytest.raises(
        ValueError, match=r"bucket_mib must be a positive number, got .*\. Leave it out for the default\."
    ):
        bucket_numel_of(mib, DType.FP32)


def test_buckets_are_counted_in_elements_of_gradients() -> None:
    assert bucket_numel_of(None, DType.FP32) is None
    assert (bucket_numel_of(1, DType.FP32), bucket_numel_of(1, DType.BF16)) == (2**18, 2**19)
    assert bucket_numel_of(1e-9, DType.FP32) == 1
