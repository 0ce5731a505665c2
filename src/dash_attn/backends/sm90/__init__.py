"""The Hopper backend: launching, and what its kernels share; ``backward`` has the kernels of the backward."""
