"""Rates that users copy fit the scale that stands beside them: in README, docs, examples, configs and docstrings.

The range of each scale is a table of docs/learning_rate.md. It holds for `lr * extra_scale`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.tables import ROOT, pages
from layerwise.config.rules import AdaMuon, Muon, NorMuon, Scale
from layerwise.config.schema import OptimConfig

RULES = tuple(rule.__name__ for rule in (Muon, NorMuon, AdaMuon))
FILES = [
    *pages(),
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted(path for folder in ("configs", "src") for path in (ROOT / folder).rglob("*.toml")),
]


@dataclass(frozen=True)
class Rate:
    """A learning rate of matrices together with the scale that applies to it."""

    lr: float
    scale: str = Muon.scale
    extra_scale: float = Muon.extra_scale


def ranges() -> dict[str, tuple[float, float]]:
    """Lowest and highest usual rate of each scale, from the table of docs/learning_rate.md."""
    text = (ROOT / "docs" / "learning_rate.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|$", text, flags=re.MULTILINE)
    return {scale: (float(low), float(high)) for scale, low, high in rows}


def numbers(value: ast.expr, code: ast.AST) -> Iterator[float]:
    """Numbers that an expression of `code` stands for: a literal, a name with its assignments and defaults, or `args.NAME`."""
    match value:
        case ast.Constant(value=int() | float() as number):
            yield float(number)
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            for element in elements:
                yield from numbers(element, code)
        case ast.Name(id=name):
            yield from (number for origin in origins(name, code) for number in numbers(origin, code))
        case ast.Attribute(value=ast.Name(id="args"), attr=name):
            for node in ast.walk(code):
                match node:
                    case ast.Call(args=[ast.Constant(value=flag), *_], keywords=keywords) if flag == f"--{name}":
                        yield from (n for word in keywords if word.arg == "default" for n in numbers(word.value, code))


def origins(name: str, code: ast.AST) -> Iterator[ast.expr]:
    """Expressions that a name takes its value from: assignments, loops and defaults of arguments."""
    for node in ast.walk(code):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                yield value
            case ast.For(target=ast.Name(id=target), iter=value) if target == name:
                yield value
            case ast.arguments(args=args, defaults=defaults):
                with_defaults = zip(args[len(args) - len(defaults) :], defaults, strict=True)
                yield from (default for arg, default in with_defaults if arg.arg == name)


def rates_of_call(call: ast.Call, code: ast.AST) -> Iterator[Rate]:
    options = {word.arg: word.value for word in call.keywords}
    scale = options.get("scale", ast.Constant(value=Muon.scale))
    extra = options.get("extra_scale", ast.Constant(value=Muon.extra_scale))
    if "lr" in options and isinstance(scale, ast.Constant) and isinstance(extra, ast.Constant):
        yield from (Rate(lr, str(scale.value), float(extra.value)) for lr in numbers(options["lr"], code))  # type: ignore[arg-type]


def rates_in_python(text: str) -> Iterator[Rate]:
    """Rates of all calls of a matrix rule of layerwise."""
    code = ast.parse(text)
    for node in ast.walk(code):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="layerwise"), attr=name) | ast.Name(id=name)):
                if name in RULES:
                    yield from rates_of_call(node, code)


def rates_in_prose(text: str) -> Iterator[Rate]:
    """Rates of calls in differences, docstrings and inline code, which are no whole programs."""
    for match in re.finditer(rf"layerwise\.(?:{'|'.join(RULES)})\([^()]*(?:\([^()]*\)[^()]*)*\)", text):
        call = re.sub(r"^[+ ]", "", match.group(), flags=re.MULTILINE)
        try:
            expression = ast.parse(call, mode="eval").body
        except SyntaxError:  # `Muon(groups, ...)` of a sentence
            continue
        assert isinstance(expression, ast.Call)
        yield from rates_of_call(expression, expression)


def rates_of_settings(optim: dict[str, Any]) -> Iterator[Rate]:
    """Rates of the trainer's `[optim]`, written in a file or as flags."""
    if "lr" in optim and optim.get("rule") != "adamw":
        extra = float(optim.get("extra_scale", OptimConfig().extra_scale))
        yield Rate(float(optim["lr"]), optim.get("scale", OptimConfig().scale), extra)


def rates_in_flags(text: str) -> Iterator[Rate]:
    for line in text.splitlines():
        flags = re.findall(r"--optim\.([\w-]+)[ =]([\w.+-]+)", line)
        yield from rates_of_settings({name.replace("-", "_"): value.rstrip(".") for name, value in flags})


def rates_in(path: Path, text: str) -> Iterator[Rate]:
    if path.suffix == ".toml":
        yield from rates_of_settings(tomllib.loads(text).get("optim", {}))
    elif path.suffix == ".py":
        yield from rates_in_python(text)
        yield from rates_in_prose("\n".join(strings_of(text)))
    else:
        fences = re.compile(r"```(python|toml)\n(.*?)```", flags=re.DOTALL)
        for language, block in fences.findall(text):
            yield from rates_in_python(block) if language == "python" else rates_in(Path("block.toml"), block)
        yield from rates_in_prose(fences.sub("", text))
    yield from rates_in_flags(text)


def strings_of(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def wrong(rates: Sequence[Rate]) -> list[Rate]:
    """Rates outside of the range of their scale; a rate of 0 is none."""
    known = ranges()
    return [
        rate
        for rate in rates
        if rate.lr and not known[rate.scale][0] <= rate.lr * rate.extra_scale <= known[rate.scale][1]
    ]


def test_every_scale_has_a_range() -> None:
    assert sorted(ranges()) == sorted(get_args(Scale))


def test_no_example_has_a_rate_that_its_scale_makes_wrong() -> None:
    found = {str(path.relative_to(ROOT)): list(rates_in(path, path.read_text())) for path in FILES}
    assert {name: bad for name, rates in found.items() if (bad := wrong(rates))} == {}
    # Each kind of file was read: prose and blocks, a sweep in a loop, a default of argparse, a config.
    for name in ("docs/from_muon.md", "docs/learning_rate.md", "examples/fsdp2/train.py"):
        assert found[name], name
    assert any(rates for name, rates in found.items() if name.endswith(".toml"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "```python\noptimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=2e-2))\n```"),
        ("page.md", "```python\nfor lr in (1e-3, 0.05):\n    layerwise.NorMuon(lr=lr)\n```"),
        ("page.md", "```diff\n+    matrix=layerwise.Muon(\n+        lr=0.02, betas=(0.9, 0.95)\n+    ),\n```"),
        ("page.md", 'Take `layerwise.AdaMuon(lr=3e-4, scale="shape")`.'),
        ("page.md", "```toml\n[optim]\nlr = 0.02\n```"),
        ("page.md", "`layerwise train --optim.lr 0.02`"),
        ("page.md", "```console\n$ layerwise train --optim.scale=shape --optim.lr=3e-4\n```"),
        ("script.py", "parser.add_argument('--lr', type=float, default=0.03)\nlayerwise.Muon(lr=args.lr)"),
        ("script.py", "def rules(steps, lr=0.03):\n    return layerwise.Muon(lr=lr)"),
        ("script.py", '"""Try `layerwise.Muon(lr=0.02)`."""'),
        ("config.toml", "[optim]\nlr = 1e-3\nextra_scale = 100.0"),
    ],
)
def test_a_wrong_rate_is_found(name: str, text: str) -> None:
    assert wrong(list(rates_in(Path(name), text)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", '```python\nlayerwise.Muon(lr=0.02, scale="shape")\ntorch.optim.Muon(params, lr=0.02)\n```'),
        ("page.md", "`Muon(lr=0.02)` of somebody else, `layerwise.Muon(lr=...)`, `layerwise.AdamW(lr=0.5)`"),
        ("page.md", "`layerwise train --optim.scale shape --optim.lr 0.02`, `--optim.lr 0.01`."),
        ("config.toml", '[optim]\nrule = "adamw"\nlr = 0.02'),
    ],
)
def test_a_right_rate_is_not(name: str, text: str) -> None:
    assert wrong(list(rates_in(Path(name), text))) == []
