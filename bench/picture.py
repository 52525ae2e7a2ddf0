"""Draw the README's picture: `python -m llamaspec.bench.picture docs/demo.svg` runs the demo and paints its terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from llamaspec.bench.demo import OPTIONS, PROMPT, demo_model


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "llamaspec", "run", "-m", str(demo_model()), *OPTIONS, "--show-draft"]
    with PROMPT.open("rb") as prompt:
        done = subprocess.run(
            command, stdin=prompt, capture_output=True, check=True, env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100"}
        )
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the process
    console.print(
        f"[bold]$ llamaspec run -m smollm2.gguf {' '.join(OPTIONS)} --show-draft < edit-letter.md[/]", highlight=False
    )
    console.print(Text.from_ansi(done.stdout.decode() + "\n" + done.stderr.decode()))
    Path(sys.argv[1]).write_text(console.export_svg(title="green: drafted, and accepted by the target"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
