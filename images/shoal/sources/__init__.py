"""From the matrix to what goes to the engine: Dockerfile, locked wheels, context, and the record of all of it."""
