"""Finds the hosts of a job if no resourceconfig.json lists them: `sources` has the table of platforms."""
