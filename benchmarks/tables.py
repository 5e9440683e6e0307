"""Write what README.md and docs/ show of other files: `python benchmarks/tables.py`. A test checks that it is up to date.

Tables come from committed JSON (`<!-- table: NAME -->`), listings from the file they are of (`<!-- file: PATH -->`) and differences from two
files (`<!-- diff: PATH PATH -->`); each ends at `<!-- end -->`.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def convergence(data: dict[str, Any]) -> str:
    rows = [[best["rule"], best["lr"], best["val_bpb"]] for best in data["best"].values()]
    return markdown(["rule for matrices", "best lr", f"bits per byte after {data['steps']} steps"], rows)


def convergence_sweep(data: dict[str, Any]) -> str:
    rows = [[run["rule"], run["lr"], run["val_bpb"]] for run in data["runs"]]
    return markdown(["rule for matrices", "lr", f"bits per byte after {data['steps']} steps"], rows)


def optimizer_step(data: dict[str, Any]) -> str:
    wide = data["rows_at_width_2048"]
    names = "ms", "loop_ms"
    return markdown(
        [f"on {data['host']['gpu']}", "ms", "behind backward, ms", "width 2048, ms", "behind backward, ms"],
        [
            [name, *(row[key] for key in names), *(wide[name][key] if name in wide else "" for key in names)]
            for name, row in data["rows"].items()
        ],
    )


def end_to_end(data: dict[str, Any]) -> str:
    def mean(times: Sequence[float]) -> str:
        return f"{sum(times) / len(times):.1f}"

    found = data["iterations"]
    arms = list(next(iter(found.values()))["ms"])
    first = {name: sum(row["ms"][arms[0]]) for name, row in found.items()}
    losses = {arm: f"{min(by_rate.values()):.3f}" for arm, by_rate in data["val_loss"].items()}
    return markdown(
        [
            f"on {data['host']['gpu']}",
            *(title for name in found for title in (f"{name}, ms", "over the first")),
            "validation loss after 200 steps",
        ],
        [
            [
                arm,
                *(
                    text
                    for name, row in found.items()
                    for text in (mean(row["ms"][arm]), f"{sum(row['ms'][arm]) / first[name]:.3f}")
                ),
                losses.get(arm, ""),
            ]
            for arm in arms
        ],
    )


def newton_schulz(data: dict[str, Any]) -> str:
    return markdown(
        [
            f"matrices on {data['host']['gpu']}",
            "form",
            "ours, ms",
            "best of others, ms",
            "torch's products, ms",
            "floor, ms",
            "over floor",
        ],
        [
            [
                "{} of {} x {}".format(*row["shape"]),
                row["method"],
                f"{row['ours_ms']:.2f}",
                f"{min(row['peers_ms'].values()):.2f}" if row["peers_ms"] else "",
                f"{row['torch_products_ms']:.2f}",
                f"{row['floor_ms']:.2f}",
                f"{row['ours_over_floor']:.2f}",
            ]
            for row in data["rows"]
        ],
    )


def newton_schulz_accuracy(data: dict[str, Any]) -> str:
    return markdown(
        ["relative distance to float64", "shape", "ours", "torch's products", "torch's products, standard form"],
        [
            [
                row["kind"],
                "{} x {}".format(*row["shape"]),
                row["ours"],
                row["torch_products"],
                row["torch_products_standard"],
            ]
            for row in data["accuracy"]
        ],
    )


def checkpoint(data: dict[str, Any]) -> str:
    return markdown(
        [
            "ranks",
            "state, MiB",
            "bandwidth of saving over a raw copy",
            "part of a save that one in the background keeps the caller for",
            "bandwidth of loading from disk over that copy",
            "over a raw read from disk",
            "over that and a gather of weights",
            "of loading from the cache over a raw read from it",
            "bytes on disk over state",
            "extra MiB of saving, of saving in the background, of loading, of a gather alone",
        ],
        [
            [
                row["ranks"],
                row["state_mib"],
                row["save_over_raw"],
                row["begin_over_save"],
                row["load_over_raw"],
                row["load_over_raw_read_from_disk"],
                row["load_over_raw_read_and_gather_from_disk"],
                row["load_over_raw_read"],
                row["disk_over_state"],
                ", ".join(str(row["extra_mib"][name]) for name in ("save", "save_in_background", "load", "gather")),
            ]
            for row in data["rows"]
        ],
    )


def flat(data: dict[str, Any]) -> str:
    models = ("llama3-8b", "llama3-70b", "deepseek-v3", "kimi-k2")
    shown = [
        row
        for row in data["rows"]
        if row["model"] in models and row["world"] in (8, 64, 1024) and row["layout"] == "flat"
    ]
    return markdown(
        ["model", "ranks", "padding", "buckets", "matrices", "imbalance"],
        [
            [
                row["model"],
                row["world"],
                f"{row['waste_percent']:.4f} %",
                row["buckets"],
                row["matrices"],
                f"{row['imbalance']:.2f}",
            ]
            for row in shown
        ],
    )


def gib(nbytes_by_kind: dict[str, int]) -> str:
    return f"{sum(nbytes_by_kind.values()) / 2**30:.1f} GiB"


def layouts(data: dict[str, Any]) -> str:
    models = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "deepseek-v3")
    shown = [row for row in data["rows"] if row["model"] in models and row["world"] in (8, 64, 512)]
    return markdown(
        [
            "model",
            "ranks",
            "layout",
            "padding",
            "buckets",
            "imbalance",
            "exposed",
            "memory per rank",
            "sent per rank and step",
        ],
        [
            [
                row["model"],
                row["world"],
                f"`{row['layout']}`",
                f"{row['waste_percent']:.1f} %",
                row["buckets"],
                f"{row['imbalance']:.2f}",
                f"{row['exposed_percent']:.0f} %",
                gib(row["memory_nbytes"]),
                gib(row["sent_nbytes"]),
            ]
            for row in shown
        ],
    )


def layouts_reference(data: dict[str, Any]) -> str:
    def cell(figures: dict[str, Any]) -> str:
        return f"{figures['waste_percent']:.1f} %, {figures['buckets']}, {figures['megatron_imbalance']:.2f}"

    return markdown(
        ["matrices of", "ranks", "Megatron-LM, measured", "`padded`", "imbalance in FLOPs"],
        [
            [
                row["model"],
                row["world"],
                cell(row["measured"]),
                cell(row["found"]),
                f"{row['found']['imbalance']:.2f}",
            ]
            for row in data["reference"]
        ],
    )


def layouts_padding(data: dict[str, Any]) -> str:
    by_model: dict[str, list[str]] = {}
    for row in data["padding"]:
        by_model.setdefault(row["model"], []).append(
            f"{row['padding_percent']:.1f} % ({row['searched_percent']:.1f} %)"
        )
    return markdown(
        ["model", *(f"{world} ranks" for world in sorted({row["world"] for row in data["padding"]}))],
        [[model, *cells] for model, cells in by_model.items()],
    )


def overlap(data: dict[str, Any]) -> str:
    arms = [arm["overlapped"] for arm in data["rows"][0]["arms"]]

    def cells(row: dict[str, Any]) -> list[str]:
        found = {arm["overlapped"]: arm for arm in row["arms"]}
        return [f"{found[name]['over_nothing']:.2f}" if name in found else "" for name in arms[1:]]

    return markdown(
        ["layout", "nothing overlapped", *arms[1:]],
        [[f"`{row['layout']}`", f"{row['arms'][0]['ms']:.0f} ms", *cells(row)] for row in data["rows"]],
    )


def overlap_hidden(data: dict[str, Any]) -> str:
    def percent(share: dict[str, float] | None) -> str:
        if share is None:
            return "nothing to exchange"
        return f"{100 * share['median']:.0f} % ({100 * share['low']:.0f} to {100 * share['high']:.0f})"

    return markdown(
        ["layout", "gathers alone", "hidden", "beside reductions", "exchange hidden"],
        [
            [
                f"`{row['layout']}`",
                f"{row['gathers_alone_ms']:.0f} ms",
                percent(row["gathers_hidden"]),
                percent(row["gathers_hidden_beside_reductions"]),
                percent(row.get("exchange_hidden")),
            ]
            for row in data["rows"]
        ],
    )


def overlap_timeline(data: dict[str, Any]) -> str:
    kinds = {
        "gathers under forward": "gathers_under_forward",
        "exchange under Newton-Schulz": "exchange_under_newton_schulz",
        "reductions under backward": "reductions_under_backward",
    }
    return markdown(
        [
            f"{data['world']} ranks on {data['ranks'][0]['device']}",
            "rank",
            "in flight",
            "of that under work",
            "work",
            "of that with something in flight",
        ],
        [
            [
                what,
                rank["rank"],
                f"{rank[key]['in_flight_ms']:.1f} ms",
                f"{100 * rank[key]['share']:.0f} %",
                f"{rank[key]['work_ms']:.1f} ms",
                f"{100 * rank[key]['share_of_work']:.0f} %",
            ]
            for what, key in kinds.items()
            for rank in data["ranks"]
        ],
    )


def fsdp(data: dict[str, Any]) -> str:
    header = [
        "ranks",
        "layerwise Muon, ms",
        "gather everywhere, ms",
        "torch AdamW, fused, ms",
        "gather everywhere over ours",
    ]
    rows = []
    for device in data.values():
        for world, found in device["worlds"].items():
            times = [f"{row['ms']:.2f}" for row in found["rows"].values()]
            rows.append([f"{world}, {device['host']['device']}", *times, f"{found['gather_everywhere_over_ours']:.1f}"])
    return markdown(header, rows)


def quantized_training(data: dict[str, Any]) -> str:
    kinds = {"training, last 50 steps": "last_train_loss", "validation": "last_val_loss"}
    return markdown(
        [
            f"loss after 300 steps, {len(data['seeds'])} seeds",
            "bf16, mean",
            "MXFP8, mean",
            "mean ratio",
            "its standard error",
            "bf16 from seed to seed",
        ],
        [
            [
                what,
                f"{sum(data[key]['bf16']) / len(data['seeds']):.4f}",
                f"{sum(data[key]['mxfp8']) / len(data['seeds']):.4f}",
                f"{data[key]['mean_ratio']:.4f}",
                f"{data[key]['standard_error']:.4f}",
                f"{100 * data[key]['spread_of_bf16']:.1f} %",
            ]
            for what, key in kinds.items()
        ],
    )


def codec(data: dict[str, Any]) -> str:
    return markdown(
        ["codes", "directions", "matrix", "ms", "torch, ms", "TB/s", "of a copy's rate"],
        [
            [
                row["format"],
                str(row["directions"]),
                " x ".join(map(str, row["shape"])),
                f"{row['ms']:.4f}",
                f"{row['torch_ms']:.2f}",
                f"{row['tb_s']:.2f}",
                f"{row['of_copy']:.2f}",
            ]
            for row in data["rows"]
        ],
    )


def quantized_memory(data: dict[str, Any]) -> str:
    def cells(part: dict[str, Any], row: dict[str, Any], known: dict[str, Any]) -> list[str]:
        ranks = "1" if part["ranks"] == 1 else f"{part['ranks']}, `shard_grads`"
        return [
            ranks,
            row["mode"],
            *(f"{row[name]:.0f} ({row[f'planned_{name}']:.0f})" for name in ("at_rest_mib", "peak_mib")),
            f"{row['at_rest_ratio']:.3f}, {row['peak_ratio']:.3f}",
            *(f"{value:.0f}" for value in (row["saved_mib"], row["planned_saved_mib"], known["planned_saved_mib"])),
        ]

    return markdown(
        [
            "ranks",
            "weights",
            "at rest, MiB (planned)",
            "peak, MiB (planned)",
            "ratios to the plan",
            "saved, MiB",
            "planned",
            "planned of `llama3-8b`",
        ],
        [
            cells(part, row, known)
            for part in data["parts"]
            for row, known in zip(part["rows"], part["llama3_8b"], strict=True)
        ],
    )


def loss_over_time(data: dict[str, Any]) -> str:
    tried = {arm: ", ".join(str(run["lr"]) for run in data["runs"] if run["arm"] == arm) for arm in data["best"]}
    return markdown(
        [
            f"on one {data['host']['gpu']}",
            "learning rates tried",
            "best",
            f"validation loss after {data['steps']} steps, nats per byte",
            "ms per step",
            "seconds to AdamW's final loss",
        ],
        [
            [arm, tried[arm], run["lr"], f"{run['val_loss']:.3f}", run["ms_per_step"], f"{run['seconds_to_adamw']:.1f}"]
            for arm, run in data["best"].items()
        ],
    )


def claims(data: dict[str, Any]) -> str:
    """The measured claims of README.md."""
    steps = json.loads((RESULTS / "optimizer_step.json").read_text())
    ms = {name: f"{row['ms']:.1f} ms" for name, row in steps["rows"].items()}
    (peer,) = (name for name in ms if name.startswith("gram-newton-schulz"))
    seconds = {arm: f"{run['seconds_to_adamw']:.1f}" for arm, run in data["best"].items()}
    return markdown(
        ["measured", "layerwise", "baseline", "on", "command"],
        [
            [
                "seconds to AdamW's final loss (chart)",
                f"**{seconds['layerwise Muon']}**",
                f"{seconds['torch AdamW']}, torch's fused AdamW; {seconds['torch.optim.Muon']}, `torch.optim.Muon`",
                f"one {data['host']['gpu']}, 1 rank",
                f"`{data['command']}`",
            ],
            [
                "optimizer step, 24-layer GPT of width 1024",
                f"**{ms['layerwise Muon']}**",
                f"{ms[peer]}, {peer.removesuffix(' Muon')}; {ms['torch Muon']}, `torch.optim.Muon`",
                f"one {steps['host']['gpu']}, 1 rank",
                f"`{steps['command']}`",
            ],
            [
                "weights that differ from a one-process run, if gradients sum without rounding",
                "**0**",
                "one process",
                "CPU, gloo, 1 to 8 ranks",
                "`make test`",
            ],
        ],
    )


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "claims": ("loss_over_time", claims),
    "convergence": ("convergence", convergence),
    "convergence_sweep": ("convergence", convergence_sweep),
    "flat": ("layouts", flat),
    "checkpoint": ("checkpoint", checkpoint),
    "codec": ("codec", codec),
    "layouts": ("layouts", layouts),
    "layouts_padding": ("layouts", layouts_padding),
    "layouts_reference": ("layouts", layouts_reference),
    "fsdp": ("fsdp", fsdp),
    "loss_over_time": ("loss_over_time", loss_over_time),
    "newton_schulz": ("newton_schulz", newton_schulz),
    "newton_schulz_accuracy": ("newton_schulz", newton_schulz_accuracy),
    "optimizer_step": ("optimizer_step", optimizer_step),
    "end_to_end": ("end_to_end", end_to_end),
    "overlap": ("overlap", overlap),
    "quantized_training": ("quantized_training", quantized_training),
    "quantized_memory": ("quantized_memory", quantized_memory),
    "overlap_hidden": ("overlap", overlap_hidden),
    "overlap_timeline": ("overlap_timeline", overlap_timeline),
}
"""For every table the JSON it comes from, and what it shows of it."""


def pages() -> list[Path]:
    """The pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def fill_table(name: str) -> str:
    source, table = TABLES[name]
    return table(json.loads((RESULTS / f"{source}.json").read_text()))


def fill_file(path: str) -> str:
    language = {".sh": "bash", ".yaml": "yaml", ".py": "python"}[Path(path).suffix]
    return f"```{language}\n{(ROOT / path).read_text()}```"


def fill_diff(paths: str) -> str:
    return "```diff\n" + "\n".join(difference(*paths.split(), context=1)) + "\n```"


def difference(before: str, after: str, *, context: int) -> list[str]:
    """The lines of a unified diff between two files of the repository, without the lines that name them."""
    texts = [(ROOT / path).read_text().splitlines() for path in (before, after)]
    return list(difflib.unified_diff(*texts, lineterm="", n=context))[2:]


FILLS: dict[str, Callable[[str], str]] = {"table": fill_table, "file": fill_file, "diff": fill_diff}


def render(text: str) -> str:
    """The text with everything that is marked filled in."""

    def fill(match: re.Match[str]) -> str:
        kind, what = match.groups()
        return f"<!-- {kind}: {what} -->\n{FILLS[kind](what)}\n<!-- end -->"

    return re.sub(rf"<!-- ({'|'.join(FILLS)}): ([^\n]+?) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def main() -> int:
    for page in pages():
        page.write_text(render(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
