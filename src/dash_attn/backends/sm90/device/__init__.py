"""Device code that the kernels of both directions share."""
