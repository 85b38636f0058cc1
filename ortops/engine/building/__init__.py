"""Building a trainable model: parameters, training algorithm, updates."""
