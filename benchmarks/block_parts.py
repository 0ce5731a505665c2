"""Where the time of a block goes: kernels of a profile, by what launched them."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from block_values import PARTS

__all__ = ["parts_of", "profiled"]

FORWARD, BACKWARD, PRODUCTS, REST = PARTS

Event = dict[str, Any]
"""Of a trace in Chrome's format; times in microseconds."""

_PRODUCT = re.compile(r"gemm|nvjet|xmma|splitk", re.IGNORECASE)
"""In names of kernels of cuBLAS and CUTLASS, outside of attention."""
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def profiled(call: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a call on the GPU, by part."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return parts_of(events)


def parts_of(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds of all kernels, by part.

    A kernel is attention's if a thread launched it while it was within that, or if the profiler says so on
    the GPU's own time line.

    Raises:
        ValueError: there is no kernel, or none of attention.
    """
    launched = dict(_launched(events))
    on_gpu = _spans(events, "gpu_user_annotation")
    found = dict.fromkeys(PARTS, 0.0)
    for event in events:
        if event.get("cat") in _KERNELS:
            part = launched.get(event.get("args", {}).get("correlation")) or _within(on_gpu, event)
            if part is None:
                part = PRODUCTS if _PRODUCT.search(event["name"]) else REST
            found[part] += event["dur"] / 1000
    if not found[FORWARD] or not found[BACKWARD]:
        raise ValueError(f"a profile in which attention takes no time: {found}")
    return {part: round(ms, 4) for part, ms in found.items()}


def _launched(events: Iterable[Event]) -> Iterable[tuple[object, str]]:
    """(correlation, part) of what was launched within attention."""
    threads: dict[object, list[Event]] = defaultdict(list)
    for span in _spans(events, "user_annotation"):
        threads[span.get("tid")].append(span)
    for event in events:
        if event.get("cat") in _LAUNCHES and (part := _within(threads[event.get("tid")], event)):
            yield event.get("args", {}).get("correlation"), part


def _spans(events: Iterable[Event], category: str) -> list[Event]:
    """Forwards and backwards of attention, in the order of time."""
    found = [e for e in events if e.get("cat") == category and e.get("name") in (FORWARD, BACKWARD)]
    return sorted(found, key=lambda e: float(e["ts"]))


def _within(spans: Sequence[Event], event: Event) -> str | None:
    """The part in which an event begins. Spans do not overlap."""
    at = bisect_right([span["ts"] for span in spans], event["ts"]) - 1
    if at >= 0 and event["ts"] <= spans[at]["ts"] + spans[at]["dur"]:
        return str(spans[at]["name"])
    return None
