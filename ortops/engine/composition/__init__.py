"""Several models as one: composed for training, and split again.

See `ortops.compose` and `ortops.split`.
"""
