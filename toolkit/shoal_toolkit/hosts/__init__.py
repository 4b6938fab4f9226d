"""How hosts meet and talk: the connection between them, and Open MPI's daemons over it."""
