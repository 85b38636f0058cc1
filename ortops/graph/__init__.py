"""Graphs: built, read, rewritten, converted, and kept in files."""
