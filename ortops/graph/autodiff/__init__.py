"""Differentiation: rules, the sweep that applies them, and the Gradient node."""
