"""The Hopper kernels' PTX, executed on the CPU with its numbers: copies, products, everything."""
