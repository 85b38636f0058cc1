"""The training domain in ONNX's reference evaluator: NumPy only, from the specification's text.

``ReferenceEvaluator(model, new_ops=ortops.reference.OPS)`` executes Gradient, Adagrad, Adam and
Momentum. `Evaluator` does so in functions of the model as well, and `TrainingEvaluator` executes
``training_info``. They are meant to be read and compared with: they share no code with the rest of
ortops, and they are slow.

A Gradient passes through the operators in `ortops.reference.operators`, through If, Loop and Scan,
through functions of the model, and through operators that ONNX defines as functions.
"""

from ortops.reference.training import OPS, Evaluator, TrainingEvaluator

__all__ = ["OPS", "Evaluator", "TrainingEvaluator"]
