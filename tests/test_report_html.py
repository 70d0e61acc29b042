"""report.html: self-contained, accessible, every value linked to rows that exist, hostile text harmless."""

from __future__ import annotations

import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from artifact.report import html, intervals, raw
from artifact.report.stored import open_run
from artifact.report.write import write_reports
from artifact.stats import Interval, Region
from tests import run_folder

VOID = {"meta", "br", "img", "link", "line", "rect", "circle"}


class Page(HTMLParser):
    """Elements with their attributes, text, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "r"
    return run_folder.make(folder, ("byte_account", "crossover", "speedup_bounds"))


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    write_reports(run)
    return Page((run / "report.html").read_text(encoding="utf-8"))


def test_nothing_is_loaded_from_elsewhere(page: Page, run: Path) -> None:
    assert not page.all("script") and not page.all("link") and not page.all("iframe")
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    assert all(a["href"].startswith("#") for a in page.all("a"))
    style = (run / "report.html").read_text().split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert "default-src 'none'" in policy and "script" not in policy


def test_every_link_leads_somewhere_and_every_id_is_unique(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in page.all("a")} <= set(ids)
    for _, attributes in page.elements:
        assert set(attributes.get("aria-labelledby", "").split()) <= set(ids)


def test_a_value_leads_to_the_line_of_its_row(page: Page, run: Path) -> None:
    lines = (run / "samples.jsonl").read_text().splitlines()
    predicate = "table1.llama-3.1-8b.all"
    label = next(a for a in page.all("a") if a.get("aria-label", "").endswith(f"raw rows of {predicate}"))
    line = int(label["href"].removeprefix("#L"))
    assert json.loads(lines[line - 1])["figure"] == predicate


def test_it_can_be_read_aloud_and_used_from_a_keyboard(page: Page) -> None:
    assert next(iter(page.all("html")))["lang"] == "en"
    assert [len(page.all(landmark)) for landmark in ("header", "nav", "main", "footer")][1:] == [1, 1, 1]
    assert all(image["alt"].strip() for image in page.all("img"))
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(head.get("scope") in ("row", "col") for head in page.all("th"))
    assert len(page.all("svg")) == len(page.all("title")) - 1
    assert next(a for a in page.all("a"))["href"] == "#main"
    css = (html.FOLDER / "report.css").read_text()
    assert "focus-visible" in css and "prefers-color-scheme: dark" in css and "@media print" in css


def test_verdicts_values_caveats_and_machine_are_on_it(page: Page) -> None:
    for words in ("reproduced", "contradicted", "within 4.1K tokens", "Example CPU <8-Core>", "avx2, fma", "2.13.0"):
        assert words in page.text
    assert "no samples of baseline_sensitivity in this run" in page.text  # why figure 5 is not there


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_contrast_in_light_and_dark() -> None:
    """WCAG 2 AA: 4.5 to 1 for text, on the page and on a card."""
    css = (html.FOLDER / "report.css").read_text()
    for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)[:2]:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
        for text in ("ink", "quiet", "link", "good", "bad", "open", "seen"):
            for ground in ("paper", "card"):
                light, dark = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}{% raw %}\u202e&amp;'


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = run_folder.make(tmp_path / "r", ("byte_account",))
    results = json.loads((folder / "results.json").read_text())
    results["model"] = results["claims"]["byte_account"]["reason"] = HOSTILE
    finding = results["claims"]["byte_account"]["findings"][0]
    for key in ("predicate", "statement", "place", "paper_value", "note"):
        finding[key] = HOSTILE
    finding["extra"] = {HOSTILE: HOSTILE}
    finding["region"]["reason"] = finding["region"]["unit"] = finding["interval"]["unit"] = HOSTILE
    finding["interval"]["method"] = HOSTILE
    (folder / "results.json").write_text(json.dumps(results))
    system = json.loads((folder / "system.json").read_text())
    system["cpu"]["model"] = HOSTILE
    (folder / "system.json").write_text(json.dumps(system | {HOSTILE: HOSTILE}))
    text = html.render(open_run(folder), missing={HOSTILE: HOSTILE})
    page = Page(text)
    assert not page.all("script") and not page.all("img")
    assert page.text.count("<script>alert(1)</script>") >= 8 and "{{ 7*7 }}" in page.text


@pytest.mark.parametrize(
    ("interval", "region"),
    [
        (Interval(1.0, 0.5, 1.5, 5, "t"), Region(0.0, 2.0, "r")),
        (Interval(1.0, 1.0, 1.0, 1, "exact"), Region(1.0, 1.0, "r")),
        (Interval(0.0, 0.0, 0.0, 1, "exact"), Region(None, 0.0, "r")),
        (Interval(5.0, -math.inf, math.inf, 1, "t"), Region(None, None, "r")),
        (Interval(1e12, 1e-3, 1e12, 3, "t"), Region(None, 1.0, "r")),
        (Interval(-3.0, -4.0, -2.0, 3, "t"), Region(10.0, None, "<&")),
    ],
)
def test_intervals_stay_inside_their_drawing(interval: Interval, region: Region) -> None:
    drawing = str(intervals.draw(interval, region, "reproduced"))
    places = [float(x) for x in re.findall(r'\b(?:x|x1|x2|cx)="([^"]+)"', drawing)]
    assert places and all(-1 <= place <= intervals.WIDTH + 1 for place in places)
    assert "nan" not in drawing and "inf" not in drawing.replace("interval", "")


def test_the_point_lies_in_the_band_exactly_when_it_is_accepted() -> None:
    def drawn(point: float) -> tuple[float, float, float]:
        drawing = str(intervals.draw(Interval(point, point, point, 1, "exact"), Region(1.0, 2.0, "r"), "v"))
        x = re.search(r'class="region" x="([\d.]+)" y="4" width="([\d.]+)"', drawing)
        cx = re.search(r'cx="([\d.]+)"', drawing)
        assert x is not None and cx is not None
        return float(x[1]), float(x[1]) + float(x[2]), float(cx[1])

    for point, inside in ((0.5, False), (1.0, True), (1.7, True), (2.4, False)):
        left, right, centre = drawn(point)
        assert (left - 0.01 <= centre <= right + 0.01) is inside


def test_nothing_is_drawn_of_what_was_not_measured() -> None:
    assert str(intervals.draw(None, Region(0, 1, "r"), "not-run")) == ""
    assert str(intervals.draw(Interval(math.nan, math.nan, math.nan, 0, "t"), Region(0, 1, "r"), "inconclusive")) == ""


def test_raw_tables_keep_rows_of_a_kind_together_and_say_what_is_left_out() -> None:
    rows = [(i, {"a": i, "b": "same", "ms": [1.0, 2.0, 9.0]}) for i in range(1, raw.ROWS_SHOWN + 4)]
    first, second = raw.tables([*rows, (999, {"other": True})])
    assert first.columns == ("cell", "block", "a") and first.left_out == 3 and len(first.lines) == raw.ROWS_SHOWN
    assert ("ms", "median 2 of 3") in first.constant and ("b", "same") in first.constant
    assert second.lines == (999,) and second.rows[0][-1] == "True"
