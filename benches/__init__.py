"""The benchmarks of fastlock, installed as ``fastlock.benches``: ``fastlock bench``, ``fastlock flash-sale`` and a
pytest-benchmark suite.

Nothing in ``fastlock`` imports this package but the command line, and only for these two commands. Every number is a
ratio taken in one run, beside the versions and the build that produced it. Benches are code: CI runs each once.
"""
