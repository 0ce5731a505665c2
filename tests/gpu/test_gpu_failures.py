"""What goes wrong on a GPU ends in a message that names it, and the next call works."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
import torch

import dash_attn
from dash_attn.backends.cuda.multiprocessors import multiprocessors, usable_multiprocessors
from dash_attn.backends.sm90 import launch as launcher
from dash_attn.backends.sm90.launch import Debug, run_backward
from dash_attn.errors import TooFewWorkersError
from dash_attn.schedule import Shift, build_plan
from gpu_cases import CAUSAL, FULL, Inputs, auto_plan, dense, differing, launch, make_case, random_tensors
from hold import held

DEVICE = torch.device("cuda", 0)


def test_out_of_memory_in_the_workspace():
    """PyTorch's error, and the same call gives the same bytes once there is room."""
    problem = dense(CAUSAL, batch=4, heads=16, kv_heads=16, seqlen=4096)
    dout, q, k, v = random_tensors(problem)
    lse = torch.full((4, 16, 4096), 10.0, device="cuda")
    inputs = Inputs(dout, q, k, v, torch.zeros_like(q), lse)
    plan = auto_plan(problem)
    first = run_backward(plan, inputs, 0.1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allowed, taken = torch.cuda.memory_reserved() + (64 << 20), []
    try:
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:  # what earlier tests left in PyTorch's cache is taken, too
                taken.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            run_backward(plan, inputs, 0.1)
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not differing(first, run_backward(plan, inputs, 0.1))


def test_a_forked_process_is_told_so():
    """CUDA does not survive a fork; nothing may hang or compute in the child."""
    q = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16)
    dash_attn.attention(q, q, q)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        message = "no error"
        try:
            dash_attn.attention(q, q, q)
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writing, message.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        message = file.read()
    os.waitpid(child, 0)
    assert "Cannot re-initialize CUDA in forked subprocess" in message


def test_a_ring_that_a_green_context_has_too_few_sms_for_is_refused():
    """The device's number of SMs says nothing there; without this refusal the launch would never end."""
    if not hasattr(torch.cuda, "green_contexts"):
        pytest.skip("this PyTorch makes no green contexts")
    ring, free = (dense(mask, batch=1, heads=1, kv_heads=1, seqlen=8192) for mask in (FULL, CAUSAL))
    plan, case = build_plan(ring, Shift(ring=64)), make_case(ring)
    free_plan, free_case = auto_plan(free), make_case(free)
    first, expected = launch(plan, case), launch(free_plan, free_case)
    assert usable_multiprocessors(DEVICE) == multiprocessors(DEVICE) > 64
    green = torch.cuda.green_contexts.GreenContext.create(num_sms=32)
    green.set_context()
    try:
        assert usable_multiprocessors(DEVICE) == 32
        with pytest.raises(TooFewWorkersError, match="needs 64 resident workers .* got 32"):
            launch(plan, case)
        assert not differing(expected, launch(free_plan, free_case))
    finally:
        green.pop_context()
    assert usable_multiprocessors(DEVICE) == multiprocessors(DEVICE)
    assert not differing(first, launch(plan, case))
    if hasattr(green, "Stream"):
        with torch.cuda.stream(green.Stream()):
            assert usable_multiprocessors(DEVICE) == 32
            with pytest.raises(TooFewWorkersError, match="needs 64 resident workers .* got 32"):
                launch(plan, case)


def test_a_new_thread_has_the_whole_device():
    """A thread has no current context until its first call of CUDA."""
    found = []

    def ask() -> None:
        found.append(usable_multiprocessors(DEVICE))
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(usable_multiprocessors(DEVICE))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [multiprocessors(DEVICE)] * 2


def test_a_ring_is_captured_in_a_graph():
    """Asking for the SMs is no operation of the stream that is captured."""
    problem = dense(FULL, seqlen=1024)
    plan, case = auto_plan(problem), make_case(problem)
    assert plan.min_workers > 1
    first = launch(plan, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch(plan, case)
    graph.replay()
    assert not differing(first, captured)


@pytest.mark.parametrize(
    "priorities",
    [
        (0, 0, 0),
        (0, -1, -2),
    ],
)
def test_streams_that_get_a_third_of_the_sms_each(monkeypatch, priorities):
    """Rings of 64 on three streams, while SMs become free 44 at a time.

    A stream of higher priority takes the next free SMs although an earlier launch still waits for its own:
    each of the three would hold 44 and wait for ever, did the launches not take turns. Bounded waits would
    make that an error here.
    """
    monkeypatch.undo()  # filling memory takes SMs, and so changes who gets which
    problem = dense(FULL, batch=1, heads=1, kv_heads=1, seqlen=8192)
    plan, case = build_plan(problem, Shift(ring=64)), make_case(problem)
    assert plan.min_workers == 64
    errors = []
    monkeypatch.setattr(
        launcher, "check_hand_overs", lambda found, trace: errors.append(found)
    )  # read at the end: nobody waits
    monkeypatch.setattr(launcher, "SPIN_LIMIT", 100_000)
    how = {"debug": Debug(bounded=True)}
    first, results = launch(plan, case, **how), []
    torch.cuda.synchronize()
    with held(132) as sms:
        for priority in priorities:
            with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
                results.append(launch(plan, case, **how))
            time.sleep(5e-4)
            sms.release(44)
            time.sleep(5e-4)
    torch.cuda.synchronize()
    assert [error.tolist()[0] for error in errors] == [0] * 4
    assert not any(differing(first, result) for result in results)
