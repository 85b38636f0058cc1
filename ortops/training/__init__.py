"""Building trainable models, and running them."""

from ortops.training.builder import build_training_model
from ortops.training.session import TrainingSession
from ortops.training.step_graph import step_graph

__all__ = ["TrainingSession", "build_training_model", "step_graph"]
