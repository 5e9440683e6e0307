"""Element-wise parts of the update rules, and copies, over lists of tensors.

Each list entry is a run of elements with equal options; our own kernels walk all runs in one launch, foreach kernels in
a few. Every function is element-wise, so the result for an element does not depend on how the params were cut into
shards and runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.kernels.facts import has_own_kernels
from layerwise.kernels.lists import Tensors, facts_of
from layerwise.kernels.verdicts import ONE, Factor, Scale, known_to_host

# `scale` is what gradients count as multiplied by (they are clipped so), `keep` what weights are multiplied by before they are
# updated (they decay so): whoever reads them anyway does it on the way, with the rounding of a pass of its own.


def keep_of(*, lr: float, weight_decay: float, mode: str) -> float:
    """What weight decay leaves of a weight; all of it where decay is a part of the gradient."""
    match mode:
        case "decoupled":
            return 1.0 - lr * weight_decay
        case "independent":
            return 1.0 - weight_decay
        case "coupled":
            return 1.0
        case _:
            raise ValueError(f"weight_decay_mode must be decoupled, independent or coupled, got {mode!r}.")


def couple_(grads: Tensors, masters: Tensors, *, weight_decay: float, scale: Scale = 1.0) -> None:
    """Weight decay as a part of the gradient, which is clipped before."""
    if not grads:
        return
    grads, masters = list(grads), list(masters)
    scale_(grads, scale)
    torch._foreach_add_(grads, masters, alpha=weight_decay)


def look_at(tensors: Tensors) -> None:
    """Whatever is called with this list later finds there what it has to know of it."""
    if tensors and has_own_kernels(facts_of(tensors).device):
        from layerwise.kernels.triton_elementwise import look_at

        look_at(tensors)


def momentum_(
    grads: Tensors,
    momenta: Tensors,
    into: Tensors | None = None,
    *,
    momentum: float,
    nesterov: bool,
    scale: Scale = 1.0,
) -> None:
    """`M = mu*M + (1-mu)*G`; leaves in `into` what is to be orthogonalised: `(1-mu)*G + mu*M` with nesterov, else M,
    rounded to the dtype there. That is in `grads`, if nothing else is said; else those may hold anything afterwards."""
    if not grads:
        return
    if has_own_kernels(facts_of(grads).device):
        from layerwise.kernels.triton_elementwise import fused_momentum_

        fused_momentum_(grads, momenta, into, momentum=momentum, nesterov=nesterov, scale=scale)
        return
    factor = known_to_host(scale)
    if factor is None:
        return
    grads, momenta = list(grads), list(momenta)
    scale_(grads, factor)
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, grads, alpha=1.0 - momentum)
    if nesterov:
        torch._foreach_mul_(grads, 1.0 - momentum)
        torch._foreach_add_(grads, momenta, alpha=momentum)
    else:
        torch._foreach_copy_(grads, momenta)
    if into is not None:
        torch._foreach_copy_(list(into), grads)


def subtract_scaled_(
    masters: Tensors,
    updates: Tensors,
    factors: Sequence[float],
    keeps: Sequence[float] | None = None,
    verdict: Tensor | None = None,
) -> None:
    """`W = keep * W - factor * U`, with both for every run; pairs may be views. May scale `updates` in place. Updates of
    another dtype count as if they had been cast to that of the masters. In a step that is not taken, nothing."""
    if not masters:
        return
    if has_own_kernels(facts_of(masters).device):
        from layerwise.kernels.triton_pairs import fused_subtract_

        fused_subtract_(masters, updates, factors, keeps, verdict)
        return
    if verdict is not None and known_to_host(Factor(verdict, ONE)) is None:
        return
    masters = list(masters)
    if keeps is not None and set(keeps) != {1.0}:
        torch._foreach_mul_(masters, list(keeps))
    if masters[0].is_cuda:  # one pass for every factor instead of two passes
        by_factor: dict[float, list[int]] = {}
        for index, factor in enumerate(factors):
            by_factor.setdefault(factor, []).append(index)
        for factor, some in by_factor.items():
            torch._foreach_add_([masters[index] for index in some], [updates[index] for index in some], alpha=-factor)
        return
    wide = [update.to(master.dtype) for master, update in zip(masters, updates, strict=True)]
    torch._foreach_mul_(wide, list(factors))
    torch._foreach_sub_(masters, wide)


def copy_all_(targets: Tensors, sources: Tensors) -> None:
    """Every source into its target, casts included; pairs are views of equal shapes."""
    if not targets:
        return
    if has_own_kernels(facts_of(targets).device):
        from layerwise.kernels.triton_pairs import fused_copy_

        fused_copy_(targets, sources)
        return
    torch._foreach_copy_(list(targets), list(sources))


def adamw_(
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    keep: float = 1.0,
    scale: Scale = 1.0,
) -> None:
    """One Adam update; `step` counts from 1."""
    if not masters:
        return
    beta1, beta2 = betas
    root, size = math.sqrt(1.0 - beta2**step), lr / (1.0 - beta1**step)
    if has_own_kernels(facts_of(masters).device):
        from layerwise.kernels.triton_elementwise import fused_adamw_

        lists = masters, grads, exp_avgs, exp_avg_sqs
        fused_adamw_(*lists, betas=betas, root=root, eps=eps, size=size, keep=keep, scale=scale)
        return
    factor = known_to_host(scale)
    if factor is None:
        return
    masters, grads, exp_avgs, exp_avg_sqs = map(list, (masters, grads, exp_avgs, exp_avg_sqs))
    scale_(masters, keep)
    scale_(grads, factor)
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, grads, alpha=1.0 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1.0 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, root)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(masters, exp_avgs, denominators, value=-size)


def lion_(
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    keep: float = 1.0,
    scale: Scale = 1.0,
) -> None:
    """One Lion update: step along the sign of an interpolated momentum, then advance the momentum."""
    if not masters:
        return
    if has_own_kernels(facts_of(masters).device):
        from layerwise.kernels.triton_elementwise import fused_lion_

        fused_lion_(masters, grads, exp_avgs, lr=lr, betas=betas, keep=keep, scale=scale)
        return
    factor = known_to_host(scale)
    if factor is None:
        return
    masters, grads, exp_avgs = map(list, (masters, grads, exp_avgs))
    scale_(masters, keep)
    scale_(grads, factor)
    beta1, beta2 = betas
    directions = torch._foreach_mul(exp_avgs, beta1)
    torch._foreach_add_(directions, grads, alpha=1.0 - beta1)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(directions, lr)
    torch._foreach_sub_(masters, directions)
    torch._foreach_mul_(exp_avgs, beta2)
    torch._foreach_add_(exp_avgs, grads, alpha=1.0 - beta2)


def scale_(tensors: list[Tensor], scale: Scale) -> None:
    """Multiply; in a step that is not taken by anything."""
    if isinstance(scale, Factor):
        torch._foreach_mul_(tensors, scale.verdict[scale.place])
    elif scale != 1.0:
        torch._foreach_mul_(tensors, scale)
