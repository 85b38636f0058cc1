"""Worked examples; each is one script that says what it shows and the figure it reaches."""
