"""The control plane: an HTTP server in each rank."""
