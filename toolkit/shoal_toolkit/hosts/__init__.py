"""Connections between the hosts of a job, and Open MPI's daemons, which are started over them."""
