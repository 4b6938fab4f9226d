#!/bin/sh
# SageMaker starts a container for inference with the command `serve`.
exec python /opt/serve/serve.py "$@"
