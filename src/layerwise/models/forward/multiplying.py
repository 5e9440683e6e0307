"""What reads whole operands: products, convolutions, lookups and attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerwise.models.forward import operations as ops
from layerwise.models.forward.books import Books, Call
from layerwise.models.forward.labels import LabelsBySource
from layerwise.models.forward.moving import channelwise
from layerwise.models.forward.products import outputs_of_convolution, outputs_of_product
from layerwise.models.forward.weights import storage_of


def product(books: Books, call: Call) -> None:
    left, right = (call.args[place] for place in ops.PRODUCTS[call.name])
    for place, tensor in ((0, left), (1, right)):
        books.end(books.labels.of(tensor), place)
    labels: LabelsBySource = {}
    if ops.PRODUCTS[call.name][0] == 1:  # something is added
        books.used(call.args[0], "bias")
        if not books.weights.holds(call.args[0]):
            books.end(books.labels.of(call.args[0]), 2)
    if books.weights.holds(right):
        lengths = books.lanes.runs(left)
        if lengths:
            _in_lanes(books, right, lengths, call.outs[0])
        else:
            labels = _labelled(books, right, call.outs[0], is_right=True)
        if any(books.features.sources[source].is_stack for source in labels):
            books.lanes.meet_stack(left)
        books.used(left, "input of a product")
    elif books.weights.holds(left):
        labels = _labelled(books, left, call.outs[0], is_right=False)
    else:
        books.lanes.gate_as_product(left, right, call.outs[0])
    books.labels.put(call.outs[0], labels)


def _labelled(books: Books, weight: Tensor, out: Tensor, *, is_right: bool) -> LabelsBySource:
    if out.numel() == 0:  # data decide which entry gets how much, and this one got nothing
        return {}
    found = outputs_of_product(books.weights, books.features, weight, out, is_right=is_right)
    if found is None:
        for fqn in books.weights.names(weight):
            books.lost[fqn] = "it is multiplied in an order that cannot be told"
        return {}
    if not found:
        books.used(weight, "vector product")
    for source in found:
        books.lanes.begin(out, {source: found[source]}, books.shapes[books.features.sources[source].fqn])
    return found


def _in_lanes(books: Books, weight: Tensor, lengths: Sequence[int], out: Tensor) -> None:
    """Inputs of experts side by side: the product is the sum of one for each of them."""
    start = 0
    for length in lengths:
        labels = _labelled(books, weight.narrow(-2, start, length), out, is_right=True)
        start += length
        books.end(labels, "stream")
        for source in labels:
            books.features.sources[source].is_joined = True


def grouped_product(books: Books, call: Call) -> None:
    """Rows in groups, each with an entry of a stack: any entry will do for the labels."""
    rows, weight = call.args[0], call.args[1]
    books.end(books.labels.of(rows), 0)
    if books.weights.holds(weight) and weight.dim() == 3 and call.outs[0].dim() == 2:
        books.answers.count += 1
        books.labels.put(call.outs[0], _labelled(books, weight[0], call.outs[0], is_right=True))
    else:
        books.end(books.labels.of(weight), 1)


def convolution(books: Books, call: Call) -> None:
    images, weight, groups, out = call.args[0], call.args[1], call.args[8], call.outs[0]
    is_transposed = bool(call.args[6])
    labels = books.labels.of(images)
    channels = images.shape[1]
    for fqn in books.weights.names(weight):
        one_channel = min(weight.shape[:2]) == 1
        kind = "grouped" if groups > 1 else "input" if one_channel or storage_of(images) in books.raw else "plain"
        books.convolutions[fqn] = kind
    if isinstance(call.args[2], Tensor):
        books.used(call.args[2], "bias")
    if groups > 1 and groups == channels and out.shape[1] % channels == 0:
        channelwise(books, labels, images, out, times=out.shape[1] // channels)
        return
    books.end(labels, 0)
    found = None
    if books.weights.holds(weight) and groups == 1:
        found = outputs_of_convolution(books.weights, books.features, weight, out, is_transposed=is_transposed)
        if found is None:
            for fqn in books.weights.names(weight):
                books.lost[fqn] = "it is multiplied in an order that cannot be told"
    books.labels.put(out, found or {})


def look_up(books: Books, call: Call) -> None:
    books.looked_up.update(books.weights.names(call.args[0]))


def read(books: Books, call: Call) -> None:
    for place, tensor in enumerate(call.ins):
        books.end(books.labels.of(tensor), place)
        books.used(tensor, call.name)
