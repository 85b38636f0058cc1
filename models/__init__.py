"""Models that are written as ONNX without another framework, and the data to train them."""
