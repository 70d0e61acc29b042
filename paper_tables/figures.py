"""Figures as a paper prints them, from `paper_tables/paper/NAME.json`: transcribed with their place, never measured."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from artifact.errors import UserError, one_line

FOLDER = Path(__file__).resolve().parent / "paper"
FIELDS = frozenset(("printed", "unit", "place", "what"))


@dataclass(frozen=True)
class Printed:
    """One printed figure. The digits are kept as text, because 2.00 says more than 2.0."""

    id: str
    printed: str
    unit: str
    place: str
    what: str

    @property
    def value(self) -> float:
        return float(self.printed)

    @property
    def low(self) -> float:
        """The least value that rounds to the printed digits."""
        return float(Decimal(self.printed) - self._half_unit)

    @property
    def high(self) -> float:
        """The greatest value that rounds to the printed digits."""
        return float(Decimal(self.printed) + self._half_unit)

    @property
    def _half_unit(self) -> Decimal:
        exponent = Decimal(self.printed).as_tuple().exponent
        if not isinstance(exponent, int):
            raise ValueError(f"{self.id}: {self.printed!r} is not a number")
        return Decimal(10) ** exponent / 2


@cache
def transcript(paper: str) -> dict[str, Any]:
    """The whole transcription of one paper: title, tables, figures. UserError when the file is not one."""
    text = _text(paper)
    parse(text, paper)
    return dict(json.loads(text))


@cache
def figures(paper: str) -> dict[str, Printed]:
    """All printed figures of one paper by their id."""
    return parse(_text(paper), paper)


def _text(paper: str) -> str:
    try:
        return (FOLDER / f"{paper}.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"paper/{paper}.json cannot be read ({one_line(error)}); restore it") from error


def parse(text: str, paper: str) -> dict[str, Printed]:
    """The figures of a transcription. UserError naming the entry that is none: these files are edited by hand."""
    where = f"paper/{paper}.json"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({one_line(error)}); restore it") from error
    if not isinstance(data, dict) or data.get("paper") != paper or not isinstance(data.get("figures"), dict):
        raise UserError(f"{where} does not describe the paper {paper!r}; restore it")
    found = {}
    for key, fields in data["figures"].items():
        if (
            not isinstance(fields, dict)
            or fields.keys() != FIELDS
            or not all(isinstance(v, str) for v in fields.values())
        ):
            raise UserError(f"{where}: figure {key!r} must hold {', '.join(sorted(FIELDS))} as texts")
        if not re.fullmatch(r"-?\d{1,9}(\.\d{1,9})?", fields["printed"]):
            raise UserError(f"{where}: figure {key!r} prints {fields['printed'][:40]!r}, which is not a number")
        found[key] = Printed(key, **fields)
    return found
