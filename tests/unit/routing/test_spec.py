import re

import pytest

from layerwise.dtypes import DType
from layerwise.routing.spec import ParamSpec, ParamTable, table_of


def test_a_param_knows_its_elements_and_bytes() -> None:
    param = ParamSpec(fqn="w", shape=(3, 5), dtype=DType.BF16)
    assert (param.numel, param.nbytes) == (15, 30)
    assert ParamSpec(fqn="s", shape=()).numel == 1
    assert ParamSpec(fqn="z", shape=(4, 0)).nbytes == 0


def test_a_table_keeps_registration_order() -> None:
    table = table_of([("b", (2, 2)), ("a", (2, 2))])
    assert [param.fqn for param in table] == ["b", "a"]
    assert len(table) == 2


@pytest.mark.parametrize(
    "params",
    [
        (ParamSpec(fqn="w", shape=(2,)), ParamSpec(fqn="w", shape=(2,))),
        (ParamSpec(fqn="v", shape=(2,), aliases=("w",)), ParamSpec(fqn="w", shape=(2,))),
        (ParamSpec(fqn="u", shape=(2,), aliases=("w",)), ParamSpec(fqn="v", shape=(2,), aliases=("w",))),
        (ParamSpec(fqn="w", shape=(2,), aliases=("w",)),),
    ],
)
def test_a_name_that_comes_twice_is_refused(params: tuple[ParamSpec, ...]) -> None:
    expected = "param 'w' appears twice in the table: names identify params, so each may come once."
    with pytest.raises(ValueError, match=re.escape(expected)):
        ParamTable(params)


def test_a_param_is_found_under_every_name_it_has() -> None:
    tied = ParamSpec(fqn="embed.weight", shape=(4, 2), aliases=("head.weight",))
    table = ParamTable((tied,))
    assert table.find("embed.weight") is tied
    assert table.find("head.weight") is tied


def test_an_unknown_name_gets_the_nearest_one() -> None:
    table = table_of([("blocks.0.attn.qkv.weight", (2, 2)), ("head.weight", (2, 2))])
    with pytest.raises(
        KeyError,
        match=re.escape("no param is called 'blocks.0.attn.qvk.weight'. Did you mean 'blocks.0.attn.qkv.weight'?"),
    ):
        table.find("blocks.0.attn.qvk.weight")
