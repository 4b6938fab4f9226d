"""What is built: buildspec.yml and the data files under dockerfiles/, read and checked."""
