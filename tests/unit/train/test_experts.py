"""The mixture of experts against a slow one that does one token at a time."""

import pytest
import torch
from torch import Tensor

from layerwise.comm.dispatch import ExpertRanks
from layerwise.config.resolve import ModelShape, resolve_model
from layerwise.config.schema import ModelConfig
from layerwise.models.table import param_table
from layerwise.routing.rules import route_params
from layerwise.train.experts import MoE
from layerwise.train.model import GPT, Stage, build_gpt, count_params


def shape_of(**settings: object) -> ModelShape:
    small: dict[str, object] = {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "seq_len": 6}
    small |= {"n_experts": 6, "expert_hidden": 8}
    return resolve_model(ModelConfig(**{**small, **settings}))  # type: ignore[arg-type]


def moe_of(seed: int = 0, **settings: object) -> MoE:
    moe = MoE(shape_of(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in moe.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return moe


def slow(x: Tensor, moe: MoE, top_k: int) -> tuple[Tensor, Tensor]:
    """Result and imbalance, token by token."""
    weight, gate_up, down = moe.router.weight, moe.experts.gate_up, moe.experts.down
    num_experts, hidden = weight.shape[0], gate_up.shape[1] // 2
    rows, probs, loads = [], [], torch.zeros(num_experts)
    for token in x.reshape(-1, x.shape[-1]):
        scores = torch.stack([token @ weight[expert] for expert in range(num_experts)])
        prob = scores.exp() / scores.exp().sum()
        best = sorted(range(num_experts), key=lambda expert: -prob[expert].item())[:top_k]
        total = sum(prob[expert] for expert in best) if top_k > 1 else 1.0
        row = torch.zeros(x.shape[-1])
        for expert in best:
            gate, up = gate_up[expert, :hidden] @ token, gate_up[expert, hidden:] @ token
            row = row + prob[expert] / total * (down[expert] @ (gate * torch.sigmoid(gate) * up))
            loads[expert] += 1
        rows.append(row)
        probs.append(prob)
    imbalance = num_experts * (loads / loads.sum() * torch.stack(probs).mean(dim=0)).sum()
    return torch.stack(rows).view_as(x), imbalance


@pytest.mark.parametrize("top_k", [1, 2, 3, 6])
def test_result_and_gradients_are_those_of_one_token_at_a_time(top_k: int) -> None:
    penalty, share = 0.7, 0.5
    moe = moe_of(top_k=top_k, router_penalty=penalty)
    moe.penalty *= share
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    towards = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2))
    found = moe(ours)
    (found * towards).sum().backward()
    grads = {name: param.grad.clone() for name, param in moe.named_parameters() if param.grad is not None}
    moe.zero_grad()
    expected, imbalance = slow(theirs, moe, top_k)
    ((expected * towards).sum() + penalty * share * imbalance).backward()
    # fp32 sums in another order
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    for name, param in moe.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-4, atol=1e-6)


def test_without_the_penalty_the_router_has_another_gradient() -> None:
    """The control of the test above: its tolerance sees a penalty that is off by a little."""
    grads = []
    for penalty in (0.7, 0.69):
        moe = moe_of(top_k=2, router_penalty=penalty)
        moe(torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))).sum().backward()
        grads.append(moe.router.weight.grad)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)


def test_a_single_expert_per_token_still_teaches_the_router() -> None:
    moe = moe_of(top_k=1, router_penalty=0.0)
    moe(torch.randn(2, 5, 16)).square().sum().backward()
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.abs().sum() > 0


def test_experts_without_a_token_have_a_gradient_of_zero() -> None:
    moe = moe_of(top_k=1)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[2] = 1.0
    x = torch.ones(1, 4, 16, requires_grad=True)
    moe(x).sum().backward()
    assert moe.experts.down.grad is not None
    loaded = [expert for expert in range(6) if bool(moe.experts.down.grad[expert].any())]
    assert loaded == [2]


def test_imbalance_is_one_for_equal_loads_and_the_number_of_experts_for_a_favourite() -> None:
    moe = moe_of(top_k=1)
    with torch.no_grad():
        moe.router.weight.copy_(20 * torch.eye(6, 16))
    everyone = torch.eye(6, 16)
    assert moe.router(everyone).imbalance.item() == pytest.approx(1.0, abs=1e-3)
    favourite = torch.eye(6, 16)[:1].repeat(6, 1)
    assert moe.router(favourite).imbalance.item() == pytest.approx(6.0, abs=1e-3)


def test_the_router_decides_in_fp32_also_in_a_bf16_model() -> None:
    moe = moe_of(top_k=2).bfloat16()
    choice = moe.router(torch.randn(4, 16).bfloat16())
    assert choice.weights_NK.dtype == torch.float32
    assert moe(torch.randn(1, 4, 16).bfloat16()).dtype == torch.bfloat16


def test_no_penalty_is_computed_where_no_gradient_is() -> None:
    moe = moe_of()
    with torch.no_grad():
        assert moe(torch.randn(1, 3, 16)).grad_fn is None


def test_experts_that_cannot_be_shared_out_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="6 experts cannot be shared out evenly to 4 ranks"):
        MoE(shape_of(), ExpertRanks(None, 0, 4))


# -- in the model -------------------------------------------------------------------------------------------------


def test_every_second_block_has_experts() -> None:
    model = build_gpt(shape_of(n_layers=5, moe_every=2), seed=0)
    assert [isinstance(block.mlp, MoE) for block in model.blocks] == [False, True, False, True, False]


def test_automatic_width_gives_a_token_as_many_weights_as_an_mlp() -> None:
    shape = shape_of(d_model=96, top_k=2, expert_hidden=None)
    assert (shape.hidden, shape.expert_hidden) == (256, 128)
    assert shape_of(d_model=96, top_k=3, expert_hidden=None).expert_hidden == 96


def test_every_expert_is_its_own_matrices_and_routers_are_none() -> None:
    with torch.device("meta"):
        model = GPT(shape_of(n_experts=2), experts=ExpertRanks(None, 1, 2))  # a stack of one expert
    routes = route_params(param_table(model))
    sizes = {fqn: [(part.rows, part.cols) for part in route.matrices] for fqn, route in routes.items()}
    assert sizes["blocks.0.mlp.experts.gate_up"] == [(8, 16), (8, 16)]
    assert sizes["blocks.0.mlp.experts.down"] == [(16, 8)]
    assert routes["blocks.0.mlp.router.weight"].family == "other"
    assert "chooses among 2 experts" in routes["blocks.0.mlp.router.weight"].reason
    assert routes["blocks.1.attn.out.weight"].family == "matrix"


def test_expert_params_name_their_domain() -> None:
    experts = build_gpt(shape_of(), seed=0).blocks[0].mlp.experts
    assert experts.param_domains() == dict.fromkeys(dict(experts.named_parameters()), "expert")


def test_initial_experts_depend_on_their_number_in_the_model_and_not_on_their_rank() -> None:
    whole = dict(build_gpt(shape_of(), seed=3).named_parameters())
    for world in (2, 3, 6):
        parts = [
            dict(build_gpt(shape_of(), experts=ExpertRanks(None, rank, world), seed=3).named_parameters())
            for rank in range(world)
        ]
        for fqn, param in whole.items():
            if ".experts." in fqn:
                assert torch.equal(torch.cat([part[fqn] for part in parts]), param), fqn
            else:
                assert all(torch.equal(part[fqn], param) for part in parts), fqn


def test_output_projections_of_experts_start_smaller() -> None:
    model = build_gpt(shape_of(d_model=64, n_layers=8, expert_hidden=64), seed=0)
    experts = model.blocks[0].mlp.experts
    assert (experts.down.std() / experts.gate_up.std()).item() == pytest.approx(0.25, rel=0.05)


def test_params_are_counted_over_all_experts_and_stages() -> None:
    shape = shape_of(tie_embeddings=True)
    assert count_params(shape) == sum(param.numel() for param in build_gpt(shape, seed=0).parameters())


# -- stages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "count"), [(4, 2), (5, 2), (7, 4), (3, 3), (1, 1)])
def test_stages_share_out_the_blocks_in_order(layers: int, count: int) -> None:
    parts = [Stage(number, count).blocks(layers) for number in range(count)]
    assert [block for part in parts for block in part] == list(range(layers))
    assert {len(part) for part in parts} <= {layers // count, layers // count + 1} - {0}


@pytest.mark.parametrize("tied", [False, True])
def test_stages_one_after_the_other_are_the_model_bit_for_bit(tied: bool) -> None:
    shape = shape_of(n_layers=5, moe_every=2, tie_embeddings=tied)
    whole = build_gpt(shape, seed=4)
    stages = [build_gpt(shape, Stage(number, 3), seed=4) for number in range(3)]
    tokens = torch.randint(0, 256, (2, 6), generator=torch.Generator().manual_seed(0))
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(tokens))
    names = [fqn for stage in stages for fqn, _ in stage.named_parameters()]
    assert sorted(names) == sorted(dict(whole.named_parameters(remove_duplicate=False)))
    assert [stage.ties() for stage in stages] == (
        [{"embedding": "embed.weight"}, {}, {"embedding": "head.weight"}] if tied else [{}, {}, {}]
    )
    assert whole.ties() == {}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("experts", [0, 4])
def test_stages_route_their_params_as_the_whole_model_does(count: int, experts: int) -> None:
    # A fused weight of the embedding's shape: where a stage has a single block, it is taken for a head most easily.
    shape = shape_of(
        d_model=128, n_heads=4, n_kv_heads=2, n_layers=4, n_experts=experts, fuse_gate_up=False, hidden=256
    )
    with torch.device("meta"):
        whole, stages = GPT(shape), [GPT(shape, Stage(number, count)) for number in range(count)]
    expected = {fqn: (route.family, route.matrices) for fqn, route in route_params(param_table(whole)).items()}
    found = [
        (fqn, (route.family, route.matrices))
        for stage in stages
        for fqn, route in route_params(param_table(stage)).items()
    ]
    assert dict(found) == expected
    assert expected["blocks.0.attn.qkv.weight"][0] == "matrix"
