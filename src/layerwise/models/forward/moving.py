"""What moves values or changes them one by one: copies, joins, sums, norms, choices, reductions and indices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from layerwise.models.forward import operations as ops
from layerwise.models.forward.books import Books, Call
from layerwise.models.forward.labels import NONE, LabelsBySource, constant_along, without_repeats
from layerwise.models.forward.products import along_axis
from layerwise.models.forward.weights import storage_of

_MOST_SOURCES = 2
"""A sum of more products than this is a stream, whose features are all alike."""


def elementwise(books: Books, call: Call) -> None:
    out = call.outs[0]
    if call.name.removesuffix("_") == "mul":
        books.lanes.gate(call.ins, out)
    books.lanes.carry(call.ins, out)
    held = [tensor for tensor in call.ins if books.weights.holds(tensor)]
    if held and not any(books.is_live(tensor) for tensor in call.ins):
        of_params(books, call.name, held, out)
        return
    for tensor in held:
        books.used(tensor, call.name)
    labelled = [(place, tensor, found) for place, tensor in enumerate(call.ins) if (found := books.labels.of(tensor))]
    if call.name.removesuffix("_") == "masked_fill":
        labelled = [item for item in labelled if item[0] != 1]
    if not labelled:
        if call.name.endswith("_"):
            books.labels.put(out, {})
        return
    if call.name == "_softmax" and not all(
        constant_along(labels, (call.args[1],)) for labels in labelled[0][2].values()
    ):
        books.lanes.mark_gates(out)
    spread = [item for item in labelled if item[1].numel() != out.numel()]
    full = [item for item in labelled if item[1].numel() == out.numel()]
    for place, _, found in spread:  # a gain of something larger, no part of it
        books.end(found, place)
    if not full:
        return
    others = [tensor for tensor in call.ins if books.is_live(tensor) and tensor.numel() == out.numel()]
    if len(others) == 1 or _same(books, full, out):
        books.labels.put(out, _spread(full[0][2], out))
    elif call.name.removesuffix("_") in ops.SUMS or call.name.startswith(("where", "masked_scatter")):
        _sum(books, full, others, out)
    else:
        for place, _, found in full:
            books.end(found, place)
        books.labels.put(out, {})


def _same(books: Books, full: Sequence[tuple[int, Tensor, LabelsBySource]], out: Tensor) -> bool:
    """Whether all labelled operands have the same labels, as in x * sigmoid(x), and there is no other of their size."""
    first = full[0][2]
    return len(full) > 1 and all(
        found.keys() == first.keys() and all(torch.equal(found[key], first[key]) for key in first)
        for _, tensor, found in full[1:]
    )


def _sum(
    books: Books, full: Sequence[tuple[int, Tensor, LabelsBySource]], others: Sequence[Tensor], out: Tensor
) -> None:
    """Labels of a sum: of its terms, unless it is a stream that goes on from somewhere else."""
    total: dict[int, Tensor] = {}
    for _, _, found in full:
        for source, labels in found.items():
            before = total.get(source)
            labels = labels.expand(out.shape)
            if before is None:
                total[source] = labels
            else:
                terms = [one.reshape(-1) for one in without_repeats(before, labels)]
                books.features.pair(source, torch.stack(terms, 1))
                total[source] = torch.where(before >= 0, before, labels)
    is_stream = len(others) > len(full) or len(total) > _MOST_SOURCES * len(full)
    if is_stream or len(total) > 1:
        for source in total:
            books.features.sources[source].is_joined = True
    if is_stream:
        books.end(total, "stream")
    books.labels.put(out, {} if is_stream else total)


def of_params(books: Books, name: str, held: Sequence[Tensor], out: Tensor) -> None:
    """Params alone: a weight that is cast or scaled is itself; what scales it is used."""
    weight = next((tensor for tensor in held if tensor.shape == out.shape), None)
    for tensor in held:
        if tensor is not weight:
            books.used(tensor, name)
    view = books.weights.view(weight) if weight is not None else None
    if view is not None and not books.weights.holds(out):
        books.weights.copied(out, view)
    elif weight is not None:
        books.used(weight, name)


def copy(books: Books, call: Call) -> None:
    source, out = call.args[0], call.outs[0]
    if books.weights.holds(source):
        of_params(books, call.name, [source], out)
        return
    books.labels.put(out, books.labels.of(source))
    books.lanes.carry([source], out)
    if out.is_meta and (not source.is_meta or storage_of(source) in books.real):
        books.real[storage_of(out)] = books.value(source).contiguous()
        books.kept.append(out)


def write(books: Books, call: Call) -> None:
    """`copy_`, `fill_`, `zero_`: a part of a tensor becomes something else."""
    source = call.args[1] if call.name == "copy_" else None
    if isinstance(source, Tensor):
        books.used(source, call.name)
    books.labels.put(
        call.args[0], {key: found.expand(call.args[0].shape) for key, found in books.labels.of(source).items()}
    )


def move(books: Books, call: Call) -> None:
    books.used(call.ins[0], call.name)
    found = books.labels.of(call.args[0])
    if not found:
        return
    indices = list(call.ins[1:])
    if any(tensor.is_meta and storage_of(tensor) not in books.real for tensor in indices):
        books.lose(found, call.name, 0)
        return
    rest = tree_map(books.value, list(call.args[1:]))
    books.labels.put(
        call.outs[0], {source: call.func(labels, *rest, **call.kwargs) for source, labels in found.items()}
    )


def join(books: Books, call: Call) -> None:
    """`cat` and `stack`."""
    parts: list[Tensor] = [part for part in call.args[0] if not (call.name == "cat" and part.shape == (0,))]
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    if all(books.weights.holds(part) for part in parts):
        views = [books.weights.view(part) for part in parts]
        if call.name == "cat" and all(view is not None for view in views):
            books.weights.joined(call.outs[0], [view for view in views if view is not None], dim)
    for part in parts:
        if not books.weights.holds(call.outs[0]):
            books.used(part, call.name)
    labels = [books.labels.of(part) for part in parts]
    sources = dict.fromkeys(source for found in labels for source in found)
    join = torch.cat if call.name == "cat" else torch.stack
    nothing = [torch.full(part.shape, NONE, dtype=torch.int32, device="cpu") for part in parts] if sources else []
    books.labels.put(
        call.outs[0],
        {
            source: join([found.get(source, none) for found, none in zip(labels, nothing, strict=True)], dim)
            for source in sources
        },
    )


def pad(books: Books, call: Call) -> None:
    books.used(call.args[0], call.name)
    padded = {
        source: torch.constant_pad_nd(labels, call.args[1], NONE)
        for source, labels in books.labels.of(call.args[0]).items()
    }
    books.labels.put(call.outs[0], padded)


def norm(books: Books, call: Call) -> None:
    for tensor in call.ins:
        books.used(tensor, call.name)
    for fqn in books.weights.names(call.args[0]):  # a weight in place of activations
        books.lost[fqn] = "it is normalised before it is used"
    found = books.labels.of(call.args[0])
    books.end(found, 0)
    books.labels.put(call.outs[0], found)


def choose(books: Books, call: Call) -> None:
    place = ops.CHOICES[call.name]
    dim = call.args[place] if len(call.args) > place else call.kwargs.get("dim", None if call.name == "argmax" else -1)
    for source, labels in books.labels.of(call.args[0]).items():
        dims = tuple(range(labels.dim())) if dim is None or isinstance(dim, bool) else (dim,)
        if constant_along(labels, dims):
            continue
        for out in call.outs:
            books.lanes.mark_gates(out)
        for out in call.outs if call.name in ops.ORDERS else ():
            books.rank(out, source, out.numel())
        books.features.sources[source].is_router |= call.name not in ops.ORDERS
    books.end(books.labels.of(call.args[0]), 0)
    books.used(call.args[0], call.name)


def reduce(books: Books, call: Call) -> None:
    """Over tokens, features stay what they are; over features, they end here."""
    books.used(call.args[0], call.name)
    dims = _reduced_dims(call.func, call.args, call.kwargs)
    for source, labels in books.labels.of(call.args[0]).items():
        axes = tuple(range(labels.dim())) if dims is None else tuple(dim % labels.dim() for dim in dims)
        if not constant_along(labels, axes):
            books.end({source: labels}, 0)
            if call.name in ("max", "min") and len(call.outs) == 2:
                books.rank(call.outs[1], source, math.inf)
            continue
        for axis in axes:
            labels = labels.narrow(axis, 0, 1)
        for out in call.outs:
            if out.numel() == labels.numel():
                books.labels.put(out, {**books.labels.of(out), source: labels.reshape(out.shape)})


def per_channel(books: Books, call: Call) -> None:
    books.used(call.args[0], call.name)
    labels = books.labels.of(call.args[0])
    times = call.outs[0].shape[1] // call.args[0].shape[1] if call.outs[0].dim() > 1 and call.args[0].shape[1] else 1
    channelwise(books, labels, call.args[0], call.outs[0], times=max(1, times))


def channelwise(books: Books, labels: LabelsBySource, images: Tensor, out: Tensor, *, times: int) -> None:
    """Each channel of the input makes its own channels of the output."""
    carried = {}
    for source, found in labels.items():
        axis = 1 if found.dim() == out.dim() or found.dim() > 2 else 0
        others = tuple(dim for dim in range(found.dim()) if dim != axis)
        per_channel = found.amax(others) if others else found
        spread = along_axis(per_channel, found.shape, axis)
        if not bool(((found == spread) | (found == NONE)).all()):
            books.lose({source: found}, "a mix of channels", 0)
            continue
        carried[source] = along_axis(per_channel.repeat_interleave(times), out.shape, axis)
    books.labels.put(out, carried)


def index(books: Books, call: Call) -> None:
    """Advanced indexing: of a stack of weights any entry will do; of activations, along axes on which features are the
    same, or by known indices."""
    tensor = call.args[0]
    indices = (
        call.args[1] if call.name == "index" else [*(None for _ in range(call.args[1] % tensor.dim())), call.args[2]]
    )
    if books.weights.holds(tensor):
        _entries(books, tensor, indices, call.outs[0])
        return
    found = books.labels.of(tensor)
    carried = {}
    axes = tuple(axis for axis, index in enumerate(indices) if index is not None)
    is_known = all(index is None or not index.is_meta or storage_of(index) in books.real for index in indices)
    for source, labels in found.items():
        if call.name == "index" and is_known:
            values: list[Any] = [None if index is None else books.value(index) for index in indices]
            carried[source] = torch.ops.aten.index(labels, values)
        elif constant_along(labels, axes):
            for axis in axes:
                labels = labels.narrow(axis, 0, 1)
            anywhere = [
                None if index is None else torch.zeros(index.shape, dtype=torch.long, device="cpu") for index in indices
            ]
            carried[source] = (
                torch.ops.aten.index(labels, anywhere) if call.name == "index" else labels.expand(call.outs[0].shape)
            )
        else:
            books.lose({source: labels}, call.name, 0)
    books.labels.put(call.outs[0], carried)


def _entries(books: Books, tensor: Tensor, indices: Sequence[Tensor | None], out: Tensor) -> None:
    """Rows or entries of a param that data choose: as if it were the first, for all of them."""
    view = books.weights.view(tensor)
    first = indices[0] if indices else None
    names = books.weights.names(tensor)
    if view is None or first is None or any(index is not None for index in indices[1:]) or tensor.dim() < 3:
        books.looked_up.update(names)
        return
    books.answers.count += 1
    sizes = (*first.shape, *view.sizes[1:])
    strides = (*(0 for _ in first.shape), *view.strides[1:])
    books.weights.copied(out, type(view)(view.fqn, view.offset, tuple(sizes), tuple(strides)))


def put(books: Books, call: Call) -> None:
    """Parts of one tensor are put into another, or added: a stream of many."""
    for place, tensor in enumerate(call.ins):
        books.used(tensor, call.name)
        found = books.labels.of(tensor)
        for source in found:
            books.features.sources[source].is_joined = True
        books.end(found, place)


def halves(books: Books, call: Call) -> None:
    """`glu`: one half of the features gates the other."""
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", -1)
    for source, labels in books.labels.of(call.args[0]).items():
        for place, half in enumerate(labels.chunk(2, dim)):
            books.end({source: half}, place)


def _spread(labels: LabelsBySource, out: Tensor) -> LabelsBySource:
    return {
        source: found.reshape(out.shape) if found.numel() == out.numel() else found for source, found in labels.items()
    }


def _reduced_dims(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The axes that a reduction is over; None for all."""
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("dim") if "dim" in names else None
    dim = kwargs.get("dim", args[place] if place is not None and place < len(args) else None)
    if dim is None or dim == []:
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)
