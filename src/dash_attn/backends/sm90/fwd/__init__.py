"""The Hopper forward (draft: compiled, never run)."""
