"""ro-crate-metadata.json: the run folder as a Process Run Crate (profile 0.5 over RO-Crate 1.1).

One action per run: `artifact verify` made the samples and all that is derived from them, with the system record as its
environment. Every file of the folder is a data entity with its size and SHA-256.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

from artifact.report.stored import NotMade, Stored, sha256
from artifact.stats import Verdict

NAME = "ro-crate-metadata.json"
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
CONTEXT = ["https://w3id.org/ro/crate/1.1/context", "https://w3id.org/ro/terms/workflow-run/context"]
LICENSE = "https://spdx.org/licenses/Apache-2.0"
TYPES = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".tex": "application/x-tex",
    ".pdf": "application/pdf",
    ".png": "image/png",
    ".html": "text/html",
    ".xml": "application/xml",
    ".yml": "application/yaml",
    ".txt": "text/plain",
}
ASKED = ("run.json", "system.json")
DESCRIPTIONS = {
    "run.json": "what was asked: profile, model, quick or full, start time",
    "system.json": "the machine that ran",
    "samples.jsonl": "every raw sample, in checksummed groups",
    "results.json": "verdict, interval and acceptance region of every predicate",
    "report.html": "the results for reading",
    "junit.xml": "the verdicts as test results",
}
Entity = dict[str, Any]


def render(stored: Stored) -> str:
    """The metadata document. NotMade for a run of an older version that kept no start time."""
    if not stored.started:
        raise NotMade("run.json holds no start time, which a crate must state; make a new run")
    files = _files(stored.path)
    graph = [_descriptor(), _root(stored, files), _profile(), _tool(stored), _action(stored, files), _license()]
    graph += [_file(stored.path, name) for name in files]
    return json.dumps({"@context": CONTEXT, "@graph": graph}, indent=2, sort_keys=True) + "\n"


def _files(folder: Path) -> list[str]:
    """Files of a run in a fixed order: no hidden ones, not the crate itself, nothing that was put there by others."""
    patterns = (*DESCRIPTIONS, "*.intoto.json", "codecheck.yml", "tables/*.tex", "figures/*.p[dn][fg]")
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
    return list(dict.fromkeys(path.relative_to(folder).as_posix() for path in found))


def _descriptor() -> Entity:
    conforms = {"@id": "https://w3id.org/ro/crate/1.1"}
    return {"@id": NAME, "@type": "CreativeWork", "conformsTo": conforms, "about": {"@id": "./"}}


def _root(stored: Stored, files: list[str]) -> Entity:
    return {
        "@id": "./",
        "@type": "Dataset",
        "name": f"Sparse decoding artifact, profile {stored.profile.name}, {stored.started[:10]}",
        "description": f"Claims measured and judged on {stored.machine} with model {stored.profile.model}",
        "datePublished": stored.started,
        "license": {"@id": LICENSE},
        "conformsTo": {"@id": PROFILE},
        "hasPart": [{"@id": quote(name)} for name in files],
        "mentions": {"@id": _action_id(stored)},
    }


def _profile() -> Entity:
    return {"@id": PROFILE, "@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"}


def _license() -> Entity:
    return {"@id": LICENSE, "@type": "CreativeWork", "name": "Apache License 2.0"}


def _tool(stored: Stored) -> Entity:
    commit = stored.system.get("commit")
    return {
        "@id": "#artifact",
        "@type": "SoftwareApplication",
        "name": "Sparse decoding artifact",
        "softwareVersion": stored.version + (f"+{commit[:12]}" if commit else ""),
    }


def _action(stored: Stored, files: list[str]) -> Entity:
    failed = sorted(name for name, claim in stored.claims.items() if claim["verdict"] == Verdict.ERROR)
    status = "FailedActionStatus" if failed else "CompletedActionStatus"
    action: Entity = {
        "@id": _action_id(stored),
        "@type": "CreateAction",
        "name": f"Verification of {', '.join(stored.claims) or 'no claim'}",
        "description": f"artifact verify {' '.join(stored.claims)} --profile {stored.profile.name}"
        + (" --quick" if stored.quick else ""),
        "startTime": stored.started,
        "instrument": {"@id": "#artifact"},
        "object": [{"@id": name} for name in files if name in ASKED],
        "result": [{"@id": quote(name)} for name in files if name not in ASKED],
        "actionStatus": {"@id": f"http://schema.org/{status}"},
    }
    if failed:
        action["error"] = "; ".join(f"{name}: {stored.claims[name]['reason']}" for name in failed)
    return action


def _action_id(stored: Stored) -> str:
    """A name for this execution that stays the same when the crate is made again."""
    return f"#{uuid.uuid5(uuid.NAMESPACE_URL, stored.started + sha256(stored.path / 'samples.jsonl'))}"


def _file(folder: Path, name: str) -> Entity:
    path = folder / name
    entity = {
        "@id": quote(name),
        "@type": "File",
        "name": name,
        "encodingFormat": TYPES.get(path.suffix, "application/octet-stream"),
        "contentSize": str(path.stat().st_size),
        "sha256": sha256(path),
    }
    return entity | ({"description": DESCRIPTIONS[name]} if name in DESCRIPTIONS else {})
