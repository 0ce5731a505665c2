"""What a soak does on the GPU: ``soak_phases.py REPLAYS SECONDS`` prints signs of life, then a report.

Gradients are compared on the device with those of the first run, without waiting for the result: each replay
that has another byte adds one to a counter, which is read when a phase ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from broken_plans import broken_plan
from dash_attn.backends.sm90 import launch as launcher
from dash_attn.backends.sm90.launch import Debug, Result
from dash_attn.errors import HandOverError, TooFewWorkersError
from dash_attn.schedule import Plan, Shift, build_plan
from gpu_cases import (
    CAUSAL,
    FULL,
    GRADS,
    WINDOW,
    any_case,
    auto_plan,
    dense,
    launch,
    make_case,
    packed,
    relative_error,
)
from hold import held

EVERY = 250  # replays between two signs of life
BOUND = 20_000  # polls of a bounded wait, some ten milliseconds: the broken plan waits many times
DOOMED_SECONDS = 120  # after which a process that hangs on purpose ends itself

PLANS: dict[str, Plan] = {
    "full, ring of 64": build_plan(dense(FULL, batch=1, heads=1, kv_heads=1, seqlen=8192), Shift(ring=64)),
    "full, ring of 8": auto_plan(dense(FULL, heads=2, seqlen=1024)),
    "causal, SPT": auto_plan(dense(CAUSAL, batch=1, heads=4, kv_heads=4, seqlen=1000)),
    "causal, 4 q heads on 1": auto_plan(dense(CAUSAL, kv_heads=1, seqlen=900, head_dim=64)),
    "window, packed": auto_plan(packed(100, 700, 333, mask=WINDOW)),
}
OTHERS = [
    dense(FULL, batch=1, seqlen=77),
    dense(CAUSAL, batch=3, seqlen=1536, head_dim=64),
    packed(5, 1, 900, heads=8, kv_heads=8),
    dense(WINDOW, batch=1, seqlen=2500),
]


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


class Subject:
    """A plan, the gradients of its first run, and how many later runs differed, by stream."""

    def __init__(self, name: str, plan: Plan, streams: int) -> None:
        self.name, self.plan = name, plan
        self.case = any_case(plan.problem)
        self.first = launch(self.plan, self.case)
        for grad in GRADS:
            error = relative_error(getattr(self.first, grad), self.case.exact[grad])
            assert error <= 4e-3, f"{name}, {grad}: error {error}"
        self.counters = torch.zeros(streams, dtype=torch.int64, device="cuda")
        self.graph: torch.cuda.CUDAGraph | None = None

    def see(self, result: Result, stream: int) -> None:
        """Compare on the current stream; nobody waits."""
        dq, dk, dv = ((bits(getattr(result, g)) != bits(getattr(self.first, g))).any() for g in GRADS)
        self.counters[stream].add_(dq | dk | dv)

    def capture(self, stream: int) -> None:
        """A graph of one run and its comparison, which uses the counter of one stream."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.see(launch(self.plan, self.case), stream)

    def differing(self) -> int:
        """Replays since the last call that had another byte."""
        torch.cuda.synchronize()
        found = int(self.counters.sum())
        self.counters.zero_()
        torch.cuda.synchronize()
        return found

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for grad in GRADS:
            digest.update(bits(getattr(self.first, grad)).cpu().numpy().tobytes())
        return digest.hexdigest()


class Soak:
    """The subjects, the streams they run on, and what disturbs them."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.random = random.Random(0)
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.subjects = [Subject(name, plan, 2) for name, plan in PLANS.items()]
        self.others = [(auto_plan(problem), any_case(problem)) for problem in OTHERS]
        for other in self.others:
            launch(*other)
        torch.cuda.synchronize()
        for index, subject in enumerate(self.subjects):
            subject.capture(index % 2)
        self.busy = torch.cuda.Stream()
        self.square = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        self.hoard: list[Tensor] = []
        self.phases: list[dict[str, Any]] = []
        torch.cuda.synchronize()

    def disturb(self, i: int) -> None:
        """Matrix products beside, other shapes between, and memory that comes and goes, dirty."""
        with torch.cuda.stream(self.busy):
            torch.mm(self.square, self.square)
        if i % 5 == 0:
            with torch.cuda.stream(self.streams[i % 2]):
                launch(*self.random.choice(self.others))
        if i % 8 == 0:
            size = self.random.randrange(1 << 20, 256 << 20)
            self.hoard.append(torch.full((size,), i % 256, dtype=torch.uint8, device="cuda"))
            del self.hoard[: len(self.hoard) - self.random.randrange(8)]
        if i % 100 == 0:
            torch.cuda.empty_cache()

    def replay(self, i: int, **how: Any) -> None:
        """One replay of one subject: launched, or every third time from its graph. Of the launches about half
        keep contributions apart, the others wait for tickets: the bytes are the same."""
        index = i % len(self.subjects)
        subject = self.subjects[index]
        if not how and i // len(self.subjects) % 3 == 2:
            assert subject.graph is not None
            with torch.cuda.stream(self.streams[index % 2]):
                subject.graph.replay()
            return
        stream = self.random.randrange(2)
        how = how or {"apart": self.random.random() < 0.5}
        with torch.cuda.stream(self.streams[stream]):
            subject.see(launch(subject.plan, subject.case, **how), stream)

    def replays(self, phase: str, wanted: int, **how: Any) -> int:
        """That many replays with everything that disturbs; fewer if the time is over."""
        for i in range(wanted):
            if i % EVERY == 0:
                torch.cuda.synchronize()
                print(f"{phase}: {i:,} of {wanted:,}", flush=True)
                if time.monotonic() > self.deadline:
                    return i
            self.disturb(i)
            self.replay(i, **how)
        return wanted

    @contextmanager
    def phase(self, name: str, wanted: int, control: bool = False) -> Iterator[dict[str, Any]]:
        """Times a phase and reads the counters at its end; its body says how many replays were made."""
        start = time.perf_counter()
        facts: dict[str, Any] = {"phase": name, "wanted": wanted, "replays": 0, "control": control}
        yield facts
        facts["differing"] = sum(subject.differing() for subject in self.subjects)
        facts["seconds"] = round(time.perf_counter() - start, 2)
        self.phases.append(facts)

    def hashes(self) -> dict[str, str]:
        return {subject.name: subject.sha256() for subject in self.subjects}


def contention(soak: Soak, replays: int) -> None:
    with soak.phase("contention", replays) as facts:
        facts["replays"] = soak.replays("contention", replays)


def without_order(soak: Soak, replays: int) -> None:
    """The negative control: the same harness must see that dQ of no fixed order differs."""
    with soak.phase("control: without order", replays, control=True) as facts:
        facts["replays"] = soak.replays("without order", replays, ordered=False)


def aborted_launches(soak: Soak, replays: int) -> None:
    """Launches that give up in the middle, each followed by a tenth of the replays."""
    launcher.SPIN_LIMIT = BOUND
    plan = broken_plan()
    case = make_case(plan.problem)
    with soak.phase("after launches that gave up", replays) as facts:
        for _ in range(10):
            try:
                launch(plan, case, debug=Debug(bounded=True))
            except HandOverError:
                facts["replays"] += soak.replays("after a launch that gave up", replays // 10)
            else:
                raise AssertionError("the broken plan ended without an error")


def two_processes(soak: Soak, other: subprocess.Popen[str], replays: int) -> None:
    """Another process that began with this one made its replays meanwhile, and has the same hashes."""
    with soak.phase("beside another process", replays) as facts:
        facts["replays"] = soak.replays("beside another process", replays)
        while other.poll() is None:
            facts["replays"] += soak.replays("beside another process", EVERY)
        facts["beside"] = json.loads(other.communicate()[0].splitlines()[-1])
        assert facts["beside"]["sha256"] == soak.hashes(), "another process has other bytes"
        assert not facts["beside"]["differing"], f"another process: {facts['beside']}"


def killed_process(soak: Soak, doomed: subprocess.Popen[str], replays: int) -> None:
    """Another process hangs in a launch; replays beside it, then it is killed in the middle, then replays."""
    assert doomed.stdin
    assert doomed.stdout
    doomed.stdin.write("go\n")
    doomed.stdin.flush()
    assert doomed.stdout.readline() == "hanging\n"
    with soak.phase("a launch hangs, then is killed", replays) as facts:
        facts["replays"] = soak.replays("beside a process that hangs", replays // 10)
        assert doomed.poll() is None, "the process that should hang has ended"
        doomed.kill()
        doomed.wait()
        facts["replays"] += soak.replays("after its end", replays - replays // 10)


def few_sms(soak: Soak, sms: int, replays: int) -> None:
    """In a green context: plans that fit give the same bytes, the others are refused before the launch."""
    if not hasattr(torch.cuda, "green_contexts"):
        print(f"green context of {sms} SMs: left out, this PyTorch cannot make one", flush=True)
        return
    green = torch.cuda.green_contexts.GreenContext.create(num_sms=sms)
    green.set_context()
    try:
        with soak.phase(f"green context of {sms} SMs", replays) as facts:
            refused = []
            fitting = []
            for subject in soak.subjects:
                try:
                    subject.see(launch(subject.plan, subject.case), 0)
                    fitting.append(subject)
                except TooFewWorkersError:
                    refused.append(subject.name)
            assert refused == [s.name for s in soak.subjects if s.plan.min_workers > sms], refused
            for i in range(replays):
                if i % EVERY == 0:
                    torch.cuda.synchronize()
                    print(f"{sms} SMs: {i} of {replays}", flush=True)
                subject = fitting[i % len(fitting)]
                subject.see(launch(subject.plan, subject.case), 0)
            facts |= {"replays": replays, "refused": refused}
    finally:
        green.pop_context()


def held_sms(soak: Soak, rounds: int) -> None:
    """Another stream holds 100 of the SMs while every subject is launched, then gives them back."""
    count = rounds * len(soak.subjects)
    with soak.phase("SMs held by another stream", count) as facts:
        for _ in range(rounds):
            print("SMs held by another stream", flush=True)
            with held(100):
                for index, subject in enumerate(soak.subjects):
                    with torch.cuda.stream(soak.streams[index % 2]):
                        subject.see(launch(subject.plan, subject.case), index % 2)
                time.sleep(0.01)
        facts["replays"] = count


def doomed_process() -> None:
    """Launch a plan that hangs, when told to, and stay in it until killed."""
    signal.alarm(DOOMED_SECONDS)
    plan = broken_plan()
    case = make_case(plan.problem)
    launch(auto_plan(plan.problem), case)
    torch.cuda.synchronize()
    sys.stdin.readline()
    launch(plan, case)
    time.sleep(0.2)
    print("hanging", flush=True)
    torch.cuda.synchronize()


def beside_process(seconds: float) -> None:
    """The other of two processes: replays without stop until told to end."""
    soak = Soak(time.monotonic() + seconds)
    with soak.phase("beside", 1000) as facts:
        facts["replays"] = soak.replays("beside", 1000)
    print(json.dumps(facts | {"sha256": soak.hashes()}), flush=True)


def start(role: str, seconds: float) -> subprocess.Popen[str]:
    """This file in another process, in a role of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, role, str(seconds)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def everything(replays: int, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    doomed, other = start("doomed", seconds), start("beside", seconds)
    try:
        soak = Soak(deadline)
        tenth = max(10, replays // 10)
        phases: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (two_processes, (other, tenth)),
            (contention, (replays,)),
            (without_order, (tenth // 5,)),
            (aborted_launches, (tenth,)),
            (killed_process, (doomed, tenth)),
            (held_sms, (10,)),
            *((few_sms, (sms, tenth // 5)) for sms in (16, 64)),
        ]
        for run, how in phases:
            run(soak, *how)
    finally:
        doomed.kill()
        other.kill()
    hashes = soak.hashes()
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl"),
        },
        "problems": [
            {"name": s.name, "problem": str(s.plan.problem), "policy": s.plan.policy,
             "min_workers": s.plan.min_workers, "fingerprint": s.plan.fingerprint, "sha256": hashes[s.name]}
            for s in soak.subjects
        ],
        "sha256": hashlib.sha256(json.dumps(hashes).encode()).hexdigest(),
        "phases": soak.phases,
    }  # fmt: skip


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of kernel compilers
    role, given = sys.argv[1], float(sys.argv[2])
    if role == "doomed":
        doomed_process()
    elif role == "beside":
        beside_process(given)
    else:
        print(json.dumps(everything(int(role), given)), flush=True)
        sys.stdout.flush()
        os._exit(0)  # a graph or a context that does not end must not hide the report
