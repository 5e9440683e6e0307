"""Statistics on a GPU. Needs CUDA; CI has none."""

from __future__ import annotations

import pytest
import torch

from layerwise.kernels.stats import group_sums

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run on a machine with one")


def test_sums_of_norm_groups_repeat_to_the_bit() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    values = torch.rand(20_000, generator=generator, dtype=torch.float64, device="cuda")
    group_of = torch.randint(0, 3, (20_000,), generator=generator, device="cuda")
    first = group_sums(values, group_of, 4)
    assert all(torch.equal(group_sums(values, group_of, 4), first) for _ in range(200))
    assert torch.allclose(first.cpu(), group_sums(values.cpu(), group_of.cpu(), 4), rtol=1e-12, atol=0.0)
