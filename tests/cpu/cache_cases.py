"""Small tensors over a cache of keys: two sequences with three rows and three new tokens each."""

from __future__ import annotations

import torch
from torch import Tensor


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, CACHE, PAGES = draw(2, 3, 4, 8), draw(2, 32, 2, 8, seed=1), draw(4, 16, 2, 8, seed=2)
NEW, TABLE, USED = draw(2, 3, 2, 8, seed=3), int32(3, 1, 0, 2).view(2, 2), int32(3, 29)
