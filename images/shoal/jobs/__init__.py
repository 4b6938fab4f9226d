"""Runs training jobs, in containers or on this machine, and plans model parallelism in the same places."""
