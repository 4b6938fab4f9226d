"""The pipeline: how the stages of a model call each other, and in which order a stage computes."""
