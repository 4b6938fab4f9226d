"""Runs a plan on this host: its processes and ranks, and the two roles of a host."""
