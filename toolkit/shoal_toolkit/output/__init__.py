"""Moves the output of ranks and launchers to the log, and reads metrics and causes of failures from it."""
