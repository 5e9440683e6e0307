"""What is wrong with a config whose values all have the right type: ranges, combinations, and files.

`validate` looks at everything and returns every problem, so that a user fixes a config once. It reads sizes of files,
never their content, and imports nothing heavy: a bad config is refused in well under a second.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from layerwise.config.coefficients import check_coefficients
from layerwise.config.parallelism import PARALLEL_CHECKS
from layerwise.config.precision import block_problems, made_of_problems, wrapper_problems
from layerwise.config.resolve import matrix_rule, other_rule
from layerwise.config.schema import (
    BYTE_VALUES,
    STOP_SIGNALS,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    stop_signals_of,
)
from layerwise.errors import Problem, did_you_mean

# Beyond these a number is a typing mistake, and some of them would take the machine down before torch could complain.
_MOST_LAYERS = 10_000
_MOST_WIDTH = 1_000_000
_MOST_EXPERTS = 65_536
_MOST_RANKS = 1_000_000
_MOST_STEPS = 1_000_000_000
_MOST_SEED = 2**63 - 1
_MOST_SHOWN = 400  # characters of a path

_INTEGER_RANGES: dict[str, tuple[int, int]] = {
    "model.d_model": (1, _MOST_WIDTH),
    "model.n_layers": (1, _MOST_LAYERS),
    "model.n_heads": (1, _MOST_WIDTH),
    "model.n_kv_heads": (1, _MOST_WIDTH),
    "model.head_dim": (2, _MOST_WIDTH),
    "model.hidden": (1, _MOST_WIDTH),
    "model.vocab_size": (BYTE_VALUES, _MOST_WIDTH),
    "model.seq_len": (2, _MOST_WIDTH),
    "model.n_experts": (0, _MOST_EXPERTS),
    "model.top_k": (1, _MOST_EXPERTS),
    "model.expert_hidden": (1, _MOST_WIDTH),
    "model.moe_every": (1, _MOST_LAYERS),
    "data.seed": (0, _MOST_SEED),
    "optim.ns_steps": (1, 100),
    "schedule.warmup_steps": (0, _MOST_STEPS),
    "parallel.pp": (1, _MOST_RANKS),
    "parallel.ep": (1, _MOST_RANKS),
    "parallel.fsdp": (1, _MOST_RANKS),
    "parallel.replicate": (1, _MOST_RANKS),
    "parallel.tp": (1, _MOST_RANKS),
    "parallel.chunks": (1, _MOST_LAYERS),
    "train.steps": (1, _MOST_STEPS),
    "train.batch_size": (1, _MOST_WIDTH),
    "train.accumulation": (1, _MOST_WIDTH),
    "train.seed": (0, _MOST_SEED),
    "train.eval_every": (0, _MOST_STEPS),
    "train.eval_sequences": (1, _MOST_WIDTH),
    "train.log_every": (1, _MOST_STEPS),
    "checkpoint.every": (0, _MOST_STEPS),
    "checkpoint.keep": (1, _MOST_STEPS),
}


def _is_positive(number: float) -> bool:
    return number > 0


def _is_not_negative(number: float) -> bool:
    return number >= 0


def _is_share(number: float) -> bool:
    return 0 <= number <= 1


def _is_decay(number: float) -> bool:
    return 0 <= number < 1


_NUMBER_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "model.rope_base": (_is_positive, "a number above 0"),
    "model.norm_eps": (_is_positive, "a number above 0"),
    "model.init_std": (_is_positive, "a number above 0"),
    "model.router_penalty": (_is_not_negative, "a number that is not negative"),
    "optim.lr": (_is_not_negative, "a number that is not negative"),
    "optim.momentum": (_is_decay, "a number from 0 up to, but not including, 1"),
    "optim.beta2": (_is_decay, "a number from 0 up to, but not including, 1"),
    "optim.weight_decay": (_is_not_negative, "a number that is not negative"),
    "optim.extra_scale": (_is_positive, "a number above 0"),
    "optim.other_lr": (_is_not_negative, "a number that is not negative"),
    "optim.other_weight_decay": (_is_not_negative, "a number that is not negative"),
    "optim.eps": (_is_positive, "a number above 0"),
    "optim.clip_grad_norm": (_is_positive, "a number above 0, or none"),
    "optim.qk_clip": (_is_positive, "a number above 0, or none"),
    "schedule.min_lr_ratio": (_is_share, "a number from 0 to 1"),
    "schedule.decay_fraction": (_is_share, "a number from 0 to 1"),
    "parallel.bucket_mib": (_is_positive, "a number above 0, or none"),
}


class _Watched:
    """A config, or a section of one, that remembers which settings were read."""

    def __init__(self, record: object, paths: set[str], section: str = "") -> None:
        self._record, self._paths, self._section = record, paths, section

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._record, name)
        if not self._section:
            return _Watched(value, self._paths, name)
        self._paths.add(f"{self._section}.{name}")
        return value


_CHECKS: tuple[Callable[[Any], Iterator[Problem]], ...] = (
    lambda config: _model_problems(config.model),
    *PARALLEL_CHECKS,
    made_of_problems,
    wrapper_problems,
    block_problems,
    lambda config: _optim_problems(config.optim),
    lambda config: _schedule_problems(config),
    lambda config: _data_problems(config),
    lambda config: _rules_file_problems(config.routing.rules_file),
    lambda config: _out_dir_problems(config.train.out_dir),
    lambda config: _signal_problems(stop_signals_of(config.train)),
)


def validate(config: TrainConfig, in_doubt: Collection[str] = ()) -> list[Problem]:
    """Every problem of `config`; an empty list means that a run may start.

    Settings `in_doubt` have values that nobody gave them: whatever depends on one of them is no problem yet.
    """
    problems = list(_range_problems(config))
    for check in _CHECKS:
        read: set[str] = set()
        # What was read before a problem came up is what it depends on: checks are generators.
        problems += [problem for problem in check(_Watched(config, read)) if read.isdisjoint(in_doubt)]
    return problems if problems or in_doubt else list(_rule_problems(config.optim))


def _value(config: TrainConfig, path: str) -> object:
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def _range_problems(config: TrainConfig) -> Iterator[Problem]:
    """Each number on its own."""
    for path, (least, most) in _INTEGER_RANGES.items():
        value = _value(config, path)
        if isinstance(value, int) and not least <= value <= most:
            found = str(value) if abs(value) < 10**20 else "a number of more than 20 digits"
            yield Problem(path, f"expected an integer from {least} to {most}, got {found}.")
    for path, (is_fine, wanted) in _NUMBER_RANGES.items():
        value = _value(config, path)
        if isinstance(value, float) and not is_fine(value):
            yield Problem(path, f"expected {wanted}, got {value!r}.")


def _model_problems(model: ModelConfig) -> Iterator[Problem]:
    if model.n_kv_heads > 0 and model.n_heads % model.n_kv_heads != 0:
        yield Problem(
            "model.n_kv_heads",
            f"expected a divisor of n_heads={model.n_heads}, got {model.n_kv_heads}: "
            "every key head serves the same number of query heads.",
        )
    if model.head_dim is not None:
        if model.head_dim % 2 != 0:
            yield Problem("model.head_dim", f"expected an even number, got {model.head_dim}: rotary turns pairs.")
    elif model.n_heads > 0:
        head_dim, rest = divmod(model.d_model, model.n_heads)
        if rest != 0:
            yield Problem(
                "model.d_model",
                f"expected a multiple of n_heads={model.n_heads}, got {model.d_model}. "
                "Change one of them, or set model.head_dim.",
            )
        elif head_dim % 2 != 0:
            yield Problem(
                "model.d_model",
                f"d_model={model.d_model} and n_heads={model.n_heads} make heads of width {head_dim}: "
                "expected an even width, rotary turns pairs. Change one of them, or set model.head_dim.",
            )


TRACED_STEPS = range(4, 6)
"""The steps that `--trace` records. By then the order of gathers is known and all memory has been used once; there are two
of them because the gathers of one step run under the forward of the next."""


def trace_problems(path: str | None, steps: int) -> list[Problem]:
    """What is wrong with a file for a timeline, or with a run too short for one."""
    problems = [] if path is None else [Problem("--trace", what) for what in _file_problems(path)]
    if path is not None and steps < TRACED_STEPS[-1]:
        which = f"steps {TRACED_STEPS[0]} and {TRACED_STEPS[-1]} are recorded, and train.steps is {steps}."
        problems.append(Problem("--trace", f"{which} Train for {TRACED_STEPS[-1]} steps or more."))
    return problems


def _name_problem(path: str, wanted: str) -> str | None:
    """What is wrong with a name before the file system is asked."""
    if path == "":
        return f"is empty: expected {wanted}."
    return f"{_shown(path)} holds a NUL, which no file name can." if "\0" in path else None


def _file_problems(path: str) -> Iterator[str]:
    problem = _name_problem(path, "a file to write, such as out.json")
    if problem is not None:
        yield problem
        return
    try:
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            yield f"{_shown(str(folder))} is no folder: make it first."
        elif os.path.isdir(path):
            yield f"{_shown(path)} is a folder: expected a file to write, such as {_shown(os.path.join(path, 'out.json'))}."
        elif not os.access(folder, os.W_OK | os.X_OK) or (os.path.exists(path) and not os.access(path, os.W_OK)):
            yield f"{_shown(path)} cannot be written: permission denied."
        else:
            with suppress(FileNotFoundError):
                os.stat(path)
    except OSError as error:  # a name that is too long, say
        yield f"{_shown(path)} cannot be written: {_why(error)}."


def _optim_problems(optim: OptimConfig) -> Iterator[Problem]:
    if any(not _is_decay(beta) for beta in optim.betas):
        yield Problem(
            "optim.betas", f"expected two numbers from 0 up to, but not including, 1, got {list(optim.betas)}."
        )
    if optim.ns_steps >= 1:
        problem = check_coefficients(optim.coefficients, optim.ns_steps)
        if problem is not None:
            yield Problem("optim.coefficients", problem)


def _rule_problems(optim: OptimConfig) -> Iterator[Problem]:
    """The rules have the last word on their own numbers."""
    for path, build in (("optim.rule", matrix_rule), ("optim.other_rule", other_rule)):
        try:
            build(optim)
        except ValueError as error:
            yield Problem(path, str(error))


def _schedule_problems(config: TrainConfig) -> Iterator[Problem]:
    warmup, steps = config.schedule.warmup_steps, config.train.steps
    if 0 < steps <= warmup:
        yield Problem(
            "schedule.warmup_steps",
            f"expected fewer than train.steps={steps}, got {warmup}: the rate would never arrive.",
        )
    elif config.schedule.kind == "wsd" and 0 <= config.schedule.decay_fraction <= 1:
        decay = round(config.schedule.decay_fraction * steps)
        if warmup + decay > steps > 0:
            yield Problem(
                "schedule.decay_fraction",
                f"warm-up ({warmup} steps) and decay ({decay} steps) do not fit into train.steps={steps}.",
            )


def _signal_problems(names: Sequence[str]) -> Iterator[Problem]:
    for name in names:
        if name not in STOP_SIGNALS:
            what = f"expected names of signals with commas between them, got {name[:_MOST_SHOWN]!r}."
            yield Problem("train.stop_signals", f"{what}{did_you_mean(name, STOP_SIGNALS)}")


# -- files -----------------------------------------------------------------------------------------


def _shown(path: str) -> str:
    """A path in a message, which must stay readable whatever was given as one."""
    text = repr(path)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN // 2]}...{text[-_MOST_SHOWN // 2 :]}"


def _why(error: OSError | ValueError) -> str:
    """What the system says, without the path, which it would repeat."""
    return str(getattr(error, "strerror", None) or error)


def corpus_files(path: str) -> Iterator[Path]:
    """The files that make up a corpus, in name order: the one rule for what is read, used by the loader too.

    Hidden files and folders are left out. For the standard library only `.py` files count, without its test suites and
    what is installed on top of it, because not every Python ships the former and the latter is not standard.
    """
    if path == "":
        yield from _walk(
            Path(sysconfig.get_path("stdlib")), suffix=".py", skip=("site-packages", "dist-packages", "test", "tests")
        )
    elif os.path.isdir(path):
        yield from _walk(Path(path), suffix="", skip=())
    else:
        yield Path(path)


def _walk(root: Path, *, suffix: str, skip: tuple[str, ...]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and file.is_file():  # not a pipe, nor a dangling link
                yield file


def split_point(num_bytes: int, val_fraction: float) -> int:
    """Where training text ends and validation text begins."""
    return num_bytes - int(num_bytes * val_fraction)


def _data_problems(config: TrainConfig) -> Iterator[Problem]:
    data = config.data
    if not 0 < data.val_fraction < 1:
        yield Problem("data.val_fraction", f"expected a number between 0 and 1, got {data.val_fraction!r}.")
        return
    shown = _shown(data.path) if data.path else "the standard library"
    needed = config.model.seq_len + 1
    try:
        if data.path and not os.path.exists(data.path):
            yield Problem("data.path", f"{shown} does not exist. Leave it empty to train on Python's standard library.")
            return
        if data.path and not os.path.isdir(data.path) and not os.path.isfile(data.path):
            yield Problem("data.path", f"{shown} is neither a file nor a folder.")
            return
        num_bytes = 0
        for file in corpus_files(data.path):
            if not os.access(file, os.R_OK):
                yield Problem("data.path", f"{_shown(str(file))} cannot be read: permission denied.")
                return
            num_bytes += file.stat().st_size
            if _is_long_enough(num_bytes, data.val_fraction, needed):
                return  # a huge folder need not be walked to its end
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        yield Problem("data.path", f"{shown} cannot be read: {_why(error)}.")
        return
    yield Problem(
        "data.path",
        f"{shown} has {num_bytes} bytes: with val_fraction={data.val_fraction} both parts must hold at least "
        f"seq_len + 1 = {needed}. Use more text or a shorter model.seq_len.",
    )


def _is_long_enough(num_bytes: int, val_fraction: float, needed: int) -> bool:
    train_bytes = split_point(num_bytes, val_fraction)
    return min(train_bytes, num_bytes - train_bytes) >= needed


def _rules_file_problems(path: str) -> Iterator[Problem]:
    """Whether there is a file to read; what is in it is for `routing.files` to judge."""
    if path == "":
        return
    try:
        if not os.path.exists(path):
            yield Problem(
                "routing.rules_file", f"{_shown(path)} does not exist. Leave it empty to route by the defaults."
            )
        elif not os.path.isfile(path):
            yield Problem("routing.rules_file", f"{_shown(path)} is not a file: expected TOML with [[rule]] tables.")
        elif not os.access(path, os.R_OK):
            yield Problem("routing.rules_file", f"{_shown(path)} cannot be read: permission denied.")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        yield Problem("routing.rules_file", f"{_shown(path)} cannot be read: {_why(error)}.")


def _out_dir_problems(out_dir: str) -> Iterator[Problem]:
    problem = _name_problem(out_dir, "a folder for metrics and reports")
    if problem is not None:
        yield Problem("train.out_dir", problem)
        return
    try:
        nearest = Path(out_dir).absolute()
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        if not nearest.is_dir():
            yield Problem("train.out_dir", f"{_shown(str(nearest))} is a file: expected a folder.")
        elif not os.access(nearest, os.W_OK | os.X_OK):
            yield Problem("train.out_dir", f"{_shown(str(nearest))} cannot be written to: permission denied.")
    except OSError as error:  # a name that is too long, say
        yield Problem("train.out_dir", f"{_shown(out_dir)} cannot be a folder: {_why(error)}.")
