"""Helper programs that `train` runs as processes of their own: they unpack code, install packages and use S3."""
