"""Other libraries' attention, served by this one: :mod:`.sdpa` for PyTorch, :mod:`.transformers`.

Importing changes nothing. Each module has a function that the user calls to switch it on.
"""


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(map(int, version.split(".")[:2]))


OLDEST_TRANSFORMERS = (5, 4)
"""The first release that tells mask functions where the queries start."""

NO_CONTINUOUS_BATCHING = (5, 19)
"""From this release on continuous batching takes no implementations but transformers' own."""
