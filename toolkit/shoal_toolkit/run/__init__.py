"""What runs: the loop, processes, ranks, and the two roles of a host."""
