"""What holds for every test, so that a result never depends on the machine or its load.

One thread for the test process itself, as for the ranks it forks: how many threads share a product may change its last bit. Generated examples are the
same in every run and are given the time that they take: the first text that is drawn in a new checkout builds tables for seconds.
"""

import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.ranks import is_poisoned, poison_memory

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
if is_poisoned():
    poison_memory()

CROSSES = {
    **dict.fromkeys(
        (
            "distributed/test_checkpoints.py",
            "distributed/test_ddp.py",
            "distributed/test_fsdp2_changes.py",
            "distributed/test_fsdp2_life.py",
            "distributed/test_mesh_zoo.py",
            "distributed/test_planned_sharded.py",
            "distributed/test_quantized.py",
            "distributed/test_quantized_life.py",
            "distributed/test_sharded_training.py",
            "distributed/test_trainer_sharded.py",
            "distributed/test_whole_state.py",
            "examples/test_fsdp2.py",
            "hf/test_sharded.py",
            "hf/test_trace.py",
        ),
        12,
    ),
    "distributed/test_foreign.py": 2,
    "distributed/test_goldens.py": 3,
    "distributed/test_overlap.py": 3,
    "distributed/test_planned_bytes.py": 3,
    "distributed/test_trainer_checkpoints.py": 2,
}
"""Files whose slow tests are crosses of meshes or models with everything else: hundreds of cases of a few seconds. `make test-all` runs one in so many of
them, always the same ones; `make exhaustive` runs the others."""

BROAD = 5
"""Of the cases of a test that is marked as broad, `make test` runs one in so many: the first, and then every fifth."""
OF_RANKS, BROAD_OF_RANKS = ("distributed", "regressions"), 3
"""Tests of several ranks take seconds each: all that have cases are broad, and one in so many is run."""
DEEP = (
    "test_checkpoint_fit.py",
    "test_ddp.py",
    "test_dropped_groups.py",
    "test_fsdp2_changes.py",
    "test_fsdp2_life.py",
    "test_mesh_zoo.py",
    "test_quantized_life.py",
    "test_sharded_state.py",
    "test_sharded_training.py",
    "test_trainer_checkpoints.py",
    "test_trainer_moe.py",
    "test_trainer_pp.py",
)
"""Files of these that look at every side of one thing, which others use: of all their tests together, one in so many."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    seen: Counter[str] = Counter()
    for item in items:
        place = item.path.relative_to(here)
        is_of_ranks = place.parts[0] in OF_RANKS
        if (is_of_ranks or item.get_closest_marker("broad")) and not item.get_closest_marker("slow"):
            name = place.as_posix() if is_of_ranks and place.name in DEEP else item.nodeid.partition("[")[0]
            if seen[name] % (BROAD if item.get_closest_marker("broad") else BROAD_OF_RANKS):
                item.add_marker("slow")
            seen[name] += 1
        if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % CROSSES.get(place.as_posix(), 1):
            item.add_marker("exhaustive")
