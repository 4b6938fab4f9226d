"""The inputs of a build: steps, Dockerfiles, locks, our packages, the build context, and its record."""
