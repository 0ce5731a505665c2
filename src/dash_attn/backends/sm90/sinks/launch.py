"""Launching the kernels for the gradient of a sink."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...base import as_current
from ..compile import program
from .config import SinkConfig

__all__ = ["Statistics", "add_to_sink_sums", "finish_sink", "sink_gradient"]


class Statistics(NamedTuple):
    """What a backward has left of its rows.

    Attributes:
        table: of its plan.
        lse2, delta: parts of its workspace.
        sequences: how many there are.
    """

    table: Tensor
    lse2: Tensor
    delta: Tensor
    sequences: int


def sink_gradient(of_rows: Statistics, sink: Tensor) -> Tensor:
    """(heads,) fp32, of all rows. ``sink``: (heads,) fp32."""
    parts, dsink = sink.new_empty(of_rows.sequences * len(sink)), torch.empty_like(sink)
    *statistics, sequences = of_rows
    with as_current(sink.device):
        program(SinkConfig())(*statistics, sink, parts, dsink, sequences)
    return dsink


def add_to_sink_sums(sums: Tensor, of_rows: Statistics, sink: Tensor) -> None:
    """Add the rows to sums, (sequences, heads) fp32, as :func:`.new_sink_sums` makes them."""
    *statistics, sequences = of_rows
    with as_current(sink.device):
        program(SinkConfig("add"))(*statistics, sink, sums.view(-1), sequences)


def finish_sink(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """(heads,): the sums of all sequences, in their order."""
    sequences, heads = sums.shape
    dsink = sums.new_empty(heads)
    with as_current(sums.device):
        program(SinkConfig("finish"))(sums.view(-1), dsink, sequences)
    return dsink.to(dtype)
