"""Tensors whose values the host must know: read once, and not trusted when they change."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from dash_attn.errors import InputError
from dash_attn.ops import host_reads
from dash_attn.ops.host_reads import HostReads


class OnDevice(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What PyTorch says of the current stream, whose number is 0; the last entry counts."""
    answers = [False]
    monkeypatch.setattr(host_reads, "_CAPTURED", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answers[-1])
    return answers


def counting() -> tuple[HostReads[list[int]], list[str]]:
    names: list[str] = []

    def make(name: str, tensor: Tensor) -> list[int]:
        names.append(name)
        return list(tensor.tolist())

    return HostReads(make), names


def test_a_tensor_is_read_once_until_it_is_written(capturing: list[bool]) -> None:
    reads, names = counting()
    ends = torch.tensor([0, 3]).as_subclass(OnDevice)
    assert [reads.of("a", ends), reads.of("b", ends), names] == [[0, 3], [0, 3], ["a"]]
    ends[1] = 5
    assert [reads.of("c", ends), names] == [[0, 5], ["a", "c"]]
    key = id(ends)
    del ends
    assert key not in reads._known


def test_a_write_that_is_not_counted_is_found_unless_nobody_asks(capturing: list[bool]) -> None:
    reads, _ = counting()
    ends = torch.tensor([0, 3]).as_subclass(OnDevice)
    reads.of("cu_seqlens_q", ends)
    ends.data[1] = 5
    assert reads.of("cu_seqlens_q", ends, check=False) == [0, 3]
    with pytest.raises(RuntimeError, match="cu_seqlens_q was changed without PyTorch's knowledge"):
        reads.of("cu_seqlens_q", ends)


def test_nothing_new_is_read_during_a_capture(capturing: list[bool]) -> None:
    reads, names = counting()
    known, other = (torch.tensor([0, 3]).as_subclass(OnDevice) for _ in range(2))
    reads.of("known", known)
    capturing.append(True)
    assert reads.of("known", known) == [0, 3]
    with pytest.raises(InputError, match="other on cpu cannot be read while a CUDA graph is captured"):
        reads.of("other", other)
    assert names == ["known"]


def test_during_a_capture_a_tensor_of_inference_mode_is_said_to_be_one(capturing: list[bool]) -> None:
    """To make the call before the capture does not help: its numbers are not kept."""
    reads, _ = counting()
    with torch.inference_mode():
        inference = torch.tensor([0, 3]).as_subclass(OnDevice)
    reads.of("a", inference)
    capturing.append(True)
    with pytest.raises(InputError, match="a on cpu cannot be read .*: it was made in inference mode"):
        reads.of("a", inference)


def test_a_tensor_of_inference_mode_and_one_on_the_cpu_are_read_at_every_call(capturing: list[bool]) -> None:
    with torch.inference_mode():
        inference = torch.tensor([0, 3]).as_subclass(OnDevice)
    for tensor in (inference, torch.tensor([0, 3])):
        reads, names = counting()
        assert [reads.of("a", tensor), reads.of("a", tensor), names] == [[0, 3], [0, 3], ["a", "a"]]


def test_what_a_graph_compares_a_tensor_with_outlives_the_tensor(capturing: list[bool]) -> None:
    """A replay writes the comparison where the capture did, also after the tensor was read anew."""
    ends = torch.tensor([0, 3], dtype=torch.int32)
    same = torch.empty(2, dtype=torch.bool)
    copy = host_reads._Copy(ends.clone(), same, same.new_empty(()), 0)
    memory = weakref.ref(copy.all_same)
    for now in (False, True):
        capturing.append(now)
        host_reads._assert_unchanged("cu_seqlens_q", ends, copy)
        assert bool(copy.all_same)
        assert bool(host_reads._CAPTURED) == now
    del copy
    assert memory() is not None
