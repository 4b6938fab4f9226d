"""Finds the hosts of a job where no resourceconfig.json lists them: one module for each platform, see `sources`."""
