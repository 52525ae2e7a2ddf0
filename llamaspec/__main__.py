"""`python -m llamaspec`."""

from llamaspec.cli import main

main()
