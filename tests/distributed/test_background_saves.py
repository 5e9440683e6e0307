"""A checkpoint that is written while training goes on is of the moment that it was asked for, and nobody loses it or its error."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import layerwise
from tests.ranks import raised, run_ranks
from tests.reliability.training import Training, held_up, small


def no_room_on_the_second(rank: int, partial: Path) -> None:
    """Its disk is full."""
    if rank == 1:
        raise OSError(28, "No space left on device")


def trained(rank: int, steps: int, **changes: Any) -> Training:
    torch.manual_seed(7 + rank)
    training = small(**changes)
    for number in range(steps):
        training.step(rank, number)
    return training


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def goes_on_meanwhile(rank: int, world: int, folder: str, layout: str, dtype: torch.dtype) -> list[str]:
    """Save twice, on the spot and in the background, and change everything that may change before the second is written."""
    training, found = trained(rank, 2, layout=layout, dtype=dtype), []
    extra = {"tensor": torch.arange(5.0), "list": [1, 2]}
    layerwise.save(Path(folder, "spot"), training.model, training.optimizer, extra=extra)
    expected, go_on = training.hash(), threading.Event()
    with held_up(lambda *_: go_on.wait()):
        written = layerwise.save(
            Path(folder, "aside"), training.model, training.optimizer, extra=extra, background=True
        )
        found += ["it is done before it was begun"] if written.is_done or written.path.exists() else []
        extra["tensor"].zero_()  # type: ignore[union-attr]
        extra["list"].append(3)  # type: ignore[union-attr]
        torch.rand(3)
        for group in training.optimizer.param_groups:
            group["lr"] *= 2
        for number in (2, 3):
            training.step(rank, number)
        go_on.set()
        found += [] if written.wait() == Path(folder, "aside") else ["it is somewhere else"]
    found += [] if training.hash() != expected else ["nothing has changed meanwhile"]
    if rank == 0:
        spot, aside = files_of(Path(folder, "spot")), files_of(Path(folder, "aside"))
        found += [f"{name} differs" for name in sorted(spot.keys() | aside.keys()) if spot.get(name) != aside.get(name)]
    other = trained(rank, 1, layout=layout, dtype=dtype)
    loaded = layerwise.load(written.path, other.model, other.optimizer)
    found += [] if other.hash() == expected else ["what was loaded is not what was saved"]
    found += [] if loaded.extra["list"] == [1, 2] and loaded.extra["tensor"].tolist() == [0, 1, 2, 3, 4] else ["extra"]
    return found


@pytest.mark.parametrize(
    ("world", "layout", "dtype"),
    [
        pytest.param(1, "flat", torch.bfloat16, id="1 flat bf16"),
        pytest.param(2, "flat", torch.float32, id="2 flat fp32"),
        pytest.param(3, "padded", torch.bfloat16, id="3 padded bf16"),
        pytest.param(2, "compact", torch.bfloat16, id="2 compact bf16", marks=pytest.mark.slow),
        pytest.param(4, "replicated", torch.float32, id="4 replicated fp32", marks=pytest.mark.slow),
    ],
)
def test_what_is_written_is_what_there_was(tmp_path: Path, world: int, layout: str, dtype: torch.dtype) -> None:
    for found in run_ranks(world, goes_on_meanwhile, str(tmp_path), layout, dtype):
        assert found == []


def fails_aside(rank: int, world: int, folder: str) -> list[str]:
    training, found = trained(rank, 1), []
    save = lambda name: layerwise.save(Path(folder, name), training.model, training.optimizer, background=True)  # noqa: E731
    with warnings.catch_warnings(record=True) as heard, held_up(no_room_on_the_second):
        warnings.simplefilter("always")
        written = save("one")
        found += [raised(written.wait), str(written.has_failed), str(Path(folder, "one").exists())]
        said = [str(warning.message) for warning in heard if "in the background failed" in str(warning.message)]
        found += [str(len(said))]
        save("two")
        training.step(rank, 1)
        # Nobody has waited for the second one: the third says what became of it, and is not begun.
        found += [raised(lambda: save("three"))]
    found += [str(save("three").wait().exists())]  # which was told once
    return found


def test_what_goes_wrong_is_warned_of_at_once_and_raised_on_every_rank_where_it_is_waited_for(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(3, fails_aside, str(tmp_path))):
        waited, has_failed, is_there, warned, next_time, at_last = found
        assert "No space left on device" in waited
        assert ("OSError" if rank == 1 else "rank 1 failed where others did not") in waited
        assert (has_failed, is_there, at_last) == ("True", "False", "True")
        assert warned == ("1" if rank == 0 else "0")
        assert "No space left on device" in next_time
    assert not (tmp_path / "two").exists()


def waited_for_by_one(rank: int, world: int, folder: str) -> list[str]:
    """A save fails, and the first rank alone asks for it; then all of them save again, and again."""
    training = trained(rank, 1)
    with held_up(no_room_on_the_second), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = layerwise.save(Path(folder, "one"), training.model, training.optimizer, background=True)
        while not written.is_done:
            time.sleep(0.01)
    save = lambda name: layerwise.save(Path(folder, name), training.model, training.optimizer)  # noqa: E731
    found = [raised(written.wait)] if rank == 0 else []
    return [*found, raised(lambda: save("two")), raised(lambda: save("three"))]


def test_an_error_that_one_rank_was_told_of_is_told_to_all_once_and_no_more(tmp_path: Path) -> None:
    first, second = run_ranks(2, waited_for_by_one, str(tmp_path))
    assert "No space left" in first[0]
    for told, went in (first[1:], second):
        assert "No space left" in told
        assert went == "nothing was raised"


def one_after_another(rank: int, world: int, folder: str) -> list[Any]:
    training = trained(rank, 1)
    checkpoints = layerwise.Checkpoints(folder, keep=2, background=True)
    order: list[str] = []
    with held_up(lambda *_: order.append("write")):
        for step in (1, 2, 2, 3):
            checkpoints.save(training.model, training.optimizer, step=step)
            order.append(f"begun {step}")
            training.step(rank, step)
    other = small()
    loaded = layerwise.Checkpoints(folder).load(other.model, other.optimizer)  # of another run: may not see the last
    assert loaded is not None
    assert loaded.step >= 2
    loaded = checkpoints.load(training.model, training.optimizer)  # waits for it
    assert loaded is not None
    return [loaded.step, checkpoints.steps(), order.count("write"), order.index("begun 1") <= 1, checkpoints.has_failed]


def test_a_second_save_waits_for_the_first_and_loading_for_the_last(tmp_path: Path) -> None:
    for found in run_ranks(2, one_after_another, str(tmp_path)):
        assert found == [4, [2, 3], 3, True, False]  # a step more was taken while the second of step 2 was let be
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002", "step_00000003"]


def loaded_at_once(rank: int, world: int, folder: str) -> list[bool]:
    training = trained(rank, 1)
    expected = training.hash()
    with held_up(lambda *_: time.sleep(0.3)):
        written = layerwise.save(Path(folder, "one"), training.model, training.optimizer, background=True)
        training.step(rank, 1)
        layerwise.load(Path(folder, "one"), training.model, training.optimizer)
    return [written.is_done, training.hash() == expected]


def test_loading_waits_for_what_is_being_written(tmp_path: Path) -> None:
    assert run_ranks(2, loaded_at_once, str(tmp_path)) == [[True, True]] * 2


def only_some(rank: int, world: int, folder: str) -> tuple[str, bool]:
    training = trained(rank, 1)
    save = lambda **way: layerwise.save(Path(folder, "one"), training.model, training.optimizer, **way)  # noqa: E731
    return raised(lambda: save(background=rank == 1)), save(background=True).wait().exists()


def test_ranks_that_are_of_two_minds_are_told_so(tmp_path: Path) -> None:
    for said, is_there in run_ranks(3, only_some, str(tmp_path)):
        assert "ranks 0 and 1 derived different checkpoints: plan, background: False against True" in said
        assert is_there


def taken_back(rank: int, world: int, folder: str) -> bool:
    training = trained(rank, 1)
    release = threading.Event()
    with held_up(lambda *_: release.wait()):
        layerwise.save(Path(folder, "one"), training.model, training.optimizer, background=True)
        threading.Timer(0.3, release.set).start()
        training.model.unwrap()  # type: ignore[operator]  # which leaves all groups
    return Path(folder, "one").exists()


def test_a_model_is_taken_back_when_it_is_written(tmp_path: Path) -> None:
    assert all(run_ranks(2, taken_back, str(tmp_path)))


def half_of_the_ranks(rank: int, world: int, folder: str) -> str:
    """Two models on two ranks each, which save at other times, beside each other."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[rank // 2]
    torch.manual_seed(3)
    model = layerwise.DataParallel(torch.nn.Linear(6, 4), process_group=group)
    rules: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.02), "other": layerwise.AdamW(lr=0.02)}
    optimizer = layerwise.Optimizer(model, **rules)
    for number in range(3 + rank // 2):
        model(torch.ones(2, 6) * (1 + rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        written = layerwise.save(Path(folder, f"{rank // 2} {number}"), model, optimizer, background=True)
    written.wait()
    return written.path.name


def test_ranks_that_are_not_in_it_take_no_part(tmp_path: Path) -> None:
    assert run_ranks(4, half_of_the_ranks, str(tmp_path)) == ["0 2", "0 2", "1 3", "1 3"]
    assert len(list(tmp_path.iterdir())) == 7


SCRIPT = """
import sys, time, torch, torch.distributed as dist, layerwise
from layerwise.checkpoint import saving

def main():
    ranks = layerwise.init()
    model = layerwise.DataParallel(torch.nn.Linear(8, 8))
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    write = saving._write_share
    saving._write_share = lambda *args: (time.sleep(0.5), write(*args))
    layerwise.save(sys.argv[1], model, optimizer, background=True)
    if sys.argv[2] == "destroy":
        dist.destroy_process_group()
    if sys.argv[2] == "raise":
        raise SystemExit(3)

main()
"""


@pytest.mark.parametrize(
    ("way", "code"), [("end", 0), ("destroy", 0), pytest.param("raise", 1, marks=pytest.mark.slow)]
)
def test_a_process_that_ends_has_written_it(tmp_path: Path, way: str, code: int) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command += [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "one"), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    assert (tmp_path / "one" / "manifest.json").exists(), done.stderr[-3000:]
    assert not (tmp_path / "one.partial").exists()
