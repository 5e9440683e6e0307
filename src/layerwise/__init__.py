"""Muon and other matrix optimizers across many ranks, in PyTorch: storage and work as two plans.

Importing this package does not import torch; the names that need it resolve on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from layerwise._version import __version__
from layerwise.config.rules import AdaMuon, AdamW, Lion, Muon, NorMuon
from layerwise.routing.rules import RouteRule
from layerwise.routing.split import Split

if TYPE_CHECKING:
    from layerwise.optim.loss_scale import LossScale
    from layerwise.optim.optimizer import Optimizer
    from layerwise.parallel.data_parallel import DataParallel

__all__ = [
    "AdaMuon",
    "AdamW",
    "DataParallel",
    "Lion",
    "LossScale",
    "Muon",
    "NorMuon",
    "Optimizer",
    "RouteRule",
    "Split",
    "__version__",
]

_LAZY = {
    "DataParallel": "layerwise.parallel.data_parallel",
    "LossScale": "layerwise.optim.loss_scale",
    "Optimizer": "layerwise.optim.optimizer",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
