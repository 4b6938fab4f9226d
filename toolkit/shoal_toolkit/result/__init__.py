"""How it ended: the verdict, and why."""
