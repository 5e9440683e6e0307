"""`inspect` of models that are not the trainer's: a user's function, Hugging Face configs, rules from a file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from layerwise.cli.inspect import plan_for
from layerwise.cli.main import main
from layerwise.cli.param_rows import rows_of
from layerwise.config.schema import TrainConfig
from layerwise.layout.cost import newton_schulz_flops
from tests.cli.test_main import layerwise

Captured = pytest.CaptureFixture[str]
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


class Block(nn.Module):
    """Nine params, of which six are matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width)


class Deep(nn.Module):
    """An embedding, blocks, and a head that is the embedding."""

    def __init__(self, depth: int, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.readout = nn.Linear(width, 100, bias=False)
        self.readout.weight = self.embed.weight


def deep() -> nn.Module:
    print("building")
    return Deep(4)


def not_a_module() -> int:
    return 3


def failing() -> nn.Module:
    raise RuntimeError("no\nluck.")


def leaving() -> nn.Module:
    sys.exit(4)


def needs_more(width: int) -> nn.Module:
    return Deep(1, width)


def lacks_a_package() -> nn.Module:
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401

    return Deep(1)


def frozen() -> nn.Module:
    return Deep(1).requires_grad_(False)


class Bare(nn.Module):
    """A 2-D param that no module type explains."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.mixer = nn.Parameter(torch.empty(8, 8))


class FusedByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)


HERE = "tests.cli.test_inspect_models"


def test_a_function_is_built_on_the_meta_device_and_folded_by_layer(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:deep", "--world", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == "building\n"  # what user code prints is no result
    row = next(line for line in out.splitlines() if line.startswith("blocks.{0..3}.up.weight"))
    assert row.split()[1:4] == ["128x32", "muon", "128x32"]
    assert "64.0 KiB" in row
    totals = out.splitlines()[-3:]
    flops = 4 * (4 * newton_schulz_flops(32, 32, 5, gram=False) + 2 * newton_schulz_flops(128, 32, 5, gram=True))
    assert totals[1].split() == ["muon", "24", "49,152", "192.0", "KiB", "24", f"{flops / 1e6:.2f}M"]


def test_all_gives_every_param_a_line(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:deep", "--all"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("blocks.")]
    assert len(names) == 4 * 9
    assert not any("{" in name for name in names)


def test_json_has_totals_and_other_names_of_tied_params(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:deep", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {row["fqn"]: row for row in found["params"]}
    assert by_name["embed.weight"]["aliases"] == ["readout.weight"]
    assert (by_name["embed.weight"]["rule"], by_name["embed.weight"]["family"]) == ("adamw", "other")
    assert found["totals"]["params"] == len(found["params"]) == 37
    assert found["totals"]["elements"] == sum(total["elements"] for total in found["totals"]["rules"].values())
    assert found["totals"]["rules"]["muon"]["newton_schulz_flops"] > 0
    assert found["totals"]["rules"]["adamw"]["newton_schulz_flops"] == 0


def test_an_elementwise_rule_on_matrices_orthogonalises_nothing(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:deep", "--json", "--optim.rule", "adamw"]) == 0
    rules = json.loads(capsys.readouterr().out)["totals"]["rules"]
    assert list(rules) == ["adamw"]
    assert rules["adamw"]["newton_schulz_flops"] == 0


def test_explain_knows_a_param_by_its_other_name(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:deep", "--explain", "readout.weight", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["fqn"], found["family"]) == ("embed.weight", "other")
    assert list(found) == ["fqn", "shape", "tried", "family", "reason", "matrices"]


WRONG = [
    (":build", "expected module:function, such as my_package.models:build."),
    ("a b:c", "expected module:function, such as my_package.models:build."),
    ("no_such_module:build", "module 'no_such_module' cannot be imported: ModuleNotFoundError: No module named 'no_such_module'."),
    (f"{HERE}:deeep", f"'{HERE}' has no 'deeep'. Did you mean 'deep'?"),
    (f"{HERE}:HERE", "'HERE' is a str: expected a function that returns an nn.Module."),
    (f"{HERE}:not_a_module", "not_a_module() returned int: expected an nn.Module."),
    (f"{HERE}:failing", "failing() raised: RuntimeError: no luck (test_inspect_models.py, line "),
    (f"{HERE}:leaving", "leaving() raised: SystemExit: 4 (test_inspect_models.py, line "),
    (f"{HERE}:needs_more", "needs_more() raised: TypeError: needs_more() missing 1 required positional argument: 'width'."),
    (f"{HERE}:lacks_a_package", "lacks_a_package() raised: ModuleNotFoundError: No module named 'no_such_package' (test_inspect_"),
    ("meta-llama/Llama-3.1-8B", "there is no such file. A model of the Hugging Face hub is read from its config.json, and nothing is downloaded: "),
    ("nothing.json", "there is no such file. Without a file, every setting has its default."),
    ("tests", "is a folder without a config.json: expected a config file, a model type or module:function."),
]  # fmt: skip


@pytest.mark.parametrize(("model", "message"), WRONG, ids=[model for model, _ in WRONG])
def test_a_wrong_model_is_bad_input_with_one_message(model: str, message: str, capsys: Captured) -> None:
    assert main(["inspect", model]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"1 problem in the configuration:\n  1. {model}: {message}")
    assert len(err.splitlines()) == 2


def test_a_model_that_cannot_be_routed_says_why(capsys: Captured) -> None:
    for function, message in (
        ("FusedByName", "routing: param 'qkv.weight' of shape (24, 8) looks fused ('qkv')"),
        ("frozen", "routing: Deep has no trainable param: there is nothing to optimise."),
    ):
        assert main(["inspect", f"{HERE}:{function}"]) == 2
        assert message in capsys.readouterr().err


def test_explain_works_where_routing_refuses_the_model(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:FusedByName", "--explain", "qkv.weight"]) == 2
    out, err = capsys.readouterr()
    assert "matched: " in out
    assert "looks fused ('qkv')" in err


def test_strict_refuses_what_only_a_fallback_explains(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:Bare"]) == 0
    assert main(["inspect", f"{HERE}:Bare", "--strict"]) == 2
    assert "strict routing: 1 param with two or more dims went by a fallback: 'mixer'." in capsys.readouterr().err


def test_rules_come_from_a_file_and_show_in_the_table(tmp_path: Path, capsys: Captured) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\npattern = "qkv.weight"\nto = "matrix"\nrow_blocks = [8, 8, 8]\noptions = {lr = 0.5, steps = 3}\n'
    )
    assert main(["inspect", f"{HERE}:FusedByName", "--rules", str(rules)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("qkv.weight"))
    for piece in ("muon (lr=0.5, steps=3)", "3 of 8x8", "matches the user's rule 1 ('qkv.weight')"):
        assert piece in row
    assert main(["inspect", f"{HERE}:FusedByName", "--rules", str(rules), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = next(row for row in found["params"] if row["fqn"] == "qkv.weight")
    assert row["options"] == {"lr": 0.5, "steps": 3}
    expected = 3 * newton_schulz_flops(8, 8, 3, gram=False) + newton_schulz_flops(8, 8, 5, gram=False)
    assert found["totals"]["rules"]["muon"]["newton_schulz_flops"] == expected
    assert main(["inspect", f"{HERE}:FusedByName", "--rules", str(rules), "--explain", "qkv.weight"]) == 0
    assert "user rule 1 'qkv.weight'" in capsys.readouterr().out


def test_a_rule_that_fits_nothing_is_bad_input(tmp_path: Path, capsys: Captured) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npattern = "qvk.weight"\nto = "other"\n')
    for words in ([], ["--explain", "embed.weight"]):
        assert main(["inspect", f"{HERE}:deep", "--rules", str(rules), *words]) == 2
        assert "routing: route rule 1 ('qvk.weight') matches no param." in capsys.readouterr().err


def test_problems_of_flags_and_rules_come_together(tmp_path: Path, capsys: Captured) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npatern = "x"\nto = "other"\n')
    words = ["--rules", str(rules), "--world", "0", "--model.d-model", "64"]
    assert main(["inspect", f"{HERE}:deep", *words]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "3 problems in the configuration:",
        "  1. --world: expected a number of ranks from 1 to 1000000, got 0.",
        f"  2. --model.d-model: is about the trainer's own model, and MODEL is '{HERE}:deep'. Leave it out.",
        f"  3. {rules}: rule 1.patern: is unknown. Did you mean 'pattern'?",
    ]
    assert main(["inspect", f"{HERE}:deep", "--rules", "no/such.toml"]) == 2
    assert "1. routing.rules_file: 'no/such.toml' does not exist." in capsys.readouterr().err


def test_the_current_directory_is_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    (tmp_path / "my_models_of_this_test.py").write_text(
        "from torch import nn\nclass Zoo:\n    @staticmethod\n    def build():\n        return nn.Linear(4, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["inspect", "my_models_of_this_test:Zoo.build"]) == 0
    assert "4x4" in capsys.readouterr().out


def test_without_transformers_the_line_to_install_it_is_shown(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for model in ("llama", str(tmp_path / "config.json"), str(tmp_path)):
        with mock.patch.dict(sys.modules, {"transformers": None}):
            assert main(["inspect", model]) == 3
        out, err = capsys.readouterr()
        assert out == ""
        assert err.endswith("Run: pip install 'layerwise[hf]'\n")


SMALL_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@needs_transformers
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_hugging_face_config_is_built_as_its_architecture(as_folder: bool, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    assert main(["inspect", str(tmp_path if as_folder else tmp_path / "config.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {row["fqn"]: row for row in found["params"]}
    assert len(by_name) == 3 * 9 + 3
    assert {row["dtype"] for row in by_name.values()} == {"bf16"}
    assert by_name["model.layers.2.mlp.down_proj.weight"]["rule"] == "muon"
    assert by_name["lm_head.weight"]["rule"] == "adamw"


@needs_transformers
def test_a_model_type_alone_means_the_defaults_of_that_type(capsys: Captured) -> None:
    assert main(["inspect", "gpt2"]) == 0
    out = capsys.readouterr().out
    assert "transformer.h.{0..11}.mlp.c_fc.weight" in out
    assert "transformer.wte.weight" in out


@needs_transformers
@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"model_type": "lama"}, "has no model type 'lama'. Did you mean 'llama'?"),
        ({"model_type": 3}, "has no model type 3."),
        ({**SMALL_LLAMA, "architectures": ["NoSuchModel"]}, "its architecture 'NoSuchModel' is not in transformers "),
        ({**SMALL_LLAMA, "hidden_size": "wide"}, "transformers cannot build a 'llama' from it: "),
    ],
)
def test_a_wrong_hugging_face_config_is_bad_input(
    document: dict[str, object], message: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert main(["inspect", str(tmp_path / "config.json")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 2


def test_a_trainer_config_in_json_is_still_a_trainer_config(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text('{"model": {"n_layers": 2}}')
    assert main(["inspect", str(tmp_path / "config.json")]) == 0
    assert "blocks.{0,1}.attn.qkv.weight" in capsys.readouterr().out


def test_a_thousand_params_take_less_than_two_seconds() -> None:
    """The work beyond imports; benchmarks/inspect_time.py measures the command as a whole."""
    with torch.device("meta"):
        module = Deep(120, width=256)
    seconds = []
    for _ in range(3):
        started = time.process_time()
        plan = plan_for(module, TrainConfig(), [], 8)
        rows = rows_of(plan, TrainConfig())
        seconds.append(time.process_time() - started)
    assert len(rows) == 1081
    assert min(seconds) < 2.0


def test_results_go_to_stdout_and_the_rest_to_stderr() -> None:
    done = layerwise("inspect", f"{HERE}:deep", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["world"] == 2
    assert done.stderr == "importing torch\nbuilding\n"


def test_building_a_model_of_shapes_does_not_import_the_compiler() -> None:
    """torch imports it to draw random values for tensors that have none, and that takes seconds."""
    code = f"import sys; from layerwise.cli.main import main; main(['inspect', '{HERE}:deep']); sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


class Followed(nn.Module):
    """A gate and what it gates in one projection, under a name that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(gate.sigmoid() * up)

    def example_inputs(self) -> torch.Tensor:
        return torch.zeros(2, 3, 8)


def test_trace_shows_what_the_forward_says_and_the_rules_that_mend_routing(capsys: Captured, tmp_path: Path) -> None:
    assert main(["inspect", f"{HERE}:Followed", "--trace", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["fqn"], row["routing"], row["matrices"]) for row in found["params"]] == [
        ("up.weight", "differs", [[8, 8], [8, 8]]),
        ("down.weight", "agrees", [[8, 8]]),
    ]
    rules = tmp_path / "rules.toml"
    rules.write_text(found["rules"])
    assert main(["inspect", f"{HERE}:Followed", "--rules", str(rules), "--explain", "up.weight", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matrices"] == [[8, 8], [8, 8]]


def test_a_recorded_routing_is_what_inspect_goes_by(capsys: Captured, tmp_path: Path) -> None:
    path = str(tmp_path / "routing.json")
    assert main(["inspect", f"{HERE}:Followed", "--trace", "--record", path, "--json"]) == 0
    capsys.readouterr()
    assert main(["inspect", f"{HERE}:Followed", "--routing.recorded", path, "--json"]) == 0
    rows = {row["fqn"]: row for row in json.loads(capsys.readouterr().out)["params"]}
    assert rows["up.weight"]["matrices"] == [[8, 8], [8, 8]]
    assert main(["inspect", f"{HERE}:deep", "--routing.recorded", path]) == 2
    assert "is not of this model" in capsys.readouterr().err


def test_a_module_without_inputs_cannot_be_followed(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:FusedByName", "--trace"]) == 2
    assert "has no example_inputs()" in capsys.readouterr().err


def test_a_refusal_comes_with_rules_to_paste(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:FusedByName"]) == 2
    assert '[[rule]]\npattern = "qkv.weight"\nto = "matrix"\nsplit = "whole"' in capsys.readouterr().err


def test_piped_lines_stay_short_and_places_are_on_request(capsys: Captured) -> None:
    assert main(["inspect", f"{HERE}:deep", "--world", "64"]) == 0
    plain = capsys.readouterr().out
    assert max(map(len, plain.splitlines())) < 200
    assert "bucket" not in plain.splitlines()[-12]
    assert main(["inspect", f"{HERE}:deep", "--places"]) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("param"))
    assert header.split() == ["param", "shape", "route", "matrices", "size", "home", "bucket", "why"]
