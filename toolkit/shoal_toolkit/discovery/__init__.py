"""Finds the hosts of a job if no resourceconfig.json lists them: one module for each platform, see `sources`."""
