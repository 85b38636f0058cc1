"""Measurements of ortops beside its peers: ``python -m benchmarks``."""
