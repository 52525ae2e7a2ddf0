"""Measurements. Each module is a command: `python -m llamaspec.bench.overhead`, `python -m llamaspec.bench.demo`."""
