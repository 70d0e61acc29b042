"""junit.xml: one test suite per claim, one test case per predicate, for whatever shows test results.

Contradicted is a failure, an error is an error, inconclusive and not-run are skipped with the reason, observed passes
and says in its output that nothing was asserted. The elements and attributes are those that Jenkins and Surefire read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

from artifact.report.numbers import finding_text
from artifact.report.stored import Stored
from artifact.stats import Verdict

# XML 1.0 has no way to write these, not even escaped.
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SKIPPED = (Verdict.INCONCLUSIVE, Verdict.NOT_RUN)


def render(stored: Stored) -> str:
    """The whole document."""
    root = ET.Element("testsuites", name="sparse decoding artifact")
    suites = [_suite(root, name, claim) for name, claim in stored.claims.items()]
    for count in ("tests", "failures", "errors"):
        root.set(count, str(sum(int(suite.get(count, 0)) for suite in suites)))
    ET.indent(root)
    return "<?xml version='1.0' encoding='UTF-8'?>\n" + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, name: str, claim: Mapping[str, Any]) -> ET.Element:
    suite = ET.SubElement(root, "testsuite", name=_text(name))
    cases = [_case(suite, name, finding) for finding in claim["findings"]]
    if claim["verdict"] == Verdict.ERROR or not cases:
        # A claim whose measurement failed must not look like a suite of passing tests.
        cases.append(_whole_claim(suite, name, claim))
    counted = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    suite.set("tests", str(len(cases)))
    for attribute, element in counted.items():
        suite.set(attribute, str(sum(case.find(element) is not None for case in cases)))
    suite.set("time", f"{60 * float(claim['minutes']):.1f}")
    return suite


def _case(suite: ET.Element, name: str, finding: Mapping[str, Any]) -> ET.Element:
    case = ET.SubElement(suite, "testcase", name=_text(finding["predicate"]), classname=_text(f"claims.{name}"))
    verdict, said = Verdict(finding["verdict"]), _text(finding_text(finding))
    if verdict is Verdict.CONTRADICTED:
        ET.SubElement(case, "failure", type=verdict.value, message=said)
    elif verdict is Verdict.ERROR:
        ET.SubElement(case, "error", type=verdict.value, message=said)
    elif verdict in SKIPPED:
        ET.SubElement(case, "skipped", type=verdict.value, message=said)
    ET.SubElement(case, "system-out").text = f"{verdict.value}: {said}"
    return case


def _whole_claim(suite: ET.Element, name: str, claim: Mapping[str, Any]) -> ET.Element:
    case = ET.SubElement(suite, "testcase", name="the claim as a whole", classname=_text(f"claims.{name}"))
    element = "error" if claim["verdict"] == Verdict.ERROR else "skipped"
    ET.SubElement(
        case, element, type=str(claim["verdict"]), message=_text(claim["reason"] or "no predicate was judged")
    )
    return case


def _text(value: str) -> str:
    return FORBIDDEN.sub("\ufffd", value)
