"""A folder of checkpoints: what was left behind by those who were killed goes with the next save."""

from __future__ import annotations

from pathlib import Path

from torch import nn

import layerwise


def test_what_was_not_finished_goes_and_nothing_else(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    for name in ("step_00000001.partial", "step_00000002.partial", "mine.partial", "step_1.partial", "step_00000007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "step_00000003.partial").touch()
    for keep in (3, None):
        layerwise.Checkpoints(tmp_path, keep=keep).save(model, optimizer, step=2 if keep else 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "mine.partial",
        "step_00000002",
        "step_00000003.partial",
        "step_00000004",
        "step_00000007",
        "step_1.partial",
    ]
