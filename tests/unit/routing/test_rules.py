import re

import pytest
from torch import nn

from layerwise.routing.defaults import DEFAULT_RULES
from layerwise.routing.refusals import RefusedError
from layerwise.routing.rules import RouteRule, explain, route_param, route_params, summarise, suspicion
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable, table_of
from layerwise.routing.split import Split, row_blocks


def spec(
    fqn: str, shape: tuple[int, ...], kind: ModuleKind = ModuleKind.OTHER, type_: str = "", **fields: object
) -> ParamSpec:
    return ParamSpec(fqn=fqn, shape=shape, module_kind=kind, module_type=type_, **fields)  # type: ignore[arg-type]


LINEAR, EMBEDDING, NORM, CONV, OTHER = (
    ModuleKind.LINEAR,
    ModuleKind.EMBEDDING,
    ModuleKind.NORM,
    ModuleKind.CONV,
    ModuleKind.OTHER,
)

# One or more params per default rule: the rule's name, the param, where it goes and the reason in words.
EXAMPLES = [
    (
        "scales of weight_norm",
        spec("up.weight_g", (8, 1), LINEAR, "Linear", stands_for="up.weight", is_scale=True),
        "other",
        "is the scale that weight_norm sets apart from 'up.weight': lengths, one for each direction, not a matrix",
    ),
    (
        "norms",
        spec("norm.weight", (8,), NORM, "LlamaRMSNorm"),
        "other",
        "belongs to a normalisation layer (LlamaRMSNorm)",
    ),
    ("norms", spec("norm.weight", (4, 8), NORM, "LayerNorm"), "other", "belongs to a normalisation layer (LayerNorm)"),
    (
        "state-space params",
        spec("mixer.A_log", (8, 4), OTHER, "Mixer"),
        "other",
        "is the 'A_log' of a state-space layer: each entry is a rate or a gain of its own",
    ),
    (
        "state-space params",
        spec("mixer.D", (8,), OTHER, "MambaMixer"),
        "other",
        "is the 'D' of a state-space layer: each entry is a rate or a gain of its own",
    ),
    ("biases", spec("fc.bias", (8,), LINEAR, "Linear"), "other", "is a bias: added, not multiplied"),
    ("biases", spec("experts.up_bias", (3, 8), OTHER, "Experts"), "other", "is a bias, going by its name 'up_bias'"),
    ("biases", spec("attn.bias_k", (1, 1, 8), OTHER, "Attn"), "other", "is a bias, going by its name 'bias_k'"),
    ("biases", spec("rnn.bias_ih_l0", (4, 8), OTHER, "Rnn"), "other", "is a bias, going by its name 'bias_ih_l0'"),
    (
        "embeddings",
        spec("wte.weight", (9, 4), EMBEDDING, "Embedding"),
        "other",
        "is an embedding table (Embedding): its rows are looked up, not multiplied",
    ),
    (
        "embeddings",
        spec("wte.weight", (9, 4), EMBEDDING, "Embedding", aliases=("out.weight",), alias_kinds=(LINEAR,)),
        "other",
        "is an embedding table (Embedding, tied to 'out.weight'): its rows are looked up, not multiplied",
    ),
    (
        "embeddings",
        spec("out.weight", (9, 4), LINEAR, "Linear", aliases=("wte.weight",), alias_kinds=(EMBEDDING,)),
        "other",
        "is an embedding table (Linear, tied to 'wte.weight'): its rows are looked up, not multiplied",
    ),
    ("scalars and vectors", spec("scale", ()), "other", "is a scalar"),
    ("scalars and vectors", spec("scale", (8,)), "other", "is a vector, not a matrix"),
    ("scalars and vectors", spec("empty.weight", (0, 8), LINEAR, "Linear"), "other", "has no elements"),
    (
        "low-rank pairs",
        spec("q_proj.lora_A.default.weight", (2, 8), LINEAR, "Linear"),
        "other",
        "is one factor of a low-rank pair ('lora_A'): only the product of the two is a matrix of the model",
    ),
    (
        "output heads",
        spec("out.weight", (9, 4), LINEAR, "Linear", maps_to_vocabulary=True),
        "other",
        "is an output head: a linear layer onto the rows of an embedding",
    ),
    (
        "output heads",
        spec("model.lm_head.weight", (9, 4), LINEAR, "Linear"),
        "other",
        "is an output head, going by its name 'lm_head'",
    ),
    (
        "output heads",
        spec("score.modules_to_save.default.weight", (9, 4), LINEAR, "Linear"),
        "other",
        "is an output head, going by its name 'score'",
    ),
    (
        "output heads",
        spec("out.weight", (9, 4), LINEAR, "Linear", maps_to_labels=True),
        "other",
        "is an output head: a linear layer onto the labels of the model's config",
    ),
    (
        "routers",
        spec("moe.gate.weight", (6, 4), LINEAR, "Linear", routes_to=6),
        "other",
        "is a router that chooses among 6 experts: its rows are scores that compete, and balance matters more than "
        "direction",
    ),
    (
        "routers",
        spec("moe.router.weight", (6, 4), LINEAR, "Linear"),
        "other",
        "is a router, going by its name 'router': its rows are scores that compete, and balance matters more than "
        "direction",
    ),
    (
        "one-sided layers",
        spec("shared_expert_gate.weight", (1, 4), LINEAR, "Linear"),
        "other",
        "is a linear layer onto one number (a gate or a score): a vector, not a matrix",
    ),
    (
        "one-sided layers",
        spec("time.weight", (4, 1), LINEAR, "Linear"),
        "other",
        "is a linear layer from one number (a gate or a score): a vector, not a matrix",
    ),
    ("one-sided layers", spec("attn.w_g", (4, 1)), "other", "has one row, or one column: a vector, not a matrix"),
    ("one-sided layers", spec("cls_token", (1, 4)), "other", "has one row, or one column: a vector, not a matrix"),
    (
        "grouped convolutions",
        spec("conv.weight", (8, 1, 3), CONV, "Conv1d", conv_groups=8),
        "other",
        "is a convolution in 8 groups: its rows belong to different inputs",
    ),
    (
        "one-channel convolutions",
        spec("conv.weight", (8, 1, 3), CONV, "Conv1d"),
        "other",
        "is a convolution with one channel: its rows are filters over a signal, no map between channels",
    ),
    (
        "input convolutions",
        spec("patch.weight", (8, 3, 4, 4), CONV, "Conv2d", reads_input=True),
        "other",
        "is an input layer: a convolution that embeds the 3 channels of the input, as a table embeds tokens",
    ),
    ("linear layers", spec("fc.weight", (8, 4), LINEAR, "Linear"), "matrix", "is the weight of a Linear"),
    (
        "linear layers",
        spec("qkv.weight", (8, 4), LINEAR, "Linear", split=row_blocks((8, 4), (4, 2, 2))),
        "matrix",
        "is the weight of a Linear, in row blocks of 4, 2, 2",
    ),
    (
        "declared splits",
        spec("w", (2, 4, 3, 3), OTHER, "Odd", split=Split(grid=(2, 4, 9), roles="arc")),
        "matrix",
        "is a weight of Odd, which says how it splits, in 2 matrices apart",
    ),
    (
        "convolutions",
        spec("conv.weight", (8, 4, 3, 3), CONV, "Conv2d"),
        "matrix",
        "is a convolution, flattened to rows x (columns * kernel)",
    ),
    (
        "broadcast tables",
        spec("vit.registers", (1, 16, 4)),
        "other",
        "has a leading dim of 1, so it is one for all of a batch (a table of positions or tokens): no map",
    ),
    (
        "stacks",
        spec("experts.w1", (3, 8, 4), OTHER, "GroupedExperts"),
        "matrix",
        "is a stack of 3 matrices, one for each expert of GroupedExperts",
    ),
    (
        "stacks",
        spec("experts.w1", (1, 8, 4), OTHER, "GroupedExperts"),
        "matrix",
        "is a stack of 1 matrix, one for each expert of GroupedExperts",
    ),
    (
        "stacks",
        spec("ffn.w1", (3, 8, 4), OTHER, "Ffn", domain="expert"),
        "matrix",
        "is a stack of 3 matrices, one for each expert of Ffn",
    ),
    ("everything else", spec("kernel", (8, 4, 3), OTHER, "Odd"), "other", "has 3 dims, which no matrix rule covers"),
    (
        "declared splits",
        spec("m.in_proj", (8, 4), OTHER, "Mixer", split=row_blocks((8, 4), (4, 4)), split_is_known=True),
        "matrix",
        "is a weight of Mixer, whose splits are known, in row blocks of 4, 4",
    ),
    (
        "tables by name",
        spec("vit.pos_embed", (16, 4)),
        "other",
        "looks like a table by its name ('embed' in 'pos_embed')",
    ),
    ("tables by name", spec("mask_token", (2, 4)), "other", "looks like a table by its name ('token' in 'mask_token')"),
    (
        "tables by name",
        spec("sam.grid.frequencies", (2, 16), EMBEDDING, "GridEmbedding"),
        "other",
        "is held by GridEmbedding, a class of embeddings: a table of inputs, going by that name",
    ),
    ("bare matrices", spec("mixer.weight", (8, 4), OTHER, "Mixer"), "matrix", "is a 2-D param held directly by Mixer"),
    ("bare matrices", spec("weight", (8, 4)), "matrix", "is a 2-D param held directly by a module"),
    ("everything else", spec("kernel", (2, 3, 4, 5)), "other", "has 4 dims, which no matrix rule covers"),
]


@pytest.mark.parametrize(("rule", "param", "family", "reason"), EXAMPLES)
def test_every_default_rule_gives_its_reason(rule: str, param: ParamSpec, family: str, reason: str) -> None:
    route = route_params(ParamTable((param,)))[param.fqn]
    assert (route.family, route.reason) == (family, reason)
    assert bool(route.matrices) == (family == "matrix")


@pytest.mark.parametrize(("rule", "param", "family", "reason"), EXAMPLES)
def test_explain_tries_the_rules_in_order_and_ends_with_the_one_that_matched(
    rule: str, param: ParamSpec, family: str, reason: str
) -> None:
    *tried, (name, verdict) = explain(param)
    names = [default.name for default in DEFAULT_RULES]
    assert [*(earlier for earlier, _ in tried), name] == names[: names.index(rule) + 1]
    assert {said for _, said in tried} <= {"no match"}
    assert verdict == f"matched: {re.split(', in (?:row blocks|2 matrices)', reason)[0]}; goes to {family}"


def test_the_examples_show_every_default_rule() -> None:
    assert {rule for rule, *_ in EXAMPLES} == {default.name for default in DEFAULT_RULES}


def test_a_frozen_param_has_no_rule_whatever_it_is() -> None:
    param = spec("fc.weight", (8, 4), LINEAR, "Linear", trainable=False)
    route = route_params(ParamTable((param,)), [RouteRule(pattern="fc.*", to="matrix")])["fc.weight"]
    assert (route.family, route.reason, route.matrices) == ("frozen", "does not require a gradient", ())
    assert list(explain(param)) == [("frozen params", "matched: does not require a gradient")]


TABLE = table_of([("blocks.0.fc.weight", (8, 4)), ("blocks.0.router.weight", (4, 4)), ("blocks.1.fc.weight", (8, 4))])


def test_a_param_of_three_dims_that_nobody_calls_experts_is_left_to_a_fallback() -> None:
    table = ParamTable((spec("conv.kernel", (768, 48, 128), OTHER, "PositionalConv"),))
    assert route_params(table)["conv.kernel"].is_fallback
    with pytest.raises(ValueError, match=re.escape("strict routing: 1 param with two or more dims went by a fallback")):
        route_params(table, strict=True)


def test_the_first_user_rule_that_matches_wins() -> None:
    rules = [
        RouteRule(pattern="*.router.weight", to="other", options={"lr": 0.1, "betas": (0.8, 0.9)}),
        RouteRule(pattern="blocks.*", to="matrix"),
    ]
    routes = route_params(TABLE, rules)
    assert routes["blocks.0.router.weight"].family == "other"
    assert routes["blocks.0.router.weight"].reason == "matches the user's rule 1 ('*.router.weight')"
    assert routes["blocks.0.router.weight"].options == (("betas", (0.8, 0.9)), ("lr", 0.1))
    assert routes["blocks.0.fc.weight"].reason == "matches the user's rule 2 ('blocks.*')"


def test_explain_shows_user_rules_before_the_defaults() -> None:
    rules = [RouteRule(pattern="*.router.weight", to="other"), RouteRule(pattern="blocks.1.*", to="other")]
    assert list(explain(TABLE.find("blocks.1.fc.weight"), rules)) == [
        ("user rule 1 '*.router.weight'", "no match"),
        ("user rule 2 'blocks.1.*'", "matched: goes to other"),
    ]
    *_, last = explain(TABLE.find("blocks.0.fc.weight"), rules)
    assert last == ("linear layers", "matched: is the weight of a Linear; goes to matrix")


def test_row_blocks_of_a_rule_override_those_of_the_module() -> None:
    table = ParamTable((spec("qkv.weight", (8, 4), LINEAR, "Linear", split=row_blocks((8, 4), (4, 4))),))
    routes = route_params(table, [RouteRule(pattern="qkv.*", to="matrix", row_blocks=(4, 2, 2))])
    assert [matrix.rows for matrix in routes["qkv.weight"].matrices] == [4, 2, 2]
    kept = route_params(table, [RouteRule(pattern="qkv.*", to="matrix")])
    assert [matrix.rows for matrix in kept["qkv.weight"].matrices] == [4, 4]


@pytest.mark.parametrize("pattern", ["wte.*", "lm_head.*"])
def test_a_tied_param_matches_by_either_name(pattern: str) -> None:
    tied = spec("wte.weight", (9, 4), EMBEDDING, "Embedding", aliases=("lm_head.weight",), alias_kinds=(LINEAR,))
    routes = route_params(ParamTable((tied,)), [RouteRule(pattern=pattern, to="matrix")])
    assert routes["wte.weight"].reason == f"matches the user's rule 1 ({pattern!r})"


def test_patterns_are_case_sensitive_on_every_platform() -> None:
    with pytest.raises(ValueError, match="matches no param"):
        route_params(TABLE, [RouteRule(pattern="BLOCKS.*", to="other")])


def test_a_rule_that_matches_nothing_is_an_error_with_the_nearest_name() -> None:
    expected = "route rule 2 ('blocks.0.ruoter.weight') matches no param. Did you mean 'blocks.0.router.weight'?"
    with pytest.raises(ValueError, match=re.escape(expected)):
        route_params(
            TABLE, [RouteRule(pattern="*.fc.*", to="matrix"), RouteRule(pattern="blocks.0.ruoter.weight", to="other")]
        )


def test_a_rule_in_the_shadow_of_an_earlier_one_is_an_error() -> None:
    expected = (
        "route rule 2 ('*.router.weight') never applies: every param it matches is taken by earlier rules, first rule "
        "1 ('blocks.*'). "
        "Reorder the rules or remove one."
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        route_params(
            TABLE, [RouteRule(pattern="blocks.*", to="matrix"), RouteRule(pattern="*.router.weight", to="other")]
        )


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ((8,), "a matrix rule needs at least two dims. Route it to 'other'."),
        (
            (2, 2, 2, 2),
            "expected a matrix, a stack (E, M, N) or a convolution, got 4 dims. Route it to 'other', or say how it splits.",
        ),
        ((0, 8), "a matrix rule needs elements. Route it to 'other'."),
    ],
)
def test_a_user_rule_cannot_make_a_matrix_of_what_is_none(shape: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"param 'odd' has shape {shape}: {complaint}")):
        route_params(ParamTable((spec("odd", shape),)), [RouteRule(pattern="odd", to="matrix")])


def test_row_blocks_of_a_rule_that_do_not_add_up_name_the_rule_and_the_param() -> None:
    with pytest.raises(ValueError) as caught:
        route_params(TABLE, [RouteRule(pattern="blocks.0.fc.weight", to="matrix", row_blocks=(4, 3))])
    assert str(caught.value) == (
        "route rule 1 ('blocks.0.fc.weight') for param 'blocks.0.fc.weight': split into grid (8, 4): blocks (4, 3) must be "
        "positive and sum to 8, got 7."
    )


@pytest.mark.parametrize(
    ("fqn", "family"),
    [("experts", "matrix"), ("mlp.local_experts.w1", "matrix"), ("conv.weight_v", "other"), ("expertise", "other")],
)
def test_three_dims_are_a_stack_only_where_something_says_experts(fqn: str, family: str) -> None:
    assert route_params(ParamTable((spec(fqn, (3, 8, 4)),)))[fqn].family == family


def test_row_blocks_on_a_stack_cut_every_entry() -> None:
    table = ParamTable((spec("experts", (3, 8, 4)),))
    routes = route_params(table, [RouteRule(pattern="experts", to="matrix", row_blocks=(6, 2))])
    assert [(matrix.rows, matrix.cols) for matrix in routes["experts"].matrices] == [(6, 4), (2, 4)] * 3


def test_a_weight_that_looks_fused_is_refused_until_somebody_says_how() -> None:
    table = ParamTable((spec("attn.qkv.weight", (12, 4), LINEAR, "Linear", looks_fused="qkv"),))
    with pytest.raises(ValueError) as caught:
        route_params(table)
    assert str(caught.value) == (
        "param 'attn.qkv.weight' of shape (12, 4) looks fused ('qkv'), and more than one reading fits: blocks of rows one "
        "after the other, the same taking turns head by head, or one matrix. Say which: give Linear (or the module around "
        "it) a method matrix_splits(), or pass RouteRule(pattern='attn.qkv.weight', to='matrix', row_blocks=(...)), "
        "split=Split(...) or split='whole'."
    )
    for rule, count in (
        (RouteRule(pattern="*.qkv.weight", to="matrix", split="whole"), 1),
        (RouteRule(pattern="*.qkv.weight", to="matrix", row_blocks=(4, 4, 4)), 3),
        (RouteRule(pattern="*.qkv.weight", to="matrix", split=Split(grid=(3, 4, 4), roles="arc")), 3),
        (RouteRule(pattern="*.qkv.weight", to="other"), 0),
    ):
        assert len(route_params(table, [rule])["attn.qkv.weight"].matrices) == count


def test_strict_routing_names_what_only_a_fallback_took() -> None:
    table = ParamTable((spec("odd", (8, 4), OTHER, "Odd"), spec("fc.weight", (8, 4), LINEAR, "Linear")))
    with pytest.raises(ValueError) as caught:
        route_params(table, strict=True)
    assert str(caught.value) == (
        "strict routing: 1 param with two or more dims went by a fallback: 'odd'. The first is a 2-D param held directly by "
        "Odd and would go to 'matrix'. Add a RouteRule for each."
    )
    routes = route_params(table, [RouteRule(pattern="odd", to="other")], strict=True)
    assert routes["odd"].family == "other"


def test_rules_match_by_module_type_and_by_predicate() -> None:
    table = ParamTable((spec("a.weight", (8, 4), LINEAR, "Linear"), spec("b.weight", (2, 4), LINEAR, "Router")))

    def is_small(param: ParamSpec) -> bool:
        return param.numel < 16

    by_type = route_params(table, [RouteRule(module_type="Rout*", to="other")])
    by_size = route_params(table, [RouteRule(when=is_small, to="other")])
    assert [routes["b.weight"].family for routes in (by_type, by_size)] == ["other", "other"]
    assert by_type["b.weight"].reason == "matches the user's rule 1 (module 'Rout*')"
    assert by_size["b.weight"].reason == "matches the user's rule 1 (when is_small)"


def test_little_under_the_matrix_rule_is_suspicious_and_a_usual_share_is_not() -> None:
    table = ParamTable(
        (spec("wte.weight", (1000, 4), EMBEDDING, "Embedding"), spec("fc.weight", (8, 4), LINEAR, "Linear"))
    )
    doubt = suspicion(route_params(table), table)
    assert doubt is not None
    assert doubt.startswith(
        "only 0.8 % of the trainable elements are under the matrix rule. The largest that are not: 'wte.weight'"
    )
    usual = ParamTable(
        (spec("wte.weight", (10, 4), EMBEDDING, "Embedding"), spec("fc.weight", (8, 4), LINEAR, "Linear"))
    )
    assert suspicion(route_params(usual), usual) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pattern": "a", "to": "muon"}, "route rule 'a': to must be 'matrix' or 'other', got 'muon'."),
        (
            {"pattern": "", "to": "other"},
            "a route rule has an empty pattern: expected a glob on param names, such as '*.router.weight'.",
        ),
        (
            {"pattern": "a", "to": "other", "row_blocks": (1,)},
            "route rule 'a': row_blocks=(1,) only makes sense with to='matrix'.",
        ),
        (
            {"pattern": "a", "to": "matrix", "row_blocks": (1,), "split": "whole"},
            "route rule 'a': give row_blocks or split, not both.",
        ),
        ({"to": "other"}, "a route rule has nothing to match by: give it a pattern, a module_type or a predicate."),
    ],
)
def test_a_malformed_rule_is_refused_when_it_is_made(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        RouteRule(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pattern": 5}, "route rule: pattern must be a glob, got 5."),
        ({"module_type": nn.Linear}, "route rule: module_type must be a glob, got <class"),
        ({"when": "x"}, "route rule: when must be a function of a ParamSpec, got 'x'."),
        ({"pattern": "a", "options": [1]}, "route rule 'a': options must be a dict such as {'lr': 1e-4}, got [1]."),
        ({"pattern": "a", "row_blocks": "ab"}, "route rule 'a': row_blocks must be whole numbers of rows, got 'ab'."),
        ({"pattern": "a", "row_blocks": (16.0, 16)}, "row_blocks must be whole numbers of rows, got (16.0, 16)."),
    ],
)
def test_fields_of_another_type_are_refused_when_a_rule_is_made(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(TypeError, match=re.escape(expected)):
        RouteRule(to="matrix", **fields)  # type: ignore[arg-type]


def test_the_summary_counts_families_and_names_two_dimensional_params_left_aside() -> None:
    table = ParamTable(
        (
            spec("wte.weight", (9, 4), EMBEDDING, "Embedding"),
            spec("fc.weight", (8, 4), LINEAR, "Linear"),
            spec("fc.bias", (8,), LINEAR, "Linear"),
            spec("old.weight", (2, 2), LINEAR, "Linear", trainable=False),
        )
    )
    assert summarise(route_params(table), table) == (
        "matrix 1 param, 32 elements; other 2 params, 44 elements; frozen 1 param, 4 elements; "
        "not orthogonalised though 2-D: 'wte.weight'"
    )


FUSED = [spec(f"layers.{n}.attn.qkv.weight", (12, 4), LINEAR, "Linear", looks_fused="qkv") for n in range(3)]
ODD = spec("layers.0.mlp.gate_up.weight", (8, 4), LINEAR, "Linear", looks_fused="gate_up")


def test_all_refused_params_are_named_at_once_with_patterns_that_cover_them() -> None:
    table = ParamTable((*FUSED, ODD, spec("norm.weight", (4,), NORM, "LayerNorm")))
    with pytest.raises(RefusedError) as caught:
        route_params(table)
    assert [refusal.pattern for refusal in caught.value.refusals] == ["layers.*.attn.qkv.weight", ODD.fqn]
    assert str(caught.value).startswith(
        "4 params are refused:\n  3 params 'layers.*.attn.qkv.weight' of shape (12, 4): each looks fused"
    )
    rules = [RouteRule(pattern=refusal.pattern, to="matrix", split="whole") for refusal in caught.value.refusals]
    assert all(route.family == "matrix" for fqn, route in route_params(table, rules).items() if fqn != "norm.weight")


def test_a_pattern_covers_no_param_of_another_shape() -> None:
    """Stages that grow: one glob over all of them would give each the split of the first."""
    widths = {"stages.0.0": 4, "stages.0.1": 4, "stages.1.0": 8, "stages.1.1": 8}
    shapes = {f"{name}.qkv.weight": (3 * width, width) for name, width in widths.items()}
    fused = [spec(fqn, shape, LINEAR, "Linear", looks_fused="qkv") for fqn, shape in shapes.items()]
    table = ParamTable((*fused, spec("stages.2.0.qkv.weight", (5, 5), LINEAR, "Linear")))
    with pytest.raises(RefusedError) as caught:
        route_params(table)
    found = [(refusal.pattern, refusal.first.shape) for refusal in caught.value.refusals]
    assert found == [("stages.0.*.qkv.weight", (12, 4)), ("stages.1.*.qkv.weight", (24, 8))]
    rules = [RouteRule(pattern=name, to="matrix", row_blocks=(rows // 3,) * 3) for name, (rows, _) in found]
    routed = route_params(table, rules)
    assert [len(routed[param.fqn].matrices) for param in table] == [3, 3, 3, 3, 1]


def test_an_innocent_param_of_a_refused_model_has_a_route() -> None:
    assert route_param(spec("norm.weight", (4,), NORM, "LayerNorm")).family == "other"
    with pytest.raises(
        RefusedError, match=re.escape("param 'layers.0.mlp.gate_up.weight' of shape (8, 4) looks fused")
    ):
        route_param(ODD)
