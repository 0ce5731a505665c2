"""The fold of segments behind a forward, where tiles were split.

A program of its own, so that a first call compiles it only if it launches it."""
