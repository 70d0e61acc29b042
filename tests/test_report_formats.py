"""Standard records of a run, each against the published rules of its format, and made again with the same bytes.

The rules are written out here from the specifications: the junit-10 schema of Jenkins, RO-Crate 1.1 with the Process
Run Crate profile 0.5, the in-toto Statement v1 with test-result v0.1, CODECHECK configuration 1.0, CodeMeta 3.0 and
CFF 1.2.0.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import jsonschema
import pytest
import yaml

from artifact.report import codecheck, in_toto, junit, ro_crate
from artifact.report.stored import NotMade, open_run
from artifact.report.write import write_reports
from artifact.verify import derive
from tests import run_folder

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ("junit.xml", in_toto.NAME, "codecheck.yml", "report.html", ro_crate.NAME)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds reproduced and contradicted predicates."""
    folder = tmp_path_factory.mktemp("runs") / "r"
    run_folder.make(folder, ("byte_account", "speedup_bounds"))
    written, missing = write_reports(folder)
    assert {path.name for path in written} >= set(RECORDS) and "figure4" in missing
    return folder


def changed(run: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the run whose results were changed."""
    folder = tmp_path / "changed"
    shutil.copytree(run, folder)
    results = json.loads((folder / "results.json").read_text())
    change(results)
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_everything_is_made_again_with_the_same_bytes_elsewhere(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "another name"
    moved.mkdir()
    for name in ("samples.jsonl", "system.json", "run.json"):
        shutil.copyfile(run / name, moved / name)
    derive(moved)
    write_reports(moved)
    for name in RECORDS:
        assert (moved / name).read_bytes() == (run / name).read_bytes(), name


# --- junit.xml

ALLOWED = {
    "testsuites": ({"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname", "id", "package"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": ({"name", "time", "classname", "group"}, {"skipped", "error", "failure", "system-out", "system-err"}),
    "failure": ({"type", "message"}, set()),
    "error": ({"type", "message"}, set()),
    "skipped": ({"type", "message"}, set()),
    "system-out": (set(), set()),
}
REQUIRED = {"testsuite": {"name", "tests", "failures", "errors"}, "testcase": {"name"}}


def check_junit(root: ET.Element) -> None:
    for element in root.iter():
        attributes, children = ALLOWED[element.tag]
        assert set(element.attrib) <= attributes and {child.tag for child in element} <= children
        assert REQUIRED.get(element.tag, set()) <= set(element.attrib)
    for suite in root.iter("testsuite"):
        assert re.fullmatch(r"\d{1,3}(,?\d{3})*(\.\d*)?|\d*\.\d*", suite.attrib["time"])
        for count, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[count]) == len(list(suite.iter(tag)))


def test_junit_holds_a_case_per_predicate_and_a_failure_per_contradiction(run: Path) -> None:
    root = ET.fromstring((run / "junit.xml").read_text())
    check_junit(root)
    results = json.loads((run / "results.json").read_text())["claims"]
    findings = [finding for claim in results.values() for finding in claim["findings"]]
    assert root.attrib["tests"] == str(len(findings))
    contradicted = sum(finding["verdict"] == "contradicted" for finding in findings)
    assert contradicted >= 1 and root.attrib["failures"] == str(contradicted)


@pytest.mark.parametrize(
    ("verdict", "element"),
    [("inconclusive", "skipped"), ("not-run", "skipped"), ("error", "error"), ("observed", None)],
)
def test_no_verdict_but_reproduced_and_observed_passes(
    run: Path, tmp_path: Path, verdict: str, element: str | None
) -> None:
    def change(results: dict[str, Any]) -> None:
        results["claims"]["byte_account"]["findings"][0] |= {"verdict": verdict, "interval": None}

    root = ET.fromstring(junit.render(open_run(changed(run, tmp_path, change))))
    check_junit(root)
    case = root.find("testsuite/testcase")
    assert case is not None and [child.tag for child in case if child.tag != "system-out"] == (
        [element] if element else []
    )


def test_a_claim_that_failed_as_a_whole_is_an_error_in_junit_and_a_failure_in_the_statement(
    run: Path, tmp_path: Path
) -> None:
    def change(results: dict[str, Any]) -> None:
        results["claims"] = {
            "byte_account": {**results["claims"]["byte_account"], "verdict": "error", "reason": "x\0y"}
        }

    stored = open_run(changed(run, tmp_path, change))
    root = ET.fromstring(junit.render(stored))
    check_junit(root)
    assert root.attrib["errors"] == "1"
    predicate = json.loads(in_toto.render(stored))["predicate"]
    assert predicate["result"] == "FAILED" and predicate["failedTests"] == ["byte_account"]
    crate = json.loads(ro_crate.render(stored))["@graph"]
    action = next(entity for entity in crate if entity["@type"] == "CreateAction")
    assert action["actionStatus"]["@id"].endswith("FailedActionStatus") and "byte_account" in action["error"]


# --- in-toto


def test_the_statement_follows_in_toto_and_its_digests_hold(run: Path) -> None:
    statement = json.loads((run / in_toto.NAME).read_text())
    assert set(statement) == {"_type", "subject", "predicateType", "predicate"}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    predicate = statement["predicate"]
    assert set(predicate) <= {"result", "configuration", "url", "passedTests", "warnedTests", "failedTests"}
    assert predicate["result"] == "FAILED" and predicate["passedTests"] and predicate["failedTests"]
    names = [descriptor["name"] for descriptor in statement["subject"]]
    assert len(names) == len(set(names)) and "source" in names
    for descriptor in statement["subject"] + predicate["configuration"]:
        for algorithm, value in descriptor["digest"].items():
            if algorithm == "sha256":
                assert value == hashlib.sha256((run / descriptor["name"]).read_bytes()).hexdigest()
            else:
                assert algorithm == "gitCommit" and re.fullmatch("[0-9a-f]{40}", value)


def test_nothing_passed_is_not_passed(run: Path, tmp_path: Path) -> None:
    stored = open_run(changed(run, tmp_path, lambda results: results.update(claims={})))
    assert json.loads(in_toto.render(stored))["predicate"]["result"] == "WARNED"
    check_junit(ET.fromstring(junit.render(stored)))


# --- RO-Crate


def test_the_crate_follows_the_process_run_profile(run: Path) -> None:
    crate = json.loads((run / ro_crate.NAME).read_text())
    assert crate["@context"][0] == "https://w3id.org/ro/crate/1.1/context"
    graph = {entity["@id"]: entity for entity in crate["@graph"]}
    assert len(graph) == len(crate["@graph"])
    descriptor, root = graph["ro-crate-metadata.json"], graph["./"]
    assert descriptor["@type"] == "CreativeWork" and descriptor["about"] == {"@id": "./"}
    assert descriptor["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.1"}
    assert root["@type"] == "Dataset" and {"name", "description", "license", "datePublished"} <= set(root)
    datetime.fromisoformat(root["datePublished"])
    profile = graph[root["conformsTo"]["@id"]]
    assert profile["@id"] == "https://w3id.org/ro/wfrun/process/0.5" and profile["@type"] == "CreativeWork"
    action = graph[root["mentions"]["@id"]]
    assert action["@type"] == "CreateAction" and {"name", "description", "instrument", "result"} <= set(action)
    assert graph[action["instrument"]["@id"]]["@type"] == "SoftwareApplication"
    parts = {part["@id"] for part in root["hasPart"]}
    used = {one["@id"] for one in action["object"] + action["result"]}
    assert used == parts and all(graph[name]["@type"] == "File" for name in parts)


def test_the_crate_lists_every_file_with_its_hash(run: Path) -> None:
    graph = json.loads((run / ro_crate.NAME).read_text())["@graph"]
    listed = {unquote(entity["@id"]): entity for entity in graph if entity["@type"] == "File"}
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert set(listed) == files - {ro_crate.NAME}
    for name, entity in listed.items():
        content = (run / name).read_bytes()
        assert entity["sha256"] == hashlib.sha256(content).hexdigest() and entity["contentSize"] == str(len(content))


def test_a_run_without_a_start_time_has_no_crate_but_all_else(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(run, folder)
    options = json.loads((folder / "run.json").read_text())
    del options["started"]
    (folder / "run.json").write_text(json.dumps(options))
    (folder / ro_crate.NAME).unlink()
    with pytest.raises(NotMade, match="start time"):
        ro_crate.render(open_run(folder))
    written, missing = write_reports(folder)
    assert ro_crate.NAME in missing and "report.html" in {path.name for path in written}


# --- codecheck.yml, codemeta.json, CITATION.cff


def test_codecheck_names_what_the_specification_asks_for(run: Path) -> None:
    checked = yaml.safe_load((run / "codecheck.yml").read_text())
    known = {"version", "paper", "manifest", "codechecker", "report", "source", "summary", "repository", "check_time"}
    assert set(checked) <= known | {"certificate"} and {"manifest", "codechecker", "report"} <= set(checked)
    assert checked["version"] == "https://codecheck.org.uk/spec/config/1.0/"
    assert {"title", "authors", "reference"} == set(checked["paper"])
    assert checked["paper"]["title"].startswith("Where Activation Sparsity")
    assert all((run / entry["file"]).is_file() and entry["comment"] for entry in checked["manifest"])
    assert all("name" in person for person in checked["codechecker"] + checked["paper"]["authors"])


@pytest.mark.parametrize(
    "text", ["plain", 'quote " : - # {x}', "line\nbreak\ttab", "ünïcode \u2028 end", "yes", "1.0", ""]
)
def test_any_text_survives_our_yaml(text: str) -> None:
    value = {"a": text, "list": [{"b": text, "c": text}, {"d": text}]}
    assert yaml.safe_load(codecheck._yaml(value)) == value


# Terms of CodeMeta 3.0 that a description of software may hold.
CODEMETA = set(
    "codeRepository programmingLanguage runtimePlatform targetProduct applicationCategory applicationSubCategory "
    "downloadUrl fileSize installUrl memoryRequirements operatingSystem permissions processorRequirements releaseNotes "
    "softwareHelp softwareRequirements softwareVersion storageRequirements supportingData author citation contributor "
    "copyrightHolder copyrightYear dateCreated dateModified datePublished editor encoding fileFormat funder keywords "
    "license producer provider publisher sponsor version isAccessibleForFree isPartOf hasPart position description "
    "identifier name sameAs url relatedLink review softwareSuggestions maintainer continuousIntegration "
    "buildInstructions developmentStatus embargoEndDate funding issueTracker readme referencePublication "
    "isSourceCodeOf hasSourceCode".split()
)


def test_codemeta_uses_its_vocabulary_and_agrees_with_the_citation() -> None:
    meta = json.loads((ROOT / "codemeta.json").read_text())
    assert meta.pop("@context") == "https://w3id.org/codemeta/3.0" and meta.pop("@type") == "SoftwareSourceCode"
    assert set(meta) <= CODEMETA
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (meta["name"], meta["version"]) == (citation["title"], citation["version"])
    assert meta["license"].endswith(citation["license"]) and (ROOT / meta["readme"]).is_file()


def test_the_citation_file_follows_its_schema() -> None:
    citation = yaml.load((ROOT / "CITATION.cff").read_text(), yaml.BaseLoader)  # dates stay the text that they are
    schema = json.loads((ROOT / "tests" / "schemas" / "cff-1.2.0.json").read_text())
    jsonschema.Draft7Validator(schema, format_checker=jsonschema.FormatChecker()).validate(citation)
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(citation | {"authors": []}, schema)
