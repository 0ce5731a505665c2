"""Which programs calls of a kind can launch, so that they may be compiled before there is a call."""

from __future__ import annotations

from collections.abc import Iterator

from ...problem import Problem
from ...scores import Scores
from .add_sums.config import AddSumsConfig
from .compile import Config, backward_variants, cached_variants, forward_variants, spread_variants, variants
from .convert.config import MANY_FROM, convert_config
from .fold.config import fold_config
from .forward.config import ForwardConfig
from .key_sums.config import KeySumsConfig
from .sinks.config import STEPS, SinkConfig
from .tiles import SHORT_DTYPES, cached_kernel_of, forward_kernel_of, kernel_of

__all__ = ["programs_of"]


def programs_of(problem: Problem, scores: Scores, *, cached: bool = False) -> dict[str, Config]:
    """Every variant that calls of a kind can launch, by name, whatever their lengths, masks and numbers of
    heads. Not those of ``deterministic=False`` and ``DASH_ATTN_DEBUG``.

    Args:
        problem: one that the backend covers; its head dims and its dtype count.
        scores: of the calls; whether there are a softcap, a sink and intervals of rows counts.
        cached: those of the forward over a cache of keys, too.

    >>> found = programs_of(Problem.dense(seqlen=1, head_dim=256), Scores(1.0))
    >>> [name.replace("-d256-bf16", "") for name in found]  # doctest: +NORMALIZE_WHITESPACE
    ['backward', 'backward-sums', 'backward-apart', 'convert', 'convert-apart', 'convert-apart-many',
     'forward', 'fold', 'key-sums', 'add-sums']
    """
    wanted = {*_of_training(problem, scores)}
    if cached:
        wanted |= {*_of_serving(problem, scores)}
    return {name: config for name, config in variants().items() if config in wanted}


def _of_training(problem: Problem, scores: Scores) -> Iterator[Config]:
    kernel, dtype = kernel_of(problem.head_dim, problem.head_dim_v), SHORT_DTYPES[problem.dtype]
    padded = kernel.padded or scores.row_intervals
    kind = (*kernel[:2], dtype, padded, scores.softcap > 0, scores.row_intervals)
    for backward in backward_variants().values():
        sizes, rest = (backward.head_dim, backward.head_dim_v), (backward.softcap, backward.intervals)
        debug = backward.spin_limit or backward.dump_contributions or backward.trace
        if (*sizes, backward.dtype, backward.padded, *rest) == kind and backward.ordered and not debug:
            yield backward
            yield from (convert_config(backward, tickets) for tickets in (1, MANY_FROM))
            if backward.key_sums:
                yield KeySumsConfig(backward.head_dim, dtype, backward.head_dim_v)
                yield AddSumsConfig()
    columns = forward_kernel_of(problem.head_dim, problem.head_dim_v)
    for forward in forward_variants().values():
        mine = (forward.head_dim, forward.head_dim_v, forward.rest, forward.dtype) == (*columns, dtype)
        if mine and _suits(forward, scores) and not forward.trace:
            yield forward
            if forward.warpgroups > 1:
                yield fold_config(forward)
    if scores.sink:  # with intervals there are no segments, and so no sums of several launches
        yield from map(SinkConfig, [""] if scores.row_intervals else STEPS)


def _suits(forward: ForwardConfig, scores: Scores) -> bool:
    has = forward.sink, forward.softcap, forward.intervals
    return has == (scores.sink, scores.softcap > 0, scores.row_intervals)


def _of_serving(problem: Problem, scores: Scores) -> Iterator[Config]:
    dtype, columns = SHORT_DTYPES[problem.dtype], cached_kernel_of(problem.head_dim, problem.head_dim_v)
    as_it_is = columns == (problem.head_dim, problem.head_dim_v)
    for config in (*cached_variants().values(), *(spread_variants().values() if as_it_is else ())):
        mine = (config.head_dim, config.head_dim_v, config.dtype) == (*columns, dtype)
        if mine and config.softcap == (scores.softcap > 0):
            yield config
