"""Errors that are the user's to mend: one sentence, a documented exit code, never a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Wrong input. The message names object, value and next step; the command line prints it and exits 2."""


def one_line(error: Exception, limit: int = 160) -> str:
    """The text of another library's error inside a sentence of ours: on one line and not endless."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
