"""Checks several hosts before the launch: each collects facts, and the first host compares them."""
