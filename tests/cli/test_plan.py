"""`layerwise plan` as a user meets it: presets and configs without torch, modules with it, one message for what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from layerwise.cli.main import main
from layerwise.cli.plan import format_ms
from layerwise.config.load import load
from layerwise.config.resolve import resolve_model
from layerwise.dtypes import DType
from layerwise.engine import engine
from layerwise.layout.cost import Hardware
from layerwise.layout.options import Options, bucket_numel_of
from layerwise.layout.plan import make_plan
from layerwise.planner.decoder import Decoder, GroupedQuery, table_of_shape
from layerwise.planner.presets import PRESETS
from layerwise.planner.report import SIDE_BY_SIDE, column_of
from layerwise.train.model import GPT
from layerwise.units import format_nbytes
from tests.cli.test_main import layerwise

Captured = pytest.CaptureFixture[str]
GOLDEN = Path(__file__).parent / "golden"
HERE = "tests.cli.test_plan"
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
T5 = {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "vocab_size": 100}


def config_file(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def as_json(capsys: Captured, *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- what is printed -------------------------------------------------------------------------------


def test_what_the_figures_of_a_choice_count_is_said_beside_those_of_the_table(capsys: Captured) -> None:
    words = ("--model", "llama3-8b", "--world", "128", "--layout", "flat,padded")
    flat = as_json(capsys, *words)["layouts"][0]
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    (memory,) = (line for line in lines if line.startswith("memory without activations"))
    told = format_nbytes(flat["memory_bytes"]["total"])
    assert told in memory
    note = lines[next(n for n, line in enumerate(lines) if line.startswith("* best for dense/matrix: flat, ")) + 1]
    assert note.startswith("these figures are of the matrices alone: ms waited for the wire and for Newton-Schulz; ")
    waited, busy = (format_ms(flat["sent"]["ms"][name]) for name in ("waited", "total"))
    assert f"flat {told}, waited for {waited} of {busy} on the wire, " in note
    assert not any(line.startswith("at most") for line in lines)
    assert main(["plan", *words, "--shard-grads"]) == 0
    out = capsys.readouterr().out
    assert "  at most" in out
    assert "\nat most: with the gradients that wait while reductions lag behind backward; as much must fit\n" in out


def test_the_table_of_gpt2_is_what_it_was(capsys: Captured) -> None:
    """When the cost model or a layout changes on purpose, write the new table into the file."""
    assert main(["plan", "--model", "gpt2", "--world", "8"]) == 0
    out, err = capsys.readouterr()
    assert out == (GOLDEN / "plan_gpt2.txt").read_text()
    assert err == ""


def test_the_page_shows_what_the_command_prints(capsys: Captured) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    command, *lines = re.search(r"```console\n\$ layerwise (.*?)```", page, re.DOTALL).group(1).splitlines()  # type: ignore[union-attr]
    assert main(command.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = [line.removesuffix(" ...") for line in lines if line != "..."]
    assert len(shown) > 5
    for line in shown:
        assert any(found.startswith(line) for found in printed), f"docs/planning.md is not up to date: {line}"


def test_flags_are_pinned() -> None:
    help_text = layerwise("plan", "--help").stdout
    found = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", help_text)))
    assert found == (GOLDEN / "plan_flags.txt").read_text().split()


def keys_of(value: object, path: str = "") -> set[str]:
    """Every key of a JSON document by its path; entries of lists share theirs."""
    if isinstance(value, dict):
        return {f"{path}.{key}".lstrip(".") for key in value}.union(
            *(keys_of(v, f"{path}.{k}") for k, v in value.items())
        )
    if isinstance(value, list):
        return set().union(*(keys_of(entry, f"{path}[]") for entry in value))
    return set()


def test_json_has_the_keys_that_are_documented(capsys: Captured) -> None:
    found = as_json(capsys, "--model", "qwen3-30b-a3b", "--world", "32", "--ep", "8", "--layout", "flat,compact")
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    documented = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert keys_of(found) == keys_of(documented)
    assert list(found) == list(documented)


def test_json_adds_up(capsys: Captured) -> None:
    found = as_json(capsys, "--model", "gpt2", "--world", "8")
    assert (found["world"], found["domains"], found["matrices"]) == (8, {"dense": 8}, 72)
    assert found["hardware"] == {"tflops": Hardware().ns_tflops, "link_gb_s": Hardware().link_gb_s}
    assert [column["layout"] for column in found["layouts"]] == list(SIDE_BY_SIDE)
    assert sum(column["chosen"] for column in found["layouts"]) == 1
    for column in found["layouts"]:
        memory, sent = column["memory_bytes"], column["sent"]
        total, at_rest = memory.pop("total"), memory.pop("at_rest")
        assert total == sum(memory.values())
        assert sum(memory[name] for name in ("params", "grads", "masters", "state")) <= at_rest < total
        assert sent["bytes"].pop("total") == sum(sent["bytes"].values())
        assert sent["ms"].pop("waited") <= sent["ms"].pop("total") == pytest.approx(sum(sent["ms"].values()))


def test_times_follow_the_hardware_that_was_given(capsys: Captured) -> None:
    words = ("--model", "gpt2", "--world", "8", "--layout", "flat")
    usual = as_json(capsys, *words)["layouts"][0]
    quick = as_json(capsys, *words, "--tflops", "800", "--link-gb-s", "90")["layouts"][0]
    assert quick["newton_schulz"]["ms"] == pytest.approx(usual["newton_schulz"]["ms"] / 2)
    assert quick["sent"]["ms"]["total"] == pytest.approx(usual["sent"]["ms"]["total"] / 2)


def test_flags_change_the_bytes_they_are_about(capsys: Captured) -> None:
    def memory(*words: str) -> dict[str, int]:
        found = as_json(capsys, "--model", "gpt2", "--world", "8", "--layout", "flat", *words)
        return found["layouts"][0]["memory_bytes"]

    usual = memory()
    assert memory("--param-dtype", "fp32")["params"] == 2 * usual["params"]
    assert memory("--param-dtype", "fp32")["masters"] == 0
    assert memory("--grad-dtype", "bf16")["grads"] < usual["grads"]
    assert memory("--rule", "adamuon")["state"] > usual["state"]
    assert memory("--reducer", "ordered")["slots"] > usual["slots"]
    assert memory("--bucket-mib", "8", "--shard-grads")["grads"] < usual["grads"] // 2


def test_what_is_refused_is_left_out_and_says_so(capsys: Captured) -> None:
    assert main(["plan", "--model", "gpt2", "--world", "8", "--reducer", "ordered", "--shard-grads"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^on the worst rank +flat( \*)? +padded( \*)? +compact$", out, re.MULTILINE)
    assert "without replicated: reducer='ordered' with layout 'replicated'" in out
    assert "ordered sums, gradients released once reduced" in out


def test_a_mixture_is_printed_as_the_argument_that_asks_for_it(capsys: Captured) -> None:
    assert main(["plan", "--model", "qwen3-235b-a22b", "--world", "512", "--ep", "128"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^on the worst rank .* flat \+ padded \*$", out, re.MULTILINE)
    assert "\n* the mixture is layout={'dense/matrix': 'flat', 'expert/matrix': 'padded'}\n" in out


def test_a_hopeless_stack_of_experts_is_hinted_at(capsys: Captured) -> None:
    assert main(["plan", "--model", "qwen3-30b-a3b", "--world", "256"]) == 0
    assert "hint: padded and compact keep a stack of 128 experts whole" in capsys.readouterr().out
    assert main(["plan", "--model", "qwen3-30b-a3b", "--world", "256", "--ep", "64"]) == 0
    out = capsys.readouterr().out
    assert "hint" not in out
    assert "on 256 ranks, each expert param on 4 of them" in out


def test_one_rank_has_nothing_to_choose(capsys: Captured) -> None:
    assert main(["plan", "--model", "gpt2", "--world", "1"]) == 0
    assert "* all layouts are the same: no matrix is held by more than one rank" in capsys.readouterr().out


# -- models that torch cuts ------------------------------------------------------------------------


def test_a_mesh_has_one_column_and_its_sizes_are_the_world(capsys: Captured) -> None:
    found = as_json(capsys, "--model", "gpt2", "--fsdp", "4", "--replicate", "2", "--tp", "2")
    assert found["world"] == 16
    assert found["mesh"] == {"replicate": 2, "fsdp": 4, "tp": 2, "ep": 1}
    assert [column["layout"] for column in found["layouts"]] == ["as params are"]
    whole = as_json(capsys, "--model", "gpt2", "--world", "1", "--layout", "flat")
    memory, one = column(found, "as params are")["memory_bytes"], column(whole)["memory_bytes"]
    # Norms, biases of outputs and positions are not cut by tp, and 50257 rows are not divided by anything.
    assert 1 <= memory["params"] / (one["params"] / 8) < 1.05
    assert 1 <= memory["state"] / (one["state"] / 8) < 1.05
    sent = found["sent_by_torch"]
    assert sent["all_gather"] * 2 == sent["reduce_scatter"] * 2  # twice in bf16, once in fp32
    assert sent["total"] == sent["all_gather"] + sent["reduce_scatter"] + sent["all_reduce"]
    assert main(["plan", "--model", "gpt2", "--fsdp", "4"]) == 0
    out = capsys.readouterr().out
    assert "muon and adamw, cut by torch: fsdp 4" in out
    assert "beside that fully_shard() itself sends" in out


def test_blocks_of_tensor_parallelism_do_not_move(capsys: Captured) -> None:
    whole = as_json(capsys, "--model", "llama3-8b", "--tp", "8")
    blocks = as_json(capsys, "--model", "llama3-8b", "--tp", "8", "--tp-mode", "blockwise")
    assert (whole["settings"]["tp_mode"], blocks["settings"]["tp_mode"]) == ("auto", "blockwise")
    # 32 layers of query, key and value, output, gate and up, and down, each on all of the eight ranks. Fused weights are cut where
    # their parts end as well.
    assert whole["matrices"] == 32 * 7
    assert blocks["matrices"] > 32 * 7 * 4
    assert "all_to_all" in column(whole, "as params are")["sent"]["bytes"]
    assert not column(blocks, "as params are")["sent"]["bytes"].get("all_to_all")
    assert main(["plan", "--model", "gpt2", "--tp", "2", "--tp-mode", "blockwise"]) == 0
    assert "cut by torch: tp 2, matrices in blocks of tp" in capsys.readouterr().out
    assert main(["plan", "--model", "gpt2", "--fsdp", "2", "--tp-mode", "blockwise"]) == 2
    assert "--tp-mode: blockwise is for matrices that tensor parallelism has cut" in capsys.readouterr().err


def test_the_way_there_is_shared_by_replicas_and_the_way_back_is_not(capsys: Captured) -> None:
    """R x S ranks: P / (R S) of each way there, P / S back, but for what stays at home."""
    found = as_json(capsys, "--model", "llama3-8b", "--replicate", "4", "--fsdp", "8")
    alone = as_json(capsys, "--model", "llama3-8b", "--fsdp", "8")
    ms, one = (column(plan, "as params are")["sent"]["ms"] for plan in (found, alone))
    assert ms["exchange"] == pytest.approx(one["exchange"] / 4, rel=0.2)
    assert ms["return"] == pytest.approx(one["return"], rel=0.2)


def test_experts_of_a_mesh_are_whole_stacks(capsys: Captured) -> None:
    found = as_json(capsys, "--model", "configs/moe.toml", "--fsdp", "2", "--ep", "2")
    whole = as_json(capsys, "--model", "configs/moe.toml", "--world", "2", "--layout", "flat")
    assert found["elements"] == whole["elements"]
    assert found["domains"] == {"dense": 2, "expert": 2}
    assert main(["plan", "--model", "qwen3-30b-a3b", "--fsdp", "1024"]) == 0
    out = capsys.readouterr().out
    assert "hint: fully_shard() cuts 128 experts over 1024 ranks, and 896 of them get none" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "--world: expected a number of ranks. Or say how torch cuts the model"),
        (("--fsdp", "0"), "--fsdp: expected at least 1, got 0."),
        (("--fsdp", "8", "--world", "4"), "--world: expected 8, the ranks of the mesh, got 4."),
        (("--fsdp", "8", "--ep", "3"), "--ep: expected a divisor of --fsdp 8 times --tp 1, got 3."),
        (("--fsdp", "8", "--ep", "2"), "has no stack of experts: --ep 2 needs a number of them"),
        (("--tp", "2", "--layout", "flat"), "--layout: is for layerwise.DataParallel"),
        (("--tp", "2", "--reducer", "ordered"), "--reducer: is for layerwise.DataParallel"),
        (("--tp", "2", "--shard-grads"), "--shard-grads: is for layerwise.DataParallel"),
        (("--tp", "2", "--bucket-mib", "4"), "--bucket-mib: is for layerwise.DataParallel"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(words: tuple[str, ...], expected: str, capsys: Captured) -> None:
    assert main(["plan", "--model", "gpt2", *words]) == 2
    assert expected in capsys.readouterr().err


# -- weights that are kept as codes ----------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "each"), [("mxfp8", 2 * 33 / 32), ("blockwise", 1 + 4 / 128**2)])
def test_codes_are_counted_and_compared_with_both_kinds_of_bf16(recipe: str, each: float, capsys: Captured) -> None:
    words = ("--model", "llama3-8b", "--world", "128", "--layout", "flat")
    plain, found = as_json(capsys, *words), as_json(capsys, *words, "--quantize", recipe)
    codes = found["quantized"]
    assert plain["quantized"] is None
    assert (codes["recipe"], codes["params"]) == (recipe, 4 * 32)
    assert codes["bytes"] == each * codes["elements"]
    assert codes["bf16_bytes"] == 2 * codes["elements"]
    assert codes["bf16_and_codes_bytes"] == codes["bf16_bytes"] + codes["bytes"]
    before, after = (column(plan)["memory_bytes"] for plan in (plain, found))
    # What a bucket has in padding is not kept of it.
    assert before["params"] - after["params"] == pytest.approx(codes["bf16_bytes"] - codes["bytes"], abs=2**20)
    saved = {name: before[name] - after[name] for name in before}
    assert saved["params"] == saved["total"] == saved["at_rest"]
    assert {name for name, nbytes in saved.items() if nbytes} == {"params", "total", "at_rest"}
    assert column(plain)["sent"] == column(found)["sent"]  # bf16 travels


def test_the_page_shows_what_codes_come_to(capsys: Captured) -> None:
    page = (Path(__file__).parents[2] / "docs" / "quantized.md").read_text()
    listings = re.findall(r"```console\n\$ layerwise (plan .*?)```", page, re.DOTALL)
    assert len(listings) == 2
    for listing in listings:
        command, *lines = listing.splitlines()
        assert main(command.split()) == 0
        printed = capsys.readouterr().out.splitlines()
        shown = [line for line in lines if line != "..."]
        assert len(shown) > 4
        assert [line for line in shown if line not in printed] == [], "docs/quantized.md is not up to date"


def test_documented_keys_of_codes_are_those_of_the_json(capsys: Captured) -> None:
    found = as_json(capsys, "--model", "gpt2", "--world", "8", "--quantize", "mxfp8")
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("`quantized` "))
    assert set(re.findall(r"`(\w+)`", line.split(":", 1)[1])) == set(found["quantized"])


def test_skipped_params_stay_in_bf16(capsys: Captured) -> None:
    words = ("--model", "deepseek-v3", "--world", "64", "--ep", "64", "--layout", "flat", "--quantize", "blockwise")
    assert main(["plan", *words]) == 2
    err = capsys.readouterr().err
    assert "--quantize: blockwise cannot keep 'model.layers.0.self_attn.kv_a_proj_with_mqa.weight (576 x 7168" in err
    assert "Here that is --skip" in err
    found = as_json(capsys, *words, "--skip", "*.kv_a_proj_with_mqa.weight, model.layers.0.mlp.*")
    whole = as_json(capsys, *words, "--skip", "*.kv_a_proj_with_mqa.weight")
    assert found["quantized"]["params"] < whole["quantized"]["params"]


def test_a_config_of_the_trainer_says_itself_what_it_keeps(tmp_path: Path, capsys: Captured) -> None:
    text = (
        Path("configs/tiny.toml")
        .read_text()
        .replace("[train]", '[precision]\nparam_gather = "mxfp8"\n[train]\nprecision = "bf16"')
    )
    path = tmp_path / "run.toml"
    path.write_text(text)
    words = ("--model", str(path), "--world", "2", "--layout", "flat")
    assert as_json(capsys, *words)["quantized"]["recipe"] == "mxfp8"
    assert as_json(capsys, *words, "--param-dtype", "fp32")["quantized"] is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--fsdp", "8", "--quantize", "mxfp8"), "--quantize: DTensor params cannot be quantised"),
        (("--tp", "2", "--quantize", "blockwise"), "--quantize: DTensor params cannot be quantised"),
        (("--world", "8", "--quantize", "mxfp8", "--param-dtype", "fp32"), "params are fp32. Add --param-dtype bf16."),
        (("--world", "8", "--skip", "*"), "--skip: is for --quantize"),
        (("--world", "8", "--quantize", "mxfp8", "--skip", "nothing"), "skip='nothing' matches no param of gpt2"),
    ],
)
def test_codes_that_cannot_be_are_refused(words: tuple[str, ...], expected: str, capsys: Captured) -> None:
    assert main(["plan", "--model", "gpt2", *words]) == 2
    assert expected in capsys.readouterr().err


# -- without torch ---------------------------------------------------------------------------------


def without_torch(*words: str) -> tuple[int, str, str]:
    """Run in a process of its own that cannot import torch: exit code, stdout, stderr."""
    probe = (
        "import sys\n"
        "class Nowhere:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('torch', 'numpy', 'transformers'): raise ImportError(f'there is no {name}')\n"
        "sys.meta_path.insert(0, Nowhere())\n"
        f"from layerwise.cli.main import main\nsys.exit(main({list(words)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout, done.stderr


def test_presets_and_known_families_need_no_torch(tmp_path: Path) -> None:
    config_file(tmp_path, LLAMA)
    for words in (
        ("--model", "llama3-8b", "--world", "64"),
        ("--model", "gpt2", "--world", "8", "--json"),
        ("--model", "gpt2", "--fsdp", "8", "--tp", "2"),
        ("--model", "gpt2", "--world", "8", "--quantize", "mxfp8"),
        ("--model", str(tmp_path), "--world", "8"),
        ("--model", str(tmp_path / "config.json"), "--world", "8"),
    ):
        code, out, err = without_torch("plan", *words)
        assert (code, err) == (0, "")
        assert out
    assert without_torch("plan", "--model", "gpt3", "--world", "8")[0] == 2
    assert without_torch("plan", "--help")[0] == 0


def test_a_module_needs_torch_and_says_so() -> None:
    code, out, err = without_torch("plan", "--model", f"{HERE}:two_layers", "--world", "8")
    assert (code, out) == (3, "")
    assert (
        err
        == "importing torch\nplan needs a package that cannot be imported: there is no torch. Run: pip install layerwise\n"
    )


def test_a_family_that_only_transformers_knows_says_what_to_install(tmp_path: Path, capsys: Captured) -> None:
    with mock.patch.dict(sys.modules, {"transformers": None}):
        assert main(["plan", "--model", str(config_file(tmp_path, T5)), "--world", "8"]) == 3
    assert "which needs transformers" in capsys.readouterr().err


# -- models ----------------------------------------------------------------------------------------


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64), nn.Linear(64, 64, bias=False))


def frozen() -> nn.Module:
    return two_layers().requires_grad_(False)


def fused() -> nn.Module:
    return nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)})


class Sparse(nn.Module):
    """A dense layer and the experts that one rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.empty(2, 16, 16))

    def param_domains(self) -> dict[str, str]:
        return {"experts": "expert"}


def column(found: dict[str, Any], layout: str = "flat") -> dict[str, Any]:
    return next(entry for entry in found["layouts"] if entry["layout"] == layout)


@pytest.mark.slow
def test_every_preset_can_be_planned(capsys: Captured) -> None:
    for name in PRESETS:
        found = as_json(capsys, "--model", name, "--world", "16", "--layout", "flat")
        assert column(found)["padding_percent"] < 0.1


def test_a_config_is_read_with_its_own_dtype(tmp_path: Path, capsys: Captured) -> None:
    path = str(config_file(tmp_path, LLAMA))
    found = as_json(capsys, "--model", path, "--world", "4")
    assert found["settings"]["param_dtypes"] == ["bf16"]
    assert found["params"] == 3 * 9 + 3
    assert as_json(capsys, "--model", path, "--world", "4", "--param-dtype", "fp32")["settings"]["param_dtypes"] == [
        "fp32"
    ]


def test_experts_of_a_config_are_spread(tmp_path: Path, capsys: Captured) -> None:
    path = str(config_file(tmp_path, MIXTRAL))
    whole = as_json(capsys, "--model", path, "--world", "8", "--layout", "flat")
    spread = as_json(capsys, "--model", path, "--world", "8", "--layout", "flat", "--ep", "4")
    assert spread["domains"] == {"dense": 8, "expert": 2}
    experts = 3 * 8 * 3 * 64 * 160
    assert whole["elements"] - spread["elements"] == experts * 3 // 4


@needs_transformers
def test_a_family_that_is_not_known_here_is_built_by_transformers(tmp_path: Path, capsys: Captured) -> None:
    found = as_json(capsys, "--model", str(config_file(tmp_path, T5)), "--world", "4", "--layout", "flat")
    assert found["matrices"] > 0


@needs_transformers
def test_a_config_and_its_live_module_cost_the_same(tmp_path: Path, capsys: Captured) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig.from_dict(dict(LLAMA))).to(torch.bfloat16)
    found = as_json(capsys, "--model", str(config_file(tmp_path, LLAMA)), "--world", "4", "--layout", "padded")
    plan = engine.plan_for((module,), Options(layout="padded"), world=4)
    assert column(found, "padded") == column_of(plan).to_json()


@pytest.mark.parametrize("layout", SIDE_BY_SIDE)
def test_the_trainers_model_costs_what_its_plan_says(layout: str, capsys: Captured) -> None:
    words = ("--bucket-mib", "0.25", "--grad-dtype", "bf16", "--world", "3", "--layout", layout)
    found = as_json(capsys, "--model", "configs/tiny.toml", *words)
    with torch.device("meta"):
        module = GPT(resolve_model(load("configs/tiny.toml").config.model))
    numel = bucket_numel_of(0.25, DType.BF16)
    options = Options(layout=layout, bucket_numel=numel, grad_dtype=DType.BF16)
    assert column(found, layout) == column_of(engine.plan_for((module,), options, world=3)).to_json()


@pytest.mark.parametrize("layout", SIDE_BY_SIDE)
def test_the_trainers_model_costs_what_a_preset_of_its_shape_does(layout: str, capsys: Captured) -> None:
    found = as_json(capsys, "--model", "configs/tiny.toml", "--world", "3", "--layout", layout)
    shape = resolve_model(load("configs/tiny.toml").config.model)
    attention = GroupedQuery(heads=shape.n_heads, kv_heads=shape.n_kv_heads, head_dim=shape.head_dim)
    decoder = Decoder(
        hidden=shape.d_model,
        layers=shape.n_layers,
        vocab=shape.vocab_size,
        intermediate=shape.hidden,
        attention=attention,
    )
    table = table_of_shape(decoder, "the trainer's GPT", dtype=DType.FP32)
    assert column(found, layout) == column_of(make_plan(table, Options(layout=layout), world=3)).to_json()


def test_the_trainers_experts_are_spread(capsys: Captured) -> None:
    found = as_json(capsys, "--model", "configs/moe.toml", "--world", "4", "--ep", "2", "--layout", "flat")
    whole = as_json(capsys, "--model", "configs/moe.toml", "--world", "4", "--layout", "flat")
    assert (found["domains"], whole["domains"]) == ({"dense": 4, "expert": 2}, {"dense": 4, "expert": 4})
    assert found["elements"] < whole["elements"]


def test_a_pipeline_is_planned_as_one_stage_and_says_so(capsys: Captured) -> None:
    assert main(["plan", "--model", "configs/pipeline.toml", "--world", "2", "--layout", "flat"]) == 0
    assert "note: parallel.pp = 2 is left aside" in capsys.readouterr().err


def test_a_users_module_is_planned_as_one_rank_holds_it(capsys: Captured) -> None:
    found = as_json(capsys, "--model", f"{HERE}:two_layers", "--world", "2", "--layout", "flat")
    assert (found["elements"], found["settings"]["param_dtypes"]) == (2 * 64 * 64 + 128, ["fp32"])
    found = as_json(capsys, "--model", f"{HERE}:Sparse", "--world", "4", "--ep", "2", "--layout", "flat")
    assert (found["elements"], found["domains"]) == (16 * 16 * 3 + 16, {"dense": 4, "expert": 2})
    found = as_json(
        capsys, "--model", f"{HERE}:two_layers", "--world", "2", "--param-dtype", "bf16", "--layout", "flat"
    )
    assert found["settings"]["param_dtypes"] == ["bf16"]


# -- what is wrong ---------------------------------------------------------------------------------

WRONG: list[tuple[Sequence[str], Sequence[str]]] = [
    (("--model", "llama-8b", "--world", "8"), ["--model llama-8b: is no preset. Did you mean 'llama3-8b'? Or give a config.json, its"]),
    (("--model", "gpt2", "--world", "0"), ["--world: expected a number of ranks from 1 to 1000000, got 0."]),
    (("--model", "gpt2", "--world", "8", "--ep", "3"), ["--ep: expected a number that divides the 8 ranks of --world, got 3."]),
    (("--model", "gpt2", "--world", "8", "--ep", "0"), ["--ep: expected a number that divides the 8 ranks of --world, got 0."]),
    (("--model", "gpt2", "--world", "8", "--ep", "2"), ["--model gpt2: preset 'gpt2' has no experts: expert_parallel must be 1, got 2."]),
    (("--model", "deepseek-v3", "--world", "9", "--ep", "3"), ["--model deepseek-v3: preset 'deepseek-v3' has 256 routed experts: "]),
    (("--model", "gpt2", "--world", "8", "--layout", "flt"), ["--layout: layout 'flt' is unknown. Did you mean 'flat'?"]),
    (
        ("--model", "gpt2", "--world", "-1", "--layout", "flat,x", "--tflops", "0", "--link-gb-s", "nan", "--bucket-mib", "-1"),
        [
            "--world: expected a number of ranks from 1 to 1000000, got -1.",
            "--bucket-mib: expected a positive number, got -1.",
            "--tflops: expected a positive number, got 0.",
            "--link-gb-s: expected a positive number, got nan.",
            "--layout: layout 'x' is unknown. Known: compact, flat, padded, replicated.",
        ],
    ),
    (
        ("--model", "gpt2", "--world", "8", "--layout", "compact", "--shard-grads"),
        ["plan: shard_grads=True with layout 'compact' (buffer dense/matrix/bf16/compact): its gradients are all-reduced"],
    ),
    (
        ("--model", "gpt2", "--world", "8", "--layout", "compact,replicated", "--shard-grads"),
        ["plan: shard_grads=True with layout 'compact' (buffer dense/matrix/bf16/compact)"],
    ),
    (("--model", "no/such/config.json", "--world", "8"), ["no/such/config.json: there is no such file."]),
    (("--model", "meta-llama/Llama-3.1-8B", "--world", "8"), ["meta-llama/Llama-3.1-8B: there is no such file. A model of the Hugging"]),
    (("--model", "tests", "--world", "8"), ["tests: is a folder without a config.json"]),
    (("--model", f"{HERE}:frozen", "--world", "8"), [f"--model {HERE}:frozen: has no trainable param: there is nothing to optimise."]),
    (("--model", f"{HERE}:fused", "--world", "8"), ["plan: param 'qkv.weight' of shape (24, 8) looks fused ('qkv')"]),
    (
        ("--model", f"{HERE}:two_layers", "--world", "8", "--ep", "2"),
        [f"--model {HERE}:two_layers: --ep 2 needs experts with a domain of their own: none of its modules names any"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "messages"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_what_is_wrong_is_said_once_and_whole(words: Sequence[str], messages: Sequence[str], capsys: Captured) -> None:
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == f"{len(messages)} problem{'s' if len(messages) > 1 else ''} in the configuration:"
    assert len(lines) == 1 + len(messages)
    for number, (line, message) in enumerate(zip(lines[1:], messages, strict=True), start=1):
        assert line.startswith(f"  {number}. {message}")


def test_a_broken_config_names_the_file_and_the_key(tmp_path: Path, capsys: Captured) -> None:
    path = config_file(tmp_path, {**LLAMA, "hidden_size": "wide"})
    assert main(["plan", "--model", str(path), "--world", "8"]) == 2
    assert f"{path}: 'hidden_size' must be a whole number of at least 1, got 'wide'." in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["plan"], ["plan", "--model", "gpt2"], ["plan", "--model", "gpt2", "--world", "many"],
     ["plan", "--model", "gpt2", "--world", "8", "--rule", "sgd"], ["plan", "--model", "gpt2", "--world", "8", "--optim.lr", "1"]],
)  # fmt: skip
def test_words_that_make_no_command_are_bad_input(words: list[str], capsys: Captured) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err != ""


def test_a_model_that_is_hardly_orthogonalised_is_warned_about(tmp_path: Path, capsys: Captured) -> None:
    assert main(["plan", "--model", str(config_file(tmp_path, {**LLAMA, "vocab_size": 500_000})), "--world", "2"]) == 0
    assert "warning: only " in capsys.readouterr().err
