"""Runs training jobs, in containers or on this machine."""
