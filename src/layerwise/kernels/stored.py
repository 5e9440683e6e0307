"""What a quantised param holds: codes of eight bits in both directions."""

from __future__ import annotations

import torch
from torch import Tensor

from layerwise.errors import StateError
from layerwise.kernels.codec import Codes, decode, encode, encode_both_into, encode_into
from layerwise.layout.recipes import Recipe


class Stored:
    """What a quantised param holds: codes of both directions, or values in memory of a replica, of which codes are made
    whenever they are used.

    Values that were given are kept beside the codes until a master was taken from them: what codes stand for is no
    beginning for it.
    """

    def __init__(self, recipe: Recipe, values: Tensor) -> None:
        self.recipe = recipe
        self.shape = values.shape
        self.given: Tensor | None = values
        self._codes: tuple[Codes, Codes] | None = None
        self._counted = [0]  # one list for a param and for entries of it
        self.settle(values)

    @property
    def writes(self) -> int:
        """How often values came here: once per step, and whenever somebody writes into the param."""
        return self._counted[0]

    @property
    def is_by_codes(self) -> bool:
        """Whether codes are what is kept."""
        return self._codes is not None

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """All tensors of codes that are kept."""
        if self._codes is None:
            return ()
        rows, cols = self._codes
        return (rows.values, rows.scales, *((cols.values, cols.scales) if self.recipe.both_directions else ()))

    def rows(self) -> Codes:
        """Codes in blocks along rows."""
        return self._codes[0] if self._codes is not None else encode(self._values(), self.recipe.weights)

    def cols(self) -> Codes:
        """Codes of the transposed values."""
        if self._codes is not None:
            return self._codes[1]
        if not self.recipe.both_directions:
            return _transposed(self.rows())
        return encode(self._values().mT.contiguous(), self.recipe.weights)

    def _values(self) -> Tensor:
        if self.given is None:
            raise StateError("a quantised param has neither codes nor values.")
        return self.given

    def read(self) -> Tensor:
        """The values that the codes stand for."""
        return decode(self.rows(), torch.bfloat16)

    def settle(self, values: Tensor) -> None:
        """Take values over as codes, of both directions."""
        if self._codes is None:
            rows = Codes.empty(tuple(self.shape), self.recipe.weights, values.device)
            cols = (
                Codes.empty((*self.shape[:-2], self.shape[-1], self.shape[-2]), self.recipe.weights, values.device)
                if self.recipe.both_directions
                else _transposed(rows)
            )
            self._codes = rows, cols
        rows, cols = self._codes
        if self.recipe.both_directions:
            encode_both_into(values, rows, cols)
        else:
            encode_into(values, rows)
        self._counted[0] += 1

    def keep_in(self, place: Tensor) -> None:
        """From now on values are kept, in this place; codes are made of them whenever they are used."""
        if self.given is None:
            raise StateError("a quantised param has no values to keep.")
        place.copy_(self.given)
        self.given, self._codes = place, None

    def take_given(self, fqn: str) -> Tensor:
        """The values that were given, which are not needed here any more."""
        given, self.given = self.given, None
        if given is None:
            raise StateError(
                f"param {fqn!r} has codes and no values: a master must not begin with what codes stand for. Copy weights into it "
                "first, as load_state_dict() does, or call layerwise.quantize() on the module that it was made of."
            )
        return given

    def release(self) -> None:
        """Have codes, and the values in memory of their own."""
        if self.given is not None:
            self.given = self.given.clone()
            self.settle(self.given)

    def write(self, values: Tensor) -> None:
        """Somebody else writes into the param."""
        if self._codes is None:
            self._values().copy_(values)
            self._counted[0] += 1
        else:
            self.given = values.to(torch.bfloat16).expand(self.shape).clone()
            self.settle(self.given)

    def copy(self) -> Stored:
        """The same in memory of its own."""
        made = object.__new__(Stored)
        made.recipe, made.shape, made._counted = self.recipe, self.shape, list(self._counted)
        made.given = None if self.given is None else self.given.clone()
        made._codes = None if self._codes is None else (_cloned(self._codes[0]), _cloned(self._codes[1]))
        if made._codes is not None and not self.recipe.both_directions:
            made._codes = made._codes[0], _transposed(made._codes[0])
        return made

    def entry(self, number: int) -> Stored:
        """One entry of a stack, in the same memory."""
        made = object.__new__(Stored)
        made.recipe, made.shape, made._counted = self.recipe, self.shape[1:], self._counted
        made.given = None if self.given is None else self.given[number]
        made._codes = None if self._codes is None else (_entry(self._codes[0], number), _entry(self._codes[1], number))
        return made


def _transposed(codes: Codes) -> Codes:
    """Codes whose blocks are as high as they are wide, of the transposed values: the same memory."""
    return Codes(codes.values.mT, codes.scales.mT, codes.format)


def _cloned(codes: Codes) -> Codes:
    return Codes(codes.values.clone(), codes.scales.clone(), codes.format)


def _entry(codes: Codes, number: int) -> Codes:
    return Codes(codes.values[number], codes.scales[number], codes.format)


def stored_of(param: Tensor) -> Stored | None:
    """What a param holds, if that is not a plain tensor."""
    found = getattr(param, "stored", None)
    return found if isinstance(found, Stored) else None


def recipe_of(param: Tensor) -> str:
    """The name of the recipe that a param is quantised by, if it is."""
    stored = stored_of(param)
    return "" if stored is None else stored.recipe.name
