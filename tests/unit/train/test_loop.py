import dataclasses
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layerwise.comm.joining import Ranks
from layerwise.config.resolve import resolve_model
from layerwise.config.schema import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RoutingConfig,
    ScheduleConfig,
    TrainConfig,
)
from layerwise.errors import ConfigError
from layerwise.routing.record import routing_to_json
from layerwise.train import stop as stopping
from layerwise.train.loop import prepare, train
from layerwise.train.metrics import EndRecord, EvalRecord, Record, RunRecord, StepRecord
from layerwise.train.model import build_gpt
from layerwise.train.stop import StopRequest
from tests.ranks import raised, run_ranks
from tests.worlds import hash_tensors

ALONE = Ranks(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Easy text: a few repeated lines, so that a few steps are enough to learn something."""
    file: Path = tmp_path_factory.mktemp("text") / "easy.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\nall work and no play\n" * 300)
    return str(file)


def config_of(text: str, **train: object) -> TrainConfig:
    loop: dict[str, object] = {"steps": 6, "batch_size": 4, "eval_every": 3, "eval_sequences": 5, "log_every": 2}
    return TrainConfig(
        model=ModelConfig(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, seq_len=24),
        data=DataConfig(path=text, val_fraction=0.2),
        optim=OptimConfig(lr=0.02, other_lr=0.02, ns_dtype="fp32"),
        schedule=ScheduleConfig(warmup_steps=2),
        train=LoopConfig(**{**loop, **train}),  # type: ignore[arg-type]
    )


class Recorder:
    """Keeps what it is told."""

    def __init__(self, interrupt_at: int | None = None, number: signal.Signals = signal.SIGINT) -> None:
        self.records: list[Record] = []
        self.interrupt_at = interrupt_at
        self.number = number

    def write(self, record: Record) -> None:
        self.records.append(record)
        if isinstance(record, StepRecord) and record.step == self.interrupt_at:
            os.kill(os.getpid(), self.number)

    def steps(self, kind: type[Record]) -> list[int]:
        return [
            record.step for record in self.records if isinstance(record, kind) and not isinstance(record, RunRecord)
        ]


def test_a_run_tells_its_story_in_order_and_learns(text: str) -> None:
    recorder = Recorder()
    end = train(config_of(text, steps=20), ALONE, (recorder,))
    assert isinstance(recorder.records[0], RunRecord)
    assert recorder.records[-1] == end
    assert recorder.steps(StepRecord) == list(range(2, 21, 2))
    assert recorder.steps(EvalRecord) == [0, 3, 6, 9, 12, 15, 18, 20]
    assert (end.outcome, end.step, end.tokens) == ("finished", 20, 20 * 4 * 24)
    assert abs(end.first_val_bpb - 8.0) < 0.3
    assert end.final_val_bpb < end.first_val_bpb - 1.0
    losses = [record.loss for record in recorder.records if isinstance(record, StepRecord)]
    assert losses[-1] < losses[0]


def test_what_a_killed_run_was_to_validate_is_validated(text: str, tmp_path: Path) -> None:
    config = dataclasses.replace(config_of(text), checkpoint=CheckpointConfig(every=3))
    straight = Recorder()
    train(config, ALONE, (straight,), checkpoints=tmp_path)
    assert straight.steps(StepRecord) == [2, 3, 4, 6]
    shutil.rmtree(tmp_path / "step_00000006")
    again = Recorder()
    train(config, ALONE, (again,), checkpoints=tmp_path)
    assert again.steps(StepRecord) == [4, 6]
    assert again.steps(EvalRecord) == [3, 6]
    bits = [
        {record.step: record.val_bpb for record in recorder.records if isinstance(record, EvalRecord)}
        for recorder in (straight, again)
    ]
    assert bits[1] == {step: value for step, value in bits[0].items() if step}


def test_a_routing_of_another_model_is_a_problem_of_the_configuration(text: str, tmp_path: Path) -> None:
    found = prepare(config_of(text), ALONE).optimizer.plan
    (tmp_path / "routing.json").write_text(routing_to_json(found.table, found.routes))
    config = dataclasses.replace(config_of(text), routing=RoutingConfig(recorded=str(tmp_path / "routing.json")))
    assert prepare(config, ALONE).optimizer.plan.route("head.weight").reason.endswith("routing.json)")
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, d_model=64))
    with pytest.raises(ConfigError, match=r"routing.recorded: the recorded routing .* is not of this model"):
        prepare(wider, ALONE)


def test_the_last_step_is_logged_and_validated_once_whatever_the_intervals(text: str) -> None:
    recorder = Recorder()
    train(config_of(text, steps=5, log_every=10, eval_every=0), ALONE, (recorder,))
    assert recorder.steps(StepRecord) == [5]
    assert recorder.steps(EvalRecord) == [0, 5]


def test_two_runs_with_one_config_are_equal_bit_for_bit(text: str) -> None:
    first, second = Recorder(), Recorder()
    train(config_of(text), ALONE, (first,))
    train(config_of(text), ALONE, (second,))
    for a, b in zip(first.records, second.records, strict=True):
        if isinstance(a, StepRecord) and isinstance(b, StepRecord):
            assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)


def test_qk_clip_keeps_the_logits_of_the_gpt_down_and_logs_them(text: str) -> None:
    largest = []
    for threshold in (math.inf, 0.01):
        recorder = Recorder()
        config = dataclasses.replace(config_of(text, log_every=1), optim=OptimConfig(lr=0.05, qk_clip=threshold))
        train(config, ALONE, (recorder,))
        steps = [record for record in recorder.records if isinstance(record, StepRecord)]
        assert all(bool(record.clipped_heads) == (threshold < 1.0) for record in steps[1:])
        largest.append(max(record.max_logit or 0.0 for record in steps[1:]))
    assert largest[1] < largest[0]


def test_accumulation_is_the_same_as_a_larger_batch(text: str) -> None:
    seen: list[list[StepRecord]] = []
    for batch_size, accumulation in ((6, 1), (2, 3)):
        recorder = Recorder()
        train(config_of(text, batch_size=batch_size, accumulation=accumulation, log_every=1), ALONE, (recorder,))
        seen.append([record for record in recorder.records if isinstance(record, StepRecord)])
    # The mean of three means rounds differently from one mean. Rules that do not mind how large a gradient is would hide
    # a wrong one: its norm does not.
    for whole, parts in zip(*seen, strict=True):
        assert (parts.loss, parts.grad_norm) == pytest.approx((whole.loss, whole.grad_norm), rel=1e-3)


@pytest.mark.parametrize(
    ("optim", "precision", "layout"),
    [
        (OptimConfig(rule="adamw"), "fp32", "flat"),
        (OptimConfig(rule="normuon", other_rule="lion", other_lr=1e-3), "fp32", "replicated"),
        (OptimConfig(rule="adamuon", clip_grad_norm=None), "bf16", "padded"),
        (OptimConfig(rule="muon", coefficients="simple", scale="spectral", lr=1e-3), "bf16", "flat"),
    ],
)
def test_every_rule_precision_and_layout_trains(text: str, optim: OptimConfig, precision: str, layout: str) -> None:
    config = dataclasses.replace(
        config_of(text, precision=precision),
        optim=optim,
        parallel=ParallelConfig(layout=layout),  # type: ignore[arg-type]
    )
    end = train(config, ALONE)
    assert math.isfinite(end.final_val_bpb)
    assert end.final_val_bpb < end.first_val_bpb


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in the background with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_first_interrupt_finishes_the_step_and_ends_the_run_properly(text: str) -> None:
    recorder = Recorder(interrupt_at=4)
    end = train(config_of(text, steps=50), ALONE, (recorder,))
    assert (end.outcome, end.step) == ("stopped", 4)
    assert recorder.steps(EvalRecord) == [0, 3, 4]
    assert isinstance(recorder.records[-1], EndRecord)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_second_interrupt_ends_it_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ECHO_S", -1.0)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_echo_of_a_signal_is_no_second_one(number: signal.Signals) -> None:
    with StopRequest() as stop:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.requested


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_the_signals_of_schedulers_and_lost_terminals_end_the_run_properly(text: str, number: signal.Signals) -> None:
    recorder = Recorder(interrupt_at=4, number=number)
    end = train(config_of(text, steps=50), ALONE, (recorder,))
    assert (end.outcome, end.step) == ("stopped", 4)


def test_a_run_listens_to_the_signals_that_it_is_told_of_and_to_no_others() -> None:
    with StopRequest(["SIGUSR2"]) as stop:
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.requested
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_initial_weights_are_drawn_from_the_seed_alone_whatever_torch_has_drawn_before(text: str) -> None:
    for seed in (0, 7):
        torch.manual_seed(99)
        config = config_of(text, seed=seed)
        alone = build_gpt(resolve_model(config.model), seed=seed)
        assert hash_tensors(prepare(config, ALONE).model.parameters()) == hash_tensors(alone.parameters())


def _train_on_rank(rank: int, world: int, config: TrainConfig, interrupt_at: int | None) -> tuple[EndRecord, int]:
    recorder = Recorder(interrupt_at if rank == 1 else None)
    ranks = Ranks(rank=rank, world=world, local_rank=rank, device=torch.device("cpu"))
    end = train(config, ranks, (recorder,))
    return end, len(recorder.records)


def test_two_ranks_train_like_one_on_the_same_global_batch(text: str) -> None:
    alone = train(config_of(text, batch_size=4), ALONE)
    ends = [end for end, _ in run_ranks(2, _train_on_rank, config_of(text, batch_size=2), None)]
    assert ends[0].final_val_bpb == ends[1].final_val_bpb
    assert ends[0].tokens == alone.tokens
    # ranks sum gradients in another order than one process does
    assert ends[0].first_val_bpb == pytest.approx(alone.first_val_bpb, rel=1e-6)
    assert ends[0].final_val_bpb == pytest.approx(alone.final_val_bpb, rel=1e-4)


def test_an_interrupt_on_one_rank_stops_all_at_the_same_step(text: str) -> None:
    found = run_ranks(2, _train_on_rank, config_of(text, steps=50, batch_size=2), 4)
    assert {(end.outcome, end.step) for end, _ in found} == {("stopped", 4)}
    assert len({num_records for _, num_records in found}) == 1


def _train_with_own_seed(rank: int, world: int, config: TrainConfig) -> str:
    mine = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=rank))
    return raised(lambda: train(mine, Ranks(rank=rank, world=world, local_rank=rank, device=torch.device("cpu"))))


def test_ranks_that_were_started_differently_are_told_what_differs(text: str) -> None:
    for message in run_ranks(2, _train_with_own_seed, config_of(text)):
        assert message.startswith("PlanMismatchError: ranks 0 and 1 were started with different config:")
        assert '"seed": 0' in message
        assert '"seed": 1' in message


def config_with_rules(text: str, rules: str, folder: Path, *, strict: bool = False) -> TrainConfig:
    (folder / "rules.toml").write_text(rules)
    routing = RoutingConfig(rules_file=str(folder / "rules.toml"), strict=strict)
    return dataclasses.replace(config_of(text), routing=routing)


def test_rules_of_a_file_decide_routes_and_options(text: str, tmp_path: Path) -> None:
    rules = '[[rule]]\npattern = "*.out.weight"\nto = "other"\noptions = {lr = 0.125}\n'
    run = prepare(config_with_rules(text, rules, tmp_path, strict=True), ALONE)
    route = run.model.plan.route("blocks.0.attn.out.weight")
    assert (route.family, route.reason) == ("other", "matches the user's rule 1 ('*.out.weight')")
    assert 0.125 in {group["lr"] for group in run.optimizer.param_groups}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ('pattern = "*.uot.weight"\nto = "other"', "route rule 1 ('*.uot.weight') matches no param."),
        (
            'pattern = "*.qkv.weight"\nto = "matrix"\nrow_blocks = [3, 4]',
            "blocks (3, 4) must be positive and sum to 64",
        ),
        ('pattern = "*.qkv.weight"\nto = "matrix"\noptions = {beta2 = 0.5}', "sets 'beta2', which Muon does not have."),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_a_problem_of_the_configuration(
    text: str, tmp_path: Path, rules: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(config_with_rules(text, f"[[rule]]\n{rules}\n", tmp_path), ALONE)
    (problem,) = caught.value.problems
    assert problem.where == str(tmp_path / "rules.toml")
    assert message in problem.what
