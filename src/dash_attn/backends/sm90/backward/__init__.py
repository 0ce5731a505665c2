"""The Hopper (sm_90a) kernels; the only folder that imports cutlass."""
