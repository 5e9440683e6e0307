"""NorMuon's and AdaMuon's second moments, against their formulas in fp64, and where there is nothing to normalise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.kernels.second_moment import normalise_elements, normalise_rows

BETA2, EPS = 0.9, 1e-8
Normalise = Callable[..., Tensor]
KINDS: dict[str, tuple[Normalise, Callable[[Tensor], Tensor]]] = {
    "rows": (normalise_rows, lambda update: update.square().mean(-1, keepdim=True)),
    "elements": (normalise_elements, torch.square),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 5), (20, 16), (16, 40)])
def test_an_update_is_divided_by_the_root_of_its_running_square_and_has_the_norm_of_a_polar_factor(
    kind: str, shape: tuple[int, int]
) -> None:
    normalise, square_of = KINDS[kind]
    moment_BM = torch.zeros((2, *shape) if kind == "elements" else (2, shape[0]))
    expected_moment = torch.zeros(2, *square_of(torch.zeros(shape)).shape, dtype=torch.float64)
    for step in range(3):
        update = torch.randn(2, *shape, generator=torch.Generator().manual_seed(step)) * 10.0**-step
        found = normalise(update.clone(), moment_BM, beta2=BETA2, eps=EPS)
        wide = update.double()
        expected_moment = BETA2 * expected_moment + (1 - BETA2) * torch.stack([square_of(matrix) for matrix in wide])
        expected = wide / (expected_moment.sqrt() + EPS)
        expected *= min(shape) ** 0.5 / expected.flatten(1).norm(dim=1)[:, None, None]
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [1, 8, 16, 300])
def test_a_matrix_without_an_update_stays_where_it_is(kind: str, side: int) -> None:
    """Beside one that has an update, at first and after some steps."""
    normalise, _ = KINDS[kind]
    moment = torch.zeros((2, side, side) if kind == "elements" else (2, side))
    for scale in (0.0, 1.0, 0.0):
        update = torch.ones(2, side, side)
        update[0] *= scale
        found = normalise(update, moment, beta2=BETA2, eps=EPS)
        assert found.isfinite().all()
        assert bool(found[0].any()) == (scale == 1.0)
        assert found[1].norm() == pytest.approx(side**0.5, rel=1e-4)


class Silent(nn.Module):
    """One matrix is not used, and the output that begins with zeros gives none of its gradients on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 24)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.up(x).relu())
        return found


@pytest.mark.parametrize("rule", [layerwise.Muon, layerwise.NorMuon, layerwise.AdaMuon])
@pytest.mark.parametrize("wrap", [lambda module: module, layerwise.DataParallel], ids=["plain", "DataParallel"])
def test_matrices_whose_gradients_are_zero_do_not_move(
    rule: type[layerwise.Muon], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    module = Silent()
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    model = wrap(module)
    optimizer = layerwise.Optimizer(model, matrix=rule(lr=0.01), other=layerwise.AdamW(lr=0.01))
    for step in range(3):
        (model(torch.ones(2, 16)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(module.unused.weight, before["unused.weight"])
        assert torch.equal(module.up.weight, before["up.weight"]) == (step == 0)
        assert all(param.isfinite().all() for param in module.parameters())
