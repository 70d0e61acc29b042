"""Errors that are the user's to mend: one sentence, a documented exit code, never a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Wrong input. The message names the object, the value and the next step; the command line prints it and exits 2."""
