"""Running training steps on onnxruntime."""
