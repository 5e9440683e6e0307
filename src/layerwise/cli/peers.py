"""Newton-Schulz and Muon of other libraries, where they are installed: measured beside ours, in the same run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.config.coefficients import Coefficient

_GRAM = "gram_newton_schulz"
_RESTARTS = [2]
"""Where it restarts in five steps, as it does by default; ours do at the same place."""


def newton_schulz(schedule: Sequence[Coefficient]) -> dict[str, Callable[[Tensor], Tensor]]:
    """What other libraries orthogonalise a batch with, by name and version. Ask anew for every shape: theirs is compiled,
    and the compiler counts."""
    if not _is_there(_GRAM):
        return {}
    import gram_newton_schulz  # type: ignore[import-not-found]

    torch._dynamo.reset()
    coefficients = [list(step) for step in schedule]
    form: Any = gram_newton_schulz.GramNewtonSchulz
    return {
        f"{_named(_GRAM)}, gram": form(ns_coefficients=coefficients, gram_newton_schulz_reset_iterations=_RESTARTS),
        f"{_named(_GRAM)}, standard": form(ns_coefficients=coefficients, use_gram_newton_schulz=False),
    }


def optimizers() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    """Whole optimizers of others, over all params of a module, by name and version."""
    found: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {}
    if hasattr(torch.optim, "Muon"):
        found["torch Muon"] = lambda module: torch.optim.Muon(module.parameters(), lr=1e-3)
    if _is_there(_GRAM):
        found[f"{_named(_GRAM)} Muon"] = _gram_muon
    return found


def _gram_muon(module: nn.Module) -> torch.optim.Optimizer:
    import gram_newton_schulz

    torch._dynamo.reset()
    found: torch.optim.Optimizer = gram_newton_schulz.Muon(
        module.parameters(), lr=1e-3, gram_newton_schulz_restart_iterations=_RESTARTS
    )
    return found


def _is_there(package: str) -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec(package) is not None


def _named(package: str) -> str:
    return f"{package.replace('_', '-')} {metadata.version(package)}"
