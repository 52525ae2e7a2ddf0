"""llamaspec: speculative decoding for llama.cpp that sets itself up. Faster answers, the same text.

    import llamaspec

    with llamaspec.load("target.gguf", "draft.gguf") as pair:
        rounds = pair.generate([{"role": "user", "content": "Why is the sky blue?"}])
        stats = llamaspec.Stats()
        for one in rounds:
            print(one.text, end="", flush=True)
            stats = stats.add(one)
    print(stats.tokens_per_second, stats.acceptance_rate)

The names below are the whole public interface; `llamaspec.errors` holds the exceptions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llamaspec import errors
from llamaspec._version import __version__

if TYPE_CHECKING:
    from llamaspec.decoding.rounds import Round
    from llamaspec.decoding.stats import Stats
    from llamaspec.engine import LoadOptions, Pair, load
    from llamaspec.options import Sampling, Speculation

__all__ = ["LoadOptions", "Pair", "Round", "Sampling", "Speculation", "Stats", "__version__", "errors", "load"]

_HOMES = {
    "LoadOptions": "llamaspec.engine",
    "Pair": "llamaspec.engine",
    "Round": "llamaspec.decoding.rounds",
    "Sampling": "llamaspec.options",
    "Speculation": "llamaspec.options",
    "Stats": "llamaspec.decoding.stats",
    "load": "llamaspec.engine",
}


def __getattr__(name: str) -> Any:
    # The command line must start without numpy and the native library: names are fetched when asked for.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'llamaspec' has no attribute {name!r}")
