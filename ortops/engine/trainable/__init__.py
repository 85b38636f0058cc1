"""Trainable files: metadata, step graphs, initialization, and writing values back."""
