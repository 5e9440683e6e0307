"""`python -m tests.reliability NAME [--sabotage] [--quick]`: one JSON line; exit 0 if nothing was bad. `all` runs every figure and its control."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
import warnings
from importlib import import_module
from typing import Any

FIGURES = {
    "kill_sweep": "S1: kill -9 at any moment of a save loses no checkpoint and mixes none",
    "resume_bitwise": "S2: a run that was stopped and gone on with is the run that was not, to the bit",
    "reshard_matrix": "S3: what any number of ranks has saved, in any layout, any other loads to the bit",
    "dp_invariance": "S4: the same batch on any number of ranks, in any layout and over any mesh, gives the same bits",
    "oracle_parity": "S5: shapes, worlds and meshes, 0 ulp from the single-process oracle",
    "layout_props": "S6: properties of generated plans, up to 65,536 ranks",
    "comm_contract": "S7: collectives that differ between ranks are stopped before data moves",
    "corrupt": "S11: damaged checkpoints are refused, by the name of a file, and nothing is changed",
    "hostile": "S12: checkpoints that mean harm run nothing, read nothing outside, take little, and are refused",
    "nonfinite": "S13: inf and NaN on one rank skip the step on all, with nothing changed",
    "overlap_fuzz": "S14: gathers under whatever comes next, on late ranks, change no bit of it",
    "misuse": "S15: every wrong use has a typed error that names the object and the remedy",
    "config_fuzz": "S16: every generated config runs or is refused in words",
    "mxfp8_parity": "S18: weights that are kept as codes train to the bits of those of which codes are made at use",
}
QUICK_CASES, FULL_CASES = 300, 2000
"""For figures that ask how many cases to try."""


def measure(name: str, *, quick: bool, sabotage: bool) -> dict[str, Any]:
    """Run one figure; what it found as plain data."""
    figure = import_module(f"tests.reliability.{name}").run
    wanted = inspect.signature(figure).parameters
    arguments = {"quick": quick, "sabotage": sabotage, "n": QUICK_CASES if quick else FULL_CASES}
    begin = time.monotonic()
    found = figure(**{key: value for key, value in arguments.items() if key in wanted})
    fields = found if isinstance(found, dict) else found._asdict()
    return {
        "figure": name,
        "n": fields["n"],
        "bad": fields["bad"],
        "worst": str(fields["worst"])[:400],
        "seconds": round(time.monotonic() - begin, 1),
    }


def run_all(*, quick: bool) -> bool:
    """Every figure, then its control: good when no figure is bad and every control is."""
    good = True
    for name in FIGURES:
        for sabotage in (False, True):
            found = measure(name, quick=quick, sabotage=sabotage)
            print(json.dumps({**found, "sabotage": sabotage}), flush=True)
            good = good and (found["bad"] > 0) == sabotage
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description="The reliability board.")
    parser.add_argument(
        "figure", nargs="?", choices=[*FIGURES, "all"], metavar="NAME", help=f"{', '.join(FIGURES)} or all"
    )
    parser.add_argument("--sabotage", action="store_true", help="run the control, which must exit 1")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--list", action="store_true", help="name the figures and stop")
    options = parser.parse_args()
    if options.list:
        for name, text in FIGURES.items():
            print(f"{name:14} {text}")
        return 0
    if options.figure is None:
        parser.error("name a figure, or 'all'; --list shows them")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if options.figure == "all":
        return 0 if run_all(quick=options.quick) else 1
    found = measure(options.figure, quick=options.quick, sabotage=options.sabotage)
    print(json.dumps(found))
    return 0 if found["bad"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
