"""The launch examples: they parse, and they call the command with options that it has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from artifact import claim as claims
from artifact.verbs import campaign

FOLDER = Path(__file__).resolve().parent.parent / "examples"
SLURM, KUBERNETES = FOLDER / "slurm.sh", FOLDER / "kubernetes.yaml"


def checked(line: str) -> None:
    """A command line of the campaign verb names options and claims that exist."""
    words = line.split()
    known = {option for parameter in campaign.command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    assert "--executor ray" in line and "--run" in words


def test_the_slurm_script_parses_and_runs_the_campaign() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text()
    checked(re.search(r"artifact campaign (.*)$", text, re.M)[1])  # type: ignore[index]
    assert set(re.search(r"CLAIMS:-([\w ]+)", text)[1].split()) <= set(claims.names())  # type: ignore[index]
    assert subprocess.run(["bash", str(SLURM)], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"},
                          check=False).returncode != 0  # fmt: skip


def test_the_kubernetes_job_runs_the_campaign_and_its_head_measures_nothing() -> None:
    job = yaml.safe_load(KUBERNETES.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    line = job["spec"]["entrypoint"].removeprefix("artifact campaign ")
    checked(line)
    assert set(line.split(" --")[0].split()) <= set(claims.names())
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (workers,) = cluster["workerGroupSpecs"]
    container = workers["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["volumeMounts"][0]["mountPath"] == "/results"
    lock = (FOLDER.parent / "requirements" / "ray.txt").read_text()
    assert f"ray=={cluster['rayVersion']} " in lock


@pytest.mark.parametrize("file", [SLURM, KUBERNETES], ids=lambda file: file.name)
def test_no_example_names_a_machine_of_ours(file: Path) -> None:
    assert not re.search(r"/(root|home|work)/|\d+\.\d+\.\d+\.\d+", file.read_text())
