"""The engine in TensorFlow: collectives as operations, eager and in graphs."""
