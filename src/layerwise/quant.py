"""Weights quantised by another library: `adopt` takes over the params of a model, `register_quantized` describes a tensor class that is not known here.

`layerwise.quantize` makes codes of our own; docs/quantized.md compares the two.
"""

from __future__ import annotations

from layerwise.kernels.foreign import register_quantized
from layerwise.kernels.stored import QuantizedStorage
from layerwise.models.adopting import adopt

__all__ = ["QuantizedStorage", "adopt", "register_quantized"]
