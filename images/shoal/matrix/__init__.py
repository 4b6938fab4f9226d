"""The matrix of images: reads and checks buildspec.yml and the data files under dockerfiles/."""
