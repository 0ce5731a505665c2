"""The Triton backend: the same plans and numerics on other GPUs. Correct first, not fast."""
