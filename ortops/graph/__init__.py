"""Graphs: construction, analysis, rewriting, conversion, and files."""
