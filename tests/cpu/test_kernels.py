"""Kernel variants compile for sm_90a without a GPU and without a spill, to the machine code on record."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from loads import under_way
from outputs import output_of

from dash_attn.backends.cuda.cubin import code_of_cubin, resources_of_cubin
from dash_attn.backends.cuda.linking import linker
from dash_attn.backends.sm90 import machine_code as machine_code_module
from dash_attn.backends.sm90.backward.config import THREADS, Accumulation, BackwardConfig
from dash_attn.backends.sm90.cached.config import ChunkConfig
from dash_attn.backends.sm90.compile import ARCH, Config, variants
from dash_attn.backends.sm90.forward.config import ForwardConfig
from dash_attn.backends.sm90.machine_code import MachineCode, code_of, hashes_of, machine_code, normalised
from dash_attn.errors import DashError
from dash_attn.tools.cli import main

pytest.importorskip("cutlass", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")
pytest.importorskip("tvm_ffi", reason="the kernel compiler is not installed: pip install 'dash-attn[cuda]'")

SHARED = 232_448  # bytes that a block may use at most
SOURCES = Path(__file__).parents[2] / "src"
RECORD = Path(__file__).parents[1] / "kernels-sm_90a.json"
KNOWN = json.loads(RECORD.read_text())
FAST = (
    "backward-d64-bf16",
    "backward-d64-bf16-apart",
    "backward-d128-bf16",
    "forward-d64-bf16",
    "forward-d128-bf16",
)
VARIANTS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in variants()]


@cache
def compiled(config: Config) -> MachineCode:
    return code_of(config, output_of(config))


@pytest.fixture(scope="module", params=VARIANTS)
def name(request: pytest.FixtureRequest) -> str:
    """A variant. A fixture, so that all tests of a variant run one after the other, in one process."""
    return request.param


@pytest.mark.filterwarnings("default")
def test_compiles_without_spills(name: str) -> None:
    config = variants()[name]
    kernels = {kernel.name: kernel for kernel in compiled(config).kernels}
    assert set(kernels) == {role.lower() for role in config.kernels}
    assert {name: kernel.stack for name, kernel in kernels.items()} == dict.fromkeys(kernels, 0)
    if not isinstance(config, (BackwardConfig, ForwardConfig)):
        return
    main = kernels["chunk" if isinstance(config, ChunkConfig) else config.direction]
    if isinstance(config, ForwardConfig) and config.warpgroups == 1:
        assert main.registers <= 255  # there are as many as nobody needs
    else:
        assert main.registers == launched_with(config)
    assert main.shared <= SHARED
    assert 1 <= main.barriers <= 16


EXPERIMENTS = {
    "nothing": {"overlap": "nothing"}, "products": {"overlap": "products"}, "exp2": {"exp2_share": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_ablations_measure_compiles(name: str) -> None:
    """No variant has these options. They stay comparable with what ships."""
    config = replace(variants()["forward-d128-bf16"], **EXPERIMENTS[name])
    assert [kernel.stack for kernel in machine_code(config).kernels] == [0, 0]


def launched_with(config: BackwardConfig | ForwardConfig) -> int:
    """Registers per thread of one resident block per SM: all of them, in eights."""
    threads = config.threads if isinstance(config, ForwardConfig) else THREADS
    return 65_536 // threads // 8 * 8


@pytest.mark.parametrize(
    "config", [config for config in variants().values() if isinstance(config, ForwardConfig)], ids=str
)
def test_warps_take_no_more_registers_than_others_have_left(config: ForwardConfig) -> None:
    """Otherwise they wait for ever: a launch gets no register later."""
    multiply, others = config.registers
    launched = config.threads * launched_with(config)
    assert 128 * (config.warpgroups * multiply + others) <= launched


def test_the_record_is_of_the_compiler_that_is_pinned() -> None:
    """With another one the next test is skipped."""
    pins = (RECORD.parents[1] / "constraints.txt").read_text().splitlines()
    (pinned,) = [pin.partition("==")[2] for pin in pins if pin.startswith("nvidia-cutlass-dsl==")]
    assert KNOWN["compiler"].startswith(f"nvidia-cutlass-dsl {pinned}, ")
    assert set(KNOWN["variants"]) == set(variants())


@pytest.mark.filterwarnings("default")
def test_machine_code_is_what_is_on_record(name: str) -> None:
    """If code should change: ``dash-attn kernels --hashes --save tests/kernels-sm_90a.json``."""
    code = compiled(variants()[name])
    if code.compiler != KNOWN["compiler"]:
        pytest.skip(f"the record is of {KNOWN['compiler']}, installed is {code.compiler}")
    assert code.hashes == KNOWN["variants"][name]


@pytest.mark.filterwarnings("default")
def test_memory_is_touched_when_the_kernel_before_is_done(name: str) -> None:
    """A kernel may start before the one before it ends. What it read too early could be an old value, which
    the emulator does not see: there one kernel runs after the other."""
    entries = compiled(variants()[name]).ptx.split(".entry")[1:]
    assert entries
    for ptx in entries:
        assert touching(ptx), "the control: behind the wait something is found"
        before = ptx.partition("griddepcontrol.wait")[0]
        if "-apart" in name and "preprocess" not in before.lower():
            # Preprocessing lets these begin when it has waited itself: what is older, such as the plan table,
            # is there. That they wait for the rest is tested in test_emulated.py.
            assert touching(before)
            assert not re.findall(r"\b(?:st|red|atom)\.\S*global|\bld\.global\.v4", before)
        elif name != "add-sums":  # which is launched when the kernel before has ended
            assert not touching(before)
            assert "-apart" not in name or "launch_dependents" not in before


@pytest.mark.filterwarnings("default")
def test_what_a_warp_has_read_is_there_when_it_arrives(name: str) -> None:
    """Behind an arrival the copy engine may write over it. It never does so over single words, which are
    mail between warps. Where dQ is a task late, LSE of the next task is read when dO of this one is done."""
    config = variants()[name]
    allowed = {32, 64} if isinstance(config, BackwardConfig) and config.head_dim in (80, 96) else {32}
    kernels = code_of_cubin(output_of(config).cubin).values()
    # There the warp that loads V reads four words of an item at a time. They are mail: the warp that writes
    # the next ones waits for the end of the item, too.
    four_words = int(name.startswith("forward-d64") and "narrow" in name)
    for code in kernels:
        found = [bits for _, bits in under_way(code)]
        assert found.count(128) <= four_words
        assert {*found} - {128} <= allowed
    if name in FAST:
        assert any(under_way(code, waits=False) for code in kernels), "the control: loads are found"


def touching(ptx: str) -> list[str]:
    """Instructions on global memory."""
    return re.findall(r"^.*(?:\.global\b|cp\.async\.bulk).*$", ptx, re.MULTILINE)


def test_every_variant_is_on_record() -> None:
    assert list(KNOWN["variants"]) == list(variants())
    assert KNOWN["arch"] == ARCH
    kernels = [frozenset(hashes.items()) for hashes in KNOWN["variants"].values()]
    assert len(set(kernels)) == len(kernels), "two variants have the same kernels"


def test_names_and_comments_do_not_count() -> None:
    ptx = ".entry kernel_cutlass_{0}_1(.param .b32 kernel_cutlass_{0}_1_param_0)\n{{ {1}; // {2}\n}}"
    once = normalised(ptx.format("Backward_object_at_", "add.f32 %f1, %f2, %f3", "in one file"))
    assert once == normalised(ptx.format("Renamed_object_at_", "add.f32 %f1, %f2, %f3", "in another"))
    assert once != normalised(ptx.format("Backward_object_at_", "add.f32 %f1, %f3, %f2", "in one file"))
    assert "KERNEL_param_0" in once


def test_hashes_of_two_compilers_are_not_one_record() -> None:
    codes = {name: MachineCode(name, "", [], {}) for name in ("one", "other")}
    with pytest.raises(DashError, match="expected code of one compiler, found \\['one', 'other'\\]"):
        hashes_of(codes)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name", ["64-bf16", "80-bf16-padded", "96-bf16", "128-bf16", "192v128-bf16", "256-bf16"]
)
def test_shared_memory_is_what_the_kernel_allocates(name: str) -> None:
    from dash_attn.backends.sm90.backward.kernel import Backward

    config = variants()[f"backward-d{name}"]
    assert Backward(config)._storage().size_in_bytes() == config.shared_bytes <= SHARED


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 72}, r"head_dim 72 is not supported; supported: 64, 80, 96, 128, 192 \(V: 128\)"),
        ({"dtype": "fp32"}, "dtype must be 'bf16' or 'fp16', got 'fp32'"),
        ({"q_stages": 5}, "bytes of shared memory, limit 232448"),
        ({"do_stages": 1}, "has one stage of Q or dO"),
        *(
            ({"accumulation": Accumulation.APART} | each, "contributions are not apart in segments")
            for each in (
                {"key_sums": True},
                {"intervals": True, "padded": True},
                {"spin_limit": 1},
                {"dump_contributions": True},
                {"trace": True},
            )
        ),
        (
            {"head_dim": 256, "accumulation": Accumulation.APART, "softcap": True},
            "no register is left for contributions apart beside a softcap",
        ),
        ({"head_dim": 64, "ds_stages": 1}, "two stages of the buffer that dK leaves through"),
        ({"dq_stages": 1}, "two stages of the buffer that dK leaves through"),
        ({"head_dim": 192, "head_dim_v": 128, "dq_stages": 2}, "bytes of shared memory, limit 232448"),
        ({"head_dim": 192, "head_dim_v": 128, "q_stages": 1}, "has one stage of Q or dO"),
        ({"head_dim": 256, "do_stages": 2}, "bytes of shared memory, limit 232448"),
        ({"head_dim": 256, "tile_n": 128}, "tile_n must be 64"),
        ({"head_dim": 256, "ds_stages": 1}, "P and dS have a buffer each"),
        (
            {"head_dim": 192, "head_dim_v": 128, "softcap": True},
            "no register is left for what a softcap multiplies dP by",
        ),
        ({"k_columns": 24}, "k_columns must be a multiple of 16 and at most 128, got 24"),
        ({"v_columns": 144}, "v_columns must be a multiple of 16 and at most 128, got 144"),
        ({"head_dim": 128, "head_dim_v": 64}, r"head_dim 128 \(V: 64\) is not supported"),
    ],
)
def test_configurations_that_cannot_run(changed: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackwardConfig(**({"head_dim": 128} | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed", [{"rest": 8}, {"rest": 32}, {"head_dim": 192, "head_dim_v": 128, "rest": 16}]
)
def test_a_rest_of_k_and_v_that_cannot_be(changed: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a rest is a multiple of 16 columns, and divides those of K and V"):
        ForwardConfig(**({"head_dim": 80} | changed))


@pytest.mark.filterwarnings("default")
def test_one_lane_stores_dk_and_dv() -> None:
    """load.py elects the lane that stores and prefetches; a compiler that elects one would nest the two."""
    ptx = compiled(variants()["backward-d64-bf16"]).ptx
    before_stores = ptx.split("cp.async.bulk.tensor.5d.global.shared")[:-1]
    assert len(before_stores) == 4  # dV and dK, between items and at the end
    for before in before_stores:
        assert before.rpartition("bar.warp.sync")[2].count("elect.sync") == 1
    prefetches = ptx.split("cp.async.bulk.prefetch.tensor")
    assert [between.count("elect.sync") for between in prefetches[1:-1]] == [1]


def test_an_unknown_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--only", "cached-d64-bf16-16", "--json"]) == 2
    said = capsys.readouterr().err
    assert "unknown variant 'cached-d64-bf16-16'; of " in said
    assert "cached-d64-bf16-few-16" in said


@pytest.mark.filterwarnings("default")
def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code_module, "machine_code", compiled)
    assert main(["kernels", "--only", FAST[0], "--json", "--hashes"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(row["variant"], row["arch"]) for row in found["kernels"]} == {(FAST[0], ARCH)}
    assert found["hashes"]["variants"] == {FAST[0]: compiled(variants()[FAST[0]]).hashes}
    assert main(["kernels", "--only", FAST[0], "--hashes"]) == 0
    assert found["hashes"]["variants"][FAST[0]]["ptx"] in capsys.readouterr().out


def test_command_saves_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    codes = {
        config: MachineCode(KNOWN["compiler"], "", [], KNOWN["variants"][name])
        for name, config in variants().items()
    }
    monkeypatch.setattr(machine_code_module, "machine_code", codes.__getitem__)
    assert main(["kernels", "--hashes", "--save", str(tmp_path / "record.json")]) == 0
    assert (tmp_path / "record.json").read_bytes() == RECORD.read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--save {0}/new", "/new writes the hashes of all variants: give --hashes, and no --only"),
        ("--save {0}/new --hashes --only backward-d64-bf16", "give --hashes, and no --only"),
        ("--save {0} --hashes", "it is a folder"),
        ("--save {0}/no/new --hashes", "No such file or directory"),
    ],
)
def test_a_record_that_would_not_be_whole_or_not_be_written(
    flags: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delattr(machine_code_module, "machine_code")  # said before anything is compiled
    assert main(["kernels", *flags.format(tmp_path).split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_cubin() -> None:
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        resources_of_cubin(b"#!/bin/sh")


FIRST_CALL = """
import sys
from dash_attn.backends.sm90 import compile
if sys.argv[1] == "load":
    compile._PROGRAMS._compile = lambda config: sys.exit("compiled again")
print("ready", flush=True)
sys.stdin.readline()
assert callable(compile.program(compile.variants()["add-sums"]))  # the one that compiles fastest
assert sys.argv[1] == "compile" or "cutlass" not in sys.modules
"""


@pytest.mark.slow
def test_processes_that_make_the_first_call_together(tmp_path: Path) -> None:
    """Two processes compile and store one variant at the same time; a third one loads it, and no compiler."""
    if linker() is None:
        pytest.skip("no C compiler on the PATH (cc, gcc, clang)")
    environment = {**os.environ, "DASH_ATTN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SOURCES)}

    def start(what: str) -> subprocess.Popen[str]:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen([sys.executable, "-c", FIRST_CALL, what], text=True, env=environment, **pipes)

    for together in (["compile", "compile"], ["load"]):
        processes = [start(what) for what in together]
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * len(together)
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        errors = [process.communicate(timeout=120)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(together), errors
        assert [path.suffix for path in tmp_path.iterdir()] == [".program"]
