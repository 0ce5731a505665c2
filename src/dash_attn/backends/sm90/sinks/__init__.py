"""The gradient of a sink, after a backward."""
