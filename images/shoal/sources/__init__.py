"""What a build is made from: steps, Dockerfiles, locks, our packages, the build context, and its record."""
