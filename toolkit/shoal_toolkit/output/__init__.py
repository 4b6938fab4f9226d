"""The output of ranks and launchers on its way to the log, and what is read from it: metrics and causes of failures."""
