"""The training loop.

`train` is the whole story; what it calls is below it. It prints nothing: watchers (a metrics file, a console) are told
what happens, on rank 0 only, and every rank returns the same `EndRecord`.
"""

from __future__ import annotations

import math
import platform
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import layerwise
from layerwise.comm import joining
from layerwise.comm.scopes import scope
from layerwise.config.load import dump_json
from layerwise.config.parallelism import cut_in_words, world_problems
from layerwise.config.resolve import matrix_rule, other_rule, qk_clip_of, resolve_model
from layerwise.config.schema import TrainConfig, is_sharded, stop_signals_of
from layerwise.config.validate import TRACED_STEPS
from layerwise.errors import ConfigError, Problem
from layerwise.routing.files import read_rules, rules_to_toml
from layerwise.routing.rules import RouteRule, summarise
from layerwise.train.data import Batching, Corpus, Loader, load_corpus
from layerwise.train.metrics import EndRecord, EvalRecord, Record, RunRecord, StepRecord
from layerwise.train.model import count_params, next_byte_loss
from layerwise.train.saved import Progress, Resumed, Saved
from layerwise.train.schedule import lr_factor
from layerwise.train.stages import Passes, PipelinedModel, WholeModel, build_chunks, ties_of
from layerwise.train.stop import StopRequest
from layerwise.train.trace import recorded

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Watcher(Protocol):
    """Someone who wants to know how training goes; must not raise and must not take long."""

    def write(self, record: Record) -> None: ...


def train(
    config: TrainConfig,
    ranks: joining.Ranks,
    watchers: Sequence[Watcher] = (),
    trace: str | None = None,
    checkpoints: Path | None = None,
) -> EndRecord:
    """Train from the first step, or from the last checkpoint, to the last step or the first signal that asks it to stop. `trace` names a file for a
    timeline of two steps; the first rank says where `checkpoints` are."""
    run = prepare(config, ranks, watchers)
    saved = Saved.of(config, ranks, run.model, run.optimizer, checkpoints)
    resumed = run.go_on(saved)
    run.tell(run.record(resumed))
    before = resumed.progress
    first_bpb = last_bpb = before.first_val_bpb if before.step else run.evaluate(step=0)
    step = before.step
    total, outcome = config.train.steps, "finished"
    if 0 < step < total and run.is_validated(step):  # whoever saved it may have been killed before that
        last_bpb = run.evaluate(step)
    with StopRequest(stop_signals_of(config.train)) as stop, ExitStack() as recording:
        for step in range(before.step + 1, total + 1):  # `step` counts finished steps; samples and rates count from 0
            if trace is not None and step == TRACED_STEPS[0]:
                recording.enter_context(recorded(trace, ranks.rank, ranks.device))
            with scope(f"step {step}"):
                run.train_step(step)
            if step == TRACED_STEPS[-1]:
                recording.close()
            is_last = step == total
            if is_last or step % config.train.log_every == 0:
                run.log(step)
            # A checkpoint that could not be written is as good a reason: saving again says why.
            if run.should_stop(stop.requested or saved.has_failed, step) and not is_last:
                outcome, is_last = "stopped", True
            if is_last or saved.is_due(step):  # before validation: who is asked to stop may not have the time for both
                run.save(saved, step, first_bpb)
            if is_last or run.is_validated(step):
                last_bpb = run.evaluate(step)
            if is_last:
                break
        else:
            last_bpb = run.evaluate(step)  # a checkpoint of the last step
        saved.finish()
    end = run.end(step, outcome, first_bpb, last_bpb)
    run.tell(end)
    return end


@dataclass
class Meter:
    """What has been measured since the last log line, and in all."""

    loss_sum: Tensor
    """Sum of step losses, on the device: reading it waits for the device, so that is done once per log line."""
    steps: int = 0
    skipped: int = 0
    skip_reason: str = ""
    is_behind: bool = False
    """Whether it has to be noted yet what became of the last step."""
    train_s: float = 0.0
    """Time of the steps that `log` has seen, without validation."""
    total_steps: int = 0
    started_s: float = field(default_factory=time.perf_counter)
    lap_started_s: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started_s


@dataclass
class Run:
    """The live parts of a run on this rank."""

    config: TrainConfig
    ranks: joining.Ranks
    corpus: Corpus
    loader: Loader
    model: nn.Module
    passes: Passes
    optimizer: layerwise.Optimizer
    base_lrs: tuple[float, ...]
    """Learning rate of every param group before the schedule."""
    watchers: Sequence[Watcher]
    meter: Meter
    counts: bool = True
    """Whether losses of this rank count: of ranks that see the same ones, the first."""

    @property
    def tokens_per_step(self) -> int:
        return self.loader.batching.global_batch * self.loader.seq_len

    def tell(self, record: Record) -> None:
        for watcher in self.watchers:
            watcher.write(record)

    def train_step(self, step: int) -> None:
        """One optimizer step: every microbatch forward and backward, then the update."""
        factor = lr_factor(self.config.schedule, step - 1, self.config.train.steps)
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * factor
        batches = [self.loader.train_batch(step - 1, micro) for micro in range(self.config.train.accumulation)]
        self.meter.loss_sum += self.passes.train(batches)
        self._look_back()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.meter.steps += 1
        self.meter.is_behind = True

    def _look_back(self) -> None:
        """Note what became of the last step, once. Right after it a host would wait for its device."""
        meter = self.meter
        if meter.is_behind and (stats := self.optimizer.stats).skipped:
            meter.skipped += 1
            meter.skip_reason = stats.skip_reason
        meter.is_behind = False

    def log(self, step: int) -> None:
        """Average over ranks what happened since the last time and tell it."""
        self._look_back()
        meter, stats = self.meter, self.optimizer.stats
        loss = self._total(float(meter.loss_sum) / meter.steps) / self.loader.batching.world
        lap_s = time.perf_counter() - meter.lap_started_s
        record = StepRecord(
            step=step,
            loss=loss,
            bpb=loss / math.log(2),
            grad_norm=stats.grad_norm,
            max_logit=stats.max_logit,
            clipped_heads=stats.clipped_heads,
            skipped=meter.skipped,
            skip_reason=meter.skip_reason,
            lr_factor=lr_factor(self.config.schedule, step - 1, self.config.train.steps),
            step_ms=1000 * lap_s / meter.steps,
            tokens_per_s=self.tokens_per_step * meter.steps / lap_s,
            bytes_sent=stats.bytes_sent,
            elapsed_s=meter.elapsed_s,
        )
        meter.train_s += lap_s
        meter.total_steps += meter.steps
        meter.steps, meter.skipped, meter.skip_reason = 0, 0, ""
        meter.loss_sum.zero_()
        self.tell(record)
        meter.lap_started_s = time.perf_counter()

    def is_validated(self, step: int) -> bool:
        return self.config.train.eval_every > 0 and step % self.config.train.eval_every == 0

    def evaluate(self, step: int) -> float:
        """Validation loss in bits per byte, over all ranks."""
        began_s = time.perf_counter()
        num_sequences = self.config.train.eval_sequences
        self.model.eval()
        nats = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for batch, weights in self.loader.val_batches(num_sequences):
            logits = self.passes.logits(batch.tokens)
            if logits is not None:
                nats += (next_byte_loss(logits, batch.targets) * weights).sum()
        self.model.train()
        val_loss = self._total(float(nats)) / num_sequences
        val_bpb = val_loss / math.log(2)
        self.tell(EvalRecord(step=step, val_loss=val_loss, val_bpb=val_bpb, elapsed_s=self.meter.elapsed_s))
        self.meter.lap_started_s += time.perf_counter() - began_s  # validation is not the step's time
        return val_bpb

    def _total(self, value: float) -> float:
        """The sum of a number over all samples, whoever saw them."""
        return joining.total(value if self.counts else 0.0, self.ranks)

    def should_stop(self, is_asked_to: bool, step: int) -> bool:
        """Whether any rank was asked to stop. All answer alike, or the rest would wait for the one that left."""
        # On a GPU the question makes the host wait, so it is asked where the host waits anyway.
        is_time = self.ranks.device.type == "cpu" or step % self.config.train.log_every == 0
        return is_time and joining.mean(float(is_asked_to), self.ranks) > 0

    def go_on(self, saved: Saved) -> Resumed:
        """Continue where the last checkpoint is, if there is one: with the sample after its last."""
        resumed = saved.resume(self._start)
        progress = resumed.progress
        self.loader = replace(self.loader, batching=self.loader.batching.going_on(progress.step, progress.samples))
        return resumed

    def save(self, saved: Saved, step: int, first_bpb: float) -> None:
        if self.meter.steps:  # who goes on from here knows nothing of them
            self.log(step)
        began_s = time.perf_counter()
        samples = self.loader.batching.samples_before(step)
        saved.save(replace(self._start, step=step, samples=samples, first_val_bpb=first_bpb))
        self.meter.lap_started_s += time.perf_counter() - began_s  # nor is saving the step's time

    @property
    def _start(self) -> Progress:
        """How far this run is before its first step, with the text and sizes that decide which sample comes when."""
        text, loader = self.corpus, self.loader
        data = f"text {text.digest}, {text.val.numel()} bytes of it to validate, sequences of {loader.seq_len}, seed {loader.seed}"
        return Progress(data=data, world=self.ranks.world, tokens_per_step=self.tokens_per_step)

    def record(self, resumed: Resumed | None = None) -> RunRecord:
        """How this run begins, after the steps of the run that it goes on from."""
        before, changes = (resumed.progress, resumed.changes) if resumed is not None else (self._start, ())
        plan, parallel = self.optimizer.plan, self.config.parallel
        # With a pipeline or expert ranks of ours no rank's plan has all params; the first rank speaks for its own.
        whose = "on rank 0: " if parallel.pp * parallel.ep > 1 and not is_sharded(parallel) else ""
        return RunRecord(
            layerwise=layerwise.__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            world=self.ranks.world,
            device=self.ranks.device.type,
            num_params=count_params(resolve_model(self.config.model)),
            routing=whose + summarise(plan.routes, plan.table),
            layout=plan.layout_label + cut_in_words(parallel),
            plan_digest=plan.digest,
            data_digest=self.corpus.digest,
            train_bytes=self.corpus.train.numel(),
            val_bytes=self.corpus.val.numel(),
            steps=self.config.train.steps,
            tokens_per_step=self.tokens_per_step,
            config=asdict(self.config),
            first_step=before.step,
            changes=changes,
            tokens_per_step_before=before.tokens_per_step if before.step and before.tokens_per_step else None,
        )

    def end(self, step: int, outcome: str, first_bpb: float, final_bpb: float) -> EndRecord:
        """How it ended after `step` steps."""
        meter = self.meter
        return EndRecord(
            step=step,
            outcome=outcome,
            first_val_bpb=first_bpb,
            final_val_bpb=final_bpb,
            tokens=self.loader.batching.samples_before(step) * self.loader.seq_len,
            tokens_per_s=meter.total_steps * self.tokens_per_step / meter.train_s if meter.train_s else math.nan,
            elapsed_s=meter.elapsed_s,
        )


def prepare(config: TrainConfig, ranks: joining.Ranks, watchers: Sequence[Watcher] = ()) -> Run:
    """Text, model and optimizer, after making sure that all ranks mean the same run."""
    torch.use_deterministic_algorithms(config.train.deterministic)
    shape = resolve_model(config.model)
    corpus = load_corpus(config.data, shape.seq_len)
    joining.same_on_all(dump_json(config), "config", ranks)
    joining.same_on_all(corpus.digest, "training text", ranks)
    rules = read_rules(config.routing.rules_file)
    joining.same_on_all(rules_to_toml(rules), "routing rules", ranks)
    _check_world(config, ranks)
    build = _sharded if is_sharded(config.parallel) else _averaged if config.parallel.ddp else _wrapped
    with _routing_as_configuration(config):
        grid, model, passes, optimizer = build(config, ranks, rules)
    # Initial weights have a generator of their own: what a model draws while it trains is another stream on every rank.
    torch.manual_seed(random.Random(f"{config.train.seed} {ranks.rank}").getrandbits(63))
    batching = Batching(config.train.batch_size, config.train.accumulation, grid.data_world)
    loader = Loader(corpus, batching, shape.seq_len, config.data.seed, grid.data_coord, ranks.device)
    return Run(
        config=config,
        ranks=ranks,
        corpus=corpus,
        loader=loader,
        model=model,
        passes=passes,
        optimizer=optimizer,
        base_lrs=tuple(float(group["lr"]) for group in optimizer.param_groups),
        watchers=watchers,
        meter=Meter(loss_sum=torch.zeros((), device=ranks.device)),
        counts=grid.tensor.rank == 0,
    )


def _check_world(config: TrainConfig, ranks: joining.Ranks) -> None:
    problems = world_problems(config.parallel, ranks.world)
    if problems:
        raise ConfigError(problems)


_Built: TypeAlias = tuple[joining.Grid, nn.Module, Passes, layerwise.Optimizer]


def _wrapped(config: TrainConfig, ranks: joining.Ranks, rules: Sequence[RouteRule]) -> _Built:
    """The model in a `DataParallel`."""
    grid = joining.arrange(ranks, pp=config.parallel.pp, ep=config.parallel.ep)
    chunks = build_chunks(config, grid, ranks.device, _DTYPES[config.train.precision])
    if config.precision.param_gather != "none":
        for chunk in chunks:
            layerwise.quantize(chunk, config.precision.param_gather)
    model = layerwise.DataParallel(
        chunks if len(chunks) > 1 else chunks[0],
        layout=config.parallel.layout,
        **_routing(config, rules),
        mesh=grid.mesh,
        ties=ties_of(chunks),
        reducer=config.parallel.reducer,
        shard_grads=config.parallel.shard_grads,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=config.parallel.overlap_param_gather,
        bucket_mib=config.parallel.bucket_mib,
        grad_dtype=_DTYPES[config.parallel.grad_dtype],
    )
    passes = PipelinedModel(chunks, config, grid, ranks.device) if grid.pp > 1 else WholeModel(model, model.no_sync)
    return grid, model, passes, _optimizer(model, config)


def _sharded(config: TrainConfig, ranks: joining.Ranks, rules: Sequence[RouteRule]) -> _Built:
    """The model as torch cuts it."""
    # What these need of torch takes long to import.
    from layerwise.comm.cutting import no_sync
    from layerwise.train.sharding import arrange, cut_gpt

    grid, meshes = arrange(ranks, config.parallel)
    (model,) = build_chunks(config, grid, ranks.device, _DTYPES[config.train.precision])
    cut_gpt(model, meshes, config.parallel, _DTYPES[config.parallel.grad_dtype])
    passes = WholeModel(model, partial(no_sync, model))
    return grid, model, passes, _optimizer(model, config, **_routing(config, rules))


def _routing(config: TrainConfig, rules: Sequence[RouteRule]) -> dict[str, Any]:
    """Arguments of `DataParallel` or `Optimizer` that route params; a recorded routing comes after the rules."""
    recorded = config.routing.recorded
    return {"strict": config.routing.strict, "rules": [*rules, recorded] if recorded else rules}


def _averaged(config: TrainConfig, ranks: joining.Ranks, rules: Sequence[RouteRule]) -> _Built:
    """The model in torch's DistributedDataParallel."""
    grid = joining.arrange(ranks)
    (module,) = build_chunks(config, grid, ranks.device, _DTYPES[config.train.precision])
    model = DistributedDataParallel(module, device_ids=[ranks.device] if ranks.device.type == "cuda" else None)
    optimizer = _optimizer(model, config, layout=config.parallel.layout, **_routing(config, rules))
    return grid, model, WholeModel(model, model.no_sync), optimizer


def _optimizer(model: nn.Module, config: TrainConfig, **given: Any) -> layerwise.Optimizer:
    """The optimizer that a config asks for; `given` is what only one kind of model takes."""
    return layerwise.Optimizer(
        model,
        matrix=matrix_rule(config.optim),
        other=other_rule(config.optim),
        clip_grad_norm=config.optim.clip_grad_norm,
        qk_clip=qk_clip_of(config.optim),
        **given,
    )


@contextmanager
def _routing_as_configuration(config: TrainConfig) -> Iterator[None]:
    """A rule that does not fit the model is the user's mistake and not a crash. The model is ours and every other
    setting was checked before, so a value that is refused in here belongs to a rule."""
    try:
        yield
    except ValueError as error:
        routing = config.routing
        where = routing.rules_file or ("routing.recorded" if routing.recorded else "routing.strict")
        if routing.rules_file or routing.recorded or routing.strict:
            raise ConfigError([Problem(where, str(error))]) from error
        raise
