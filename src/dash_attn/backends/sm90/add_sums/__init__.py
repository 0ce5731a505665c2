"""Adding the fp32 sums of dK and dV that two segments of q rows have left."""
