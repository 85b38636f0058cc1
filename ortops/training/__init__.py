"""Building trainable models, and running them."""
