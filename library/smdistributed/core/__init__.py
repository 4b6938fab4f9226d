"""What the libraries share, free of any framework: how this process was launched."""
