"""The example trainers of other frameworks: each is run with the real library on two gloo ranks, follows the losses of the plain loop, and goes on from its
own checkpoint as if it had not stopped."""

from __future__ import annotations

import importlib
import importlib.util
import socket
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tables import ROOT
from tests.marks import sampled
from tests.ranks import as_launched, run_ranks

FOLDER = ROOT / "examples" / "frameworks"
WORLD, STEPS = 2, 8
LIBRARIES = {
    "ddp": (),
    "huggingface": ("transformers", "accelerate"),
    "accelerated": ("accelerate",),
    "lightning_trainer": ("lightning",),
    "lightning_fabric": ("lightning",),
    "huggingface --fsdp": ("transformers", "accelerate"),
    "accelerated --fsdp": ("accelerate",),
}
"""Scripts, with a word for those that cut the model, and what each needs."""
TOLERANCE = 2e-3
"""Gradients of the same sequences, dealt to ranks in another order: fp32 sums round differently, and Newton-Schulz in bf16 makes more of it. Losses fall by
a twentieth meanwhile."""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_script(rank: int, world: int, script: str, port: str, words: list[str]) -> list[float]:
    """What `main()` returns, in an environment as torchrun leaves it."""
    sys.path.insert(0, str(FOLDER))
    as_launched(rank, world, port)
    if "--fsdp" in words:
        let_cpus_shard()
    found: list[float] = importlib.import_module(script).main(words)
    return found


def let_cpus_shard() -> None:
    """accelerate asks whether ranks are on GPUs before it takes up FSDP, and on CPUs goes on with DistributedDataParallel, without a
    word. What comes after that question is the same on both: so it is answered here."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    begin = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = init


def losses_of(script: str, steps: int, out: Path, *words: str) -> list[float]:
    script, *more = script.split()
    arguments = ["--steps", str(steps), "--out", str(out), *more, *words]
    first, *others = run_ranks(WORLD, run_script, script, free_port(), arguments, timeout_s=240, meet=False)
    for other in others:
        assert other == first or not other  # some tell the first rank only
    return list(first)


@cache
def plain() -> list[float]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return losses_of("ddp", STEPS, Path(folder))


@pytest.fixture(params=sampled(LIBRARIES))
def script(request: pytest.FixtureRequest) -> str:
    for library in LIBRARIES[request.param]:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install layerwise[frameworks]")
    return str(request.param)


def test_it_follows_the_plain_loop_and_goes_on_from_its_own_checkpoint(script: str, tmp_path: Path) -> None:
    expected = plain()
    assert expected[-1] < 0.96 * expected[0]
    half = STEPS // 2
    before = losses_of(script, half, tmp_path)
    assert len(before) == half
    # What accelerate writes of a model that it has cut is there, and only then.
    assert any(tmp_path.rglob("pytorch_model_fsdp*")) is script.endswith("--fsdp")
    after = losses_of(script, STEPS, tmp_path, "--resume")
    assert before + after[-half:] == pytest.approx(expected, rel=TOLERANCE)
