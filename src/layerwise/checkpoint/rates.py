"""Where schedules were. A schedule's place is state, its base rate an option: rates that a scheduler (or the user) has changed
are taken over. Param groups go by their params, since what they are called depends on the order of rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from layerwise.checkpoint.contents import Contents
from layerwise.checkpoint.fitting import Names
from layerwise.checkpoint.plain import number, to_plain
from layerwise.errors import listed, warn
from layerwise.optim.optimizer import Optimizer

_GIVEN = "given_lr"
"""The lr that a group began with."""
_INITIAL = "initial_lr"
"""The base rate of torch's schedulers, which is there where one is at work."""
_BASES, _LAST = "base_lrs", "_last_lr"
"""What a scheduler has of its optimizer's groups."""


def options_of(contents: Contents) -> dict[str, Any]:
    """The options of every param group that this rank has, and its params. Pipeline stages may have different groups under
    one name."""
    optimizer, found = contents.optimizer, dict[str, Any]()
    for group in [] if optimizer is None else optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in ("fqns", "param_names")}
        options["params"] = [contents.name_of(fqn) for fqn in group["fqns"]]
        options[_GIVEN] = contents.given_rates[group["name"]]
        found[f"{contents.groups.stage} {group['name']}"] = to_plain(options, "param_groups", {})
    return found


def rates_of(contents: Contents, saved: Sequence[Mapping[str, Any]], names: Names) -> dict[str, float]:
    """The rate that every param group goes on with, by its name; those that nothing is known of are left out."""
    groups = [] if contents.optimizer is None else contents.optimizer.param_groups
    group_of, found = {name: group for group in saved for name in group["params"]}, dict[str, float]()
    for group in groups:
        theirs = (group_of.get(names.theirs(contents.name_of(fqn))) for fqn in group["fqns"])
        base = group.get(_INITIAL, contents.given_rates[group["name"]])
        rates = {_rate(one, base, _INITIAL in group) for one in theirs if one is not None} - {None}
        if len(rates) > 1:
            warn(
                f"param group {group['name']!r} has params that were at different places of their schedules when they were saved: it "
                f"begins with lr={group['lr']:g}."
            )
        elif rates:
            found[group["name"]] = number(rates.pop())
    stopped = [group["name"] for group in groups if _stands_still(group, found)]
    if stopped:
        warn(
            f"param groups {listed(stopped)} go on with lr=0, which the run that was saved had come to "
            "without a scheduler of torch: nothing of them is trained until somebody sets group['lr'].",
            aloud=contents.groups.rank == 0,
        )
    return found


def _rate(saved: Mapping[str, Any], base: float, has_schedule: bool) -> float | None:
    """What a saved rate is for a base rate, in proportion where that is another now. With a scheduler on one side alone there is
    nothing to go on."""
    if (_INITIAL in saved) != has_schedule:
        return None
    rate, before = number(saved["lr"]), number(saved.get(_INITIAL, saved[_GIVEN]))
    if before == base:
        return rate
    return rate * base / before if before else None


def _stands_still(group: Mapping[str, Any], rates: Mapping[str, float]) -> bool:
    return _INITIAL not in group and rates.get(group["name"]) == 0 and float(group["lr"]) != 0


def take_place(taker: Any, state: object, optimizer: Optimizer | None) -> None:
    """Have an object go on from its state. Of a scheduler of the optimizer that is the place that it had reached: its base rates are
    those that it was built with, and the rates that it says were set last those of the optimizer."""
    schedulers = list(_schedulers_in(taker)) if _steers(taker, optimizer) else []
    before = [getattr(scheduler, _BASES, None) for scheduler in schedulers]
    taker.load_state_dict(state)
    for scheduler, bases in zip(schedulers, before, strict=True):
        if bases is not None:
            setattr(scheduler, _BASES, bases)
    if schedulers and hasattr(taker, _LAST):
        setattr(taker, _LAST, [group["lr"] for group in taker.optimizer.param_groups])


def _steers(value: object, optimizer: Optimizer | None) -> bool:
    """Whether something is a scheduler of torch's for an optimizer, or for what a framework has put around that."""
    steered = getattr(value, "optimizer", None)
    own = isinstance(value, LRScheduler) and optimizer is not None
    return own and (steered is optimizer or getattr(steered, "optimizer", None) is optimizer)


def _schedulers_in(value: object) -> Iterator[LRScheduler]:
    """A scheduler, and those that it is made of."""
    if isinstance(value, LRScheduler):
        yield value
        for one in getattr(value, "_schedulers", ()):
            yield from _schedulers_in(one)
