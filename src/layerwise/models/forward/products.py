"""Products with params: which of their elements are multiplied, and what their outputs are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from layerwise.models.forward.features import Features
from layerwise.models.forward.labels import LabelsBySource
from layerwise.models.forward.weights import View, Weights


def outputs_of_product(
    weights: Weights, features: Features, weight: Tensor, out: Tensor, *, is_right: bool
) -> LabelsBySource | None:
    """Labels of a product `x @ weight`, or `weight @ x`: the outputs are the columns of the weight on the right, or the
    rows of the one on the left. None if the weight is no view of params in this order."""
    if weight.dim() == 1:  # a vector has one output
        return {}
    out_axis, in_axis = (weight.dim() - 1, weight.dim() - 2) if is_right else (weight.dim() - 2, weight.dim() - 1)
    n_out = weight.shape[out_axis]
    if weight.dim() == 3 and weight.shape[0] > 1:
        view = weights.view(weight)
        if view is None:
            return None
        if view.strides[0] != 0:
            return _of_a_stack(features, view, out, out_axis, in_axis, is_right=is_right)
    views = weights.rows(weight, out_axis)
    if views is None:
        return None
    source = features.source(tuple(_as_pair(view, out_axis, in_axis) for view in views), n_out)
    labels = torch.arange(n_out, dtype=torch.int32, device="cpu")
    return {source: _placed(labels, out, is_right=is_right)}


def _of_a_stack(
    features: Features, view: View, out: Tensor, out_axis: int, in_axis: int, *, is_right: bool
) -> LabelsBySource:
    """A batched product: every entry is a matrix of its own, and its outputs have labels of their own."""
    pair = _as_pair(view, out_axis, in_axis)
    entries, n_out = view.sizes[0], pair.sizes[0]
    views = tuple(replace(pair, offset=pair.offset + entry * view.strides[0]) for entry in range(entries))
    source = features.source(views, n_out * entries, is_stack=True)
    labels = torch.arange(n_out * entries, dtype=torch.int32, device="cpu").reshape(entries, n_out)
    return {source: (labels.unsqueeze(1) if is_right else labels.unsqueeze(2)).expand(out.shape)}


def _as_pair(view: View, out_axis: int, in_axis: int) -> View:
    """The last two axes alone, outputs first."""
    return View(
        view.fqn,
        view.offset,
        (view.sizes[out_axis], view.sizes[in_axis]),
        (view.strides[out_axis], view.strides[in_axis]),
    )


def _placed(labels: Tensor, out: Tensor, *, is_right: bool) -> Tensor:
    return (labels if is_right or out.dim() == 1 else labels.unsqueeze(-1)).expand(out.shape)


def outputs_of_convolution(
    weights: Weights, features: Features, weight: Tensor, out: Tensor, *, is_transposed: bool
) -> LabelsBySource | None:
    """Labels of a convolution without groups: its outputs are channels."""
    view = weights.view(weight)
    if view is None:
        return None
    axis = 1 if is_transposed else 0
    n_out = weight.shape[axis]
    source = features.source((view,), n_out)
    return {source: along_axis(torch.arange(n_out, dtype=torch.int32, device="cpu"), out.shape, 1)}


def along_axis(labels: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    """One label for every index of an axis, spread over all others."""
    return labels.reshape([-1 if dim == axis else 1 for dim in range(len(shape))]).expand(tuple(shape))
