"""How many cases tests on the CPU run. Tests use or assert these numbers; docs/reliability.md quotes them.

A number is exact where a test draws that many cases, and a lower bound where a test counts what it found.
"""

from __future__ import annotations

# test_many_plans.py. A chunk has a seed of its own; `make test` runs the first chunks.
CHUNKS, FAST_CHUNKS, PROBLEMS_PER_CHUNK = 40, 10, 500
RANDOM_PROBLEMS = CHUNKS * PROBLEMS_PER_CHUNK
FAST_RANDOM_PROBLEMS = FAST_CHUNKS * PROBLEMS_PER_CHUNK
FEWEST_SMS = 78
"""Streaming multiprocessors of the smallest Hopper GPU (H20)."""

# test_liveness.py, lower bounds: plans whose every order of events is explored.
SMALL_PLANS = 400
SMALL_PAIRS = 1100
"""Pairs of a small plan and a number of workers, one beyond ``min_workers`` at most."""
DEPENDENT_SMALL_PLANS = 250
"""Small plans that need more than one worker."""
AHEAD_PAIRS = 1400
"""Pairs of a small plan and a number of workers, items being claimed ahead."""
UNSAFE_ONE_AHEAD = 100
"""Dependent small plans that can deadlock if workers claim one task ahead without a look."""

# test_interval_plans.py: random intervals of rows.
SMALL_INTERVALS, LARGE_INTERVALS = 4110, 900
"""Every order of events of what they leave of small plans, and some orders of larger ones."""
INTERVALS = SMALL_INTERVALS + LARGE_INTERVALS

# test_liveness.py, larger plans. Each problem is placed in three ways.
PLACEMENTS_TRIED = 3
LARGER_CHUNKS = 2
EVERY_WORKER_PROBLEMS, COUNTER_PROBLEMS, AHEAD_PROBLEMS = 25, 75, 30
"""Problems of a chunk."""
EVERY_WORKER_PLANS = LARGER_CHUNKS * PLACEMENTS_TRIED * EVERY_WORKER_PROBLEMS
COUNTER_PLANS = LARGER_CHUNKS * PLACEMENTS_TRIED * COUNTER_PROBLEMS
AHEAD_PLANS = LARGER_CHUNKS * PLACEMENTS_TRIED * AHEAD_PROBLEMS
EVERY_WORKER_PAIRS = 1000
"""Of a chunk, a lower bound."""
AHEAD_ORDERS = 1000
"""Of a chunk, a lower bound."""
