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
SHAPES = [(3, 256, 256), (1, 512, 128), (2, 100, 300), (5, 64, 64), (4, 128, 200), (2, 37, 51), (7, 520, 200)]


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, *, transposed: bool = False) -> torch.Tensor:
    made = torch.randn(shape, device="cuda").to(dtype)
    return made.mT.contiguous().mT if transposed else made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("steps", [1, 2, 4, 5, 8])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_replay_has_the_bits_of_a_launch_whatever_came_before_it(method: str, steps: int, dtype: torch.dtype) -> None:
    recorder = Recorder()
    options = {**OPTIONS, "schedule": coefficient_schedule("polar_express", steps), "method": method}
    places = [random(shape, dtype) for shape in SHAPES]
    replayed = 0
    for _ in range(6):
        for place in places:
            update = random(tuple(place.shape), dtype)
            expected = orthogonalize(update, **options)
            before = len(recorder._graphs)
            found = recorder.orthogonalize(place.copy_(update), **options)
            assert torch.equal(found, expected)
            replayed += before == len(recorder._graphs) > 0
            del found
    assert len(recorder._graphs) >= len(SHAPES)
    assert replayed


def test_a_transposed_batch_is_replayed_too() -> None:
    recorder = Recorder()
    for _ in range(6):
        batch = random((3, 256, 128), transposed=True)
        assert torch.equal(recorder.orthogonalize(batch.clone(), **OPTIONS), orthogonalize(batch, **OPTIONS))


def test_what_has_16_bits_and_whole_rows_is_orthogonalised_where_it_lies() -> None:
    batch = random((2, 128, 128))
    assert Recorder().orthogonalize(batch, **OPTIONS).data_ptr() == batch.data_ptr()
    apart = random((2, 128, 128), torch.float32)
    assert Recorder().orthogonalize(apart, **OPTIONS).data_ptr() != apart.data_ptr()


def test_recordings_are_for_addresses_hold_no_memory_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_MOST", 3)
    recorder = Recorder()
    places = [random((2, 64, 64)) for _ in range(5)]
    expected = [orthogonalize(place, **OPTIONS) for place in places]
    kept = [place.clone() for place in places]
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        for place, values, result in zip(places, kept, expected, strict=True):
            for _ in range(4):
                assert torch.equal(recorder.orthogonalize(place.copy_(values), **OPTIONS), result)
    assert len(recorder._graphs) == 3
    assert torch.cuda.memory_allocated() <= before + 4096  # a seed and an offset, which torch keeps for graphs
    recorder.free()
    assert not recorder._graphs


def test_another_stream_has_a_recording_of_its_own() -> None:
    recorder, stream = Recorder(), torch.cuda.Stream()
    values = random((2, 128, 128))
    expected, place = orthogonalize(values, **OPTIONS), values.clone()
    torch.cuda.synchronize()
    for _ in range(4):
        assert torch.equal(recorder.orthogonalize(place.copy_(values), **OPTIONS), expected)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            assert torch.equal(recorder.orthogonalize(place.copy_(values), **OPTIONS), expected)
        torch.cuda.synchronize()
    assert len(recorder._graphs) >= 2
