"""Muon and other matrix optimizers across many ranks, in PyTorch: storage and work as two plans.

Importing this package does not import torch; the names that need it resolve on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from layerwise._version import __version__
from layerwise.config.clipping import QKClip
from layerwise.config.rules import AdaMuon, AdamW, Lion, Muon, NorMuon
from layerwise.errors import did_you_mean
from layerwise.routing.heads import AttentionHeads
from layerwise.routing.rules import RouteRule
from layerwise.routing.split import Split

if TYPE_CHECKING:
    from layerwise.checkpoint.folder import Checkpoints
    from layerwise.checkpoint.loading import load
    from layerwise.checkpoint.saving import Saving, save
    from layerwise.checkpoint.torch_planners import LoadPlanner, SavePlanner, TrainState
    from layerwise.comm.joining import init
    from layerwise.engine.loss_scale import LossScale
    from layerwise.kernels.foreign import register_quantized
    from layerwise.kernels.stored import QuantizedStorage
    from layerwise.models.adopting import adopt
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
    "Lion",
    "LoadPlanner",
    "LossScale",
    "Muon",
    "NorMuon",
    "Optimizer",
    "QKClip",
    "QuantizedStorage",
    "RouteRule",
    "SavePlanner",
    "Saving",
    "Split",
    "TrainState",
    "__version__",
    "adopt",
    "init",
    "load",
    "quantize",
    "record_logits",
    "register_quantized",
    "save",
]

_LAZY = {
    "Checkpoints": "layerwise.checkpoint.folder",
    "DataParallel": "layerwise.parallel.data_parallel",
    "LoadPlanner": "layerwise.checkpoint.torch_planners",
    "LossScale": "layerwise.engine.loss_scale",
    "Optimizer": "layerwise.optim.optimizer",
    "QuantizedStorage": "layerwise.kernels.stored",
    "SavePlanner": "layerwise.checkpoint.torch_planners",
    "Saving": "layerwise.checkpoint.saving",
    "TrainState": "layerwise.checkpoint.torch_planners",
    "adopt": "layerwise.models.adopting",
    "init": "layerwise.comm.joining",
    "load": "layerwise.checkpoint.loading",
    "quantize": "layerwise.models.quantizing",
    "record_logits": "layerwise.models.logits",
    "register_quantized": "layerwise.kernels.foreign",
    "save": "layerwise.checkpoint.saving",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    close = "" if name.startswith("_") else did_you_mean(name, __all__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{close}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
