"""What overlap hides: step times of a GPT on 4 ranks with a slow network between them, and a timeline of it.

    python benchmarks/overlap.py                               # writes benchmarks/results/overlap.json
    python benchmarks/overlap.py --timeline DIR                # writes a Chrome trace per rank to DIR, and
    python benchmarks/overlap.py --timeline DIR --device cuda  # benchmarks/results/overlap_timeline.json from them

Gloo ranks, one core's worth of threads each, train the trainer's GPT. Between them is a real network, shaped between
network namespaces, where that is possible (it takes root), else a delayed transport; the JSON says which. All arms of a layout
live in the same processes, run the same steps on the same batches in turn, and must end with the same bits. A time is
that of whole steps in steady state: from the end of one `optimizer.step()` to the end of another some steps later, so that
gathers that run on under the next forward are in it.

Shares: how much of what the gathers take alone, on the same link with nobody computing, is gone from the step; for the
exchange, how much of what the same step waits for it when every all-to-all is waited for at once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))  # ranks are spawned from this file

from benchmarks.link import Delays, LinkError, Namespaces, nowhere, run_ranks

RESULTS = Path(__file__).parent / "results"
LAYOUTS = ("flat", "padded", "compact")


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is trained, how, and how often it is measured."""

    width: int = 128
    layers: int = 6
    heads: int = 4
    seq_len: int = 128
    batch: int = 2
    bucket_mib: float = 0.75
    cohorts: int = 4
    """A model this small would be one cohort; a large one has many."""
    mbit: float = 300.0
    repeats: int = 5
    steps: int = 2
    """Timed steps of an arm in one repetition; there is one more before them."""
    dtype: str = "float32"


QUICK = Size(layers=3, repeats=1, steps=1, cohorts=2)
ON_GPU = Size(width=1024, layers=6, heads=16, seq_len=1024, batch=64, bucket_mib=40.0, dtype="bfloat16")

SYNC, REDUCE, GATHER, BOTH = "nothing", "reductions", "gathers", "both"
WAITED = "both, exchange waited for"
ARMS: dict[str, dict[str, Any]] = {
    SYNC: {"overlap_grad_reduce": False, "overlap_param_gather": False},
    REDUCE: {"overlap_grad_reduce": True, "overlap_param_gather": False},
    GATHER: {"overlap_grad_reduce": False, "overlap_param_gather": True},
    BOTH: {"overlap_grad_reduce": True, "overlap_param_gather": True},
    WAITED: {"overlap_grad_reduce": True, "overlap_param_gather": True},
}


# -- one rank --------------------------------------------------------------------------------------------


@contextmanager
def exchange_waited_for(spent_s: list[float]) -> Iterator[None]:
    """The same all-to-alls in the same order, but each is waited for where it is launched; what that takes is added up."""
    from layerwise.comm.collectives import Communicator
    from layerwise.comm.handles import Handle

    original = Communicator.all_to_all

    def at_once(self: Any, op: Any, *args: Any) -> Handle:
        began_s = time.perf_counter()
        handle = original(self, op, *args)
        if op.phase not in ("exchange", "return"):
            return handle
        result = handle.wait()
        spent_s.append(time.perf_counter() - began_s)
        return Handle(handle.label, result)

    Communicator.all_to_all = at_once
    try:
        yield
    finally:
        Communicator.all_to_all = original


class Arm:
    """One way to overlap: a model and its optimizer, and how many steps it has taken."""

    def __init__(self, rank: int, world: int, size: Size, device: Any, layout: str, options: Mapping[str, Any]) -> None:
        import torch

        import layerwise
        from layerwise.config.resolve import resolve_model
        from layerwise.config.schema import ModelConfig
        from layerwise.engine import engine
        from layerwise.layout.options import Options
        from layerwise.layout.plan import Plan, make_plan
        from layerwise.routing.spec import ParamTable
        from layerwise.train.model import build_gpt

        config = ModelConfig(
            d_model=size.width, n_layers=size.layers, n_heads=size.heads, n_kv_heads=size.heads, seq_len=size.seq_len
        )
        module = build_gpt(resolve_model(config), seed=1, device=device, dtype=getattr(torch, size.dtype))
        matrices = sum(param.numel() for fqn, param in module.named_parameters() if ".mlp." in fqn or ".attn." in fqn)
        cohort_numel = matrices // (size.cohorts * world) + 1

        def planned(table: ParamTable, asked: Options, **more: Any) -> Plan:
            return make_plan(table, replace(asked, cohort_numel=cohort_numel), **more)

        with mock.patch.object(engine, "make_plan", planned):  # users cannot ask for the size of cohorts
            self.model = layerwise.DataParallel(module, layout=layout, bucket_mib=size.bucket_mib, **options)
        self.optimizer = layerwise.Optimizer(
            self.model, matrix=layerwise.Muon(lr=5e-3, weight_decay=0.1), other=layerwise.AdamW(lr=3e-3)
        )
        self._size, self._rank, self._device = size, rank, device
        self.taken = 0
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []

    def step(self) -> None:
        import torch

        from layerwise.comm.scopes import scope
        from layerwise.train.model import next_byte_loss

        shape = (self._size.batch, self._size.seq_len + 1)
        generator = torch.Generator().manual_seed(1000 * self.taken + self._rank)
        text = torch.randint(0, 256, shape, generator=generator).to(self._device)
        began_s = time.perf_counter()
        with scope("forward"):
            loss = next_byte_loss(self.model(text[:, :-1]), text[:, 1:]).mean()
        middle_s = time.perf_counter()
        with scope("backward"):
            loss.backward()
        self.forward_s.append(middle_s - began_s)
        self.backward_s.append(time.perf_counter() - middle_s)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1

    def gather_alone(self) -> float:
        """Seconds that all gathers take with nobody computing: the weights are gathered once more, as they are."""
        import torch.distributed as dist

        engine = self.model.engine
        dist.barrier()
        began_s = time.perf_counter()
        engine.publisher.begin()
        engine.publisher.ensure_all()
        return time.perf_counter() - began_s


class Sample(NamedTuple):
    """One arm in one repetition, on one rank."""

    seconds: float
    others: float
    """Share of the machine that processes other than the ranks took meanwhile; the same on every rank."""


def busy_s() -> float:
    """Seconds of all cores that processes have had so far, or that a hypervisor took. Interrupts are not in it: the
    network of the ranks is their work."""
    user, nice, system, _, _, _, _, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def timed(arm: Arm, rank: int, steps: int) -> Sample:
    """Seconds per step, in steady state."""
    import torch
    import torch.distributed as dist

    arm.model.ensure()
    dist.barrier()
    arm.step()
    began_s, mine_s, all_s = time.perf_counter(), time.process_time(), busy_s()
    for _ in range(steps):
        arm.step()
    seconds = time.perf_counter() - began_s
    shared = torch.tensor([mine_s - time.process_time(), busy_s() - all_s if rank == 0 else 0.0], dtype=torch.float64)
    dist.all_reduce(shared)
    return Sample(seconds / steps, max(0.0, float(shared.sum())) / seconds / (os.cpu_count() or 1))


def measure_layout(rank: int, world: int, size: Size, layout: str) -> dict[str, Any]:
    """All arms of a layout, in turn."""
    import torch

    from layerwise.layout.schedule import publish_op

    chosen = {name: options for name, options in ARMS.items() if name != WAITED or layout == "flat"}
    arms = {name: Arm(rank, world, size, torch.device("cpu"), layout, options) for name, options in chosen.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    alone_s: list[float] = []
    waited_s: list[float] = []
    for arm in arms.values():  # the first steps are for learning the orders and for caches
        for _ in range(3):
            arm.step()
        arm.forward_s.clear()
        arm.backward_s.clear()
    for _ in range(size.repeats):
        for name, arm in arms.items():
            spent: list[float] = []
            with exchange_waited_for(spent) if name == WAITED else nullcontext():
                samples[name].append(timed(arm, rank, size.steps))
            if spent:
                waited_s.append(sum(spent) / (size.steps + 1))
        alone_s.append(arms[SYNC].gather_alone())
    for arm in arms.values():
        arm.model.ensure()
    model = arms[SYNC].model
    ops = [publish_op(bucket, model.plan.buffers[bucket.buffer].key.dtype) for bucket in model.plan.buckets]
    return {
        "samples": samples,
        "gather_alone_s": alone_s,
        "exchange_waited_s": waited_s,
        "forward_s": arms[SYNC].forward_s,
        "backward_s": arms[SYNC].backward_s,
        "equal": {name: same_bits(arms[SYNC], arm) for name, arm in arms.items()},
        "gather_nbytes": sum(op.nbytes(rank) for op in ops if op is not None),
        "buckets": len(model.plan.buckets),
        "cohorts": [work.num_cohorts for work in model.plan.works],
        "params": sum(param.numel() for param in model.module.parameters()),
    }


def same_bits(one: Arm, other: Arm) -> bool:
    """Whether two arms have the same weights and the same optimizer state."""
    import torch

    def tensors(arm: Arm) -> list[Any]:
        state = [tensor for states in arm.optimizer.state.values() for tensor in states.values()]
        return [*(param.detach() for param in arm.model.module.parameters()), *state]

    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def measure(rank: int, world: int, size: Size) -> dict[str, Any]:
    found = {}
    for layout in LAYOUTS:
        began_s = time.perf_counter()
        found[layout] = measure_layout(rank, world, size, layout)
        if rank == 0:
            print(f"{layout}: {time.perf_counter() - began_s:.0f} s", flush=True)
    return found


# -- from seconds to shares ------------------------------------------------------------------------------


def summary(layout: str, by_rank: Sequence[Mapping[str, Any]], mbit: float) -> dict[str, Any]:
    """One layout's medians, ratios and shares. A repetition's time is that of its slowest rank."""

    def slowest(samples: Sequence[Sequence[float]]) -> list[float]:
        return [1000 * max(of_ranks) for of_ranks in zip(*samples, strict=True)]

    samples = by_rank[0]["samples"]
    step_ms = {
        name: slowest([[sample.seconds for sample in found["samples"][name]] for found in by_rank]) for name in samples
    }
    median = {name: statistics.median(times) for name, times in step_ms.items()}
    alone_ms = min(
        slowest([found["gather_alone_s"] for found in by_rank])
    )  # what the link can do, not what came between

    def share(before: str, after: str, of_ms: float) -> dict[str, float]:
        """What one arm saves over another, as a part of something, by the repetitions: each runs both within seconds."""
        saved = [(one - other) / of_ms for one, other in zip(step_ms[before], step_ms[after], strict=True)]
        quarters = statistics.quantiles(saved, n=4, method="inclusive") if len(saved) > 1 else saved * 3
        return dict(zip(("low", "median", "high"), (round(share, 3) for share in quarters), strict=True))

    arms = [
        {
            "overlapped": name,
            "ms": round(median[name], 1),
            "samples_ms": [round(time_ms, 1) for time_ms in times],
            "over_nothing": round(median[name] / median[SYNC], 3),
            "taken_by_others": round(statistics.median(sample.others for sample in samples[name]), 3),
        }
        for name, times in step_ms.items()
    ]
    report = {
        "layout": layout,
        "buckets": by_rank[0]["buckets"],
        "cohorts": by_rank[0]["cohorts"],
        "arms": arms,
        "same_bits": all(all(found["equal"].values()) for found in by_rank),
        "forward_ms": round(1000 * statistics.median(by_rank[0]["forward_s"]), 1),
        "backward_ms": round(1000 * statistics.median(by_rank[0]["backward_s"]), 1),
        "gathers_alone_ms": round(alone_ms, 1),
        "gathers_by_bytes_ms": round(max(found["gather_nbytes"] for found in by_rank) * 8 / mbit / 1000, 1),
        "gathers_hidden": share(SYNC, GATHER, alone_ms),
        "gathers_hidden_beside_reductions": share(REDUCE, BOTH, alone_ms),
    }
    if WAITED in median:
        exchange_ms = statistics.median(slowest([found["exchange_waited_s"] for found in by_rank]))
        report["exchange_waited_ms"] = round(exchange_ms, 1)
        report["exchange_hidden"] = share(WAITED, BOTH, exchange_ms)
    return report


# -- what a timeline says --------------------------------------------------------------------------------

Stretch = tuple[float, float]
Event = dict[str, Any]


def joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same time, in order and without overlaps."""
    found: list[Stretch] = []
    for start, stop in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def common_us(one: Sequence[Stretch], other: Sequence[Stretch]) -> float:
    return sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in one for begin, end in other)


def stretch(event: Event) -> Stretch:
    return event["ts"], event["ts"] + event["dur"]


def scopes(events: Sequence[Event], name: str) -> list[Event]:
    return [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(name)]


def work_of(events: Sequence[Event], name: str) -> list[Stretch]:
    """When the work of all scopes whose name starts like this runs: the kernels that they launched, or without a device their
    operators. What they wait is not in it."""
    ranges = [(*stretch(event), event["tid"]) for event in scopes(events, name)]

    spans = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in spans if event.get("cat") == "kernel"]

    def is_inside(event: Event) -> bool:
        # On a device backward is launched by a thread of autograd's own.
        return any(
            start <= event["ts"] < stop and (kernels or event["tid"] == thread) for start, stop, thread in ranges
        )

    if not kernels:
        return joined(stretch(event) for event in spans if event.get("cat") == "cpu_op" and is_inside(event))
    launched = {
        event["args"]["correlation"]
        for event in spans
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
        and is_inside(event)
    }
    return joined(stretch(event) for event in kernels if event["args"].get("correlation") in launched)


def under(events: Sequence[Event], phases: Sequence[str], name: str, before_us: float) -> dict[str, float]:
    """How long collectives of these phases were under way, how much of that time the work of a scope ran, and how much of
    that work it was."""
    flights = joined(
        stretch(event)
        for event in events
        if event.get("cat") == "in_flight" and event["args"]["phase"] in phases and event["ts"] < before_us
    )
    work = work_of(events, name)
    total, shared = sum(stop - start for start, stop in flights), common_us(flights, work)
    busy = sum(stop - start for start, stop in work)
    return {
        "in_flight_ms": round(total / 1000, 2),
        "under_work_ms": round(shared / 1000, 2),
        "share": round(shared / total, 3) if total else 0.0,
        "work_ms": round(busy / 1000, 2),
        "share_of_work": round(shared / busy, 3) if busy else 0.0,
    }


def read_timeline(timeline: Mapping[str, Any]) -> dict[str, Any]:
    """Gathers under forward, and the exchange under Newton-Schulz, on one rank."""
    events: Sequence[Event] = timeline["traceEvents"]
    # The gathers of the last step are cut off by the end of the recording.
    last_forward_us = max(event["ts"] for event in scopes(events, "layerwise::forward"))
    return {
        "gathers_under_forward": under(events, ("publish",), "layerwise::forward", last_forward_us),
        "exchange_under_newton_schulz": under(events, ("exchange", "return"), "layerwise::orthogonalise", float("inf")),
        "reductions_under_backward": under(events, ("reduce",), "layerwise::backward", float("inf")),
    }


def record_timeline(rank: int, world: int, size: Size, device_name: str, folder: str) -> dict[str, Any]:
    """A few steps, then two of them on record."""
    import torch

    from layerwise.train.trace import path_of, recorded

    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    arm = Arm(rank, world, size, device, "flat", ARMS[BOTH])
    for _ in range(4):
        arm.step()
    path = Path(folder, "overlap.json")
    torch.distributed.barrier()
    with recorded(path, rank, device):
        arm.step()
        arm.step()
    arm.model.ensure()
    found = read_timeline(json.loads(path_of(path, rank).read_text()))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {"rank": rank, "device": name, "torch": str(torch.__version__), **found}


# -- the command -----------------------------------------------------------------------------------------


def host() -> dict[str, Any]:
    import torch

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def network_for(link: str, world: int, mbit: float) -> tuple[Namespaces | Delays, str]:
    """The network that was asked for, and why it is not a real one."""
    if link == "delays":
        return Delays(world, mbit), "asked for"
    try:
        with Namespaces(world, mbit) as network:
            return network, ""
    except LinkError as error:
        if link == "namespaces":
            raise
        return Delays(world, mbit), str(error)


def compare(size: Size, world: int, link: str, out: Path) -> int:
    network, reason = network_for(link, world, size.mbit)
    with network:
        results = run_ranks(world, network.joiner(), measure, size)
    rows = [summary(layout, [found[layout] for found in results], size.mbit) for layout in LAYOUTS]
    report = {
        "what": "medians of whole steps on the slowest rank, arms in turn. taken_by_others: share of the machine that other processes had meanwhile, waits of the ranks included. shares are medians and quartiles over repetitions. gathers_hidden: (step with nothing overlapped - step with "
        "gathers overlapped) / gathers_alone; beside reductions: the same between reductions and both. gathers_alone: all gathers of a step "
        "with no rank computing, the fastest time. exchange_hidden: (step with every all-to-all waited for - step with both) / what that step waits "
        "for them. gloo's reduce-scatter is an all-reduce: reductions take twice what their bytes say.",
        "command": "python benchmarks/overlap.py",
        "host": host(),
        "link": {"kind": network.kind, "mbit_per_s": size.mbit, "why_not_namespaces": reason},
        "world": world,
        "size": asdict(size),
        "params": results[0]["flat"]["params"],
        "rows": rows,
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row, indent=1))
    print(f"wrote {out}")
    return 0 if all(row["same_bits"] for row in rows) else 1


def timeline(size: Size, world: int, device: str, link: str, folder: Path, out: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    if device == "cuda":  # what gloo does for tensors on a device is slow enough
        where = "loopback; all ranks share one device"
        ranks = run_ranks(world, nowhere, record_timeline, size, device, str(folder))
    else:
        network, _ = network_for(link, world, size.mbit)
        where = network.kind
        with network:
            ranks = run_ranks(world, network.joiner(), record_timeline, size, device, str(folder))
    report = {
        "what": "two steps of every rank on record, layout flat, all overlap on. in_flight: time in which at least one collective was under "
        "way, from launch to arrival; under_work: the part of it in which kernels of the scope ran on this rank (operators, without a device)",
        "command": f"python benchmarks/overlap.py --timeline DIR --device {device}",
        "host": host(),
        "link": where,
        "world": world,
        "size": asdict(size),
        "ranks": ranks,
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    print(f"wrote {out} and traces in {folder}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and few repetitions, to see that it runs")
    parser.add_argument("--timeline", type=Path, metavar="DIR", help="record a timeline instead, into this folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for --timeline")
    parser.add_argument("--link", choices=("auto", "namespaces", "delays"), default="auto")
    parser.add_argument("--world", type=int, help="ranks; 4, or 2 for a timeline")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    for name in ("mbit", "width", "layers", "heads", "seq-len", "batch", "bucket-mib", "cohorts", "repeats", "steps"):
        kind = float if name in ("mbit", "bucket-mib") else int
        parser.add_argument(f"--{name}", type=kind)
    given = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler tells when it starts and stops
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that namespaces and ranks are cleared away
    base = QUICK if given.quick else ON_GPU if given.device == "cuda" else Size()
    changed = {name: getattr(given, name, None) for name in asdict(base)}
    size = replace(base, **{name: value for name, value in changed.items() if value is not None})
    if given.timeline is not None:
        out = given.out or RESULTS / "overlap_timeline.json"
        return timeline(size, given.world or 2, given.device, given.link, given.timeline, out)
    return compare(size, given.world or 4, given.link, given.out or RESULTS / "overlap.json")


if __name__ == "__main__":
    sys.exit(main())
