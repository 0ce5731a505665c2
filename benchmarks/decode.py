"""Time decoding and chunked prefill over a cache of keys, beside PyTorch's kernels and FlashAttention-4.

Calls of a contender are captured in a CUDA graph, as serving does, and the graph is replayed in blocks of
about 12 ms, contenders in turns. One that cannot be captured is called from Python, and the row says so.

Cases: ``decode`` has one row per sequence, all sequences alike, keys contiguous or in pages in random order.
``chunk`` has rows behind many keys, beside the same rows in training. ``copy`` is what the card copies.
``gb_per_s``: of the used keys and values, each counted once; of a copy, read and written.

    python benchmarks/decode.py --output benchmarks/results/h200-decode.json
    python benchmarks/decode.py --only decode-8x8192 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from card import facts_of_run
from forward import BLOCK_S, Call, captured, once, sustained
from record import Row, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dash_attn import flash_attn_func, flash_attn_with_kvcache
from dash_attn.peers import fa4
from dash_attn.tools.bench import require_hopper


class Case(NamedTuple):
    """rows: per sequence; page_size 0: contiguous."""

    kind: str
    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int

    @property
    def name(self) -> str:
        pages = f"-pages{self.page_size}" if self.page_size else ""
        rows = f"-rows{self.rows}" if self.rows > 1 else ""
        heads = f"{self.heads}:{self.kv_heads}x{self.head_dim}"
        return f"{self.kind}-{self.batch}x{self.keys}{rows}-{heads}{pages}"

    @property
    def bytes(self) -> int:
        """Of the used keys and values."""
        return 4 * self.batch * self.keys * self.kv_heads * self.head_dim


DECODE = (
    (1, 1024), (1, 8192), (1, 16_384), (1, 131_072), (8, 2048), (8, 8192), (16, 32_768), (32, 8192),
    (64, 4096), (128, 4096), (256, 1024),
)  # fmt: skip
"""Sequences, and keys of each."""
HEADS = ((32, 8), (64, 8), (8, 1))
CHUNKS = ((512, 16_384), (512, 65_536), (2048, 65_536), (4096, 65_536))


def cases() -> Iterator[Case]:
    for batch, keys in DECODE:
        for heads in HEADS:
            for page_size in (0, 16, 64):
                yield Case("decode", batch, 1, keys, *heads, 128, page_size)
    for rows, keys in CHUNKS:
        for page_size in (0, 16, 64):
            yield Case("chunk", 1, rows, keys, 32, 8, 128, page_size)


def contenders(case: Case) -> dict[str, Call]:
    """Functions without arguments, those of peers as far as they run."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q = drawn(case.batch, case.rows, case.heads, case.head_dim)
    used = torch.full((case.batch,), case.keys, dtype=torch.int32, device="cuda")
    table, places = None, (case.batch, case.keys)
    if case.page_size:
        count = case.keys // case.page_size
        table = torch.randperm(case.batch * count, device="cuda").int().view(case.batch, count)
        places = (case.batch * count, case.page_size)
    k, v = (drawn(*places, case.kv_heads, case.head_dim) for _ in range(2))
    found: dict[str, Call] = {
        "dash": lambda: flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, page_table=table, causal=True, backend="sm90"
        )
    }
    if table is None:
        found |= _of_pytorch(q, k, v)
        found["dash training"] = lambda: flash_attn_func(q, k, v, causal=True, backend="sm90")
    if not fa4.why_not():
        found["fa4"] = _of_fa4(q, k, v, used, table)
    return {name: call for name, call in found.items() if name == "dash" or _runs(case, name, call)}


def _of_pytorch(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Without a mask, which one row does not need; several rows would be aligned otherwise."""
    if q.shape[1] > 1:
        return {}
    tensors = [x.transpose(1, 2) for x in (q, k, v)]

    def attended(kernel: SDPBackend) -> Tensor:
        with sdpa_kernel(kernel):
            return scaled_dot_product_attention(*tensors, enable_gqa=True)

    return {
        "sdpa flash": lambda: attended(SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": lambda: attended(SDPBackend.CUDNN_ATTENTION),
    }


def _of_fa4(q: Tensor, k: Tensor, v: Tensor, used: Tensor, table: Tensor | None) -> Call:
    from flash_attn.cute.interface import _flash_attn_fwd

    options: dict[str, Any] = {"causal": True, "seqused_k": used}
    options |= {} if table is None else {"page_table": table}
    return lambda: _flash_attn_fwd(q, k, v, **options)


def _runs(case: Case, name: str, call: Call) -> bool:
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{case.name}: {name} does not run: {type(error).__name__}: {error!s:.100}", flush=True)
        return False
    return True


def rows(case: Case, rounds: int) -> Iterator[Row]:
    calls = {name: captured(call) for name, call in contenders(case).items()}
    replays: dict[str, Call] = {name: replay for name, (replay, _) in calls.items()}
    seconds = {name: min(once(call) for _ in range(2)) for name, call in replays.items()}
    counts = {name: max(1, int(BLOCK_S / s)) for name, s in seconds.items()}
    for name, times in sustained(replays, counts, rounds).items():
        number = calls[name][1]
        yield row_of(case, name, [ms / number for ms in times]) | {"graph": number > 1}


def row_of(case: Case, name: str, times: Sequence[float]) -> Row:
    ms = statistics.median(times)
    return {
        "case": case.name, "impl": name, "ms": round(ms, 5), "gb_per_s": round(case.bytes / ms / 1e6, 1),
        "spread": round((max(times) - min(times)) / ms, 4), **case._asdict(),
    }  # fmt: skip


def copied(rounds: int) -> Row:
    """A copy of 512 MB."""
    source = torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    call: Callable[[], object] = lambda: target.copy_(source)  # noqa: E731
    call()
    ms = statistics.median(sustained({"copy": call}, {"copy": 40}, rounds)["copy"])
    gb_per_s = round(4 * source.numel() / ms / 1e6, 1)
    return {"case": "copy", "impl": "torch", "ms": round(ms, 5), "gb_per_s": gb_per_s}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write this file")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose names have one")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be >= 1, got {args.rounds}")
    require_hopper()
    found = [copied(args.rounds)]
    print(f"copy: {found[0]['gb_per_s']:.0f} GB/s", flush=True)
    chosen = [case for case in cases() if any(text in case.name for text in args.only)]
    header = facts_of_run(args.rounds, "torch", "flash-attn-4", "nvidia-cutlass-dsl")
    for case in chosen:
        new = list(rows(case, args.rounds))
        found += new
        speeds = [f"{row['impl']} {1e3 * row['ms']:.1f} us {row['gb_per_s']:.0f} GB/s" for row in new]
        print(f"{case.name}: {', '.join(speeds)}", flush=True)
        torch.cuda.empty_cache()
        if args.output:
            write(args.output, header, found)


if __name__ == "__main__":
    main()
