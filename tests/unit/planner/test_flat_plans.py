"""What the flat layout promises for the models people train: no padding to speak of, and buckets by bytes."""

import math
from dataclasses import replace
from functools import cache

import pytest

from layerwise.layout.buckets import BufferPlan
from layerwise.layout.storage import default_bucket_numel, plan_storage
from layerwise.planner.presets import preset
from layerwise.routing.rules import route_params
from layerwise.routing.spec import ParamTable

MODELS = [("llama3-8b", 1), ("llama3-70b", 1), ("deepseek-v3", 32), ("kimi-k2", 16)]
WORLDS = [8, 16, 32, 64, 128, 256, 512, 1024]


@cache
def model(name: str, expert_parallel: int) -> ParamTable:
    return preset(name, expert_parallel=expert_parallel)


def stored(table: ParamTable, world: int) -> tuple[BufferPlan, ...]:
    worlds = {param.domain: world for param in table}
    return plan_storage(table, route_params(table), world_by_domain=worlds, layout="flat", bucket_numel=None)


def buckets_by_bytes(numels: list[int], bucket_numel: int) -> int:
    """How many buckets a row of params fills when each bucket closes once it is full."""
    count, filled = 0, 0
    for numel in numels:
        filled += numel
        if filled >= bucket_numel:
            count, filled = count + 1, 0
    return count + (filled > 0)


@pytest.mark.parametrize("world", [*WORLDS, 24, 96, 1000])
@pytest.mark.parametrize(("name", "expert_parallel"), MODELS)
def test_padding_is_at_most_a_thousandth(name: str, expert_parallel: int, world: int) -> None:
    buffers = stored(model(name, expert_parallel), world)
    numel = sum(buffer.param_numel for buffer in buffers)
    assert numel == sum(param.numel for param in model(name, expert_parallel) if param.trainable)
    assert sum(buffer.padding for buffer in buffers) <= 0.001 * numel


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("name", "expert_parallel"), MODELS)
def test_the_number_of_buckets_is_what_bytes_say(name: str, expert_parallel: int, world: int) -> None:
    bucket_numel = default_bucket_numel(world)
    for buffer in stored(model(name, expert_parallel), world):
        numels = [placement.numel for bucket in buffer.buckets for placement in bucket.placements]
        assert len(buffer.buckets) == buckets_by_bytes(numels, bucket_numel)
        assert len(buffer.buckets) <= math.ceil(sum(numels) / bucket_numel)
        assert len(buffer.buckets) >= sum(numels) / (bucket_numel + max(numels))


@pytest.mark.parametrize(("name", "expert_parallel"), MODELS)
def test_the_number_of_matrices_changes_no_bucket(name: str, expert_parallel: int) -> None:
    table = model(name, expert_parallel)
    whole = ParamTable(tuple(replace(param, split=None) for param in table))
    counts = [sum(len(route.matrices) for route in route_params(version).values()) for version in (table, whole)]
    assert counts[0] > counts[1]
    assert stored(table, 64) == stored(whole, 64)
