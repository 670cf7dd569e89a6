"""Where what was once made or measured is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$GRPO_CACHE, else grpo-kernels in the user's cache folder.

    Raises:
        RuntimeError: there is no home folder either.
    """
    given = os.environ.get("GRPO_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-kernels"
