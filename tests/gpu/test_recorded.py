"""Newton-Schulz that is replayed, against the same that is launched."""

from __future__ import annotations

import pytest
import torch

from layerwise.config.coefficients import coefficient_schedule
from layerwise.kernels import recorded
from layerwise.kernels.facts import products_for
from layerwise.kernels.newton_schulz import orthogonalize
from layerwise.kernels.recorded import Recorder

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or products_for(torch.device("cuda"), torch.bfloat16, torch.bfloat16).backend != "triton",
    reason="needs a GPU with our own products",
)

OPTIONS = {"schedule": coefficient_schedule("polar_express", 5), "method": "auto", "dtype": torch.bfloat16}
SHAPES = [(3, 256, 256), (1, 512, 128), (2, 100, 300), (5, 64, 64)]


def random(shape: tuple[int, ...], *, transposed: bool = False) -> torch.Tensor:
    made = torch.randn(shape, device="cuda").bfloat16()
    return made.mT.contiguous().mT if transposed else made


@pytest.mark.parametrize("transposed", [False, True])
def test_a_replay_has_the_bits_of_a_launch_whatever_came_before_it(transposed: bool) -> None:
    recorder = Recorder()
    for _ in range(5):
        batches = [random(shape, transposed=transposed) for shape in SHAPES]
        expected = [orthogonalize(batch, **OPTIONS) for batch in batches]
        found = [recorder.orthogonalize(batch, **OPTIONS) for batch in batches]
        assert all(map(torch.equal, found, expected))
    assert len(recorder._recorded) == len(SHAPES)


def test_two_batches_of_one_shape_do_not_share_what_they_return() -> None:
    recorder = Recorder()
    for _ in range(4):
        one, two = random((2, 128, 128)), random((2, 128, 128))
        found = recorder.orthogonalize(one, **OPTIONS), recorder.orthogonalize(two, **OPTIONS)
        assert torch.equal(found[0], orthogonalize(one, **OPTIONS))
        assert torch.equal(found[1], orthogonalize(two, **OPTIONS))


def test_what_is_large_is_never_recorded_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "RECORDED_NUMEL", 3 * 64 * 64)
    monkeypatch.setattr(recorded, "RECORDED_TOTAL", 4 * 64 * 64)
    recorder = Recorder()
    for _ in range(4):
        for shape in ((4, 64, 64), (3, 64, 64), (1, 64, 64), (2, 64, 64)):
            recorder.orthogonalize(random(shape), **OPTIONS)
    assert sorted(key[0][0] for key in recorder._recorded) == [1, 3]
    recorder.free()
    assert not recorder._recorded


def test_another_stream_has_a_recording_of_its_own() -> None:
    recorder, stream = Recorder(), torch.cuda.Stream()
    batch = random((2, 128, 128))
    expected = orthogonalize(batch, **OPTIONS)
    torch.cuda.synchronize()
    for _ in range(4):
        assert torch.equal(recorder.orthogonalize(batch, **OPTIONS), expected)
        with torch.cuda.stream(stream):
            assert torch.equal(recorder.orthogonalize(batch, **OPTIONS), expected)
    assert len(recorder._recorded) == 2
