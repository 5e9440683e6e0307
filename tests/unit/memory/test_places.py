from __future__ import annotations

import torch
from torch import nn

from layerwise.memory.places import Places


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(6.0)) for _ in range(4)]


def test_params_that_moved_are_numbered() -> None:
    found = params()
    places = Places(found)
    assert places.moved() == []
    found[3].data = found[3].data.clone()
    found[1].data = found[1].data.view(2, 3)  # the same memory, in another shape
    found[2].data = found[2].data.view(torch.int32).view(torch.float32)  # a view of the same
    assert places.moved() == [1, 3]


def test_a_dtype_of_the_same_width_in_the_same_memory_is_noticed() -> None:
    found = [nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)) for _ in range(2)]
    places = Places(found)
    found[1].data = found[1].data.view(torch.float16)
    assert places.moved() == [1]


def test_memory_that_was_shared_with_another_process_has_moved() -> None:
    found = params()
    places = Places(found)
    found[0].share_memory_()
    assert places.moved() == [0]


def test_a_write_is_told_once_and_what_was_noted_is_none() -> None:
    found = params()
    places = Places(found)
    assert places.written() == []
    with torch.no_grad():
        found[0].add_(1.0)
        found[2].zero_()
    assert places.written() == [0, 2]
    assert places.written() == []
    with torch.no_grad():
        found[1].add_(1.0)
    places.note()
    assert places.written() == []


def test_params_with_a_grad_are_numbered_whatever_it_holds() -> None:
    found = params()
    places = Places(found)
    assert places.with_grads() == []
    found[1].grad, found[2].grad = torch.zeros(6), torch.ones(6)
    assert places.with_grads() == [1, 2]
