"""The parts of the documentation that follow from the claim registry, so that they cannot drift from it.

REPRODUCE.md has sections between `<!-- generated: NAME -->` and `<!-- end -->`; paper_tables/appendix/*.tex and
codemeta.json are generated whole. `artifact docs` writes them, `artifact docs --check` only says what is out of date.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from artifact import claim as claims
from artifact.claim import PAPERS, Claim
from artifact.errors import UserError
from artifact.verbs.list import shipped

ROOT = Path(__file__).resolve().parent.parent.parent
SECTION = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
APPENDIX = Path("paper_tables") / "appendix"
PROFILE_NEEDS = {
    "embedded": (
        "default without CUDA",
        "SmolLM2-135M-Instruct, real weights",
        "2 cores, 6 GB of memory, 3 GB of disk",
    ),
    "gpu": (
        "default with CUDA",
        "the papers' dimensions, synthetic weights",
        "one CUDA GPU; contexts cut to its memory",
    ),
    "paper": ("with --model PATH", "the gated checkpoints", "one CUDA GPU and the checkpoint"),
}


def generated(root: Path = ROOT) -> dict[Path, str]:
    """What every generated file should hold, by its path in the checkout. UserError outside of one."""
    if not (root / "REPRODUCE.md").is_file() or not (root / "pyproject.toml").is_file():
        raise UserError("documentation is written inside a checkout only; this is an installed copy")
    registry = [claims.load(name).claim for name in claims.names()]
    files = {Path("REPRODUCE.md"): reproduce((root / "REPRODUCE.md").read_text(encoding="utf-8"), registry)}
    files[Path("codemeta.json")] = codemeta(root)
    for template in sorted((root / APPENDIX).glob("*.tex.j2")):
        files[APPENDIX / template.name.removesuffix(".j2")] = appendix(root, template.name, registry)
    return files


def reproduce(text: str, registry: list[Claim]) -> str:
    """REPRODUCE.md with its generated sections made again. UserError for a section that nothing generates."""
    makers = {"claims": claim_table, "profiles": profile_table, "sentences": sentence_list, "h200": h200_list}

    def make(found: re.Match[str]) -> str:
        if found[2] not in makers:
            raise UserError(f"REPRODUCE.md has a generated section {found[2]!r}; known are {', '.join(makers)}")
        return found[1] + makers[found[2]](registry) + found[4]

    return SECTION.sub(make, text)


def claim_table(registry: list[Claim]) -> str:
    """Claim, command, minutes, needs, expected output, tables and figures."""
    head = "| claim | command | minutes | needs | last line holds | tables, figures |\n|---|---|---|---|---|---|\n"
    rows = [
        f"| {claim.title} ({claim.paper}, {claim.place}) | `artifact verify {claim.name}` | {minutes(claim)} "
        f'| {claim.needs} | `"{claim.name}":"reproduced"` | {", ".join(outputs(claim)) or "-"} |'
        for claim in map(_escaped, registry)
    ]
    return head + "\n".join(rows) + "\n"


def profile_table(registry: list[Claim]) -> str:
    """Hardware per profile, and what all claims take there."""
    head = "| profile | model | needs |\n|---|---|---|\n"
    rows = [f"| `{name}` ({when}) | {model} | {needs} |" for name, (when, model, needs) in PROFILE_NEEDS.items()]
    return head + "\n".join(rows) + "\n"


def sentence_list(registry: list[Claim]) -> str:
    """One line per paper, so that the table with every sentence follows on the first screen."""
    by_paper = {paper: [claim.name for claim in registry if claim.paper == paper] for paper in PAPERS}
    return "".join(
        f"- *{paper}*, {len(names)} claims: {', '.join(f'`{name}`' for name in names)}\n"
        for paper, names in by_paper.items()
        if names
    )


def h200_list(registry: list[Claim]) -> str:
    """The numbered findings of docs/h200.md. UserError when there are none."""
    file = ROOT / "docs" / "h200.md"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.findall(r"^\d+\. .*\n(?: {3}.*\n)*", text, re.MULTILINE)
    if not found:
        raise UserError("docs/h200.md has no numbered findings; restore it")
    return "".join(found)


def minutes(claim: Claim) -> str:
    """Minutes on the embedded profile: measured ones where a machine's costs are shipped, else the expected ones."""
    cost = shipped().get(claim.name, {}).get("embedded")
    if cost is None:
        return claim.minutes.get("embedded", "-")
    return f"{cost['minutes']:.1f} ({cost['peak_bytes'] / 1e9:.1f} GB, {cost['machine']})"


def outputs(claim: Claim) -> list[str]:
    """Tables and figures that a claim fills."""
    from paper_tables.plots.render import figures_of

    return [*claim.tables, *figures_of(claim.name)]


def _escaped(claim: Claim) -> Claim:
    from dataclasses import replace

    return replace(claim, title=claim.title.replace("|", r"\|"), needs=claim.needs.replace("|", r"\|"))


def appendix(root: Path, template: str, registry: list[Claim]) -> str:
    """One appendix form, rendered like the tables: every value escaped, no bare number."""
    from paper_tables.render import environment

    shown = [
        {
            "name": claim.name,
            "title": claim.title,
            "place": f"{claim.paper}, {claim.place}",
            "needs": claim.needs,
            "minutes": minutes(claim),
            "outputs": ", ".join(outputs(claim)) or "none",
        }
        for claim in registry
    ]
    profiles = [
        {"name": name, "when": when, "model": model, "needs": needs}
        for name, (when, model, needs) in PROFILE_NEEDS.items()
    ]
    return environment(root / APPENDIX).get_template(template).render(claims=shown, profiles=profiles)


def codemeta(root: Path) -> str:
    """codemeta.json (version 3.0) from pyproject.toml and CITATION.cff."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = cff((root / "CITATION.cff").read_text(encoding="utf-8"))
    described = {
        "@context": "https://w3id.org/codemeta/3.0",
        "@type": "SoftwareSourceCode",
        "name": citation["title"],
        "description": citation["abstract"],
        "version": project["version"],
        "softwareVersion": project["version"],
        "license": f"https://spdx.org/licenses/{project['license']}",
        "keywords": citation["keywords"],
        "author": [{"@type": "Organization", "name": citation["authors"][0]["name"]}],
        "programmingLanguage": {"@type": "ComputerLanguage", "name": "Python"},
        "runtimePlatform": f"Python {project['requires-python']}",
        "softwareRequirements": list(project["dependencies"]),
        "operatingSystem": ["Linux", "macOS"],
        "developmentStatus": "active",
        "readme": "README.md",
    }
    return json.dumps(described, indent=2) + "\n"


def cff(text: str) -> Mapping[str, Any]:
    """CITATION.cff as data. UserError when it is not YAML."""
    import yaml

    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError("CITATION.cff is not YAML; restore it") from None
    return dict(read)


def out_of_date(root: Path = ROOT) -> list[Path]:
    """Generated files that differ from what the registry gives."""
    return [
        path
        for path, text in generated(root).items()
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]
