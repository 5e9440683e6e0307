"""`layerwise ckpt`, and a run that the same command continues."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import layerwise as library
from layerwise.checkpoint.weights import import_weights
from layerwise.cli.exits import BAD_INPUT, FAILED, OK
from layerwise.cli.main import main
from layerwise.errors import CheckpointError
from tests.cli.test_train import SMALL, kinds_in

CHECKPOINTED = (*SMALL, "--checkpoint.every", "2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of six steps in it."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("to be, or not to be, that is the question\n" * 200)
    words = ("--data.path", str(folder / "text.txt"), "--train.out-dir", str(folder / "run"))
    assert main(["train", *CHECKPOINTED, *words]) == OK
    return folder


def lines_of(words: list[str], capsys: pytest.CaptureFixture[str], code: int = OK) -> list[str]:
    capsys.readouterr()
    assert main(["ckpt", *words]) == code
    shown = capsys.readouterr()
    return (shown.out + shown.err).splitlines()


def test_ls_inspect_verify_and_diff(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "run" / "checkpoints"
    last = str(folder / "step_00000006")
    (folder / "step_00000099.partial").mkdir(exist_ok=True)
    listed = lines_of(["ls", str(folder)], capsys)
    assert listed[0] == f"4 in {folder}"
    assert [line.split()[0] for line in listed[2:]] == [
        "step_00000002",
        "step_00000004",
        "step_00000006",
        "step_00000099.partial",
    ]
    assert "weights and optimizer" in listed[2]
    assert "not whole" in listed[5]
    assert "beside it: config, progress" in lines_of(["inspect", last], capsys)
    (said,) = lines_of(["inspect", last, "--json"], capsys)
    facts = json.loads(said)
    assert facts["about"]["step"] == 6
    assert facts["entries"]["optimizer.state.blocks.0.attn.qkv.weight.momentum"]["dtype"] == "float32"
    assert lines_of(["verify", last], capsys)[0].startswith(f"{last} is whole: step 6, 2 files, ")
    assert lines_of(["diff", last, last], capsys) == ["all tensors are equal, bit for bit."]
    differ = lines_of(["diff", last, str(folder / "step_00000004")], capsys, FAILED)
    assert any("model.blocks.0.attn.qkv.weight" in line and "elements, by at most" in line for line in differ)


def test_a_damaged_checkpoint_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, copy = run / "run" / "checkpoints" / "step_00000006", tmp_path / "copy"
    copy.mkdir()
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "__0_0.distcp").write_bytes(data)
    said = lines_of(["verify", str(copy)], capsys, FAILED)
    damage = f"__0_0.distcp has other bytes than were written, from 0 to {len(data)}"
    assert said == [f"{copy} is damaged:", f"  {damage}"]
    said = lines_of(["export", str(copy), "--to", str(tmp_path / "out.safetensors")], capsys, FAILED)
    assert damage in " ".join(said)
    assert not list(tmp_path.glob("out*"))


def test_weights_go_out_as_safetensors_and_come_in_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    source = str(run / "run" / "checkpoints" / "step_00000006")
    target, back = str(tmp_path / "model.safetensors"), str(tmp_path / "back")
    lines_of(["export", source, "--to", target], capsys)
    weights = safetensors.load_file(target)
    assert weights["blocks.0.attn.qkv.weight"].shape == (64, 32)
    assert lines_of(["import", target, "--to", back], capsys) == [f"{len(weights)} tensors written to {back}."]
    again, once_more = str(tmp_path / "again.safetensors"), str(tmp_path / "once_more")
    for action, path, to in (("export", source, again), ("import", target, once_more)):
        (said,) = lines_of([action, path, "--to", to, "--json"], capsys)
        assert json.loads(said) == {"path": to, "tensors": len(weights)}
    differ = json.loads(lines_of(["diff", source, back, "--json"], capsys, FAILED)[0])
    assert all(row["tensor"].startswith(("optimizer.", "rng.")) for row in differ)


def twice(folder: Path) -> list[Path]:
    """The same state under two names."""
    shutil.copy(folder / "muon.pt", folder / "again.pt")
    return [folder / "again.pt", folder / "muon.pt"]


def test_state_of_torchs_own_optimizers_comes_in(tmp_path: Path) -> None:
    """After it one step is theirs: both Muons keep a moving average, and in fp32 the two agree."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch.manual_seed(0)

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4, bias=False))

    theirs, x = build(), torch.randn(5, 6)
    named = dict(theirs.named_parameters())
    matrices = [(name, named[name]) for name in ("0.weight", "2.weight")]
    others = [(name, named[name]) for name in ("1.weight", "1.bias")]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)

    def step() -> None:
        theirs(x).square().sum().backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()

    named["1.bias"].requires_grad_(False)
    step()
    named["1.bias"].requires_grad_(True)  # AdamW corrects for its first steps from here
    for _ in range(2):
        step()
    safetensors.save_file(dict(theirs.state_dict()), tmp_path / "weights.safetensors")
    torch.save(muon.state_dict(), tmp_path / "muon.pt")
    torch.save(adamw.state_dict(), tmp_path / "adamw.pt")
    files = [str(tmp_path / name) for name in ("weights.safetensors", "muon.pt", "adamw.pt")]
    assert main(["ckpt", "import", *files, "--to", str(tmp_path / "came")]) == OK
    with pytest.raises(CheckpointError, match=r"muon.pt has state of '0.weight', and so has .*again.pt: expected one"):
        import_weights(tmp_path / "weights.safetensors", [*twice(tmp_path)], tmp_path / "never")
    ours = build()
    optimizer = library.Optimizer(
        ours,
        matrix=library.Muon(lr=0.02, coefficients="simple", scale="rms"),
        other=library.AdamW(lr=0.01),
        rules=[library.RouteRule(pattern="2.weight", to="matrix")],
    )
    assert library.load(tmp_path / "came", ours, optimizer).step == 3
    for name, param in ours.named_parameters():
        assert torch.equal(param, theirs.state_dict()[name])
    state = optimizer.state[ours[0].weight]["momentum"]
    assert torch.equal(state, muon.state[named["0.weight"]]["momentum_buffer"])
    step()
    ours(x).square().sum().backward()
    optimizer.step()
    for name, param in ours.named_parameters():
        torch.testing.assert_close(
            param, theirs.state_dict()[name], rtol=0, atol=5e-4
        )  # bf16 Newton-Schulz, whose update is ten times that


def test_what_cannot_be_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(["diff", "a"], capsys, BAD_INPUT) == ["ckpt diff takes 2 paths, got 1."]
    assert lines_of(["export", "a"], capsys, BAD_INPUT) == ["ckpt export needs --to, where the result goes."]
    said = lines_of(["verify", str(tmp_path)], capsys, FAILED)
    assert said == [f"{tmp_path} holds no manifest.json: expected a checkpoint that was written whole."]
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 32)
    said = lines_of(["import", str(tmp_path / "bad.safetensors"), "--to", str(tmp_path / "x")], capsys, FAILED)
    assert "is no safetensors file" in said[0]
    safetensors = pytest.importorskip("safetensors.torch")
    weights, states = (
        tmp_path / "weights.safetensors",
        [tmp_path / name for name in ("bytes.pt", "empty.pt", "module.pt", "text.pt")],
    )
    safetensors.save_file({"weight": torch.ones(2, 2)}, weights)
    states[0].write_bytes(b"\xff" * 32)
    states[1].touch()
    torch.save(nn.Linear(2, 2), states[2])
    states[3].write_text("a = [\n")
    for state in states:
        said = lines_of(["import", str(weights), str(state), "--to", str(tmp_path / "x")], capsys, FAILED)
        assert len(said) == 1
        assert f"{state} is no state dict of a torch optimizer" in said[0]
    assert not (tmp_path / "x").exists()


TAKES = {
    "ls": "a folder with checkpoints in it",
    **dict.fromkeys(("inspect", "verify", "export"), "a checkpoint"),
    "diff": "two checkpoints",
    "import": "a safetensors file, and state dicts of torch's optimizers",
}


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize("action", ["ls", "inspect", "verify", "diff", "diff with", "export", "import", "import with"])
def test_a_path_that_is_not_there_is_bad_input_whatever_was_to_be_done_with_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str, more: list[str]
) -> None:
    """One line on stderr and nothing on stdout, also where JSON was asked for, as with a model that `inspect` does not find."""
    action, _, second = action.partition(" ")
    there = str(run / "run" / "checkpoints" / "step_00000006")
    missing, target = (
        str(tmp_path / "no" / "such"),
        ["--to", str(tmp_path / "x")] if action in ("export", "import") else [],
    )
    paths = [there, missing] if second else [missing, there] if action == "diff" else [missing]
    capsys.readouterr()
    assert main(["ckpt", action, *paths, *target, *more]) == BAD_INPUT
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"{missing}: there is no such file or folder. ckpt {action} takes {TAKES[action]}.\n"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("action", ["ls", "inspect", "verify", "diff", "export"])
def test_a_file_in_place_of_a_folder_is_bad_input(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    (tmp_path / "file").touch()
    there, file = str(run / "run" / "checkpoints" / "step_00000006"), str(tmp_path / "file")
    target = ["--to", str(tmp_path / "x")] if action == "export" else []
    (said,) = lines_of([action, *([there] if action == "diff" else []), file, *target], capsys, BAD_INPUT)
    assert said == f"{file}: not a folder. ckpt {action} takes {TAKES[action]}."


def test_where_nothing_can_go_is_bad_input(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, none = str(run / "run" / "checkpoints" / "step_00000006"), tmp_path / "no"
    (said,) = lines_of(["export", there, "--to", str(tmp_path)], capsys, BAD_INPUT)
    assert said == f"--to {tmp_path}: is a folder. ckpt export writes a file, such as model.safetensors."
    (said,) = lines_of(["export", there, "--to", str(none / "x.safetensors")], capsys, BAD_INPUT)
    assert said == f"--to {none / 'x.safetensors'}: there is no folder {none} to put it into."
    (said,) = lines_of(["inspect", there, "--masters"], capsys, BAD_INPUT)
    assert said == "ckpt inspect takes no --masters."
    (said,) = lines_of(["ls", ""], capsys, BAD_INPUT)
    assert said == "'': there is no such file or folder. ckpt ls takes a folder with checkpoints in it."
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))


def test_a_folder_in_place_of_a_file_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (said,) = lines_of(["import", str(tmp_path), "--to", str(tmp_path / "x")], capsys, BAD_INPUT)
    assert said == f"{tmp_path}: not a file. ckpt import takes {TAKES['import']}."


def test_all_paths_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    (said,) = lines_of(["diff", one, two], capsys, BAD_INPUT)
    assert said == f"{one}, {two}: there is no such file or folder. ckpt diff takes two checkpoints."


def test_a_run_that_cannot_go_on_leaves_its_config_as_it_was(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--data.path", str(run / "text.txt"), "--train.out-dir", str(run / "run"))
    before = (run / "run" / "config.json").read_bytes()
    for more, said in (
        (("--data.seed", "5", "--train.steps", "8"), "the checkpoint is of a run on other samples"),
        (("--train.steps", "4", "--schedule.warmup-steps", "1"), "the checkpoint is of step 6, past train.steps=4"),
        (("--model.n-layers", "3", "--train.steps", "8"), "the checkpoint does not fit the model"),
    ):
        capsys.readouterr()
        assert main(["train", *CHECKPOINTED, *words, *more]) == BAD_INPUT
        assert said in capsys.readouterr().err
        assert (run / "run" / "config.json").read_bytes() == before


def test_the_same_command_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--data.path", str(run / "text.txt"), "--train.out-dir", str(run / "run"), "--train.steps", "8")
    capsys.readouterr()
    assert main(["train", *CHECKPOINTED, *words]) == OK
    shown = capsys.readouterr().out
    assert "going on from the checkpoint of step 6" in shown
    assert "finished: 8 steps, 256 tokens" in shown
    assert not (run / "run-2").exists()
    assert json.loads((run / "run" / "config.json").read_text())["train"]["steps"] == 8
    metrics = run / "run" / "metrics.jsonl"
    assert kinds_in(metrics) == ["run", "eval", "step", "step", "step", "eval", "run", "step", "eval", "end"]
    assert (run / "run" / "checkpoints" / "latest").read_text() == "step_00000008\n"
