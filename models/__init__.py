"""Models that emit ONNX without another framework, and the data that they are trained on."""
