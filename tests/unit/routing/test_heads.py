"""Rows of heads: what the constructors say, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layerwise.config.clipping import QKClip
from layerwise.routing.heads import AttentionHeads, HeadRows, clipped_modules
from layerwise.routing.spec import ParamSpec, ParamTable


def rows_of(heads: AttentionHeads) -> list[tuple[str, int, int, tuple[int, ...], str]]:
    return [(rows.param, rows.start, rows.stop, rows.heads, rows.role) for rows in heads.rows]


def table(**shapes: tuple[int, ...]) -> ParamTable:
    return ParamTable(
        tuple(ParamSpec(fqn=f"a.{name.replace('__', '.')}", shape=shape) for name, shape in shapes.items())
    )


PLAIN = AttentionHeads.grouped(query="q", key="k", n_heads=2, head_dim=3)
WEIGHTS = table(q__weight=(6, 5), q__bias=(6,), k__weight=(6, 5))


def test_every_arrangement_says_which_rows_are_whose() -> None:
    assert rows_of(PLAIN) == [
        ("q", 0, 3, (0,), "query"),
        ("k", 0, 3, (0,), "key"),
        ("q", 3, 6, (1,), "query"),
        ("k", 3, 6, (1,), "key"),
    ]
    assert rows_of(AttentionHeads.fused("w", n_heads=4, n_kv_heads=2, head_dim=3)) == [
        ("w", 0, 6, (0, 1), "query"),
        ("w", 12, 15, (0, 1), "key"),
        ("w", 6, 12, (2, 3), "query"),
        ("w", 15, 18, (2, 3), "key"),
    ]
    assert rows_of(AttentionHeads.fused("w", n_heads=4, n_kv_heads=2, head_dim=3, order="groups", value_dim=5)) == [
        ("w", 0, 6, (0, 1), "query"),
        ("w", 6, 9, (0, 1), "key"),
        ("w", 14, 20, (2, 3), "query"),
        ("w", 20, 23, (2, 3), "key"),
    ]
    assert rows_of(
        AttentionHeads.mla(query="q_b", key_value="kv_b", n_heads=2, nope_dim=4, rope_dim=2, value_dim=3)
    ) == [
        ("q_b", 0, 4, (0,), "query"),
        ("q_b", 4, 6, (0,), "query_alone"),
        ("kv_b", 0, 4, (0,), "key"),
        ("q_b", 6, 10, (1,), "query"),
        ("q_b", 10, 12, (1,), "query_alone"),
        ("kv_b", 7, 11, (1,), "key"),
    ]


def test_shares_of_the_factor_add_up_to_one() -> None:
    powers = {
        role: HeadRows(param="w", start=0, stop=1, heads=(0,), role=role).power(0.25)
        for role in ("query", "key", "query_alone")
    }  # type: ignore[arg-type]
    assert powers == {"query": 0.25, "key": 0.75, "query_alone": 1.0}


def test_biases_come_along_and_transposed_weights_are_cut_by_columns() -> None:
    (module,) = clipped_modules({"a": PLAIN}, WEIGHTS, lambda param: False)
    assert [(part.fqn, part.grid, part.box) for part in module.parts][:3] == [
        ("a.q.weight", (30,), ((0,), (15,))),
        ("a.q.bias", (6,), ((0,), (3,))),
        ("a.k.weight", (30,), ((0,), (15,))),
    ]
    turned = table(q__weight=(5, 6), q__bias=(6,), k__weight=(5, 6))
    (module,) = clipped_modules({"a": PLAIN}, turned, lambda param: True)
    assert [(part.fqn, part.grid, part.box) for part in module.parts][3:5] == [
        ("a.q.weight", (5, 6), ((0, 3), (5, 6))),
        ("a.q.bias", (6,), ((3,), (6,))),
    ]
    # in_proj_weight and in_proj_bias, as torch's own attention calls them
    flat = ParamTable(
        tuple(ParamSpec(fqn=f"in_proj_{kind}", shape=shape) for kind, shape in (("weight", (18, 6)), ("bias", (18,))))
    )
    (module,) = clipped_modules(
        {"": AttentionHeads.fused("in_proj_weight", n_heads=2, head_dim=3)}, flat, lambda p: False
    )
    assert {part.fqn for part in module.parts} == {"in_proj_weight", "in_proj_bias"}


def frozen(known: ParamTable, *fqns: str) -> ParamTable:
    return ParamTable(tuple(replace(param, trainable=param.fqn not in fqns) for param in known))


def test_a_frozen_module_is_left_out_and_half_a_one_refused() -> None:
    everything = [param.fqn for param in WEIGHTS]
    assert clipped_modules({"a": PLAIN}, frozen(WEIGHTS, *everything), lambda param: False) == ()
    with pytest.raises(ValueError, match=r"module 'a' names 'a.k.weight', frozen: expected all"):
        clipped_modules({"a": PLAIN}, frozen(WEIGHTS, "a.k.weight"), lambda param: False)


@pytest.mark.parametrize(
    ("heads", "known", "message"),
    [
        (replace(PLAIN, rows=(replace(PLAIN.rows[0], param="p"), *PLAIN.rows[1:])), WEIGHTS, r"names 'p', which is no param of it. Known: a.k.weight"),
        (AttentionHeads.grouped(query="q", key="k", n_heads=3, head_dim=3), WEIGHTS, r"takes rows \[6, 9\) of param 'a.q.weight': expected at most 6 rows"),
        (AttentionHeads.grouped(query="q", key="q", n_heads=2, head_dim=3), WEIGHTS, r"of param 'a.q.weight', of which module 'a' takes \[0, 3\): expected every row once"),
        (PLAIN, table(q__weight=(6, 5, 2), k__weight=(6, 5)), r"has shape \(6, 5, 2\): expected"),
        (PLAIN, ParamTable(tuple(replace(param, domain="expert") for param in WEIGHTS)), r"'a.q.weight' is in domain 'expert': expected a dense one"),
        (PLAIN, ParamTable(tuple(replace(param, tie="t" if "k" in param.fqn else "") for param in WEIGHTS)), r"'a.k.weight' is tied over pipeline stages"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_named(heads: AttentionHeads, known: ParamTable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clipped_modules({"a": heads}, known, lambda param: False)


def test_two_modules_may_not_scale_the_same_rows() -> None:
    known = ParamTable(tuple(replace(param, aliases=(param.fqn.replace("a.", "b.", 1),)) for param in WEIGHTS))
    with pytest.raises(ValueError, match="module 'b' takes rows"):
        clipped_modules({"a": PLAIN, "b": PLAIN}, known, lambda param: False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionHeads.grouped(query="q", key="k", n_heads=4, n_kv_heads=3, head_dim=2), "n_kv_heads must divide n_heads=4, got 3"),
        (lambda: AttentionHeads.grouped(query="q", key="k", n_heads=0, head_dim=2), "n_heads must be a positive integer, got 0"),
        (lambda: AttentionHeads.fused("w", n_heads=2, head_dim=2, order="rows"), "order must be one of blocks, groups"),  # type: ignore[arg-type]
        (lambda: AttentionHeads.mla(query="q", key_value="k", n_heads=2, nope_dim=2, rope_dim=0, value_dim=2), "rope_dim must be"),
        (lambda: replace(PLAIN, n_heads=3), r"every one of 3 heads must be in one group of heads, got \[\(0,\), \(1,\)\]"),
        (lambda: replace(PLAIN, rows=PLAIN.rows[:3]), r"heads \[1\] have query rows: expected query and key rows together"),
        (lambda: replace(PLAIN, rows=(replace(PLAIN.rows[0], stop=0),)), r"must be a stretch of at least one, got \[0, 0\)"),
        (lambda: replace(PLAIN, rows=(replace(PLAIN.rows[0], heads=(2,)),)), r"must be some of 0 to 1, got \[2\]"),
        (lambda: replace(PLAIN, rows=(replace(PLAIN.rows[0], role="value"),)), "role must be one of"),  # type: ignore[arg-type]
        (lambda: QKClip(threshold=0), "threshold must be above 0, got 0"),
        (lambda: QKClip(threshold=float("nan")), "threshold must be a number, got nan"),
        (lambda: QKClip(balance=1.5), r"balance must be in \[0, 1\], got 1.5"),
        (lambda: QKClip(threshold="100"), "threshold must be a number, got '100'"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_eta_is_one_for_what_is_small_unknown_or_not_finite() -> None:
    clip = QKClip(threshold=50.0)
    assert [clip.eta(logit) for logit in (-float("inf"), -70.0, 0.0, 50.0, 100.0, float("inf"))] == [1, 1, 1, 1, 0.5, 1]
    assert QKClip(threshold=float("inf")).eta(1e30) == 1.0
