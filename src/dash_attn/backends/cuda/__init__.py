"""What every backend on an NVIDIA GPU needs: compiling, caching, counting SMs, limits, turns."""
