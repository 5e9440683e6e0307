"""What it comes to that weights are kept as codes, beside the two ways of having them in bf16."""

from __future__ import annotations

from dataclasses import dataclass

from layerwise.dtypes import DType
from layerwise.routing.spec import ParamTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Bytes of the weights of one rank that a recipe keeps; padding is not in them."""

    recipe: str
    params: int
    elements: int
    nbytes: int
    """As codes, in all directions that products need."""
    bf16_nbytes: int
    """As a bf16 replica, of which codes are made whenever they are used."""

    @property
    def cached_nbytes(self) -> int:
        """As a bf16 replica with the codes kept beside it."""
        return self.bf16_nbytes + self.nbytes

    def to_json(self) -> dict[str, object]:
        return {
            "recipe": self.recipe,
            "params": self.params,
            "elements": self.elements,
            "bytes": self.nbytes,
            "bf16_bytes": self.bf16_nbytes,
            "bf16_and_codes_bytes": self.cached_nbytes,
        }


def codes_of(table: ParamTable) -> Codes | None:
    """What is kept as codes of a model, if anything is.

    >>> from layerwise.layout.quantizing import quantized_table
    >>> from layerwise.routing.spec import table_of
    >>> codes_of(quantized_table(table_of([("a.weight", (64, 64))]), "mxfp8"))
    Codes(recipe='mxfp8', params=1, elements=4096, nbytes=8448, bf16_nbytes=8192)
    """
    kept = [param for param in table if param.recipe]
    if not kept:
        return None
    elements = sum(param.numel for param in kept)
    return Codes(
        recipe=kept[0].recipe,
        params=len(kept),
        elements=elements,
        nbytes=sum(param.codes_nbytes for param in kept),
        bf16_nbytes=elements * DType.BF16.itemsize,
    )
