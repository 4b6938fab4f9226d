"""The places in which the hosts of a job run: containers of Docker, processes of this machine, and Kubernetes."""
