"""Errors that a user can mend: shown as one sentence, without a traceback, before any work starts."""

from __future__ import annotations


class UserError(Exception):
    """The message names what is wrong, what was given and what is allowed."""
