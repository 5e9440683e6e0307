"""What is wrong with the way in which ranks are to share a model: experts, pipelines, gradients, sharding by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from layerwise.config.layouts import FACTS_BY_LAYOUT
from layerwise.config.resolve import mlp_width
from layerwise.config.schema import ModelConfig, ParallelConfig, TrainConfig, is_sharded
from layerwise.errors import Problem


def _expert_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    if model.n_experts <= 0:
        if parallel.ep > 1:
            yield Problem(
                "parallel.ep",
                f"expected 1, got {parallel.ep}: the model has no experts to share out. Set model.n_experts too.",
            )
        return
    if model.n_experts == 1:
        yield Problem("model.n_experts", "expected 0 or at least 2, got 1: there would be nothing to choose.")
    elif model.top_k > model.n_experts:
        yield Problem("model.top_k", f"expected at most n_experts={model.n_experts}, got {model.top_k}.")
    if model.moe_every > model.n_layers:
        yield Problem(
            "model.moe_every",
            f"expected at most n_layers={model.n_layers}, got {model.moe_every}: no block would have experts.",
        )
    if parallel.ep > 1 and model.n_experts % parallel.ep != 0:
        yield Problem(
            "parallel.ep",
            f"expected a divisor of n_experts={model.n_experts}, got {parallel.ep}: "
            "every rank holds the same number of experts.",
        )


def _pipeline_problems(config: TrainConfig) -> Iterator[Problem]:
    parallel, layers, microbatches = config.parallel, config.model.n_layers, config.train.accumulation
    if parallel.pp <= 1:
        if parallel.chunks > 1:
            yield Problem(
                "parallel.chunks",
                f"expected 1, got {parallel.chunks}: only a pipeline has chunks. Set parallel.pp to 2 or more.",
            )
        return
    if layers >= 1 and parallel.pp * parallel.chunks > layers:
        stages = f"pp={parallel.pp}" + (f" times chunks={parallel.chunks}" if parallel.chunks > 1 else "")
        yield Problem(
            "parallel.pp", f"expected at most n_layers={layers} stages, got {stages}: every stage has a block."
        )
    if parallel.schedule == "gpipe":
        if parallel.chunks > 1:
            yield Problem("parallel.schedule", f"expected 1f1b with chunks={parallel.chunks}, got gpipe.")
        return
    rounds = max(1, microbatches // parallel.pp)
    if microbatches < parallel.pp:
        yield Problem(
            "train.accumulation",
            f"expected at least pp={parallel.pp} microbatches, which fill the pipeline, got {microbatches}. "
            "Raise it, or set parallel.schedule to gpipe.",
        )
    elif parallel.chunks > 1 and microbatches % rounds != 0:
        yield Problem(
            "train.accumulation",
            f"expected a multiple of pp={parallel.pp}, got {microbatches}: with chunks they go round in equal rounds.",
        )


def _gradient_problems(parallel: ParallelConfig) -> Iterator[Problem]:
    """Ways of summing and keeping gradients that do not go together; the plan refuses them too, but only once there is
    one."""
    facts = FACTS_BY_LAYOUT[parallel.layout]
    is_copied = facts.publishes == "none"
    if parallel.reducer != "collective" and is_copied:
        yield Problem(
            "parallel.reducer",
            f"expected collective with layout replicated, got {parallel.reducer}: an ordered sum arrives at one rank, and "
            "there every rank needs it. Use layout flat.",
        )
    is_all_reduced = facts.reduces == "all_reduce" and parallel.reducer == "collective"
    if parallel.shard_grads and (is_all_reduced or is_copied):
        yield Problem(
            "parallel.shard_grads",
            f"expected false with layout {parallel.layout}, got true: every rank gets the whole sum of gradients there. "
            "Use layout flat or padded.",
        )


_OURS: dict[str, tuple[object, str]] = {
    "layout": ("flat", "{} stores params in a way of its own"),
    "reducer": ("collective", "{} sums gradients itself"),
    "shard_grads": (False, "{} decides itself what it keeps of gradients"),
    "bucket_mib": (None, "{} has buckets of its own"),
    "overlap_grad_reduce": (True, "{} decides itself when to communicate"),
    "overlap_param_gather": (True, "{} decides itself when to communicate"),
    "grad_dtype": ("fp32", "{} sums gradients in the dtype of their params"),
}
"""What `layerwise.DataParallel` alone can be asked for: the value that asks for nothing, and why a model that torch wraps or
cuts has no use for it."""


def _ours_problems(parallel: ParallelConfig, where: str, who: str, *, but_for: str) -> Iterator[Problem]:
    """Settings of `layerwise.DataParallel` beside another wrapper, which has one of them all the same."""
    if parallel.pp > 1:
        yield Problem(
            "parallel.pp", f"expected 1 with {where}, got {parallel.pp}: stages are for layerwise.DataParallel."
        )
    for name, (nothing, why) in _OURS.items():
        value = getattr(parallel, name)
        if value != nothing and name != but_for:
            what = f"expected {_shown(nothing)} with {where}, got {_shown(value)}: {why.format(who)}."
            yield Problem(f"parallel.{name}", what)


def _shown(value: object) -> str:
    """As a config file has it."""
    return "none" if value is None else str(value).lower()


def sizes_in_words(parallel: ParallelConfig) -> str:
    """`replicate=2 times fsdp=4`: those sizes of the mesh that are not 1."""
    sizes = {"replicate": parallel.replicate, "fsdp": parallel.fsdp, "tp": parallel.tp}
    return " times ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)


def cut_in_words(parallel: ParallelConfig) -> str:
    """What torch makes of the model, for people: ` (fsdp=4, experts over 2)`, ` (ddp)`; empty where it is ours."""
    if parallel.ddp:
        return " (ddp)"
    experts = f", experts over {parallel.ep}" if parallel.ep > 1 else ""
    return f" ({sizes_in_words(parallel)}{experts})" if is_sharded(parallel) else ""


def _sharding_problems(config: TrainConfig) -> Iterator[Problem]:
    """What does not go together with a model that torch cuts."""
    parallel = config.parallel
    if not is_sharded(parallel):
        if not parallel.reshard_after_forward:
            yield Problem(
                "parallel.reshard_after_forward",
                "expected true, got false: without fsdp whole params are always there. Set parallel.fsdp too.",
            )
        return
    where = sizes_in_words(parallel)
    if parallel.ddp:
        yield Problem(
            "parallel.ddp", f"expected false with {where}, got true: fully_shard() averages gradients itself."
        )
        return
    yield from _ours_problems(parallel, where, "fully_shard()", but_for="grad_dtype")


def _ddp_problems(parallel: ParallelConfig) -> Iterator[Problem]:
    """What does not go together with torch's DistributedDataParallel."""
    if not parallel.ddp or is_sharded(parallel):
        return
    if parallel.ep > 1:
        yield Problem(
            "parallel.ep",
            f"expected 1 with ddp, got {parallel.ep}: DistributedDataParallel would average different experts.",
        )
    yield from _ours_problems(parallel, "ddp", "DistributedDataParallel", but_for="layout")


def _shared_experts_problems(parallel: ParallelConfig) -> Iterator[Problem]:
    if is_sharded(parallel) and parallel.ep > 1 and parallel.fsdp * parallel.tp % parallel.ep != 0:
        yield Problem(
            "parallel.ep",
            f"expected a divisor of fsdp={parallel.fsdp} times tp={parallel.tp}, got {parallel.ep}: these ranks share out the "
            "experts among themselves.",
        )


def _tensor_problems(config: TrainConfig) -> Iterator[Problem]:
    """What tensor parallelism cannot cut."""
    tp, model = config.parallel.tp, config.model
    if tp <= 1:
        return
    if config.optim.qk_clip is not None:
        yield Problem(
            "optim.qk_clip",
            f"expected none with tp={tp}, got {config.optim.qk_clip}: every rank sees the logits of its own heads only.",
        )
    if model.n_heads % tp != 0:
        yield Problem(
            "parallel.tp", f"expected a divisor of n_heads={model.n_heads}, got {tp}: every rank has equally many."
        )
    elif model.n_kv_heads > 0 and model.n_kv_heads % tp != 0 and tp % model.n_kv_heads != 0:
        yield Problem(
            "parallel.tp",
            f"expected a divisor or a multiple of n_kv_heads={model.n_kv_heads}, got {tp}: query heads would be apart from "
            "their keys.",
        )
    has_mlps = model.n_experts <= 0 or model.moe_every > 1
    if has_mlps and mlp_width(model) % tp != 0:
        yield Problem(
            "parallel.tp",
            f"expected a divisor of the MLP's width {mlp_width(model)}, got {tp}. Set model.hidden to a multiple of it.",
        )


PARALLEL_CHECKS: tuple[Callable[[Any], Iterator[Problem]], ...] = (
    lambda config: _expert_problems(config.model, config.parallel),
    lambda config: _pipeline_problems(config),
    lambda config: _gradient_problems(config.parallel),
    lambda config: _sharding_problems(config),
    lambda config: _ddp_problems(config.parallel),
    lambda config: _shared_experts_problems(config.parallel),
    lambda config: _tensor_problems(config),
    lambda config: _recorded_problems(config),
)
"""Each on its own: what one has read is what its problems depend on."""


def has_parts(parallel: ParallelConfig) -> bool:
    """Whether ranks have only parts of the model's params, some of its stages or experts, as whole tensors."""
    return not is_sharded(parallel) and parallel.pp * parallel.ep > 1


RECORDED_PARTS = (
    "is for a whole model, and with parallel.pp or parallel.ep ranks have parts of it: expected no recorded routing. Leave it "
    "out, and say in routing.rules_file what the defaults get wrong."
)
"""What is wrong with a recorded routing there."""


def _recorded_problems(config: TrainConfig) -> Iterator[Problem]:
    if config.routing.recorded and has_parts(config.parallel):
        yield Problem("routing.recorded", RECORDED_PARTS)


def whole_model(parallel: ParallelConfig) -> str:
    """What a plan of a model without its stages is not."""
    return f"note: parallel.pp = {parallel.pp} is left aside: the plan is for the whole model as one stage."


def least_world(parallel: ParallelConfig) -> int:
    """Two ranks, or as many as a config needs at least."""
    if is_sharded(parallel):
        return parallel.replicate * parallel.fsdp * parallel.tp
    return max(2, parallel.pp * parallel.ep)


def world_problems(parallel: ParallelConfig, world: int) -> list[Problem]:
    """What is wrong with this many ranks; nothing of it can be known from a config alone."""
    if is_sharded(parallel):
        return _mesh_problems(parallel, world)
    if parallel.ddp and world == 1:
        what = "expected false on one rank, got true: there is nobody to average gradients with. Start more, with --nproc or torchrun."
        return [Problem("parallel.ddp", what)]
    group = parallel.pp * parallel.ep
    if world % group == 0:
        return []
    sizes = [f"{name}={size}" for name, size in (("pp", parallel.pp), ("ep", parallel.ep)) if size > 1]
    where = f"parallel.{'pp' if parallel.pp > 1 else 'ep'}"
    what = f"expected a multiple of {' times '.join(sizes)} ranks, got {world}."
    return [Problem(where, f"{what} Start {group} or a multiple of it, with --nproc or torchrun.")]


def _mesh_problems(parallel: ParallelConfig, world: int) -> list[Problem]:
    ranks = parallel.replicate * parallel.fsdp * parallel.tp
    if world == ranks:
        return []
    where = next(name for name in ("fsdp", "tp", "replicate") if getattr(parallel, name) != 1)
    what = f"expected {sizes_in_words(parallel)} ranks, which is {ranks}, got {world}."
    left, rest = divmod(world, parallel.replicate * parallel.tp)
    advice = f", or set parallel.fsdp to {left}" if rest == 0 else ""
    return [Problem(f"parallel.{where}", f"{what} Start {ranks}, with --nproc or torchrun{advice}.")]
