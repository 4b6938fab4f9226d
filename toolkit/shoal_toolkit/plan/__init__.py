"""What is launched: pure functions from a `Job` to a `LaunchPlan`, which `train --explain` prints."""
