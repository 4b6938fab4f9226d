"""What the layers of a saved image hold, and to whom each file belongs."""
