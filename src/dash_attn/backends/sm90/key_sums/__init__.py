"""What makes dK and dV of the fp32 sums that several backward launches have added to."""
