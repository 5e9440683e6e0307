"""Gate for speed: measures two source trees of layerwise in turn on one GPU, and fails if the new tree is more than 3 % slower in any arm.

    make bench-check OLD=<folder or git revision> [NEW=<folder or git revision>] [ARGS="--rounds 40"]
    python benchmarks/bench_check.py --old v0.1.0 --new . --json report.json
    python benchmarks/bench_check.py --old . --self     # the control: a tree beside itself must pass

Each tree has one worker process, which builds every arm once. In each round each arm is measured in both workers, old then new in one round and new then old in
the next, so that a clock that drifts slows both. One worker waits while the other measures. An arm's ratio is the median over rounds of new / old. Workers use
the public names of layerwise and few arguments, so that trees of different age run the same arms. Exit codes: 0 passed, 1 slower, 2 not measured.

Without CUDA a small CPU profile runs, which is no gate for GPU figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LR = 1e-3
HOST = ", host"
"""Suffix of rows with the time until step() returns; the other rows last until the GPU is idle."""
CONSTRUCTION = "construction, plain module"
"""Reported and not gated: Python planning, once per training."""
SLOWER, NOT_MEASURED = 1, 2


class CheckError(Exception):
    """Reason why a tree cannot be measured."""


@dataclass(frozen=True)
class Profile:
    """Sizes of the arms, unmeasured steps after construction, and steps in one round, of which the first does not count."""

    device: str
    width: int
    layers: int
    warm_up: int
    steps: int


PROFILES = {"cuda": Profile("cuda", 1024, 24, 8, 6), "cpu": Profile("cpu", 32, 2, 1, 2)}


@dataclass(frozen=True)
class Tree:
    """A folder with `src/layerwise`, the words that the user gave for it, and its commit as far as git knows one."""

    given: str
    folder: Path
    commit: str


@dataclass(frozen=True)
class Arm:
    """One measured call, and the unmeasured work before each call, such as new gradients."""

    prepare: Callable[[], object]
    call: Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Times of one arm in both trees; `iqr` is the interquartile range of the ratios of single rounds."""

    old_ms: float
    new_ms: float
    ratio: float
    iqr: float
    gated: bool
    slower: bool
    old_rounds_ms: list[float]
    new_rounds_ms: list[float]


# --- trees


def git(folder: Path, *words: str) -> str | None:
    """Output of a git command in a folder; None where git is missing or refuses."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit_of(folder: Path) -> str:
    top = git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != folder.resolve():
        return "no commit known"
    changes = " with changes" if git(folder, "status", "--porcelain", "--", "src") else ""
    return f"{git(folder, 'rev-parse', '--short=12', 'HEAD')}{changes}"


def resolve(given: str, scratch: Path) -> Tree:
    """The tree that a folder or a git revision of this repository names. A folder wins over a revision of the same name and is used in place; a revision is
    exported into `scratch`."""
    folder = Path(given).expanduser()
    if given and folder.is_dir():
        if not (folder / "src" / "layerwise" / "__init__.py").is_file():
            raise CheckError(f"the folder {given!r} has no src/layerwise: give the root of a source tree of layerwise.")
        return Tree(given, folder.resolve(), commit_of(folder))
    commit = git(ROOT, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{given}^{{commit}}")
    if commit is None:
        raise CheckError(f"{given!r} is neither a folder nor a git revision of {ROOT}.")
    exported, archive = scratch / commit, scratch / f"{commit}.tar"
    if not exported.exists():
        if git(ROOT, "archive", "--format=tar", f"--output={archive}", commit, "src/layerwise") is None:
            raise CheckError(f"the git revision {given!r} ({commit[:12]}) has no src/layerwise.")
        with tarfile.open(archive) as files:
            files.extractall(exported, filter="data")
    return Tree(given, exported, commit[:12])


# --- the worker: one process per tree


def arms_of(profile: Profile) -> Iterator[tuple[str, Arm]]:
    """Every arm by name, built when the iterator reaches it. Params are fp32 as in optimizer_step.py, and bf16 with fp32 masters under DataParallel."""
    import torch
    from torch import Tensor, nn
    from torch import distributed as dist

    import layerwise

    device, width = torch.device(profile.device), profile.width

    class Model(nn.Module):
        """Linear weights, and RMSNorms where asked for. Forward multiplies each param by a given tensor, which is then its gradient."""

        def __init__(self, shapes: list[tuple[int, int]], norms: int, dtype: torch.dtype) -> None:
            super().__init__()
            options: dict[str, Any] = {"device": device, "dtype": dtype}
            self.linears = nn.ModuleList(nn.Linear(cols, rows, bias=False, **options) for rows, cols in shapes)
            self.norms = nn.ModuleList(nn.RMSNorm(width, **options) for _ in range(norms))

        def forward(self, grads: list[Tensor]) -> Tensor:
            products = [(param * grad).sum().float() for param, grad in zip(self.parameters(), grads, strict=True)]
            return torch.stack(products).sum()

    def gpt(dtype: torch.dtype = torch.float32) -> Model:
        """Matrices of qkv (as one), output and both MLP layers, as in optimizer_step.py, and the vectors of two norms per layer."""
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        return Model(shapes * profile.layers, 2 * profile.layers, dtype)

    def muon(model: nn.Module, clip: float | None = None) -> layerwise.Optimizer:
        return layerwise.Optimizer(
            model, matrix=layerwise.Muon(lr=LR), other=layerwise.AdamW(lr=LR), clip_grad_norm=clip
        )

    def plain(model: Model, optimizer: layerwise.Optimizer) -> Arm:
        def prepare() -> None:
            for param in model.parameters():
                param.grad = torch.randn_like(param)

        return Arm(prepare, optimizer.step)

    model = gpt()
    yield "Muon, plain module", plain(model, muon(model))
    model = gpt()
    adamw = layerwise.Optimizer(model, matrix=layerwise.AdamW(lr=LR), other=layerwise.AdamW(lr=LR))
    yield "AdamW, plain module", plain(model, adamw)
    # Newton-Schulz has no public function. On a GPU it is most of a step of these matrices.
    for rows, cols in ((width, width), (width, 4 * width)):
        model = Model([(rows, cols)] * profile.layers, 0, torch.float32)
        yield f"Newton-Schulz, step of {profile.layers} x {rows} x {cols}", plain(model, muon(model))

    fresh: dict[str, Any] = {}

    def new_module() -> None:
        fresh.clear()
        gc.collect()  # reference cycles would keep the memory of earlier optimizers
        fresh["model"] = gpt()

    def construct() -> None:
        fresh["optimizer"] = muon(fresh["model"])

    yield CONSTRUCTION, Arm(new_module, construct)
    # Last, so that the arms above run in a process without a process group while they warm up.
    backend, store = "nccl" if profile.device == "cuda" else "gloo", dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    wrapped = layerwise.DataParallel(gpt(torch.bfloat16))
    optimizer = muon(wrapped, clip=1.0)
    grads = [torch.randn_like(param) for param in wrapped.parameters()]
    yield "Muon, DataParallel, 1 rank", Arm(lambda: wrapped(grads).backward(), optimizer.step)


def measure(arm: Arm, steps: int, device: str) -> dict[str, float]:
    """Median milliseconds until a call returns, and until the GPU is idle on all streams; CUDA events would miss what a tree moves to another stream.
    The first of several calls does not count: caches hold what the other worker used."""
    import torch

    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(steps):
        arm.prepare()
        wait()
        begin = time.perf_counter()
        arm.call()
        returned = time.perf_counter()
        wait()
        times.append((time.perf_counter() - begin, returned - begin))
    idle_s, host_s = zip(*(times[1:] or times), strict=True)
    return {"ms": statistics.median(idle_s) * 1e3, "host_ms": statistics.median(host_s) * 1e3}


def work(folder: Path, only_cpu: bool) -> int:
    """Build all arms of a tree, then measure an arm for each line with its name, until stdin ends. Replies are lines of JSON."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the libraries' own prints go to stderr
    import layerwise

    source = Path(layerwise.__file__).resolve()
    if not source.is_relative_to(folder / "src"):
        print(f"bench_check: layerwise was imported from {source}, expected a file of {folder / 'src'}")
        return NOT_MEASURED
    import torch

    torch.manual_seed(0)
    profile = PROFILES["cuda" if torch.cuda.is_available() and not only_cpu else "cpu"]
    if profile.device == "cpu":
        torch.set_num_threads(1)
    arms = {}
    for name, arm in arms_of(profile):
        measure(arm, 1 if name == CONSTRUCTION else profile.warm_up, profile.device)
        arms[name] = arm
    gpu = torch.cuda.get_device_name() if profile.device == "cuda" else None
    ready = {"version": layerwise.__version__, "device": profile.device, "gpu": gpu, "torch": torch.__version__}
    print(json.dumps({**ready, "arms": list(arms)}), file=replies)
    for line in sys.stdin:
        name = line.rstrip("\n")
        times = measure(arms[name], 1 if name == CONSTRUCTION else profile.steps, profile.device)
        print(json.dumps(times), file=replies)
    torch.distributed.destroy_process_group()
    return 0


# --- the parent: turns, ratios, the table


class Worker:
    """A process that measures the arms of one tree, one at a time, when asked."""

    def __init__(self, tree: Tree, only_cpu: bool) -> None:
        path = os.pathsep.join([str(tree.folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        # -P: the folder of this script, with its many names, does not become importable.
        command = [sys.executable, "-P", __file__, "--worker", str(tree.folder), *(["--cpu"] if only_cpu else [])]
        self._tree = tree
        self._process: subprocess.Popen[str] = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def reply(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise self._ended()
        return dict(json.loads(line))

    def measured(self, arm: str) -> dict[str, Any]:
        try:
            print(arm, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self.reply()

    def _ended(self) -> CheckError:
        code = self._process.wait()
        return CheckError(f"the worker of {self._tree.given!r} ended with exit code {code}; its error is above.")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process: a worker that waits for its turn ends with its stdin, and one that was interrupted is killed."""
        try:
            if self._process.stdin:
                self._process.stdin.close()
            self._process.wait(timeout=30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def in_turn(workers: tuple[Worker, Worker], arms: list[str], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of the old and the new tree by row, one pair per round. Even rounds begin with the old tree, odd ones with the new tree."""
    times: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        for arm in arms:
            order = (0, 1) if number % 2 == 0 else (1, 0)
            replies = {which: workers[which].measured(arm) for which in order}
            times.setdefault(arm, []).append((replies[0]["ms"], replies[1]["ms"]))
            times.setdefault(arm + HOST, []).append((replies[0]["host_ms"], replies[1]["host_ms"]))
    return times


def row_of(name: str, pairs: list[tuple[float, float]], limit: float) -> Row:
    old, new = ([round(pair[which], 4) for pair in pairs] for which in (0, 1))
    ratios = [pair[1] / pair[0] for pair in pairs]
    first, _, third = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    ratio, gated = statistics.median(ratios), name != CONSTRUCTION
    slower = gated and ratio > limit
    old_ms, new_ms = (round(statistics.median(times), 4) for times in (old, new))
    return Row(old_ms, new_ms, round(ratio, 4), round(third - first, 4), gated, slower, old, new)


def rows_of(times: dict[str, list[tuple[float, float]]], device: str, limit: float) -> dict[str, Row]:
    """Rows of the table. On a CPU a step has ended when it returns, and the rows of Newton-Schulz and of construction have no host row either."""
    without = ("Newton-Schulz", CONSTRUCTION) if device == "cuda" else ("",)
    shown = [name for name in times if not (name.endswith(HOST) and name.startswith(without))]
    return {name: row_of(name, times[name], limit) for name in shown}


def table(rows: dict[str, Row], limit: float) -> str:
    width = max(map(len, rows))
    lines = [f"{'arm':<{width}}  {'old, ms':>10}  {'new, ms':>10}  {'new/old':>8}  {'IQR':>6}"]
    for name, row in rows.items():
        verdict = "slower" if row.slower else "" if row.gated else "not gated"
        # The error of a median of n ratios is about their interquartile range over the root of n.
        if row.gated and row.iqr / math.sqrt(len(row.old_rounds_ms)) > limit - 1:
            verdict += " (too noisy for this limit: more --rounds, or an idle machine)"
        numbers = f"{row.old_ms:>10.3f}  {row.new_ms:>10.3f}  {row.ratio:>8.3f}  {row.iqr:>6.3f}"
        lines.append(f"{name:<{width}}  {numbers}  {verdict}".rstrip())
    return "\n".join(lines)


def check(given: argparse.Namespace) -> int:
    """Measure both trees, print the table, write the report; the exit code."""
    with tempfile.TemporaryDirectory(prefix="bench_check_") as name:
        scratch = Path(name).resolve()
        old, new = resolve(given.old, scratch), resolve(given.old if given.alone else given.new, scratch)
        with Worker(old, given.cpu) as old_worker, Worker(new, given.cpu) as new_worker:
            infos = old_worker.reply(), new_worker.reply()
            arms, _ = (info.pop("arms") for info in infos)
            for label, tree, info in zip(("old", "new"), (old, new), infos, strict=True):
                print(f"{label}: {tree.given}, version {info['version']}, commit {tree.commit}")
            device = infos[0]["device"]
            if device == "cpu":
                print("CPU profile: tiny sizes on one thread. Its ratios are no gate for GPU figures.")
            print(f"{infos[0]['gpu'] or 'CPU'}, torch {infos[0]['torch']}, {given.rounds} rounds\n", flush=True)
            times = in_turn((old_worker, new_worker), arms, given.rounds)
    rows = rows_of(times, device, given.limit)
    slower = [name for name, row in rows.items() if row.slower]
    result = f"Slower, new/old above {given.limit:g}: {'; '.join(slower)}" if slower else "Passed."
    print(f"{table(rows, given.limit)}\n\n{result}")
    if given.json is not None:
        report = {
            "python": platform.python_version(),
            "rounds": given.rounds,
            "limit": given.limit,
            "passed": not slower,
            "old": {"given": old.given, "commit": old.commit, **infos[0]},
            "new": {"given": new.given, "commit": new.commit, **infos[1]},
            "rows": {name: asdict(row) for name, row in rows.items()},
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return SLOWER if slower else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--old", metavar="TREE", help="folder or git revision to compare with; a folder wins")
    parser.add_argument("--new", metavar="TREE", default=".", help="folder or git revision to check (default: .)")
    parser.add_argument("--self", action="store_true", dest="alone", help="compare OLD with OLD: the control")
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each arm in each tree (default: 20)")
    parser.add_argument("--limit", type=float, default=1.03, help="largest ratio new/old that passes (default: 1.03)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all times, ratios and the result to FILE")
    parser.add_argument("--cpu", action="store_true", help="run the small CPU profile even where there is a GPU")
    given = parser.parse_args(argv)
    if given.worker is not None:
        return work(given.worker, given.cpu)
    if not given.old:
        parser.error("--old is missing: a folder or a git revision to compare with")
    if given.rounds < 1 or given.limit <= 0:
        parser.error("--rounds and --limit must be positive")
    try:
        return check(given)
    except CheckError as error:
        print(f"bench_check: {error}", file=sys.stderr)
        return NOT_MEASURED


if __name__ == "__main__":
    sys.exit(main())
