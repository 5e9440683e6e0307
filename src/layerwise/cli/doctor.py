"""`layerwise doctor`: what is installed, what is not and why, and whether two ranks can train together here."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata

from layerwise._version import __version__
from layerwise.cli.exits import ENVIRONMENT, OK, announce_torch, note

_SELF_TEST_LIMIT_S = 300.0
_SELF_TEST_WORLD = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    status: str
    """`ok`, `missing` (optional) or `FAILED` (needed)."""
    detail: str


def run(*, as_json: bool) -> int:
    """Print the report; the exit code says whether everything that is needed works."""
    findings = collect()
    failed = [finding for finding in findings if finding.status == "FAILED"]
    if as_json:
        rows = [{"what": finding.what, "status": finding.status, "detail": finding.detail} for finding in findings]
        print(json.dumps({"healthy": not failed, "findings": rows}))
    else:
        _print(findings, healthy=not failed)
    return ENVIRONMENT if failed else OK


def collect() -> list[Finding]:
    """Everything worth knowing, needed parts first."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here uses it
    announce_torch()
    findings = [
        Finding("layerwise", "ok", __version__),
        Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _package("torch", needed=True),
        _package("tyro", needed=True),
        _package("rich", needed=True),
        Finding("cpu", "ok", f"{os.cpu_count()} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}"),
    ]
    if findings[2].status == "ok":
        findings += [
            _probe("gloo", _gloo),
            _probe("cuda", _cuda),
            _probe("nccl", _nccl),
            _probe("threads", _threads),
            _probe("products", _products),
        ]
        note(f"running {_SELF_TEST_WORLD} ranks, at most {_SELF_TEST_LIMIT_S:.0f} s ...")
        findings.append(self_test())
    return [*findings, _package("triton", needed=False), _package("transformers", needed=False)]


def _package(name: str, *, needed: bool) -> Finding:
    """A package counts as there when it can be imported; a broken install says why."""
    try:
        import_module(name)
    except Exception as error:  # a broken install can raise anything
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == name
        reason = "not installed" if is_absent else f"cannot be imported: {type(error).__name__}: {error}"
        return Finding(name, "FAILED" if needed else "missing", f"{reason}. Run: pip install {name}")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = "version unknown"
    return Finding(name, "ok", version)


def _probe(what: str, ask: Callable[[], tuple[str, str]]) -> Finding:
    try:
        return Finding(what, *ask())
    except Exception as error:  # drivers fail in many ways, and each is worth reporting
        return Finding(what, "missing", f"{type(error).__name__}: {error}")


def _gloo() -> tuple[str, str]:
    from layerwise.comm import joining

    return ("ok", "part of torch") if "gloo" in joining.backends() else ("FAILED", "this torch was built without gloo")


def _cuda() -> tuple[str, str]:
    import torch

    if torch.version.cuda is None:
        return "missing", "this torch was built for the CPU; training works, on the CPU"
    if not torch.cuda.is_available():
        return "missing", f"torch was built for CUDA {torch.version.cuda}, but finds no GPU or no driver"
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    return "ok", f"{count} x {', '.join(names)}, CUDA {torch.version.cuda}"


def _nccl() -> tuple[str, str]:
    import torch

    from layerwise.comm import joining

    if "nccl" not in joining.backends():
        return "missing", "this torch has no NCCL; ranks on a CPU use gloo"
    version: object = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return "ok", ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _threads() -> tuple[str, str]:
    import torch

    return "ok", f"torch computes on {torch.get_num_threads()}"


def _products() -> tuple[str, str]:
    import torch

    from layerwise.kernels.facts import products_in_words

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    backend, _, reason = products_in_words(device, torch.bfloat16, torch.bfloat16).partition(": ")
    return "ok", f"{backend} in Newton-Schulz: {reason}"


def self_test() -> Finding:
    """Two real ranks on this machine take a few steps; see `selftest`."""
    started_s = time.perf_counter()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [_start_rank(rank, port) for rank in range(_SELF_TEST_WORLD)]
    try:
        outputs = []
        for rank in ranks:
            left_s = max(0.1, started_s + _SELF_TEST_LIMIT_S - time.perf_counter())
            outputs.append(rank.communicate(timeout=left_s)[0])
    except subprocess.TimeoutExpired:
        return Finding("self test", "FAILED", f"{_SELF_TEST_WORLD} ranks did not finish in {_SELF_TEST_LIMIT_S:.0f} s")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        if rank.returncode != 0:
            last = output.strip().splitlines()[-1] if output.strip() else f"exit code {rank.returncode}"
            return Finding("self test", "FAILED", f"rank {number}: {last}")
    took_s = time.perf_counter() - started_s
    return Finding("self test", "ok", f"{_SELF_TEST_WORLD} gloo ranks trained alike, {took_s:.1f} s")


def _start_rank(rank: int, port: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(_SELF_TEST_WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "layerwise.cli.selftest"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _print(findings: list[Finding], *, healthy: bool) -> None:
    from layerwise.cli.console import print_table

    print("Copy this into an issue:\n\n```")
    print_table("", ("part", "status", "detail"), [(item.what, item.status, item.detail) for item in findings])
    print("```")
    print(
        "Everything that is needed works." if healthy else "Something that is needed does not work: see FAILED above."
    )
