import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from layerwise.cli.settings import load_settings
from layerwise.config.load import FIELD_TYPES, Loaded, dump_json, dump_toml, load, split_overrides
from layerwise.config.resolve import matrix_rule, other_rule, resolve_model
from layerwise.config.schema import SECTIONS, ModelConfig, OptimConfig, TrainConfig
from layerwise.config.validate import validate
from layerwise.errors import ConfigError


def load_flags(*words: str) -> Loaded:
    overrides, rest = split_overrides(words)
    assert rest == []
    return load(None, overrides)


def problems_of(path: Path | str | None, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(None if path is None else str(path), split_overrides(words)[0])
    return [str(problem) for problem in caught.value.problems]


def validated(*words: str) -> list[str]:
    return [str(problem) for problem in validate(load_flags(*words).config)]


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write_file(text: str, name: str = "run.toml") -> Path:
        file = tmp_path / name
        file.write_text(text)
        return file

    return write_file


def test_defaults_are_valid() -> None:
    assert load(None).config == TrainConfig()
    assert validate(TrainConfig()) == []


def test_every_setting_has_a_sentence() -> None:
    for section in SECTIONS.values():
        source = Path(__import__(section.__module__, fromlist=["x"]).__file__).read_text()
        body = source.split(f"class {section.__name__}:")[1].split("\n@dataclass")[0].split("\n\n\n")[0]
        for name in FIELD_TYPES[next(key for key, kind in SECTIONS.items() if kind is section)]:
            after = body.split(f"    {name}: ")[1].split("\n")[1]
            assert after.strip().startswith('"""'), f"{section.__name__}.{name} has no sentence under it"


def test_file_then_flags_and_each_value_knows_its_origin(write) -> None:  # type: ignore[no-untyped-def]
    file = write('[optim]\nlr = 1\nrule = "normuon"\n[model]\nhead_dim = "none"\nhidden = 64\n')
    loaded = load(str(file), split_overrides(["--optim.lr", "0.5", "--train.steps=7"])[0])
    assert loaded.config.optim.lr == 0.5
    assert loaded.config.optim.rule == "normuon"
    assert loaded.config.model.hidden == 64
    assert loaded.config.train.steps == 7
    assert loaded.origin_by_path == {
        "optim.lr": "flag",
        "optim.rule": "file",
        "model.head_dim": "file",
        "model.hidden": "file",
        "train.steps": "flag",
    }


@pytest.mark.parametrize(
    ("words", "section", "name", "value"),
    [
        (["--model.d-model", "64"], "model", "d_model", 64),
        (["--model.d_model=64"], "model", "d_model", 64),
        (["--model.head-dim", "none"], "model", "head_dim", None),
        (["--model.tie-embeddings", "True"], "model", "tie_embeddings", True),
        (["--model.tie-embeddings", "off"], "model", "tie_embeddings", False),
        (["--optim.betas", "0.8", "0.9"], "optim", "betas", (0.8, 0.9)),
        (["--optim.betas", "0.8,0.9"], "optim", "betas", (0.8, 0.9)),
        (["--optim.betas=0.8,0.9"], "optim", "betas", (0.8, 0.9)),
        (["--optim.clip-grad-norm", "none"], "optim", "clip_grad_norm", None),
        (["--optim.lr", "-1e-3"], "optim", "lr", -1e-3),
        (["--optim.scale", "none"], "optim", "scale", "none"),
        (["--data.path", ""], "data", "path", ""),
        (["--data.path=a=b"], "data", "path", "a=b"),
    ],
)
def test_flags_are_read_as_their_field_says(words: list[str], section: str, name: str, value: object) -> None:
    assert getattr(getattr(load_flags(*words).config, section), name) == value


def test_flags_leave_the_words_of_the_command_alone() -> None:
    words = ["train", "--optim.lr", "0.1", "run.toml", "--optim.betas", "0.8", "0.9", "--nproc", "2", "--train.steps"]
    overrides, rest = split_overrides(words)
    assert rest == ["train", "run.toml", "--nproc", "2"]
    assert [override.words for override in overrides] == [("0.1",), ("0.8", "0.9"), ()]


def test_a_flag_does_not_swallow_the_next_flag() -> None:
    overrides, rest = split_overrides(["--optim.lr", "--dry-run"])
    assert rest == ["--dry-run"]
    assert overrides[0].words == ()


def test_all_problems_of_file_and_flags_come_at_once(write) -> None:  # type: ignore[no-untyped-def]
    file = write(
        "speed = 3\n[modle]\nx = 1\n[model]\nd_modle = 3\nn_heads = '4'\ntie_embeddings = 1\nn_layers = 2.0\n"
        "[optim]\nrule = 'mouon'\nbetas = [0.9]\nlr = nan\nother_lr = 'fast'\n[train]\nprecision = 'fp64'\nsteps = true\n"
    )
    found = problems_of(
        file, "--train.stesp", "3", "--trian.steps", "3", "--train.seed", "x", "--optim.lr", "--zzz.y", "1"
    )
    assert found == [
        f"{file}: speed: unknown section. Known: checkpoint, data, model, optim, parallel, precision, routing, schedule, train.",
        f"{file}: modle: unknown section. Did you mean 'model'?",
        f"{file}: model.d_modle: unknown setting. Did you mean 'd_model'?",
        f"{file}: model.n_heads: expected an integer, got '4'.",
        f"{file}: model.tie_embeddings: expected true or false, got 1.",
        f"{file}: model.n_layers: expected an integer, got 2.0.",
        f"{file}: optim.rule: expected one of muon, normuon, adamuon, adamw, got 'mouon'. Did you mean 'muon'?",
        f"{file}: optim.betas: expected 2 numbers, got 1: [0.9].",
        f"{file}: optim.lr: expected a finite number, got nan.",
        f"{file}: optim.other_lr: expected a number, got 'fast'.",
        f"{file}: train.precision: expected one of fp32, bf16, got 'fp64'.",
        f"{file}: train.steps: expected an integer, got True.",
        "--train.stesp: unknown setting. Did you mean 'steps'?",
        "--trian.steps: unknown section 'trian'. Did you mean 'train'?",
        "--train.seed: expected an integer, got 'x'.",
        "--optim.lr: has no value: expected a number.",
        "--zzz.y: unknown section 'zzz'. Known: checkpoint, data, model, optim, parallel, precision, routing, schedule, train.",
    ]


def test_the_message_counts_and_numbers_the_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        load_flags("--train.stesp", "3", "--optim.lr", "inf")
    assert str(caught.value) == (
        "2 problems in the configuration:\n"
        "  1. --train.stesp: unknown setting. Did you mean 'steps'?\n"
        "  2. --optim.lr: expected a finite number, got 'inf'."
    ).replace("got 'inf'", "got inf")


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("[model\n", "run.toml", "is not valid TOML"),
        ("{", "run.json", "is not valid JSON"),
        ("[1, 2]", "run.json", "expected an object of sections, got [1, 2]."),
        ("model = 3", "run.toml", "model: expected a section of settings, got 3."),
        ("x = " + "[" * 5000, "run.toml", "is not valid TOML"),
        ("[" * 100_000, "run.json", "is not valid JSON"),
        ("[train]\nseed = " + "9" * 5000, "run.toml", "is not valid TOML"),
        ('{"optim": {"lr": ' + "9" * 400 + "}}", "run.json", "optim.lr: expected a finite number, got 999"),
    ],
)
def test_broken_files_are_one_problem_in_words(write, text: str, name: str, expected: str) -> None:  # type: ignore[no-untyped-def]
    found = problems_of(write(text, name))
    assert len(found) == 1
    assert expected in found[0]
    assert len(found[0]) < 500


def test_files_that_cannot_be_read_are_problems(tmp_path: Path) -> None:
    assert "there is no such file" in problems_of(tmp_path / "nowhere.toml")[0]
    assert "cannot be read as text" in problems_of(tmp_path)[0]
    assert "cannot be read as text" in problems_of("a\0b")[0]
    (tmp_path / "latin.toml").write_bytes(b"# \xff\xfe\n")
    assert "cannot be read as text" in problems_of(tmp_path / "latin.toml")[0]


def test_json_null_is_none(write) -> None:  # type: ignore[no-untyped-def]
    file = write(json.dumps({"optim": {"clip_grad_norm": None}}), "run.json")
    assert load(str(file)).config.optim.clip_grad_norm is None


@pytest.mark.parametrize("dump", ["json", "toml"])
def test_a_dump_loads_back_to_an_equal_config(write, dump: str) -> None:  # type: ignore[no-untyped-def]
    loaded = load_flags(
        *[
            "--model.head-dim",
            "10",
            "--optim.betas",
            "0.1",
            "0.2",
            "--optim.clip-grad-norm",
            "none",
            "--optim.eps",
            "1e-30",
        ],
        *["--data.path", 'qu"ote \\ \t \x7f \N{SNOWMAN}\U0001f600', "--train.deterministic", "true"],
    )
    text = dump_json(loaded.config) if dump == "json" else dump_toml(loaded)
    assert load(str(write(text, f"again.{dump}"))).config == loaded.config


def test_the_toml_dump_shows_where_values_come_from() -> None:
    lines = dump_toml(load_flags("--optim.lr", "0.5")).splitlines()
    assert "lr = 0.5                                 # flag" in lines
    assert "momentum = 0.95                          # default" in lines


# -- validation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model.n-kv-heads", "3"], "model.n_kv_heads: expected a divisor of n_heads=4, got 3"),
        (
            ["--model.n-heads", "3", "--model.n-kv-heads", "1"],
            "model.d_model: expected a multiple of n_heads=3, got 256",
        ),
        (["--model.d-model", "36", "--model.n-heads", "4"], "make heads of width 9: expected an even width"),
        (["--model.head-dim", "7"], "model.head_dim: expected an even number, got 7"),
        (["--model.d-model", "0"], "model.d_model: expected an integer from 1 to 1000000, got 0."),
        (["--model.vocab-size", "255"], "model.vocab_size: expected an integer from 256"),
        (
            ["--train.steps", "9" * 30],
            "train.steps: expected an integer from 1 to 1000000000, got a number of more than 20",
        ),
        (["--schedule.warmup-steps", "500"], "schedule.warmup_steps: expected fewer than train.steps=500, got 500"),
        (
            ["--schedule.kind", "wsd", "--schedule.decay-fraction", "1"],
            "schedule.decay_fraction: warm-up (20 steps) and decay (500 steps) do not fit into train.steps=500.",
        ),
        (
            ["--optim.betas", "0.9", "1"],
            "optim.betas: expected two numbers from 0 up to, but not including, 1, got [0.9, 1.0]",
        ),
        (["--optim.momentum", "1"], "optim.momentum: expected a number from 0 up to, but not including, 1, got 1.0."),
        (["--optim.lr", "-1"], "optim.lr: expected a number that is not negative, got -1.0."),
        (["--optim.clip-grad-norm", "0"], "optim.clip_grad_norm: expected a number above 0, or none, got 0.0."),
        (
            ["--optim.coefficients", "quntic"],
            "optim.coefficients: coefficients 'quntic' is not a known set. Did you mean 'quintic'?",
        ),
        (["--optim.coefficients", "cubic5", "--optim.ns-steps", "4"], "got steps=4"),
        (["--optim.ns-steps", "0"], "optim.ns_steps: expected an integer from 1 to 100, got 0."),
        (["--data.val-fraction", "0"], "data.val_fraction: expected a number between 0 and 1, got 0.0."),
        (["--data.path", "/no/such/place"], "data.path: '/no/such/place' does not exist."),
        (["--data.path", "/dev/null"], "data.path: '/dev/null' is neither a file nor a folder."),
        (["--data.path", "a\0b"], "data.path:"),
        (["--train.out-dir", ""], "train.out_dir: is empty"),
        (["--train.out-dir", "a\0b"], "train.out_dir:"),
        (["--train.out-dir", "/dev/null/x"], "train.out_dir:"),
    ],
)
def test_each_mistake_is_named(words: list[str], expected: str) -> None:
    found = validated(*words)
    assert len(found) == 1, found
    assert expected in found[0]


def test_all_mistakes_come_at_once() -> None:
    found = validated(
        "--model.n-kv-heads", "3", "--optim.lr", "-1", "--data.path", "/no/such", "--train.batch-size", "0"
    )
    assert [text.split(":")[0] for text in found] == ["train.batch_size", "optim.lr", "model.n_kv_heads", "data.path"]


def test_text_must_be_long_enough_for_both_parts(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 300)
    found = validated("--data.path", str(tmp_path), "--model.seq-len", "256")
    assert "has 300 bytes: with val_fraction=0.05 both parts must hold at least seq_len + 1 = 257." in found[0]
    assert validated("--data.path", str(tmp_path), "--model.seq-len", "8", "--data.val-fraction", "0.1") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything; runs as any other user")
def test_unreadable_text_and_unwritable_folder_are_named(tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text("x" * 10_000)
    file.chmod(0)
    assert "cannot be read: permission denied" in validated("--data.path", str(file))[0]
    tmp_path.chmod(0o500)
    assert "cannot be written to: permission denied" in validated("--train.out-dir", str(tmp_path / "run"))[0]


def test_out_dir_must_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert "is a file: expected a folder" in validated("--train.out-dir", str(tmp_path / "taken"))[0]


@pytest.mark.parametrize("rule", ["muon", "normuon", "adamuon", "adamw"])
@pytest.mark.parametrize("other", ["adamw", "lion"])
def test_rules_get_the_numbers_of_the_config(rule: str, other: str) -> None:
    optim = OptimConfig(
        rule=rule, other_rule=other, lr=0.5, weight_decay=0.25, beta2=0.5, betas=(0.1, 0.2), other_lr=0.125
    )  # type: ignore[arg-type]
    matrix, rest = matrix_rule(optim), other_rule(optim)
    assert (matrix.kind, matrix.lr, matrix.weight_decay) == (rule, 0.5, 0.25)
    assert (rest.kind, rest.lr, rest.options()["betas"]) == (other, 0.125, (0.1, 0.2))
    if rule in ("normuon", "adamuon"):
        assert matrix.options()["beta2"] == 0.5


def test_resolved_model_has_nothing_left_open() -> None:
    shape = resolve_model(ModelConfig(d_model=96, n_heads=4))
    assert (shape.head_dim, shape.hidden) == (24, 256)


def test_a_file_of_rules_must_be_there(tmp_path: Path) -> None:
    missing, folder = str(tmp_path / "rules.toml"), str(tmp_path)
    assert validated("--routing.rules-file", missing) == [
        f"routing.rules_file: {missing!r} does not exist. Leave it empty to route by the defaults."
    ]
    assert validated("--routing.rules-file", folder) == [
        f"routing.rules_file: {folder!r} is not a file: expected TOML with [[rule]] tables."
    ]
    assert validated("--routing.rules-file", "a\0b")[0].startswith("routing.rules_file: 'a\\x00b' ")


@pytest.mark.parametrize("flag", ["--data.path", "--train.out-dir", "--routing.rules-file"])
def test_a_path_that_is_far_too_long_does_not_fill_the_screen(flag: str) -> None:
    (problem,) = validated(flag, "a" * 5000)
    assert len(problem) < 1000
    assert "aaa...aaa" in problem


def settings_problems(path: Path | str | None, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(None if path is None else str(path), split_overrides(words)[0])
    return [str(problem).removeprefix(f"{path}: ") for problem in caught.value.problems]


def test_misspelt_names_and_bad_values_are_reported_together(write: Callable[[str], Path]) -> None:
    file = write(
        "[model]\nn_layers = -4\nd_modl = 3\nn_heads = 4\nn_kv_heads = 3\n[optim]\nlr = 'fast'\nbetas = [2.0, 0.1]\n"
        "[trian]\nsteps = 3\n[schedule]\nwarmup_steps = 100000\n"
    )
    assert settings_problems(file, "--parallel.pp", "8", "--parallel.bucket-mib", "-1") == [
        "model.d_modl: unknown setting. Did you mean 'd_model'?",
        "optim.lr: expected a number, got 'fast'.",
        "trian: unknown section. Did you mean 'train'?",
        "model.n_layers: expected an integer from 1 to 10000, got -4.",
        "parallel.bucket_mib: expected a number above 0, or none, got -1.0.",
        "model.n_kv_heads: expected a divisor of n_heads=4, got 3: every key head serves the same number of query heads.",
        "optim.betas: expected two numbers from 0 up to, but not including, 1, got [2.0, 0.1].",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[schedule]\nwarmup_steps = 100000\n[train]\nstep = 200000\n", ()),
        ("[schedule]\nwarmup_steps = 100000\n[trian]\nsteps = 200000\n", ()),
        ("[schedule]\nwarmup_steps = 100000\n[train]\nsteps = '200000'\n", ()),
        ("[schedule]\nwarmup_steps = 100000\n", ("--train.stepz", "200000")),
        ("[schedule]\nwarmup_steps = 100000\n", ("--trane.steps", "200000")),
        ("this is no TOML", ("--schedule.warmup-steps", "100000")),
    ],
)
def test_what_depends_on_a_setting_in_doubt_is_no_problem_yet(
    write: Callable[[str], Path], text: str, words: tuple[str, ...]
) -> None:
    """Warm-up is longer than the default of train.steps, which is not what the user meant."""
    assert len(settings_problems(write(text), *words)) == 1
    assert any("warmup_steps" in problem for problem in validated("--schedule.warmup-steps", "100000"))
