"""The largest attention logits of watched modules since they were last read.

A module that has `attention_heads()` is watched through hooks around its forward: while it runs, every call of
`scaled_dot_product_attention` is seen and its largest logits are computed once more, from the same queries and keys. A
module that computes its attention otherwise hands them over with `record_logits`.

A maximum does not mind being taken twice, so activation checkpointing and several calls of a module need no care.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from layerwise.kernels.logits import max_logits

_STAGE_FILE = os.path.join("distributed", "pipelining", "stage.py")


class MaxLogits:
    """The largest logit of every head of one module, in memory that stays the same."""

    def __init__(self, name: str, n_heads: int, device: torch.device) -> None:
        self.name = name
        self.n_heads = n_heads
        self.values = torch.full((n_heads,), -math.inf, dtype=torch.float32, device=device)
        self.is_seen = False
        """Whether there was any since the last reset: some of it may be -inf all the same, where all is masked."""
        self.handles: list[RemovableHandle] = []
        """Of the hooks that see the module's forward."""
        self.modes: list[_SeesAttention] = []

    @torch.no_grad()
    def record(self, values: Tensor) -> None:
        if values.shape != self.values.shape:
            raise ValueError(
                f"attention of module {self.name!r} has largest logits of shape {tuple(values.shape)}: expected one for each "
                f"of the {self.n_heads} heads that its attention_heads() has. Where tensor parallelism leaves a rank some heads only, give "
                "AttentionHeads records=True and call layerwise.record_logits() with -inf for the others."
            )
        # torch.maximum keeps NaN, which a collective would drop.
        self.values.copy_(torch.maximum(self.values, values.detach().to(self.values)))
        self.is_seen = True

    def reset(self) -> None:
        self.values.fill_(-math.inf)
        self.is_seen = False
        # Of forwards that an interrupt ended, for which torch calls no hooks: they must not see what others do for ever.
        for mode in self.modes:
            mode.is_over = True
        self.modes.clear()


def _watched(module: nn.Module) -> MaxLogits | None:
    """What is kept of a module. As an attribute of it: a copy has its own, and the compiler can see that it stays."""
    return getattr(module, "_layerwise_logits", None)


def watch(module: nn.Module, name: str, n_heads: int, device: torch.device, *, hooked: bool) -> MaxLogits:
    """Keep the largest logits of a module from now on."""
    known = _watched(module)
    if known is not None:
        unwatch(module, known)
    found = module._layerwise_logits = MaxLogits(name, n_heads, device)  # type: ignore[assignment]
    if hooked:
        found.handles = [
            module.register_forward_pre_hook(_begin),
            module.register_forward_hook(_end, always_call=True),
        ]
    return found


def unwatch(module: nn.Module, found: MaxLogits) -> None:
    """Keep nothing of a module any more; what somebody else keeps of it since then is theirs."""
    for handle in found.handles:
        handle.remove()
    if _watched(module) is found:
        del module._layerwise_logits


def _counts(module: nn.Module) -> bool:
    """Whether a forward that runs now is one of training. A pipeline of torch's that was not told the shapes between its stages
    begins with one of memory that nobody wrote."""
    if not module.training:
        return False
    if torch.compiler.is_compiling() or "torch.distributed.pipelining.stage" not in sys.modules:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "inference" in frame.f_code.co_name and frame.f_code.co_filename.endswith(_STAGE_FILE):
            return False
        frame = frame.f_back
    return True


def record_logits(module: nn.Module, max_per_head: Tensor) -> None:
    """Hand over the largest attention logit of every query head of a forward, after the softmax scale and without masked
    positions; for modules that do not call `scaled_dot_product_attention`.

    Counts only while the module is training and its model has an `Optimizer` with `qk_clip`; else it does nothing.
    """
    if not callable(getattr(module, "attention_heads", None)):
        raise TypeError(
            f"record_logits() for a {type(module).__name__}, which has no method attention_heads(): nobody knows which "
            "rows make its logits."
        )
    found = _watched(module)
    if found is not None and _counts(module):
        found.record(max_per_head)


class _SeesAttention(TorchFunctionMode):
    """Sees the attention of one module while its forward runs."""

    def __init__(self, found: MaxLogits) -> None:
        super().__init__()
        self._found = found
        self.is_over = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and not self.is_over:
            self._found.record(_logits_of(*args, **(kwargs or {})))
        return result


def _logits_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if query.is_nested or query.dim() < 3:
        raise NotImplementedError(
            f"attention over {'nested tensors' if query.is_nested else f'queries of {query.dim()} dims'} is not watched: "
            "expected (..., heads, positions, width). Call layerwise.record_logits() in the module's forward."
        )
    return max_logits(query, key, attn_mask, is_causal=is_causal, scale=scale)


def _begin(module: nn.Module, args: object) -> None:
    found = _watched(module)
    if found is not None and _counts(module):
        mode = _SeesAttention(found)
        mode.__enter__()  # type: ignore[no-untyped-call]
        found.modes.append(mode)


def _end(module: nn.Module, args: object, result: object) -> None:
    found = _watched(module)
    if found is not None and found.modes:
        found.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
