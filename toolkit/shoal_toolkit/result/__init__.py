"""How it ended: the result, and why."""
