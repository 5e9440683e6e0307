"""Rules as TOML: what is read is what was written, and every mistake has its sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import ConfigError
from layerwise.routing.files import read_rules, rules_from_toml, rules_to_toml
from layerwise.routing.rules import RouteRule
from layerwise.routing.split import Split, interleaved_rows, per_column_head, row_blocks, stack, transposed, whole


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        rules_from_toml(text, "rules.toml")
    return [str(problem) for problem in caught.value.problems]


def test_every_key_is_read() -> None:
    text = """
        [[rule]]
        pattern = "*.router.weight"
        to = "other"
        [rule.options]
        lr = 1e-4
        betas = [0.9, 0.99]

        [[rule]]
        module_type = "Fused*"
        to = "matrix"
        split = {grid = [2, 12, 8], roles = "rrc", block_axis = 1, blocks = [4, 4, 4]}

        [[rule]]
        pattern = "a.weight"
        module_type = "Linear"
        to = "matrix"
        row_blocks = [8, 4, 4]
        options = {ns_dtype = "fp32", steps = 3, nesterov = false}

        [[rule]]
        pattern = "b.weight"
        to = "matrix"
        split = "whole"
    """
    assert rules_from_toml(text, "rules.toml") == [
        RouteRule(pattern="*.router.weight", to="other", options={"lr": 1e-4, "betas": (0.9, 0.99)}),
        RouteRule(
            module_type="Fused*", to="matrix", split=Split(grid=(2, 12, 8), roles="rrc", block_axis=1, blocks=(4, 4, 4))
        ),
        RouteRule(
            pattern="a.weight",
            module_type="Linear",
            to="matrix",
            row_blocks=(8, 4, 4),
            options={"ns_dtype": "fp32", "steps": 3, "nesterov": False},
        ),
        RouteRule(pattern="b.weight", to="matrix", split="whole"),
    ]


SPLITS = st.sampled_from(
    [
        "whole",
        whole((8, 6)),
        row_blocks((8, 6), (4, 2, 2)),
        interleaved_rows((24, 6), 2, (4, 4, 4)),
        per_column_head((8, 6), 3),
        stack((4, 8, 6), sizes=(4, 4)),
        stack((4, 8, 6), transposed=True),
        transposed((6, 8), (4, 4)),
    ]
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.floats(min_value=0, max_value=10, allow_nan=False) | st.integers(min_value=0, max_value=10),
        "weight_decay": st.floats(min_value=0, max_value=1),
        "weight_decay_mode": st.sampled_from(["decoupled", "independent", "coupled"]),
    },
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@st.composite
def route_rules(draw: st.DrawFn) -> RouteRule:
    fields: dict[str, object] = {"options": draw(OPTIONS), "to": draw(st.sampled_from(["matrix", "other"]))}
    fields[draw(st.sampled_from(["pattern", "module_type"]))] = draw(NAMES)
    if fields["to"] == "matrix":
        fields.update(draw(st.sampled_from([{}, {"row_blocks": (4, 2)}, {"split": draw(SPLITS)}])))
    return RouteRule(**fields)  # type: ignore[arg-type]


@given(st.lists(route_rules(), max_size=4))
def test_rules_that_are_written_and_read_are_equal(rules: list[RouteRule]) -> None:
    text = rules_to_toml(rules)
    assert rules_from_toml(text, "rules.toml") == rules
    assert rules_to_toml(rules_from_toml(text, "rules.toml")) == text


def test_a_printed_rule_reads_well() -> None:
    rule = RouteRule(pattern="*.qkv.weight", to="matrix", split=row_blocks((16, 8), (8, 4, 4)), options={"lr": 0.01})
    assert rules_to_toml([rule, RouteRule(module_type="Router", to="other")]).splitlines() == [
        "[[rule]]",
        'pattern = "*.qkv.weight"',
        'to = "matrix"',
        'split = {grid = [16, 8], roles = "rc", block_axis = 0, blocks = [8, 4, 4]}',
        "options = {lr = 0.01}",
        "",
        "[[rule]]",
        'module_type = "Router"',
        'to = "other"',
    ]


def test_a_predicate_cannot_be_written() -> None:
    def is_big(param: object) -> bool:
        return True

    rules = [RouteRule(pattern="a", to="other"), RouteRule(when=is_big, to="other")]
    with pytest.raises(ValueError, match="route rule 2") as caught:
        rules_to_toml(rules)
    assert str(caught.value) == (
        "route rule 2 (when is_big) cannot be written to a file: it has a Python predicate. "
        "Say it with pattern or module_type."
    )


@pytest.mark.parametrize("value", [None, float("inf"), object])
def test_an_option_that_toml_cannot_hold_cannot_be_written(value: object) -> None:
    with pytest.raises(ValueError, match="route rule 1 cannot be written to a file: TOML has no way to say"):
        rules_to_toml([RouteRule(pattern="a", to="other", options={"lr": value})])


RULE = '[[rule]]\npattern = "*.x"\n'

WRONG = [
    ("rule = [", "rules.toml: is not valid TOML: Invalid value (at end of document)."),
    (
        '[rule]\npattern = "a"',
        "rules.toml: rule: expected [[rule]] tables, got {'pattern': 'a'}. Write [[rule]] above each rule.",
    ),
    ("rule = [1]", "rules.toml: rule: expected [[rule]] tables, got [1]. Write [[rule]] above each rule."),
    (
        "[[rules]]\nto = 'other'",
        "rules.toml: rules: is unknown: a file of rules holds [[rule]] tables. Did you mean 'rule'?",
    ),
    (
        "[optim]\nlr = 1",
        "rules.toml: optim: is unknown: a file of rules holds [[rule]] tables.",
    ),
    (RULE, "rules.toml: rule 1.to: is missing: expected 'matrix' or 'other'."),
    (
        RULE + 'to = "muon"',
        "rules.toml: rule 1: route rule '*.x': to must be 'matrix' or 'other', got 'muon'.",
    ),
    (RULE + "to = 1", "rules.toml: rule 1.to: expected a string, got 1."),
    (
        '[[rule]]\npatern = "a"\nto = "other"',
        "rules.toml: rule 1.patern: is unknown. Did you mean 'pattern'?",
    ),
    (
        RULE + 'to = "other"\nwhen = "numel > 3"',
        "rules.toml: rule 1.when: is unknown. Known: module_type, options, pattern, row_blocks, split, to.",
    ),
    ('[[rule]]\npattern = ["a"]\nto = "other"', "rules.toml: rule 1.pattern: expected a string, got ['a']."),
    ('[[rule]]\nmodule_type = 3\nto = "other"', "rules.toml: rule 1.module_type: expected a string, got 3."),
    (
        '[[rule]]\npattern = ""\nto = "other"',
        "rules.toml: rule 1: a route rule has an empty pattern: expected a glob on param names, such as '*.router.weight'.",
    ),
    (
        '[[rule]]\nto = "other"',
        "rules.toml: rule 1: a route rule has nothing to match by: give it a pattern, a module_type or a predicate.",
    ),
    (
        RULE + 'to = "matrix"\nrow_blocks = [4, true]',
        "rules.toml: rule 1.row_blocks: expected a list of integers, got [4, True].",
    ),
    (
        RULE + 'to = "matrix"\nrow_blocks = "4,4"',
        "rules.toml: rule 1.row_blocks: expected a list of integers, got '4,4'.",
    ),
    (
        RULE + 'to = "other"\nrow_blocks = [4]',
        "rules.toml: rule 1: route rule '*.x': row_blocks=(4,) only makes sense with to='matrix'.",
    ),
    (
        RULE + 'to = "matrix"\nrow_blocks = [4]\nsplit = "whole"',
        "rules.toml: rule 1: route rule '*.x': give row_blocks or split, not both.",
    ),
    (
        RULE + 'to = "other"\nsplit = "whole"',
        "rules.toml: rule 1: route rule '*.x': split='whole' only makes sense with to='matrix'.",
    ),
    (
        RULE + 'to = "matrix"\nsplit = "halves"',
        "rules.toml: rule 1.split: expected 'whole' or a table of grid and roles, got 'halves'.",
    ),
    (
        RULE + 'to = "matrix"\nsplit = {grid = [4, 4]}',
        "rules.toml: rule 1.split.roles: is missing: a split needs one letter of r, c, a for each axis.",
    ),
    (
        RULE + 'to = "matrix"\nsplit = {roles = "rc"}',
        "rules.toml: rule 1.split.grid: is missing: a split needs the sizes of its axes.",
    ),
    (
        RULE + 'to = "matrix"\nsplit = {grid = [4, 4], roles = "rc", block = [2, 2]}',
        "rules.toml: rule 1.split.block: is unknown. Did you mean 'blocks'?",
    ),
    (
        RULE + 'to = "matrix"\nsplit = {grid = [4, 4.5], roles = "rc"}',
        "rules.toml: rule 1.split.grid: expected a list of integers, got [4, 4.5].",
    ),
    (
        RULE + 'to = "matrix"\nsplit = {grid = [4, 4], roles = "rc", block_axis = "0"}',
        "rules.toml: rule 1.split.block_axis: expected an integer, got '0'.",
    ),
    (
        RULE + 'to = "matrix"\nsplit = {grid = [4, 4], roles = "rx"}',
        "rules.toml: rule 1.split: split into grid (4, 4): roles 'rx' must name one of r, c, a for each of the 2 axes.",
    ),
    (
        RULE + 'to = "matrix"\nsplit = {grid = [4, 4], roles = "rc", blocks = [2, 1]}',
        "rules.toml: rule 1.split: split into grid (4, 4): blocks (2, 1) must be positive and sum to 4, got 3.",
    ),
    (RULE + 'to = "other"\noptions = 3', "rules.toml: rule 1.options: expected a table such as {lr = 1e-3}, got 3."),
    (
        RULE + 'to = "other"\noptions = {lrr = 1}',
        "rules.toml: rule 1.options.lrr: is no option of AdamW or Lion. Did you mean 'lr'?",
    ),
    (
        RULE + 'to = "matrix"\noptions = {weight_deacy = 1}',
        "rules.toml: rule 1.options.weight_deacy: is no option of Muon, NorMuon, AdaMuon or AdamW. "
        "Did you mean 'weight_decay'?",
    ),
    (
        RULE + 'to = "other"\noptions = {momentum = 0.9}',
        "rules.toml: rule 1.options.momentum: is no option of AdamW or Lion. "
        "Known: betas, eps, lr, weight_decay, weight_decay_mode.",
    ),
    (
        RULE + 'to = "other"\noptions = {lr = 2020-01-01}',
        "rules.toml: rule 1.options.lr: expected a number, a string, true, false or a list of them, "
        "got datetime.date(2020, 1, 1).",
    ),
    (
        RULE + 'to = "other"\noptions = {lr = "fast"}',
        "rules.toml: rule 1.options: AdamW: lr must be a finite number, got 'fast'.",
    ),
    (
        RULE + 'to = "matrix"\noptions = {momentum = 1.5}',
        "rules.toml: rule 1.options: Muon: momentum must be in [0, 1), got 1.5.",
    ),
    (
        RULE + 'to = "matrix"\noptions = {beta2 = -1}',
        "rules.toml: rule 1.options: NorMuon: beta2 must be in [0, 1), got -1.",
    ),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message[12:60] for _, message in WRONG])
def test_a_wrong_rule_says_what_is_wrong(text: str, message: str) -> None:
    assert problems_of(text) == [message]


def test_all_problems_of_all_rules_come_at_once() -> None:
    text = RULE + "to = 3\nrow_block = [1]\n" + RULE + 'to = "other"\noptions = {lr = -1}\n' + '[[rule]]\nto = "x"\n'
    assert problems_of(text) == [
        "rules.toml: rule 1.to: expected a string, got 3.",
        "rules.toml: rule 1.row_block: is unknown. Did you mean 'row_blocks'?",
        "rules.toml: rule 2.options: AdamW: lr must not be negative, got -1.",
        "rules.toml: rule 3: route rule (no pattern): to must be 'matrix' or 'other', got 'x'.",
    ]


def test_no_path_and_an_empty_file_mean_no_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("# nothing yet\n")
    assert read_rules("") == read_rules(str(tmp_path / "rules.toml")) == []


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/such.toml: there is no such file\."):
        read_rules("no/such.toml")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.toml': cannot be read as text: "):
        read_rules(str(tmp_path / "latin.toml"))
