"""What must stay cheap: help, completion and errors of usage start none of the heavy libraries."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import llamaspec
from llamaspec.cli import VERBS, arguments
from llamaspec.llama import context, model

HEAVY = ("llama_cpp", "numpy", "jinja2", "psutil", "gguf", "textual", "huggingface_hub", "matplotlib")
PROGRAM = f"""
import sys
from llamaspec.cli import main
try:
    main()
finally:
    print("heavy:", sorted(set({HEAVY!r}) & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], [], ["nonsense"], ["run"], ["run", "--nonsense"], *([verb, "--help"] for verb in VERBS)],
)
def test_help_and_usage_errors_import_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_completion_imports_nothing_heavy() -> None:
    asked = {"_LLAMASPEC_COMPLETE": "bash_complete", "COMP_WORDS": "llamaspec run --draft-", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | asked, capture_output=True, text=True)
    assert "plain,--draft-length" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_the_library_itself_imports_nothing_heavy() -> None:
    code = f"import sys, llamaspec, llamaspec.options, llamaspec.errors; print(set({HEAVY!r}) & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_choices_that_are_spelled_out_twice_agree() -> None:
    assert arguments.CACHE_TYPES == context.CACHE_TYPES
    assert set(arguments.FLASH_ATTENTION) == set(get_args(context.FlashAttention))
    assert set(arguments.SPLIT_MODES) == set(get_args(model.SplitMode))


def test_the_library_knows_nothing_of_the_benchmarks() -> None:
    # import-linter does not see them: they lie outside the package's folder.
    for path in Path(llamaspec.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            assert not [name for name in names if name.startswith("llamaspec.bench")], path
