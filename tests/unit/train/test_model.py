import math

import pytest
import torch

from layerwise.config.resolve import ModelShape, resolve_model
from layerwise.config.schema import ModelConfig
from layerwise.train.model import GPT, MLP, Attention, build_gpt, next_byte_loss, rotary_angles, rotate


def shape_of(**settings: object) -> ModelShape:
    small: dict[str, object] = {"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "seq_len": 12}
    return resolve_model(ModelConfig(**{**small, **settings}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_kv_heads": 4},
        {"n_kv_heads": 1},
        {"head_dim": 6, "n_heads": 3, "n_kv_heads": 1},
        {"hidden": 40, "fuse_gate_up": False},
        {"tie_embeddings": True, "vocab_size": 300},
    ],
)
def test_every_param_gets_a_gradient_and_the_loss_starts_at_chance(settings: dict[str, object]) -> None:
    shape = shape_of(**settings)
    model = build_gpt(shape, seed=0)
    tokens = torch.randint(0, 256, (3, shape.seq_len))
    logits = model(tokens)
    assert logits.shape == (3, shape.seq_len, shape.vocab_size)
    loss = next_byte_loss(logits, torch.randint(0, 256, (3, shape.seq_len)))
    assert loss.shape == (3,)
    assert abs(loss.mean().item() - math.log(shape.vocab_size)) < 0.5
    loss.mean().backward()
    missing = [fqn for fqn, param in model.named_parameters() if param.grad is None or not param.grad.any()]
    assert missing == []


@pytest.mark.parametrize("fuse", [True, False])
def test_declared_row_blocks_cover_the_rows_of_their_weights(fuse: bool) -> None:
    model = build_gpt(shape_of(n_kv_heads=1, fuse_gate_up=fuse), seed=0)
    for module in model.modules():
        if isinstance(module, Attention | MLP):
            params = dict(module.named_parameters())
            for name, blocks in module.matrix_splits().items():
                assert sum(blocks) == params[name].shape[0]
    assert model.blocks[0].attn.matrix_splits() == {"qkv.weight": (32, 8, 8)}
    assert model.blocks[0].mlp.matrix_splits() == ({"gate_up.weight": (96, 96)} if fuse else {})


def test_query_block_of_the_fused_weight_is_its_first_rows() -> None:
    shape = shape_of(n_layers=1)
    attention = build_gpt(shape, seed=0).blocks[0].attn
    x = torch.randn(1, 5, 32)
    cos, sin = rotary_angles(5, shape.head_dim, shape.rope_base, torch.device("cpu"))
    before = attention(x, cos, sin)
    with torch.no_grad():
        attention.qkv.weight[32 + 16 :] *= 2.0  # the value rows: attention is linear in them
    torch.testing.assert_close(attention(x, cos, sin), 2.0 * before)


def test_attention_does_not_look_ahead() -> None:
    model = build_gpt(shape_of(), seed=1)
    tokens = torch.randint(0, 256, (1, 12))
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :7], model(changed)[:, :7])
    assert not torch.equal(model(tokens)[:, 7], model(changed)[:, 7])


def test_rotary_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 8)
    cos, sin = rotary_angles(30, 8, 10_000.0, torch.device("cpu"))

    def score(i: int, j: int) -> torch.Tensor:
        return (
            rotate(q.expand(1, 1, 1, 8), cos[i], sin[i]).flatten()
            @ rotate(k.expand(1, 1, 1, 8), cos[j], sin[j]).flatten()
        )

    torch.testing.assert_close(score(3, 1), score(29, 27))
    assert not torch.allclose(score(3, 1), score(3, 2))


def test_fused_and_separate_gate_and_up_compute_the_same() -> None:
    fused, separate = MLP(shape_of(fuse_gate_up=True)), MLP(shape_of(fuse_gate_up=False))
    with torch.no_grad():
        separate.gate.weight.copy_(fused.gate_up.weight[:96])
        separate.up.weight.copy_(fused.gate_up.weight[96:])
        separate.down.weight.copy_(fused.down.weight)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(fused(x), separate(x))


def test_initial_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    first = build_gpt(shape_of(), seed=3)
    torch.manual_seed(12345)
    torch.randn(7)
    state = torch.get_rng_state()
    second = build_gpt(shape_of(), seed=3)
    assert torch.equal(torch.get_rng_state(), state), "building a model must not move the global generator"
    for (fqn, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), fqn
    assert not torch.equal(first.embed.weight, build_gpt(shape_of(), seed=4).embed.weight)


def test_bf16_model_is_the_rounded_fp32_model() -> None:
    exact, rounded = build_gpt(shape_of(), seed=3), build_gpt(shape_of(), seed=3, dtype=torch.bfloat16)
    for (fqn, a), (_, b) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        assert b.dtype == torch.bfloat16
        assert torch.equal(a.bfloat16(), b), fqn


def test_output_projections_start_smaller() -> None:
    model = build_gpt(shape_of(d_model=128, n_layers=8), seed=0)
    ratio = model.blocks[0].mlp.down.weight.std() / model.blocks[0].mlp.gate_up.weight.std()
    assert ratio.item() == pytest.approx(0.25, rel=0.05)


def test_tied_head_is_the_embedding_also_after_building() -> None:
    model = build_gpt(shape_of(tie_embeddings=True), seed=0)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_model_on_meta_has_shapes_and_no_memory() -> None:
    with torch.device("meta"):
        model = GPT(shape_of(d_model=4096, n_layers=2, n_heads=32, n_kv_heads=8))
    assert model.blocks[0].attn.qkv.weight.shape == (32 * 128 + 2 * 8 * 128, 4096)


def test_automatic_hidden_width_is_eight_thirds_rounded_up() -> None:
    assert resolve_model(ModelConfig(d_model=96)).hidden == 256
    assert resolve_model(ModelConfig(d_model=128)).hidden == 352
    assert resolve_model(ModelConfig(hidden=7)).hidden == 7
