"""What must stay cheap: help, completion and errors of usage start none of the heavy libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import get_args

import pytest

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
