"""An interval drawn against its acceptance region, as inline SVG that follows the page's colours."""

from __future__ import annotations

import math

from markupsafe import Markup, escape

from artifact.report.console import interval_text, number, region_text
from artifact.stats import Interval, Region

WIDTH, HEIGHT, EDGE = 240, 40, 12
LINE_Y, LABEL_Y = 14, 36


def draw(interval: Interval | None, region: Region, verdict: str) -> Markup:
    """The drawing, or nothing where no point was measured. Its title says the same in words."""
    if interval is None or not math.isfinite(interval.point):
        return Markup("")
    scale = _Scale(interval, region)
    words = f"{verdict}: {interval_text(interval)}, accepted {region_text(region)}"
    parts = [
        f'<svg class="interval" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f"<title>{escape(words)}</title>",
        _region(region, scale),
        f'<line class="axis" x1="0" y1="{LINE_Y}" x2="{WIDTH}" y2="{LINE_Y}"/>',
        _interval(interval, scale),
        *_labels(region, scale),
        "</svg>",
    ]
    return Markup("".join(parts))  # every text in it is escaped above


class _Scale:
    """Maps values to pixels so that the interval and the finite edges of the region are in sight."""

    def __init__(self, interval: Interval, region: Region) -> None:
        shown = [interval.point, interval.low, interval.high, region.low, region.high]
        finite = [value for value in shown if value is not None and math.isfinite(value)]
        low, high = min(finite), max(finite)
        # A lone value still gets an axis around it.
        margin = 0.12 * (high - low) or 0.5 * abs(high) or 1.0
        self.low, self.high = low - margin, high + margin

    def x(self, value: float) -> float:
        """Pixels from the left, at the edge for what is infinite."""
        if math.isinf(value):
            return float(WIDTH if value > 0 else 0)
        share = (value - self.low) / (self.high - self.low)
        return round(EDGE + share * (WIDTH - 2 * EDGE), 2)


def _region(region: Region, scale: _Scale) -> str:
    left = 0.0 if region.low is None else scale.x(region.low)
    right = float(WIDTH) if region.high is None else scale.x(region.high)
    if right - left < 2:  # a single accepted value is still visible
        left, right = left - 1, left + 1
    return f'<rect class="region" x="{left}" y="4" width="{round(right - left, 2)}" height="20"/>'


def _interval(interval: Interval, scale: _Scale) -> str:
    low, high, point = (scale.x(value) for value in (interval.low, interval.high, interval.point))
    drawn = f'<line class="span" x1="{low}" y1="{LINE_Y}" x2="{high}" y2="{LINE_Y}"/>'
    for end, value in ((low, interval.low), (high, interval.high)):
        if math.isfinite(value) and interval.low != interval.high:
            drawn += f'<line class="span" x1="{end}" y1="{LINE_Y - 5}" x2="{end}" y2="{LINE_Y + 5}"/>'
    return drawn + f'<circle class="point" cx="{point}" cy="{LINE_Y}" r="4"/>'


def _labels(region: Region, scale: _Scale) -> list[str]:
    """The finite edges of the region, kept apart where they are close to each other."""
    edges = sorted({value for value in (region.low, region.high) if value is not None})
    if len(edges) == 2 and scale.x(edges[1]) - scale.x(edges[0]) < 60:
        middle = (scale.x(edges[0]) + scale.x(edges[1])) / 2
        return [_label(middle, f"{number(edges[0])} to {number(edges[1])}")]
    return [_label(scale.x(edge), number(edge)) for edge in edges]


def _label(x: float, text: str) -> str:
    anchor = "start" if x < 30 else "end" if x > WIDTH - 30 else "middle"
    place = {"start": max(x, 1.0), "end": min(x, WIDTH - 1.0)}.get(anchor, x)
    return f'<text x="{round(place, 2)}" y="{LABEL_Y}" text-anchor="{anchor}">{escape(text)}</text>'
