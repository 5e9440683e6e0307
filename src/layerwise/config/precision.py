"""What is wrong with keeping weights as codes of eight bits: what they are made of, who wraps the model, and its sizes."""

from __future__ import annotations

from collections.abc import Iterator

from layerwise.config.parallelism import sizes_in_words
from layerwise.config.resolve import expert_width, mlp_width
from layerwise.config.schema import BLOCK_MULTIPLES, TrainConfig, is_sharded
from layerwise.errors import Problem

_WHERE = "precision.param_gather"


def made_of_problems(config: TrainConfig) -> Iterator[Problem]:
    """Codes are made of bf16."""
    recipe = config.precision.param_gather
    if recipe != "none" and config.train.precision != "bf16":
        yield Problem(
            _WHERE,
            f"expected none with train.precision {config.train.precision}, got {recipe}: codes are made of bf16. Set "
            "train.precision to bf16.",
        )


def wrapper_problems(config: TrainConfig) -> Iterator[Problem]:
    """Codes are `layerwise.DataParallel`'s to keep up to date."""
    recipe, parallel = config.precision.param_gather, config.parallel
    if recipe == "none":
        return
    if is_sharded(parallel):
        yield Problem(
            _WHERE,
            f"expected none with {sizes_in_words(parallel)}, got {recipe}: DTensor params cannot be quantised. Train with a layout "
            "of ours.",
        )
    elif parallel.ddp:
        yield Problem(
            _WHERE,
            f"expected none with ddp, got {recipe}: DistributedDataParallel does not know params that are kept as codes. Leave "
            "parallel.ddp out.",
        )


def block_problems(config: TrainConfig) -> Iterator[Problem]:
    """Blocks have to divide rows and columns of every weight that is kept as codes."""
    recipe, model = config.precision.param_gather, config.model
    multiple = BLOCK_MULTIPLES[recipe]
    if multiple == 1 or min(model.n_heads, model.n_kv_heads, model.top_k) < 1:
        return
    head_dim = model.d_model // model.n_heads if model.head_dim is None else model.head_dim
    sizes = {
        "model.d_model": model.d_model,
        "the width of all query heads": model.n_heads * head_dim,
        "the rows of queries, keys and values": (model.n_heads + 2 * model.n_kv_heads) * head_dim,
    }
    if model.n_experts <= 0 or model.moe_every > 1:
        sizes["model.hidden"] = mlp_width(model)
    if model.n_experts > 0:
        sizes["model.expert_hidden"] = expert_width(model)
    wrong = [f"{name} is {size}" for name, size in sizes.items() if size % multiple]
    if wrong:
        yield Problem(
            _WHERE,
            f"expected none, got {recipe}: its blocks need multiples of {multiple} for rows and columns, and {', '.join(wrong)}.",
        )
