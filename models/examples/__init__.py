"""Worked examples; each is one script that states its topic and result."""
