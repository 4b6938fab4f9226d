"""The result of a job: its files and exit code, and the explanation of a failure."""
