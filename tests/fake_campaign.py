"""A run in a process of its own, for tests that kill it: `python tests/fake_campaign.py RUN JSON-CELLS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from artifact.cli import VERBS, main
from artifact.profiles import Profile
from artifact.records import Cell, Run

PROFILE = Profile("embedded", "none", "cpu", "float32", None, 1)


@click.command("fake")
def fake() -> int:
    """Measure the given cells and print how many rows they have."""
    with Run(Path(sys.argv[1]), PROFILE) as run:
        run.start_claim("fake", Path(__file__))
        print(len(run.measure([Cell("fake", **cell) for cell in json.loads(sys.argv[2])])))
    return 0


if __name__ == "__main__":
    VERBS["fake"] = ("fake_campaign:fake", "")
    raise SystemExit(main(["fake"]))
