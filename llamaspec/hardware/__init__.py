"""What this machine has, as this process sees it: cores, memory, cards, bandwidth.

Nothing here fails because a driver or a library lacks something: what is not reported is None.
"""

from __future__ import annotations

from llamaspec.hardware.system import available_memory, identity, physical_cores

__all__ = ["available_memory", "identity", "physical_cores"]
