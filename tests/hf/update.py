"""Rewrites the golden tables: `python -m tests.hf.update`. Read the diff line by line before you commit it."""

from __future__ import annotations

from tests.hf.families import FAMILIES, build_family
from tests.hf.models import MODELS, build
from tests.hf.tables import GOLDEN, table_of


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        (GOLDEN / f"{name}.txt").write_text(table_of(build(name)))
        print(f"wrote {name}")
    for name in FAMILIES:
        (GOLDEN / f"{name}.txt").write_text(table_of(build_family(name)))
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
