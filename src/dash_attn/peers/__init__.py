"""Other libraries' attention, in one place, for benchmarks and tests."""
