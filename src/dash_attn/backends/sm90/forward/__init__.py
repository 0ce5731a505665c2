"""The forward pass on Hopper: its configuration, its kernels and their launch."""
