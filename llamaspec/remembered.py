"""What a pair taught about itself on this machine, kept from one run to the next.

One small JSON file for each pair and way of running it, in the user's cache folder. A file that is damaged, of another
version, or old is passed over; a folder that cannot be written costs a measurement at the next start and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import platformdirs

from llamaspec.decoding.draft_length import DraftLength

VERSION = 1
"""Of the files. Another one's are not read."""

MAX_AGE = 60 * 86400
"""Seconds after which a machine may have changed."""


class Memory:
    """Where one pair's file is.

    Args:
        identity: everything that what was measured depends on: the files, the machine, the settings.
    """

    def __init__(self, identity: Mapping[str, Any]) -> None:
        text = json.dumps(identity, sort_keys=True, default=str)
        self._identity: dict[str, Any] = json.loads(text)
        self.path = (
            platformdirs.user_cache_path("llamaspec") / "pairs" / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
        )

    def recall(self) -> DraftLength | None:
        """What was kept; None when there is nothing that can be used."""
        try:
            data = json.loads(self.path.read_bytes())
            if data["version"] != VERSION or data["identity"] != self._identity or time.time() - data["saved"] > MAX_AGE:
                return None
            return DraftLength.from_dict(data["learnt"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
            return None

    def keep(self, policy: DraftLength) -> bool:
        """Write it down; False when that is not possible. Another process sees the old file or the new one, never half."""
        data = {"version": VERSION, "identity": self._identity, "saved": time.time(), "learnt": policy.to_dict()}
        name = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.path.parent, suffix=".part", delete=False) as file:
                name = file.name
                json.dump(data, file)
            os.replace(name, self.path)
        except OSError:
            if name is not None:
                Path(name).unlink(missing_ok=True)
            return False
        return True
