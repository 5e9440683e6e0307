"""Update rules as Triton kernels: one launch for all tensors of a list, and one pass over memory where a row of foreach
kernels takes several.

What an element gets depends on itself alone, wherever it lies: fused multiplications and additions are written out, so that
no compiler chooses them differently from one way through a kernel to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from layerwise.kernels.lists import Tensors, facts_of
from layerwise.kernels.tables import address_table, cut, place_of, working_on
from layerwise.kernels.triton_launch import launch
from layerwise.kernels.triton_lists import ALIGNMENT, TRITON_DTYPES, as_pointer, by_dtypes, find_block, taken
from layerwise.kernels.triton_pairs import fused_copy_
from layerwise.kernels.verdicts import Factor, Scale


@triton.jit
def _decided(verdict, place, left, scale, DECIDED: tl.constexpr):
    """How much of a block there is, nothing in a step that is not taken, and what gradients count as multiplied by."""
    if DECIDED:
        left, scale = taken(verdict, left), tl.load(verdict + place)
    return left, scale


@triton.jit
def _momentum(grad, state, target, mask, momentum, rest, scale, NESTEROV: tl.constexpr):
    g = tl.load(grad, mask=mask).to(tl.float32) * scale
    m = tl.load(state, mask=mask)
    if NESTEROV:
        m = tl.fma(momentum, m, rest * g)
        direction = tl.fma(momentum, m, rest * g)
    else:
        m = tl.fma(rest, g, momentum * m)
        direction = m
    tl.store(state, m, mask=mask)
    tl.store(target, direction.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["place"])
def _momentum_kernel(
    blocks, numels, grads, states, targets, verdict, place, momentum, rest, scale, DECIDED: tl.constexpr,
    GRAD: tl.constexpr, STATE: tl.constexpr, TARGET: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, first, left = find_block(blocks, numels, BLOCK)
    left, scale = _decided(verdict, place, left, scale, DECIDED)
    grad, state, target = tl.load(grads + tensor), tl.load(states + tensor), tl.load(targets + tensor)
    is_aligned = (grad | state | target) % ALIGNMENT == 0
    lanes = tl.arange(0, BLOCK)
    grad, state = as_pointer(grad, GRAD) + first, as_pointer(state, STATE) + first
    target = as_pointer(target, TARGET) + first
    if is_aligned & (left >= BLOCK):
        g, m = tl.multiple_of(grad + lanes, ALIGNMENT), tl.multiple_of(state + lanes, ALIGNMENT)
        _momentum(g, m, tl.multiple_of(target + lanes, ALIGNMENT), None, momentum, rest, scale, NESTEROV)
    else:
        _momentum(grad + lanes, state + lanes, target + lanes, lanes < left, momentum, rest, scale, NESTEROV)


@triton.jit
def _adamw(master, grad, avg, avg_sq, mask, beta1, rest1, beta2, rest2, root, eps, size, keep, scale):
    g = tl.load(grad, mask=mask).to(tl.float32) * scale
    m = tl.fma(rest1, g, beta1 * tl.load(avg, mask=mask))
    v = tl.fma(rest2 * g, g, beta2 * tl.load(avg_sq, mask=mask))
    tl.store(avg, m, mask=mask)
    tl.store(avg_sq, v, mask=mask)
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    tl.store(master, tl.fma(-size, tl.div_rn(m, denominator), tl.load(master, mask=mask) * keep), mask=mask)


@triton.jit(do_not_specialize=["place"])
def _adamw_kernel(
    blocks, numels, masters, grads, avgs, avg_sqs, verdict, place, beta1, rest1, beta2, rest2, root, eps, size, keep, scale,
    DECIDED: tl.constexpr, MASTER: tl.constexpr, GRAD: tl.constexpr, AVG: tl.constexpr, AVG_SQ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, first, left = find_block(blocks, numels, BLOCK)
    left, scale = _decided(verdict, place, left, scale, DECIDED)
    master, grad = tl.load(masters + tensor), tl.load(grads + tensor)
    avg, avg_sq = tl.load(avgs + tensor), tl.load(avg_sqs + tensor)
    is_aligned = (master | grad | avg | avg_sq) % ALIGNMENT == 0
    lanes = tl.arange(0, BLOCK)
    master, grad = as_pointer(master, MASTER) + first, as_pointer(grad, GRAD) + first
    avg, avg_sq = as_pointer(avg, AVG) + first, as_pointer(avg_sq, AVG_SQ) + first
    if is_aligned & (left >= BLOCK):
        w, g = tl.multiple_of(master + lanes, ALIGNMENT), tl.multiple_of(grad + lanes, ALIGNMENT)
        m, v = tl.multiple_of(avg + lanes, ALIGNMENT), tl.multiple_of(avg_sq + lanes, ALIGNMENT)
        _adamw(w, g, m, v, None, beta1, rest1, beta2, rest2, root, eps, size, keep, scale)
    else:
        w, g, m, v = master + lanes, grad + lanes, avg + lanes, avg_sq + lanes
        _adamw(w, g, m, v, lanes < left, beta1, rest1, beta2, rest2, root, eps, size, keep, scale)


@triton.jit
def _lion(master, grad, avg, mask, beta1, rest1, beta2, rest2, lr, keep, scale):
    g = tl.load(grad, mask=mask).to(tl.float32) * scale
    m = tl.load(avg, mask=mask)
    direction = tl.fma(rest1, g, beta1 * m)
    sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, direction))  # zero stays zero, NaN stays NaN
    tl.store(master, tl.fma(-lr, sign, tl.load(master, mask=mask) * keep), mask=mask)
    tl.store(avg, tl.fma(rest2, g, beta2 * m), mask=mask)


@triton.jit(do_not_specialize=["place"])
def _lion_kernel(
    blocks, numels, masters, grads, avgs, verdict, place, beta1, rest1, beta2, rest2, lr, keep, scale,
    DECIDED: tl.constexpr, MASTER: tl.constexpr, GRAD: tl.constexpr, AVG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, first, left = find_block(blocks, numels, BLOCK)
    left, scale = _decided(verdict, place, left, scale, DECIDED)
    master, grad, avg = tl.load(masters + tensor), tl.load(grads + tensor), tl.load(avgs + tensor)
    is_aligned = (master | grad | avg) % ALIGNMENT == 0
    lanes = tl.arange(0, BLOCK)
    master, grad, avg = as_pointer(master, MASTER) + first, as_pointer(grad, GRAD) + first, as_pointer(avg, AVG) + first
    if is_aligned & (left >= BLOCK):
        w, g = tl.multiple_of(master + lanes, ALIGNMENT), tl.multiple_of(grad + lanes, ALIGNMENT)
        m = tl.multiple_of(avg + lanes, ALIGNMENT)
        _lion(w, g, m, None, beta1, rest1, beta2, rest2, lr, keep, scale)
    else:
        _lion(master + lanes, grad + lanes, avg + lanes, lanes < left, beta1, rest1, beta2, rest2, lr, keep, scale)


# Small blocks: what counts is how many of them run beside each other, for AdamW divides while others read.
_BLOCK, _WARPS = 1024, 4


def look_at(tensors: Tensors) -> None:
    """Have all ready that a launch asks of these tensors, so that it takes less of the host's time when it comes."""
    facts = facts_of(tensors)
    if facts.are_contiguous and facts.one_dtype is not None:
        with working_on(facts.device):
            place = place_of(facts.device)
            address_table(facts.addresses, place)
            cut(facts.numels, _BLOCK, place)


def fused_momentum_(
    grads: Tensors,
    momenta: Tensors,
    into: Tensors | None = None,
    *,
    momentum: float,
    nesterov: bool,
    scale: Scale = 1.0,
) -> None:
    """`momentum_`, in place or into other tensors."""
    lists = grads, momenta, grads if into is None else into
    _run(_momentum_kernel, lists, (momentum, 1.0 - momentum), scale, (nesterov,))


def fused_adamw_(
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    betas: tuple[float, float],
    root: float,
    eps: float,
    size: float,
    keep: float = 1.0,
    scale: Scale = 1.0,
) -> None:
    """`adamw_` in place; `root` and `size` are what the step's number comes to."""
    beta1, beta2 = betas
    scalars = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, root, eps, size, keep)
    _run(_adamw_kernel, (masters, grads, exp_avgs, exp_avg_sqs), scalars, scale)


def fused_lion_(
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    *,
    lr: float,
    betas: tuple[float, float],
    keep: float = 1.0,
    scale: Scale = 1.0,
) -> None:
    """`lion_` in place."""
    beta1, beta2 = betas
    scalars = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr, keep)
    _run(_lion_kernel, (masters, grads, exp_avgs), scalars, scale)


def _run(
    kernel: Any, lists: Sequence[Tensors], scalars: tuple[float, ...], scale: Scale, flags: tuple[object, ...] = ()
) -> None:
    """One launch for all entries that share dtypes."""
    if not all(facts_of(tensors).are_contiguous for tensors in lists):
        _run_contiguous(kernel, lists, scalars, scale, flags)
        return
    is_decided = isinstance(scale, Factor)
    decision = (*scale, *scalars, 1.0, True) if isinstance(scale, Factor) else (None, 0, *scalars, scale, False)
    for dtypes, chosen, _ in by_dtypes(lists):
        if not all(dtype in TRITON_DTYPES for dtype in dtypes):
            raise TypeError(f"element-wise work on fp32, bf16 and fp16, got {', '.join(map(str, dtypes))}.")
        facts = [facts_of(tensors) for tensors in chosen]
        numels, *others = (known.numels for known in facts)
        if any(other != numels for other in others):
            raise ValueError("element-wise work needs tensors of equal length in every list.")
        device = facts[0].device
        with working_on(device):
            place = place_of(device)
            blocks = cut(numels, _BLOCK, place)
            if not blocks.total:
                continue
            # A table for each list: most of them lie where they did, and what is new may be known before the launch is.
            tables = blocks.of, blocks.numels, *(address_table(known.addresses, place) for known in facts)
            constants = (*(TRITON_DTYPES[dtype] for dtype in dtypes), *flags, _BLOCK)
            key = (kernel, device, dtypes, flags, is_decided)
            launch(kernel, key, blocks.total, (*tables, *decision, *constants), warps=_WARPS)


def _run_contiguous(
    kernel: Any, lists: Sequence[Tensors], scalars: tuple[float, ...], scale: Scale, flags: tuple[object, ...]
) -> None:
    """With copies of what lies in pieces: its elements have no common order in memory."""
    # Once for each list: views are other tensors whenever they are asked for.
    made = {id(tensors): list(tensors) for tensors in lists}
    lists = [made[id(tensors)] for tensors in lists]
    of = {id(tensor): tensor for tensors in lists for tensor in tensors}  # one tensor may be in two lists
    copy_of = {key: tensor.contiguous() for key, tensor in of.items()}
    _run(kernel, [[copy_of[id(tensor)] for tensor in tensors] for tensors in lists], scalars, scale, flags)
    changed = [key for key, tensor in of.items() if tensor is not copy_of[key]]
    fused_copy_([of[key] for key in changed], [copy_of[key] for key in changed])
