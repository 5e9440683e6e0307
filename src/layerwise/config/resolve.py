"""What a config comes to: the shape of the model and the update rules, with nothing left to be found out. No "none means
automatic" survives in here."""

from __future__ import annotations

from dataclasses import dataclass

from layerwise.config.clipping import QKClip
from layerwise.config.rules import AdaMuon, AdamW, Lion, Muon, NorMuon, Rule
from layerwise.config.schema import ModelConfig, OptimConfig

_HIDDEN_MULTIPLE = 32  # the automatic MLP width is rounded up to this: wide enough for any vector unit


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A `ModelConfig` with every automatic value filled in."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    vocab_size: int
    seq_len: int
    tie_embeddings: bool
    fuse_gate_up: bool
    n_experts: int
    top_k: int
    expert_hidden: int
    moe_every: int
    router_penalty: float
    rope_base: float
    norm_eps: float
    init_std: float

    def has_experts(self, block: int) -> bool:
        """Whether a block, counted from 0, has experts in place of an MLP."""
        return self.n_experts > 0 and (block + 1) % self.moe_every == 0


def mlp_width(model: ModelConfig) -> int:
    """Width of an MLP, which the user may have left open."""
    automatic = -(-8 * model.d_model // (3 * _HIDDEN_MULTIPLE)) * _HIDDEN_MULTIPLE
    return automatic if model.hidden is None else model.hidden


def expert_width(model: ModelConfig) -> int:
    """Width of one expert, likewise."""
    automatic = -(-mlp_width(model) // (model.top_k * _HIDDEN_MULTIPLE)) * _HIDDEN_MULTIPLE
    return automatic if model.expert_hidden is None else model.expert_hidden


def resolve_model(model: ModelConfig) -> ModelShape:
    """Fill in what the user left open; expects a validated config."""
    hidden = mlp_width(model)
    return ModelShape(
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.d_model // model.n_heads if model.head_dim is None else model.head_dim,
        hidden=hidden,
        vocab_size=model.vocab_size,
        seq_len=model.seq_len,
        tie_embeddings=model.tie_embeddings,
        fuse_gate_up=model.fuse_gate_up,
        n_experts=model.n_experts,
        top_k=model.top_k,
        expert_hidden=expert_width(model),
        moe_every=model.moe_every,
        router_penalty=model.router_penalty,
        rope_base=model.rope_base,
        norm_eps=model.norm_eps,
        init_std=model.init_std,
    )


def matrix_rule(optim: OptimConfig) -> Rule:
    """The rule of the matrices, as a value the optimizer takes."""
    if optim.rule == "adamw":
        return AdamW(
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            weight_decay_mode=optim.weight_decay_mode,
            betas=optim.betas,
            eps=optim.eps,
        )
    muon = Muon(
        lr=optim.lr,
        momentum=optim.momentum,
        nesterov=optim.nesterov,
        weight_decay=optim.weight_decay,
        weight_decay_mode=optim.weight_decay_mode,
        coefficients=optim.coefficients,
        steps=optim.ns_steps,
        scale=optim.scale,
        extra_scale=optim.extra_scale,
        ns_dtype=optim.ns_dtype,
        tp_mode=optim.tp_mode,
    )
    match optim.rule:
        case "muon":
            return muon
        case "normuon":
            return NorMuon(**muon.options(), beta2=optim.beta2)  # type: ignore[arg-type]
        case "adamuon":
            return AdaMuon(**muon.options(), beta2=optim.beta2)  # type: ignore[arg-type]


def other_rule(optim: OptimConfig) -> Rule:
    """The rule of everything that is not a matrix."""
    if optim.other_rule == "lion":
        return Lion(
            lr=optim.other_lr,
            weight_decay=optim.other_weight_decay,
            weight_decay_mode=optim.weight_decay_mode,
            betas=optim.betas,
        )
    return AdamW(
        lr=optim.other_lr,
        weight_decay=optim.other_weight_decay,
        weight_decay_mode=optim.weight_decay_mode,
        betas=optim.betas,
        eps=optim.eps,
    )


def qk_clip_of(optim: OptimConfig) -> QKClip | None:
    """How attention logits are kept small, if they are."""
    return None if optim.qk_clip is None else QKClip(threshold=optim.qk_clip)
