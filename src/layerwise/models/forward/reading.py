"""From what a follower saw to a reading for every param."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from layerwise.models.forward.books import Books
from layerwise.models.forward.features import Source
from layerwise.routing.partition import Use, split_of
from layerwise.routing.readings import Reading, Role
from layerwise.routing.split import Split, row_blocks, whole


def read_params(books: Books, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Reading]:
    """A reading for every param of two or more dims."""
    sources: dict[str, list[int]] = {}
    for number, source in enumerate(books.features.sources):
        for fqn in dict.fromkeys(view.fqn for view in source.views):
            sources.setdefault(fqn, []).append(number)
    return {fqn: _read(books, fqn, shape, sources.get(fqn, [])) for fqn, shape in shapes.items() if len(shape) >= 2}


def _read(books: Books, fqn: str, shape: tuple[int, ...], numbers: Sequence[int]) -> Reading:
    if 0 in shape:
        return Reading(Role.UNSEEN, "it has no elements")
    found = [books.features.sources[number] for number in numbers]
    if fqn in books.looked_up:
        also = ", and it is multiplied too" if found else ""
        return Reading(Role.TABLE, f"its rows are looked up{also}")
    kind = books.convolutions.get(fqn)
    if kind == "grouped":
        return Reading(Role.GROUPED, "it is a convolution in groups")
    if kind == "input":
        return Reading(Role.INPUT, "it is a convolution over the model's input, or over one channel")
    if fqn in books.lost:
        return Reading(Role.UNSEEN, books.lost[fqn])
    if not found:
        uses = books.other_uses.get(fqn)
        if not uses:
            return Reading(Role.UNSEEN, "the forward did not use it")
        return Reading(Role.ADDED, f"it is never an operand of a product ({', '.join(sorted(uses))})")
    return _read_products(books, shape, numbers, found, is_convolution=kind is not None)


def _read_products(
    books: Books, shape: tuple[int, ...], numbers: Sequence[int], found: Sequence[Source], *, is_convolution: bool
) -> Reading:
    if any(source.is_router for source in found):
        return Reading(Role.ROUTER, "its outputs compete in a top-k")
    lost = next((source.not_followed for source in found if source.not_followed), "")
    if lost:
        return Reading(Role.UNSEEN, f"its outputs go through {lost}, which cannot be followed")
    if not all(books.features.are_all_read(number) for number in numbers):
        return Reading(Role.UNSEEN, "the forward read only some of its outputs")
    if is_convolution:
        split: Split | str = _split_of_convolution(books, shape, numbers)
    else:
        uses = _uses(books, numbers)
        if all(min(use.n_out, use.n_in) == 1 for use in uses) and not any(source.is_output for source in found):
            return Reading(Role.VECTOR, "it maps onto one number, or from one")
        split = split_of(shape, uses, one_for_all=books.answers.count > 0)
    if all(source.is_output for source in found):
        fits = None if isinstance(split, str) else split
        return Reading(Role.HEAD, "its outputs are the model's, and nothing else reads them", fits)
    if isinstance(split, str):
        return Reading(Role.UNSEEN, split)
    words = split.describe()
    return Reading(Role.MAP, f"it is multiplied{f', in {words}' if words else ', as one matrix'}", split)


def _uses(books: Books, numbers: Sequence[int]) -> list[Use]:
    """The products of a param as plain numbers. Entries of a stack, and products of different parts, are apart."""
    found = []
    for entry, number in enumerate(numbers):
        source, classes, at = books.features.sources[number], books.features.classes(number), 0
        for place, view in enumerate(source.views):
            (n_out, n_in), (out_stride, in_stride) = view.sizes, view.strides
            mine = classes[at : at + n_out]
            at += n_out
            if source.is_stack:
                order = {kind: index for index, kind in enumerate(dict.fromkeys(mine))}
                mine = [order[kind] for kind in mine]
            runs = tuple((len(list(group)), kind) for kind, group in groupby(mine))
            own = entry + place / (len(source.views) + 1) if source.is_stack else entry
            found.append(Use(view.offset, out_stride, in_stride, n_out, n_in, runs, own))
    return found


def _split_of_convolution(books: Books, shape: tuple[int, ...], numbers: Sequence[int]) -> Split | str:
    classes = books.features.classes(numbers[0])
    runs = [(len(list(group)), kind) for kind, group in groupby(classes)]
    if len(runs) == 1:
        return whole(shape)
    if len({kind for _, kind in runs}) == len(runs) and len(classes) == shape[0]:
        return row_blocks(shape, tuple(length for length, _ in runs))
    return "its channels are used apart in an order that no split can say"
