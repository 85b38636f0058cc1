"""Trainable files: their metadata, their step graph, and what is written back."""
