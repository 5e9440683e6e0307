"""Views that nobody has made are known to lie where those would that torch makes."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import Tensor

from layerwise.kernels.lists import Cuts, Facts, Kept, View, facts_of, laid_out, stretch

FACTS = ("addresses", "numels", "dtypes", "one_dtype", "are_contiguous", "shapes", "strides", "device")


def a_tensor(rng: random.Random, dtype: torch.dtype) -> Tensor:
    """Its elements lie side by side, but it need not begin where its memory does."""
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    numel = torch.Size(shape).numel()
    first = rng.randint(0, 3)
    return torch.arange(first + numel + 2).to(dtype)[first : first + numel].view(shape)


def a_view(rng: random.Random, number: int, tensor: Tensor) -> tuple[View, Tensor]:
    """Some part of a tensor, by what torch says of it."""
    part = tensor
    for dim in range(tensor.dim()):
        start = rng.randrange(tensor.shape[dim])
        part = part.narrow(dim, start, rng.randint(1, tensor.shape[dim] - start))
    if rng.random() < 0.3:
        part = part.mT if part.dim() > 1 else part[:: rng.randint(1, 2)]
    return View(number, tuple(part.shape), part.stride(), part.storage_offset() - tensor.storage_offset()), part


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16)], ids=["one dtype", "two"])
def test_views_are_where_torch_has_them(dtypes: tuple[torch.dtype, ...]) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        tensors = [a_tensor(rng, rng.choice(dtypes)) for _ in range(rng.randint(1, 4))]
        pairs = [
            a_view(rng, number, tensors[number]) for number in rng.choices(range(len(tensors)), k=rng.randint(1, 6))
        ]
        views, parts = Cuts(view for view, _ in pairs).of(tensors), [part for _, part in pairs]
        expected = Facts(parts)
        for name in FACTS:
            assert getattr(facts_of(views), name) == getattr(expected, name), (seed, name)
        assert len(views) == len(parts)
        for made, at_once, part in zip(views, views[:], parts, strict=True):
            assert made.data_ptr() == at_once.data_ptr() == part.data_ptr()
            assert torch.equal(made, part)
        assert views[-1].stride() == parts[-1].stride()


def test_the_same_cuts_serve_other_tensors() -> None:
    cuts = Cuts([stretch(0, 2, 5), stretch(1, 0, 4)])
    for _ in range(2):
        first, second = torch.randn(6), torch.randn(4)
        views = cuts.of([first, second])
        assert views[1] is second  # all of it is itself
        views[0].zero_()
        assert first[2:5].eq(0).all()
        assert first[[0, 1, 5]].ne(0).all()
        assert facts_of(views).addresses == (first[2:].data_ptr(), second.data_ptr())


def test_a_turned_matrix_is_not_taken_for_itself() -> None:
    square = torch.arange(9.0).view(3, 3)
    (turned,) = Cuts([View(0, (3, 3), (1, 3), 0)]).of([square])
    assert torch.equal(turned, square.T)


def test_tensors_one_after_the_other() -> None:
    shapes = [(2, 3), (), (0, 4), (5,), (1, 2, 2)]
    message = torch.arange(2.0 * 3 + 1 + 5 + 4 + 7)
    views = laid_out(shapes).of([message])
    assert [tuple(view.shape) for view in views] == shapes
    assert torch.cat([view.flatten() for view in views]).tolist() == message[:16].tolist()
    assert facts_of(views).are_contiguous


def test_memory_is_free_as_soon_as_views_of_it_are_gone() -> None:
    """Without a search for garbage: a step asks for memory anew, and means to get the same."""
    gc.disable()
    try:
        tensor = torch.zeros(4)
        gone = weakref.ref(tensor)
        views = Cuts([stretch(0, 1, 3)]).of([tensor])
        assert [getattr(facts_of(views), name) for name in FACTS]
        del tensor, views
        assert gone() is None
    finally:
        gc.enable()


def test_what_is_kept_is_asked_once() -> None:
    kept = Kept([torch.zeros(2)])
    assert facts_of(kept) is facts_of(kept)
    assert facts_of(list(kept)) is not facts_of(list(kept))
    assert not Cuts([]).of([])
