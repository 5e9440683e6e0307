"""Muon and other matrix optimizers across many ranks, in PyTorch: storage and work as two plans.

Importing this package does not import torch; the names that need it resolve on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from layerwise._version import __version__
from layerwise.config.clipping import QKClip
from layerwise.config.gradients import GradientPolicy
from layerwise.config.rules import AdaMuon, AdamW, Lion, Muon, NorMuon
from layerwise.errors import did_you_mean
from layerwise.routing.heads import AttentionHeads
from layerwise.routing.rules import RouteRule
from layerwise.routing.split import Split

if TYPE_CHECKING:
    from layerwise.checkpoint.folder import Checkpoints
    from layerwise.checkpoint.loading import load
    from layerwise.checkpoint.saving import save
    from layerwise.comm.joining import init
    from layerwise.engine.loss_scale import LossScale
    from layerwise.models.logits import record_logits
    from layerwise.models.quantizing import quantize
    from layerwise.optim.optimizer import Optimizer
    from layerwise.parallel.data_parallel import DataParallel

__all__ = [
    "AdaMuon",
    "AdamW",
    "AttentionHeads",
    "Checkpoints",
    "DataParallel",
    "GradientPolicy",
    "Lion",
    "LossScale",
    "Muon",
    "NorMuon",
    "Optimizer",
    "QKClip",
    "RouteRule",
    "Split",
    "__version__",
    "init",
    "load",
    "quantize",
    "record_logits",
    "save",
]

_LAZY = {
    "Checkpoints": "layerwise.checkpoint.folder",
    "DataParallel": "layerwise.parallel.data_parallel",
    "LossScale": "layerwise.engine.loss_scale",
    "Optimizer": "layerwise.optim.optimizer",
    "init": "layerwise.comm.joining",
    "load": "layerwise.checkpoint.loading",
    "quantize": "layerwise.models.quantizing",
    "record_logits": "layerwise.models.logits",
    "save": "layerwise.checkpoint.saving",
}


_ROOMS = ("quant", "trace")
"""Public modules that are imported when they are first named."""

_MOVED = {
    **dict.fromkeys(("LoadPlanner", "SavePlanner", "TrainState"), "layerwise.integrations.dcp"),
    **dict.fromkeys(("adopt", "register_quantized", "QuantizedStorage"), "layerwise.quant"),
    "Saving": "layerwise.checkpoint.saving",
}
"""Names that were here once, and the modules that have them now."""


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _ROOMS:
        return import_module(f"layerwise.{name}")
    if name in _MOVED:
        raise AttributeError(f"layerwise.{name} has moved: write `from {_MOVED[name]} import {name}`.")
    close = "" if name.startswith("_") else did_you_mean(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{close}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
