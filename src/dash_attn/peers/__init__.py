"""Other libraries' attention, in one place: the forward on a GPU, benchmarks and tests."""
