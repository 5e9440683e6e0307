"""What a run writes down: one JSON object per line in `metrics.jsonl`, rank 0 only.

Schema 1. Every record has `kind`. A file starts with one `run` record (which carries `schema`) and, unless the run was
killed, ends with one `end` record; in between are `step` and `eval` records in step order, and another `run` record
wherever the run went on from a checkpoint. `step` counts finished
optimizer steps, so an `eval` at step 0 is the untrained model. A number that is not finite is written as null. Readers
should ignore kinds and fields that they do not know: those may be added without a new schema number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, TextIO

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """How a run began."""

    kind: ClassVar[str] = "run"

    schema: int = SCHEMA
    layerwise: str
    """Version of this package."""
    torch: str
    python: str
    world: int
    """Number of ranks."""
    device: str
    num_params: int
    """Elements of all params, tied ones once."""
    routing: str
    """How many params each rule has, in words."""
    layout: str
    plan_digest: str
    data_digest: str
    train_bytes: int
    val_bytes: int
    steps: int
    tokens_per_step: int
    """Over all ranks and microbatches."""
    config: Mapping[str, object]
    """The resolved config."""
    first_step: int = 0
    """Steps that were taken before, by a run that this one goes on from."""
    changes: Sequence[str] = ()
    """Settings, ranks and tokens per step that the run before had otherwise: `optim.lr 0.01 -> 0.02`."""
    tokens_per_step_before: int | None = None
    """Tokens of a step of the run before; null where its checkpoint does not say, and where there was no run before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Training since the previous `step` record."""

    kind: ClassVar[str] = "step"

    step: int
    loss: float
    """Nats per byte, mean over the steps since the previous record and over ranks."""
    bpb: float
    """The same in bits per byte."""
    grad_norm: float
    """Global norm before clipping, at this step."""
    max_logit: float | None = None
    """Largest attention logit at this step; null without optim.qk_clip."""
    clipped_heads: int = 0
    """Attention heads that were scaled at this step."""
    skipped: int
    """Steps since the previous record that were not taken."""
    skip_reason: str
    """Why the last of them was not; empty if there was none."""
    lr_factor: float
    """What the schedule multiplies every learning rate with."""
    step_ms: float
    """Mean time of a step, without validation."""
    tokens_per_s: float
    bytes_sent: int
    """Bytes this rank handed to collectives at this step; of a model that torch cuts or wraps, in the optimizer's step alone."""
    elapsed_s: float
    """Since the loop began, validation included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """Validation after `step` steps."""

    kind: ClassVar[str] = "eval"

    step: int
    val_loss: float
    """Nats per byte."""
    val_bpb: float
    """Bits per byte."""
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """How a run ended."""

    kind: ClassVar[str] = "end"

    step: int
    outcome: str
    """`finished`, or `stopped` when the user asked for it."""
    first_val_bpb: float
    final_val_bpb: float
    tokens: int
    """Tokens trained on, over all ranks."""
    tokens_per_s: float
    """Without validation."""
    elapsed_s: float


Record = RunRecord | StepRecord | EvalRecord | EndRecord


def to_json(record: Record) -> str:
    """A record as one line."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return json.dumps(_finite({"kind": record.kind, **values}), allow_nan=False)


def _finite(value: object) -> object:
    """The same data with null for inf and NaN, which JSON cannot write."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, object]]:
    """The records of a file; a last line that a crash cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _step_of(record: Mapping[str, object]) -> int:
    step = record.get("step")
    return step if isinstance(step, int) else 0


def replace_text(path: Path, text: str) -> None:
    """Have a file hold this text: all of it, or what it held before."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


class MetricsFile:
    """Appends records to a file, each whole and at once; a full disk ends the writing, never the training."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None
        """Why writing stopped, for the one who talks to the user."""
        self._first_step: int | None = None
        """Where a run went on from, if it did."""
        # line by line, so that the file can be read while the run goes on
        self._file: TextIO | None = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            if isinstance(record, RunRecord) and record.first_step:
                self._first_step = record.first_step
                # A run goes on from a checkpoint of this step: what came after it never was.
                self._forget(lambda one: _step_of(one) > record.first_step or one.get("kind") == "end")
            if isinstance(record, EvalRecord) and record.step == self._first_step:  # validated once more
                self._forget(lambda one: one.get("kind") == "eval" and _step_of(one) == record.step)
            self._file.write(to_json(record) + "\n")
        except OSError as error:
            self.failure = f"metrics are no longer written to {self.path}: {error}. Training goes on."
            self.close()

    def _forget(self, what: Callable[[Mapping[str, object]], bool]) -> None:
        """Take records out again."""
        kept = [record for record in read_metrics(self.path) if not what(record)]
        replace_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        if self._file is not None:
            self._file.close()
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                self.failure = f"the end of {self.path} may be missing: {error}."
