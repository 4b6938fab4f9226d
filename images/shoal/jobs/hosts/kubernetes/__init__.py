"""Writes files that run a job on a cluster. Nothing here talks to a cluster."""
