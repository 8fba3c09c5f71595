"""A real single-node Kubernetes on this machine, without Docker: see ../README.md."""
