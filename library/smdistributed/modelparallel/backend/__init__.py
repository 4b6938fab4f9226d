"""Parts for both frameworks: configuration, ranks, the schedule of a pipeline, cuts of a model. Imports neither."""
