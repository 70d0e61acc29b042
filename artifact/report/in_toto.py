"""test-result.intoto.json: an unsigned in-toto statement of type test-result v0.1. Sign it with a tool of your own.

The subject is the source that was run, by commit where the checkout was clean, and the raw samples; the configuration
is what was asked and on which machine. Inconclusive and not-run predicates are warnings: they did not pass.
"""

from __future__ import annotations

import json
from typing import Any

from artifact.report.stored import Stored, sha256
from artifact.stats import Verdict

NAME = "test-result.intoto.json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
WARNED = (Verdict.INCONCLUSIVE, Verdict.NOT_RUN)
FAILED = (Verdict.CONTRADICTED, Verdict.ERROR)


def render(stored: Stored) -> str:
    """The statement as JSON."""
    passed, warned, failed = _tests(stored)
    predicate = {
        "result": "FAILED" if failed else "WARNED" if warned or not passed else "PASSED",
        "configuration": [_descriptor(stored, name) for name in ("run.json", "system.json")],
        "passedTests": passed,
        "warnedTests": warned,
        "failedTests": failed,
    }
    statement = {"_type": STATEMENT, "subject": _subject(stored), "predicateType": PREDICATE, "predicate": predicate}
    return json.dumps(statement, indent=2, sort_keys=True) + "\n"


def _subject(stored: Stored) -> list[dict[str, Any]]:
    subject = [_descriptor(stored, "samples.jsonl")]
    if commit := stored.system.get("commit"):
        subject.insert(0, {"name": "source", "digest": {"gitCommit": str(commit)}})
    return subject


def _descriptor(stored: Stored, name: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256(stored.path / name)}}


def _tests(stored: Stored) -> tuple[list[str], list[str], list[str]]:
    """Names of the tests that passed, warned and failed; what was only observed is no test."""
    passed: list[str] = []
    warned: list[str] = []
    failed: list[str] = []
    for name, claim in stored.claims.items():
        if claim["verdict"] == Verdict.ERROR:
            failed.append(name)
        elif claim["verdict"] == Verdict.NOT_RUN:
            warned.append(name)
        for finding in claim["findings"]:
            test = f"{name}: {finding['predicate']}"
            if finding["verdict"] == Verdict.REPRODUCED:
                passed.append(test)
            elif finding["verdict"] in WARNED:
                warned.append(test)
            elif finding["verdict"] in FAILED:
                failed.append(test)
    return passed, warned, failed
