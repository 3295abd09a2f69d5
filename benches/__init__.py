"""The benchmarks of fastlock, installed as ``fastlock.benches``: ``fastlock bench`` and a pytest-benchmark suite.

Law: nothing in ``fastlock`` imports this package but the command line, and that only when asked to bench. Every number
is a ratio taken in one run, beside the versions and the build that produced it. Benches are code: CI runs each once.
"""
