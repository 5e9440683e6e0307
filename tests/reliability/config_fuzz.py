"""S16: any settings at all give a valid config or a list of problems, and never a traceback.

Cases are drawn from a seeded generator: files (TOML, JSON, noise) and flags, right and wrong, mixed. For each one loading
must end within a second in one of two ways: a config that is really usable (it survives a dump and reload, its model shape
and rules can be built), or a `ConfigError` whose problems all have a place and a sentence. A case into which something
certainly wrong was put must not be accepted. A share of the cases goes through the real command line, and a share of
usable small configs really trains two steps.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

from layerwise.cli.settings import load_settings
from layerwise.config import load as load_module
from layerwise.config.load import FIELD_TYPES, Override, dump_json, load, split_overrides
from layerwise.config.resolve import matrix_rule, other_rule, resolve_model
from layerwise.config.schema import TrainConfig
from layerwise.config.validate import validate
from layerwise.errors import ConfigError
from tests.ranks import RankFailure, run_ranks

FIGURE = "S16 config_fuzz"
_LIMIT_S = 4.0
"""Seconds of a processor, on the slowest machine: a load beside it does not count."""
_MOST_MESSAGE = 4000

_JUNK_WORDS = (
    *(
        "",
        " ",
        "nan",
        "-inf",
        "1e309",
        "-1",
        "0",
        "3.5",
        "1_0",
        "0x10",
        "\u0663",
        "True",
        "none",
        "null",
        "[]",
        "{}",
        "--",
        "-",
        "=",
        ".",
    ),
    *(
        "9" * 5000,
        "a" * 5000,
        "\0",
        "\udcff",
        "\U0001f600",
        "..",
        "/",
        "~",
        "muon ",
        "MUON",
        "$HOME",
        "%s%n",
        "\n",
        "\x1b[31m",
    ),
)
_JUNK_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**400, 1e308, -1e308, 3.5, "", "none", "x" * 3000, [], [[]], {}, {"a": {"b": 1}}),
    *([1, 2, 3], [None], ["0.9", "0.95"], [0.9, True], 2**63, -(2**63), "\u0000", "\U0001f600"),
)
_CERTAINLY_WRONG: tuple[tuple[str, str], ...] = (
    *(("--model.d-modle", "64"), ("--modle.d-model", "64"), ("--model.d-model", "0"), ("--model.d-model", "x")),
    *(("--optim.lr", "nan"), ("--optim.lr", "-0.1"), ("--optim.rule", "sgd"), ("--optim.betas", "0.9")),
    *(("--train.steps", "0"), ("--train.steps", "1.5"), ("--train.precision", "fp8"), ("--data.val-fraction", "1")),
    *(("--data.path", "/no/such/place"), ("--train.out-dir", "/dev/null/x"), ("--optim.momentum", "1"), (".", "")),
    *(("--optim.coefficients", "magic"), ("--model.head-dim", "3"), ("--schedule.min-lr-ratio", "2")),
    *(("--model.n-experts", "1"), ("--model.top-k", "0"), ("--parallel.pp", "0"), ("--parallel.schedule", "zb")),
    *(("--parallel.fsdp", "0"), ("--parallel.tp", "-2"), ("--parallel.replicate", "x"), ("--parallel.ddp", "maybe")),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One generated input."""

    file: tuple[str, bytes] | None
    """Name and content."""
    words: tuple[str, ...]
    is_certainly_wrong: bool


def _fitting(rng: random.Random, kind: object) -> Any:
    """A value of the right type, often a sensible one."""
    if get_origin(kind) is Literal:
        return rng.choice(get_args(kind))
    if get_origin(kind) is tuple:
        return [rng.choice((0.0, 0.5, 0.9, 0.95)) for _ in get_args(kind)]
    inner = [arg for arg in get_args(kind) if arg is not type(None)]
    if inner:
        return None if rng.random() < 0.3 else _fitting(rng, inner[0])
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return rng.choice((1, 2, 4, 8, 16, 64, 96, 256, 1000))
    if kind is float:
        return rng.choice((0.0, 1e-8, 1e-3, 0.02, 0.1, 0.5, 1.0, 10.0))
    return rng.choice(("", "polar_express", "runs/fuzz", "."))


def _word(value: Any) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(str(item) for item in value)
    return ("none" if value is None else str(value),)


def _name(rng: random.Random) -> tuple[str, str]:
    section = rng.choice(list(FIELD_TYPES))
    return section, rng.choice(list(FIELD_TYPES[section]))


def _typo(rng: random.Random, word: str) -> str:
    position = rng.randrange(len(word))
    return rng.choice(
        (word[:position] + word[position + 1 :], word[:position] + "q" + word[position:], word.upper(), word + ".")
    )


def _flags(rng: random.Random, noise: float) -> tuple[str, ...]:
    """One setting on the command line; `noise` is how often each thing goes wrong."""
    section, name = _name(rng)
    flag = f"--{section}.{name}"
    if rng.random() < noise / 2:
        flag = "--" + _typo(rng, flag[2:])
    if rng.random() < 0.3:
        flag = flag.replace("_", "-")
    junk = rng.random() < noise
    words = (rng.choice(_JUNK_WORDS),) if junk else _word(_fitting(rng, FIELD_TYPES[section][name]))
    if rng.random() < noise / 3:
        return (flag,)  # the value is missing
    return (f"{flag}={words[0]}", *words[1:]) if rng.random() < 0.3 else (flag, *words)


def _document(rng: random.Random, noise: float) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for _ in range(rng.randrange(8)):
        section, name = _name(rng)
        value = rng.choice(_JUNK_VALUES) if rng.random() < noise else _fitting(rng, FIELD_TYPES[section][name])
        if rng.random() < noise / 3:
            name = _typo(rng, name)
        if rng.random() < noise / 3:
            section = _typo(rng, section)
        table = document.setdefault(section, {})
        if isinstance(table, dict):
            table[name] = value
    if rng.random() < noise / 3:
        document[rng.choice(("model", "extra", ""))] = rng.choice(_JUNK_VALUES)
    return document


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return '"none"' if value is None else json.dumps(value)


def _file(rng: random.Random, noise: float) -> tuple[str, bytes]:
    document = _document(rng, noise)
    kind = rng.random() * (0.85 + noise)
    if kind < 0.45:
        lines = [f"{json.dumps(key)} = {_toml(value)}" for key, value in document.items()]
        return "run.toml", "\n".join(lines).encode()
    if kind < 0.85:
        return "run.json", json.dumps(document).encode()
    garbage = rng.choice(
        (
            rng.randbytes(200),
            b"[" * 3000,
            b"{" * 3000,
            b"",
            b"\xff\xfe",
            b"[model]\nd_model = 1979-05-27\n",
            b"a.b.c = 1\n",
        )
    )
    return rng.choice(("run.toml", "run.json", "run")), garbage


def make_case(rng: random.Random) -> Case:
    noise = rng.choice((0.0, 0.03, 0.3))
    words: list[str] = []
    for _ in range(rng.randrange(6)):
        words += _flags(rng, noise)
    is_wrong = rng.random() < 0.3
    if is_wrong:
        flag, value = rng.choice(_CERTAINLY_WRONG)
        words += [f"{flag}={value}"] if flag != "." else ["--model.=1"]
    return Case(_file(rng, noise) if rng.random() < 0.5 else None, tuple(words), is_wrong)


def _written(case: Case, folder: Path) -> str | None:
    if case.file is None:
        return None
    path = folder / case.file[0]
    path.write_bytes(case.file[1])
    return str(path)


def check_loading(case: Case, folder: Path) -> str | None:
    """What is wrong with how this case was treated, or None."""
    path = _written(case, folder)
    started_s = time.process_time()
    try:
        overrides, _ = split_overrides(case.words)
        config = load_settings(path, overrides).config
    except ConfigError as error:
        fault = _fault_of_refusal(error)
    except BaseException as error:
        fault = f"{type(error).__name__} instead of a list of problems: {error}"
    else:
        fault = (
            "something certainly wrong was accepted" if case.is_certainly_wrong else _fault_of_config(config, folder)
        )
    took_s = time.process_time() - started_s
    return fault or (f"took {took_s:.1f} s" if took_s > _LIMIT_S else None)


def _fault_of_refusal(error: ConfigError) -> str | None:
    if not error.problems:
        return "refused without a problem"
    if not all(problem.where and problem.what for problem in error.problems):
        return "a problem without a place or a sentence"
    longest = max(len(problem.what) for problem in error.problems)
    return f"a problem of {longest} characters" if longest > _MOST_MESSAGE else None


def _fault_of_config(config: TrainConfig, folder: Path) -> str | None:
    """An accepted config must be usable."""
    resolve_model(config.model)
    matrix_rule(config.optim)
    other_rule(config.optim)
    again = folder / "again.json"
    again.write_text(dump_json(config))
    if load(str(again)).config != config:
        return "the dump does not load back to the same config"
    return "accepted, and then not valid" if validate(config) else None


def check_command(case: Case, folder: Path) -> str | None:
    """The same through the real command line."""
    words = [word for word in case.words if "\0" not in word]  # no process can be given a NUL
    path = _written(case, folder)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "layerwise", "train", *([path] if path else []), "--dry-run", *words],
        capture_output=True,
        timeout=240,
        env={**os.environ, "PYTHONUTF8": "1"},
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode not in (0, 2):
        return f"exit code {done.returncode}: {done.stderr[-300:]!r}"
    if b"Traceback" in done.stderr:
        return f"a traceback: {done.stderr[-300:]!r}"
    if done.returncode == 2 and (done.stdout or not done.stderr):
        return "refused with something on stdout or nothing on stderr"
    return f"took {cpu_s:.1f} s of processor time" if cpu_s > _LIMIT_S else None


def make_small(rng: random.Random, folder: Path) -> tuple[TrainConfig, int]:
    """A valid config of a model that trains in a moment, and the number of ranks to train it on."""
    choices: dict[str, Sequence[str]] = {
        "model.d_model": ("16", "32", "48"),
        "model.n_layers": ("1", "2"),
        "model.tie_embeddings": ("true", "false"),
        "model.fuse_gate_up": ("true", "false"),
        "model.hidden": ("none", "24", "33"),
        "optim.rule": ("muon", "normuon", "adamuon", "adamw"),
        "optim.other_rule": ("adamw", "lion"),
        "optim.weight_decay_mode": ("decoupled", "independent", "coupled"),
        "optim.coefficients": ("simple", "quintic", "polar_express"),
        "optim.scale": ("rms", "spectral", "shape", "unit_rms", "none"),
        "optim.ns_dtype": ("bf16", "fp32"),
        "optim.tp_mode": ("auto", "blockwise"),
        "optim.clip_grad_norm": ("none", "0.5"),
        "schedule.kind": ("cosine", "wsd", "constant"),
        "model.n_experts": ("0", "0", "4"),
        "model.top_k": ("1", "2"),
        "model.expert_hidden": ("none", "8"),
        "model.router_penalty": ("0", "0.01"),
        "parallel.layout": ("flat", "padded", "compact", "replicated"),
        "parallel.reducer": ("collective", "ordered"),
        "parallel.schedule": ("1f1b", "gpipe"),
        "parallel.bucket_mib": ("none", "0.01"),
        "parallel.overlap_grad_reduce": ("true", "false"),
        "parallel.grad_dtype": ("fp32", "bf16"),
        "train.accumulation": ("1", "2"),
        "train.precision": ("fp32", "fp32", "bf16"),
    }
    fixed = {
        "model.n_heads": "2",
        "model.n_kv_heads": "1",
        "model.seq_len": "8",
        "train.steps": "2",
        "train.batch_size": "2",
    }
    fixed |= {"schedule.warmup_steps": "0", "train.eval_sequences": "2", "train.out_dir": str(folder / "out")}
    chosen = {path: rng.choice(values) for path, values in choices.items()} | fixed
    world, arranged = rng.choice(_ARRANGEMENTS)
    chosen |= arranged
    if chosen["parallel.layout"] == "replicated" or chosen["parallel.grad_dtype"] == "bf16":
        chosen["parallel.reducer"] = "collective"
    if chosen["parallel.layout"] in ("flat", "padded") and "parallel.shard_grads" not in arranged:
        chosen["parallel.shard_grads"] = rng.choice(("true", "false"))
    return load_settings(None, [Override(f"--{path}", (value,)) for path, value in chosen.items()]).config, world


_OF_TORCH = {
    "parallel.layout": "flat",
    "parallel.reducer": "collective",
    "parallel.bucket_mib": "none",
    "parallel.overlap_grad_reduce": "true",
    "parallel.shard_grads": "false",
}
"""What a model has to do without that torch wraps or cuts."""

_ARRANGEMENTS: tuple[tuple[int, dict[str, str]], ...] = (
    (1, {}),
    (1, {"model.n_experts": "4"}),
    (2, {}),
    (2, {"parallel.ep": "2", "model.n_experts": "4"}),
    (2, {"parallel.pp": "2", "model.n_layers": "2", "train.accumulation": "2"}),
    (
        2,
        {
            "parallel.pp": "2",
            "parallel.chunks": "2",
            "parallel.schedule": "1f1b",
            "model.n_layers": "4",
            "train.accumulation": "2",
        },
    ),
    (2, {**_OF_TORCH, "parallel.fsdp": "2"}),
    (2, {**_OF_TORCH, "parallel.replicate": "2"}),
    (2, {**_OF_TORCH, "parallel.tp": "2", "model.hidden": "24"}),
    (2, {**_OF_TORCH, "parallel.fsdp": "2", "parallel.ep": "2", "model.n_experts": "4"}),
    (2, {**_OF_TORCH, "parallel.ddp": "true", "parallel.grad_dtype": "fp32"}),
)
"""Numbers of ranks, and what must be set for them."""


def _train_on_rank(rank: int, world: int, config: TrainConfig) -> int:
    import torch

    from layerwise.comm.joining import Ranks
    from layerwise.train.loop import train

    return train(config, Ranks(rank=rank, world=world, local_rank=rank, device=torch.device("cpu"))).step


def check_training(config: TrainConfig, world: int) -> str | None:
    """Two real steps, alone or on forked ranks."""
    try:
        steps = [_train_on_rank(0, 1, config)] if world == 1 else run_ranks(world, _train_on_rank, config)
    except (Exception, RankFailure) as error:
        return f"a valid config did not train on {world} ranks: {config.parallel} {type(error).__name__}: {error}"
    return None if set(steps) == {2} else f"stopped after {steps} steps"


@contextmanager
def _sabotaged() -> Iterator[None]:
    """A loader that trusts names: the bug this figure exists to find."""

    def trusting(taken: Any, where: str, path: tuple[str, str], value: object, convert: Any) -> None:
        section, name = path
        taken.values[section][name] = convert(FIELD_TYPES[section][name], value)

    with mock.patch.object(load_module._Taken, "_take", trusting):
        yield


def run(n: int, sabotage: bool) -> dict[str, Any]:
    """Check `n` cases; `bad` counts those treated wrongly and `worst` describes the first of them."""
    started_s = time.perf_counter()
    rng = random.Random(20)
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name, _sabotaged() if sabotage else nullcontext():
        folder = Path(name)
        for number in range(n):
            case = make_case(rng)
            fault = check_loading(case, folder)
            if fault is None and number % 100 == 0:
                fault = check_command(case, folder)
            if fault is None and number % 33 == 0:
                fault = check_training(*make_small(rng, folder))
            if fault is not None:
                faults.append(f"case {number} {case.words[:6]!r} {case.file!r:.200}: {fault}")
    return {
        "figure": FIGURE,
        "n": n,
        "bad": len(faults),
        "worst": faults[0][:600] if faults else "",
        "seconds": round(time.perf_counter() - started_s, 1),
    }


if __name__ == "__main__":
    result = run(2000, "--sabotage" in sys.argv)
    print(json.dumps(result))
    raise SystemExit(1 if result["bad"] else 0)
