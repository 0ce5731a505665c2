"""What is left to do after the main kernel of a backward: dK and dV of head groups, and dQ where no
contribution waits.

A program of its own, so that a first call compiles it only if it launches it."""
