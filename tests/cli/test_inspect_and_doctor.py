"""`inspect` of the trainer's own model, and `doctor`. Other models are in test_inspect_models.py."""

import json
import sys
from collections.abc import Sequence
from unittest import mock

import pytest

from layerwise.cli import doctor
from layerwise.cli.doctor import Finding
from layerwise.cli.exits import BAD_INPUT, OK
from layerwise.cli.main import main

SMALL = (
    "--model.d-model",
    "32",
    "--model.n-layers",
    "1",
    "--model.n-heads",
    "2",
    "--model.n-kv-heads",
    "1",
    "--model.seq-len",
    "16",
)


PARAM_KEYS = [
    *(
        "fqn",
        "aliases",
        "shape",
        "dtype",
        "recipe",
        "family",
        "rule",
        "options",
        "reason",
        "matrices",
        "homes",
        "bucket",
        "bytes",
    ),
]


def test_inspect_shows_every_param_with_route_reason_home_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *SMALL, "--world", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plan ")
    assert "over 3 ranks, layout " in lines[0]
    row = next(line for line in lines if line.startswith("blocks.0.attn.qkv.weight"))
    for piece in (
        "64x32",
        "muon",
        "32x32, 2 of 16x32",
        "8.0 KiB",
        "is the weight of a Linear, in row blocks of 32, 16, 16",
    ):
        assert piece in row
    assert "adamw" in next(line for line in lines if line.startswith("head.weight"))
    assert all(line == line.rstrip() for line in lines)


def test_inspect_as_json_holds_the_same_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *SMALL, "--json", "--layout", "replicated", "--optim.rule", "normuon"]) == 0
    found = json.loads(capsys.readouterr().out)
    row = next(row for row in found["params"] if row["fqn"] == "blocks.0.mlp.gate_up.weight")
    assert row["rule"] == "normuon"
    assert row["matrices"] == [[96, 32], [96, 32]]
    assert row["homes"] == ["all", "all"]
    assert list(row) == PARAM_KEYS
    assert list(found) == ["digest", "world", "layout", "params", "totals", "plan"]
    assert found["layout"] == "replicated"
    assert {bucket["layout"] for bucket in found["plan"]["buckets"]} == {"replicated"}
    assert len(found["digest"]) == 64


CODES = ("--train.precision", "bf16", "--precision.param-gather", "mxfp8")


@pytest.mark.parametrize("precision", [(), CODES])
def test_inspect_plans_what_training_uses(precision: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    from layerwise.comm import joining
    from layerwise.config.load import load, split_overrides
    from layerwise.train.loop import prepare

    words = [*SMALL, *precision, "--parallel.bucket-mib", "0.01", "--model.tie-embeddings", "true"]
    assert main(["inspect", *words, "--world", "1", "--json"]) == 0
    digest = json.loads(capsys.readouterr().out)["digest"]
    run = prepare(load(None, split_overrides(words)[0]).config, joining.init(device="cpu"))
    assert run.model.plan.digest == digest


def test_inspect_counts_codes_where_weights_are_kept_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *SMALL, *CODES, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["fqn"]: row for row in found["params"]}
    qkv, embed = rows["blocks.0.attn.qkv.weight"], rows["embed.weight"]
    assert (qkv["recipe"], qkv["dtype"], qkv["bytes"]) == ("mxfp8", "bf16", 2 * 64 * 32 + 2 * 64)
    assert (embed["recipe"], embed["bytes"]) == ("", 2 * 256 * 32)
    assert found["totals"]["bytes"] == sum(row["bytes"] for row in found["params"])
    assert main(["inspect", *SMALL, *CODES]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("blocks.0.attn.qkv.weight"))
    assert "4.1 KiB" in row


def test_explain_lists_the_rules_that_were_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *SMALL, "--explain", "head.weight"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "the first that matches decides" in lines[0]
    assert "matched: is an output head" in lines[-2]
    assert lines[-1].startswith("-> other: is an output head")
    assert sum("matched" in line for line in lines) == 1


def test_explain_of_an_unknown_name_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *SMALL, "--explain", "blocks.0.attn.qkv.wieght"]) == 2
    assert "Did you mean 'blocks.0.attn.qkv.weight'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--parallel.fsdp", "2", "--world", "4"), "parallel.fsdp: expected fsdp=2 ranks, which is 2, got 4."),
        (("--parallel.ep", "2", "--model.n-experts", "4", "--world", "3"), "parallel.ep: expected a multiple of ep=2"),
        (("--parallel.ep", "2", "--model.n-experts", "4", "--record", "x"), "--record: is for a whole model, and with"),
        (("--record", ""), "--record: is empty: expected a file to write"),
    ],
)
def test_inspect_refuses_ranks_that_training_would_refuse(
    words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *SMALL, *words]) == BAD_INPUT
    assert said in capsys.readouterr().err


def test_inspect_without_a_number_of_ranks_takes_those_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    for words, world in (((), 2), (("--parallel.fsdp", "4"), 4), (("--parallel.ep", "4", "--model.n-experts", "4"), 4)):
        assert main(["inspect", *SMALL, *words, "--json"]) == OK
        assert json.loads(capsys.readouterr().out)["world"] == world


def test_inspect_takes_a_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *SMALL, "--world", "1024"]) == 0
    assert "over 1024 ranks" in capsys.readouterr().out


@pytest.mark.slow
def test_doctor_finds_a_healthy_machine_and_runs_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    by_name = {finding["what"]: finding for finding in found["findings"]}
    assert by_name["self test"]["status"] == "ok", by_name["self test"]
    assert (code, found["healthy"]) == (0, True)
    assert by_name["torch"]["status"] == "ok"
    assert {"layerwise", "python", "tyro", "rich", "gloo", "cuda", "nccl", "products", "triton", "transformers"} <= set(
        by_name
    )


def test_doctor_prints_a_block_to_copy_and_fails_as_environment(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("torch", "ok", "1"), Finding("gloo", "FAILED", "this torch has no gloo")]
    with mock.patch.object(doctor, "collect", return_value=findings):
        assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert out.count("```") == 2
    assert "FAILED" in out
    assert "does not work" in out


def test_a_missing_optional_part_says_how_to_get_it() -> None:
    with mock.patch.dict(sys.modules, {"triton": None}):
        found = doctor._package("triton", needed=False)
    assert (found.status, "pip install triton" in found.detail) == ("missing", True)


def test_a_rank_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/no/such/place")
    monkeypatch.chdir("/")
    with mock.patch.object(doctor, "sys", mock.Mock(executable="/bin/false")):
        found = doctor.self_test()
    assert (found.status, found.detail) == ("FAILED", "rank 0: exit code 1")
