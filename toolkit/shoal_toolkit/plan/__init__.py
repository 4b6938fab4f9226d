"""Decides what is launched: pure functions from a `Job` and a `Machine` to a `LaunchPlan`."""
