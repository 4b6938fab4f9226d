"""The plan: which stage has which module, by a trace or by hand, and the costs of a configuration."""
