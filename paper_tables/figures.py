"""Figures as a paper prints them, from `paper_tables/paper/NAME.json`: transcribed with their place, never measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "paper"


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
    """The whole transcription of one paper: title, tables, figures."""
    data = json.loads((FOLDER / f"{paper}.json").read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("paper") != paper:
        raise ValueError(f"paper/{paper}.json does not describe the paper {paper!r}")
    return data


@cache
def figures(paper: str) -> dict[str, Printed]:
    """All printed figures of one paper by their id."""
    return {key: Printed(key, **fields) for key, fields in transcript(paper)["figures"].items()}
