"""The job files: run with the cluster's own commands replaced by ones that say what they were asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from benchmarks.tables import ROOT
from layerwise.cli.main import main

FOLDER = ROOT / "examples" / "launch"
TELL = f"#!{sys.executable}\nimport json, pathlib, sys\nprint(json.dumps([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]))\n"
PASS_ON = '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n'
COMMANDS = {
    "scontrol": "#!/bin/bash\nprintf 'node0\\nnode1\\n'\n",
    "srun": PASS_ON,
    "layerwise": TELL,
    "torchrun": TELL,
}


def calls_of(script: list[str], folder: Path, **environment: str) -> list[list[str]]:
    """What a script would have called, in order."""
    for name, text in COMMANDS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    found = subprocess.run(
        script,
        env={"PATH": f"{folder}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def slurm_calls(folder: Path) -> list[list[str]]:
    job = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "64"}
    return calls_of(["bash", str(FOLDER / "slurm.sh")], folder, **job)


def kubernetes_calls(folder: Path) -> list[list[str]]:
    _, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return calls_of([*container["command"], *container["args"]], folder, JOB_COMPLETION_INDEX="1")


@pytest.mark.parametrize("calls", [slurm_calls, kubernetes_calls])
def test_a_job_asks_the_doctor_and_then_starts_the_trainer_on_all_nodes(
    calls: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(calls)
    doctor, torchrun = calls(tmp_path)
    assert doctor == ["layerwise", "doctor"]
    words = get_args_parser().parse_args(torchrun[1:])
    assert (torchrun[0], words.nnodes, words.nproc_per_node) == ("torchrun", "2", "8")
    assert (words.module, words.training_script) == (True, "layerwise")
    assert "node0:29500" in words.rdzv_endpoint or (words.master_addr, words.node_rank) == ("layerwise-0.layerwise", 1)
    assert main([*words.training_script_args, "--dry-run"]) == 0
    assert "out_dir" in capsys.readouterr().out


def test_the_kubernetes_job_hangs_together() -> None:
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_page_quotes_what_the_doctor_says() -> None:
    section = (ROOT / "docs" / "launching.md").read_text().split("## When a node is wrong")[1]
    quoted = [
        text for line in section.splitlines() if line.startswith("| `") for text in re.findall(r'"([^"]+)"', line)
    ]
    source = (ROOT / "src" / "layerwise" / "cli" / "doctor.py").read_text()
    said = [text for text in quoted if "=" not in text and text != "cuda"]
    assert len(said) >= 3
    assert [text for text in said if text not in source] == []
