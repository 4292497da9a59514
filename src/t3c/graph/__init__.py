"""Turn an artifact and a profile into the ONNX graph that an engine runs."""
