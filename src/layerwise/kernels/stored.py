"""What a quantised param holds: codes that others know of, or ours, of eight bits in both directions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from layerwise.errors import StateError
from layerwise.kernels.codec import Codes, decode
from layerwise.kernels.encoding import encode, encode_both_into, encode_into
from layerwise.kernels.quantized_products import product
from layerwise.layout.recipes import Recipe


@runtime_checkable
class QuantizedStorage(Protocol):
    """A weight that is kept as codes, whoever made them: all that has to be known of it to train it."""

    given: Tensor | None
    """The bf16 values that its codes were made of, where it has kept them; they are let go of when a master has begun with
    them."""

    @property
    def name(self) -> str:
        """How it is kept, as the plan has it: the same on every rank."""

    @property
    def shape(self) -> torch.Size:
        """Of the values, which are bf16."""

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """All memory that it keeps, as long as it lives."""

    def settle(self, values: Tensor) -> None:
        """Make codes of values, by its own rules and in the memory that it has. Values are not its to keep, and the same
        values must give the same codes on every rank."""

    def read(self) -> Tensor:
        """The values that its codes stand for, in bf16."""

    def product(self, x: Tensor, *, by_rows: bool) -> Tensor:
        """`x @ w.mT`, as forward has it, or `x @ w`, as the input's gradient does; `x` is a contiguous matrix in bf16."""


class ParamStorage(ABC):
    """What a quantised param holds, and whether the values of before are still there: all that memory knows of it.

    Values that were given are kept beside the codes until a master was taken from them: what codes stand for is no
    beginning for it. Who writes back what was read has changed nothing: masters know better than codes.
    """

    _before: ParamStorage | None = None
    """As it was when somebody first wrote here, of which masters do not know yet."""

    def __init__(self, shape: torch.Size, given: Tensor | None) -> None:
        self.shape = shape
        self.given = given
        self._counted = [0]  # one list for a param and for entries of it

    @property
    @abstractmethod
    def name(self) -> str:
        """How it is kept."""

    @property
    @abstractmethod
    def codes(self) -> tuple[Tensor, ...]:
        """All tensors of codes that are kept."""

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, which the plan counts."""
        return sum(tensor.nbytes for tensor in self.codes)

    @property
    def writes(self) -> int:
        """How often values came here: once per step, and whenever somebody writes into the param."""
        return self._counted[0]

    @property
    def is_by_codes(self) -> bool:
        """Whether codes are what is kept."""
        return True

    @abstractmethod
    def settle(self, values: Tensor) -> None:
        """Take values over as codes."""

    @abstractmethod
    def read(self) -> Tensor:
        """The values that the codes stand for."""

    @abstractmethod
    def product(self, x: Tensor, *, by_rows: bool) -> Tensor:
        """`x @ w.mT`, or `x @ w` where the weight's rows are what is summed over."""

    @abstractmethod
    def copy(self) -> ParamStorage:
        """The same in memory of its own."""

    def keep_in(self, place: Tensor) -> None:
        """From now on values are kept, in this place; codes are made of them whenever they are used."""
        raise StateError(f"a param that is quantised by {self.name} has its codes, and makes none at use.")

    def entry(self, number: int) -> ParamStorage:
        """One entry of a stack, in the same memory."""
        raise StateError(f"a param that is quantised by {self.name} is no stack.")

    def take_given(self, fqn: str) -> Tensor:
        """The values that were given, which are not needed here any more."""
        given, self.given = self.given, None
        if given is None:
            raise StateError(
                f"param {fqn!r} has codes and no values: a master must not begin with what codes stand for. Copy weights into it "
                "first, as load_state_dict() does, or call layerwise.quantize() on the module that it was made of."
            )
        return given

    def taken(self) -> None:
        """Masters know what was written, and begin with it."""
        self.given = self._before = None

    def release(self) -> None:
        """Have codes, and the values in memory of their own."""
        if self.given is not None:
            self.given = self.given.clone()
            self.settle(self.given)

    @property
    def _memory(self) -> tuple[Tensor, ...]:
        """What is written when values come here."""
        return self.codes

    def write(self, values: Tensor) -> None:
        """Somebody else writes into the param."""
        values = values.to(self._memory[0].device, torch.bfloat16).expand(self.shape)
        was_written = self._before is not None
        if not self._is_back(values, has_master=self.given is None):
            self.given = values.clone()
            self.settle(self.given)
        elif was_written:
            self.given = None

    def _is_back(self, values: Tensor, *, has_master: bool) -> bool:
        """Whether what is written is what could be read before anybody wrote here; then memory has what it had then. Only a
        master is worth keeping that for."""
        before = self._before
        if not torch.equal(values, (before or self).read()):
            self._before = before or (self.copy() if has_master else None)
            return False
        if before is not None:
            for tensor, kept in zip(self._memory, before._memory, strict=True):
                tensor.copy_(kept)
            self._counted[0] += 1
            self._before = None
        return True


class Stored(ParamStorage):
    """Codes by a recipe of ours: of both directions, or values in memory of a replica, of which codes are made whenever they
    are used."""

    def __init__(self, recipe: Recipe, values: Tensor) -> None:
        super().__init__(values.shape, values)
        self.recipe = recipe
        self._codes: tuple[Codes, Codes] | None = None
        self.settle(values)

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def nbytes(self) -> int:
        """As the recipe has it, also while values are what is kept."""
        return self.recipe.nbytes(tuple(self.shape))

    @property
    def is_by_codes(self) -> bool:
        return self._codes is not None

    @property
    def codes(self) -> tuple[Tensor, ...]:
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
        return decode(self.rows(), torch.bfloat16)

    def product(self, x: Tensor, *, by_rows: bool) -> Tensor:
        return product(x, self.rows() if by_rows else self.cols(), self.recipe)

    def settle(self, values: Tensor) -> None:
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
        if self.given is None:
            raise StateError("a quantised param has no values to keep.")
        place.copy_(self.given)
        self.given, self._codes = place, None

    def write(self, values: Tensor) -> None:
        if self._codes is not None:
            super().write(values)
            return
        own = self._values()
        values = values.to(own).expand(self.shape)
        if not self._is_back(values, has_master=True):
            own.copy_(values)
            self._counted[0] += 1

    @property
    def _memory(self) -> tuple[Tensor, ...]:
        return self.codes if self._codes is not None else (self._values(),)

    def taken(self) -> None:
        self._before = None
        if self._codes is not None:
            self.given = None

    def copy(self) -> Stored:
        made = object.__new__(Stored)
        made.recipe, made.shape, made._counted = self.recipe, self.shape, list(self._counted)
        made.given = None if self.given is None else self.given.clone()
        made._codes = None if self._codes is None else (_cloned(self._codes[0]), _cloned(self._codes[1]))
        if made._codes is not None and not self.recipe.both_directions:
            made._codes = made._codes[0], _transposed(made._codes[0])
        return made

    def entry(self, number: int) -> Stored:
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


def stored_of(param: Tensor) -> ParamStorage | None:
    """What a param holds, if that is not a plain tensor."""
    found = getattr(param, "stored", None)
    return found if isinstance(found, ParamStorage) else None


def recipe_of(param: Tensor) -> str:
    """How a param is quantised, if it is."""
    stored = stored_of(param)
    return "" if stored is None else stored.name


def codes_nbytes_of(param: Tensor) -> int:
    """Bytes of a param's codes, if it has any."""
    stored = stored_of(param)
    return 0 if stored is None else stored.nbytes
