"""The documentation, and the models of its examples."""
