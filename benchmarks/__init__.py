"""Benchmarks of ortops and other frameworks: ``python -m benchmarks``."""
