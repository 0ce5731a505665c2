"""GPU backend: what runs a plan on a Hopper GPU."""
