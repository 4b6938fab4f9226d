"""What the fronts share: configuration, ranks, the schedule of a pipeline and how a model is cut. No framework."""
