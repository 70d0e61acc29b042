"""Table 3 of the SATS paper: multiple-choice accuracy before and after LoRA fine-tuning, live."""

from __future__ import annotations

from paper_tables.contexts.sats_table1 import context

__all__ = ["CLAIMS", "context"]

CLAIMS = ("sats_finetuned",)
