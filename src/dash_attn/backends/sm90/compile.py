"""Kernel variants: which there are, and how they are compiled.

Compiling needs no GPU: tensors are fake and the target is always sm_90a.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import MissingCompilerError
from ..cuda.cache import KernelCache
from ..cuda.linking import is_shared, link
from .add_sums.config import AddSumsConfig
from .backward.config import Accumulation, BackwardConfig
from .cached.config import CHUNK_PIECES, PIECES, CachedConfig, cached_config, chunk_config
from .convert.config import FEW, MANY, MANY_FROM, ConvertConfig, convert_config
from .fold.config import FoldConfig, fold_config
from .forward.config import ForwardConfig, forward_config
from .key_sums.config import KeySumsConfig
from .sinks.config import STEPS, SinkConfig
from .spread.config import HEAD_DIMS, SpreadConfig, spread_config
from .tiles import (
    CACHED,
    FORWARD,
    SHORT_DTYPES,
    TILES,
    has_intervals,
    has_softcap,
    has_softcap_apart,
    kernel_of,
)

__all__ = [
    "ARCH",
    "CompilerOutput",
    "Config",
    "backward_variants",
    "cached_variants",
    "compiler_output",
    "flavour",
    "forward_variants",
    "program",
    "spread_variants",
    "variants",
]

Config = (
    BackwardConfig
    | ConvertConfig
    | ForwardConfig
    | FoldConfig
    | CachedConfig
    | KeySumsConfig
    | AddSumsConfig
    | SinkConfig
)

ARCH = "sm_90a"


class CompilerOutput(NamedTuple):
    """The PTX of all kernels of a variant, and the cubin (an ELF file) that was made of it."""

    ptx: str
    cubin: bytes


def variants() -> dict[str, Config]:
    """Every variant the package can launch, by name."""
    finish = {
        name: KeySumsConfig(head_dim, dtype, head_dim_v)
        for name, (head_dim, head_dim_v), dtype in _kinds("key-sums")
    }
    backwards, forwards = backward_variants(), forward_variants()
    return {
        **backwards,
        **{
            _name_of(found): found
            for tickets in (1, MANY_FROM)
            for found in (convert_config(before, tickets) for before in backwards.values())
        },
        **forwards,
        **{
            _name_of(found): found
            for found in (fold_config(c) for c in forwards.values() if c.warpgroups > 1)
        },
        **finish,
        "add-sums": AddSumsConfig(),
        **{"-".join(filter(None, ("sinks", step))): SinkConfig(step) for step in STEPS},
        **cached_variants(),
        **spread_variants(),
    }


def backward_variants() -> dict[str, BackwardConfig]:
    """Those of the backward: product, of segments of queries, unordered, and debug; each also for tensors of
    fewer columns (80 columns for these only), and with a softcap. Where contributions to dQ are apart a
    softcap is for head dims up to 128. With intervals of rows there is one for any number of columns."""
    found = {}
    for softcap, padded in product((False, True), repeat=2):
        for name, (head_dim, head_dim_v), dtype in _kinds("backward", softcap):
            if kernel_of(head_dim, head_dim_v).padded > padded:
                continue
            base = BackwardConfig(head_dim, dtype, padded, softcap=softcap, head_dim_v=head_dim_v)
            name += "-padded" * padded + "-softcap" * softcap
            found[name] = base
            found[f"{name}-sums"] = replace(base, key_sums=True)
            found[f"{name}-sums-bounded"] = replace(base, key_sums=True, spin_limit=1)
            found[f"{name}-unordered"] = replace(base, accumulation=Accumulation.ATOMIC)
            if not softcap or has_softcap_apart(head_dim, head_dim_v):
                found[f"{name}-apart"] = replace(base, accumulation=Accumulation.APART)
            found[f"{name}-bounded"] = replace(base, spin_limit=1)
            found[f"{name}-contributions"] = replace(base, dump_contributions=True)
            found[f"{name}-trace"] = replace(base, trace=True)
            found[f"{name}-bounded-trace"] = replace(base, spin_limit=1, trace=True)
    for name, head_dims, dtype in _kinds("backward"):
        if has_intervals(*head_dims):
            base, name = BackwardConfig(head_dims[0], dtype, padded=True, intervals=True), f"{name}-intervals"
            found[name] = base
            found[f"{name}-unordered"] = replace(base, accumulation=Accumulation.ATOMIC)
            found[f"{name}-bounded"] = replace(base, spin_limit=1)
            found[f"{name}-bounded-trace"] = replace(base, spin_limit=1, trace=True)
    return found


def forward_variants() -> dict[str, ForwardConfig]:
    """Those of the forward: product, with a sink, debug, in turns, narrow, with a softcap, and with
    intervals."""
    found = {}
    for (head_dim, head_dim_v, rest), dtype in product(FORWARD, SHORT_DTYPES.values()):
        name = _name("forward", head_dim, head_dim_v, dtype) + f"-rest{rest}" * (rest > 0)
        base = forward_config(head_dim, dtype, head_dim_v, rest)
        found[name] = base
        found[f"{name}-sink"] = replace(base, sink=True)
        found[f"{name}-trace"] = replace(base, trace=True)
        if base.may_take_turns:
            found[f"{name}-turns"] = replace(base, in_turns=True)
            found[f"{name}-turns-sink"] = replace(base, in_turns=True, sink=True)
        if base.may_be_narrow:
            found[f"{name}-narrow"] = base.as_narrow()
            found[f"{name}-narrow-sink"] = replace(base, sink=True).as_narrow()
        if has_softcap(head_dim, head_dim_v):
            found[f"{name}-softcap"] = replace(base, softcap=True)
            found[f"{name}-softcap-sink"] = replace(base, softcap=True, sink=True)
        if has_intervals(head_dim, head_dim_v):
            found[f"{name}-intervals"] = base.with_intervals()
            found[f"{name}-intervals-sink"] = replace(base, sink=True).with_intervals()
    return found


def cached_variants() -> dict[str, CachedConfig]:
    """Those of the forward over a cache: for few rows, for many, and for chunks, by the rows of a copy; each
    also with a softcap."""
    found = {}
    for name, (head_dim, head_dim_v), dtype in _kinds("cached"):
        sizes = (head_dim, dtype)
        bases: list[tuple[str, CachedConfig]] = [
            *(("few", cached_config(*sizes, True, piece, head_dim_v)) for piece in PIECES),
            *(("many", cached_config(*sizes, False, piece, head_dim_v)) for piece in PIECES),
            *(("chunk", chunk_config(*sizes, piece, head_dim_v)) for piece in CHUNK_PIECES),
        ]
        for rows, base in bases:
            name_of_piece = f"{name}-{rows}-{base.piece}"
            found[name_of_piece] = base
            if has_softcap(head_dim, head_dim_v):
                found[f"{name_of_piece}-softcap"] = replace(base, softcap=True)
    return found


def spread_variants() -> dict[str, SpreadConfig]:
    """Those of the forward over a cache whose keys are spread over blocks; each also with a softcap."""
    found = {}
    for head_dim, dtype, piece in product(HEAD_DIMS, SHORT_DTYPES.values(), PIECES):
        base = spread_config(head_dim, dtype, piece)
        found[f"spread-d{head_dim}-{dtype}-{piece}"] = base
        found[f"spread-d{head_dim}-{dtype}-{piece}-softcap"] = replace(base, softcap=True)
    return found


def _kinds(direction: str, softcap: bool = False) -> Iterator[tuple[str, tuple[int, int], str]]:
    """A name, head dims of Q and V, and a dtype. ``softcap``: those that have variants with one."""
    for head_dims, dtype in product(CACHED if direction == "cached" else TILES, SHORT_DTYPES.values()):
        if has_softcap(*head_dims) or not softcap:
            yield _name(direction, *head_dims, dtype), head_dims, dtype


def _name(direction: str, head_dim: int, head_dim_v: int, dtype: str) -> str:
    of_v = "" if head_dim_v == head_dim else f"v{head_dim_v}"
    return f"{direction}-d{head_dim}{of_v}-{dtype}"


def _name_of(config: ConvertConfig | FoldConfig) -> str:
    """Of what runs behind others: one serves many of them."""
    if isinstance(config, FoldConfig):
        return _name("fold", config.head_dim_v, config.head_dim_v, config.dtype) + "-sink" * config.sink
    name = _name("convert", config.head_dim, config.head_dim_v, config.dtype)
    return name + "-padded" * config.padded + {0: "", FEW: "-apart", MANY: "-apart-many"}[config.apart]


def program(config: Config) -> Any:
    """The compiled function of a configuration: from this process, from disk, or from the compiler.

    Raises:
        MissingCompilerError: nvidia-cutlass-dsl or apache-tvm-ffi is not installed.
    """
    return _PROGRAMS(config, ARCH)


def _compile(config: Config, options: str = "") -> Any:
    with _compiler_or_error():
        import cutlass.cute as cute

        made_by = import_module(f".{config.direction}.program", __package__)
    arguments = made_by.fake_arguments(config, env_stream=True)
    # The target is named, so that no GPU and no environment variable decides it.
    options = f"--enable-tvm-ffi --gpu-arch {ARCH} {options}"
    with _uncollected():
        return cute.compile(made_by.Program(config), *arguments, options=options)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: tracing makes many objects, nearly all of which stay until it ends."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(path: Path, name: str) -> Any:
    """The function of a program. The compiler is imported only if the program is an object file."""
    if is_shared(path):
        with _compiler_or_error():
            import tvm_ffi
        with tempfile.TemporaryDirectory() as folder:
            # A name of its own: the system takes a library that it has loaded under a name for this one.
            library = Path(folder) / f"{name}.so"
            library.symlink_to(path.absolute())
            return tvm_ffi.load_module(str(library))[name]
    with _compiler_or_error():
        import cutlass.cute as cute
    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), name)


def _packed(made: Path) -> bytes:
    """An object file, linked if it can be linked and loaded here."""
    from cutlass.cute.runtime import find_runtime_libraries

    library = made.with_suffix(".so")
    if link(made, library, find_runtime_libraries(enable_tvm_ffi=True)):
        with suppress(OSError, RuntimeError, AttributeError):
            program = library.read_bytes()
            _PROGRAMS.loaded(program)
            return program
    return made.read_bytes()


@contextmanager
def _compiler_or_error() -> Iterator[None]:
    try:
        import tvm_ffi  # noqa: F401 - found missing here rather than in the middle of a compilation

        yield
    except ImportError as error:
        raise MissingCompilerError(
            f"the Hopper kernels need a compiler that is not installed ({error}): pip install "
            "'dash-attn[cuda]', or ask for backend='triton'"
        ) from error


def flavour() -> str:
    """Which of the builds of the compiler is in use: the newest of those installed that the driver can run,
    or without a driver the newest. Asked without the compiler, whose import takes longer than a program's."""
    version = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    driver = version.value // 1000
    usable = [build for build in _builds() if not driver or build <= driver]
    return f"CUDA {max(usable, default=driver)}" if usable or driver else "no driver"


@cache
def _builds() -> list[int]:
    """CUDA versions of the compiler's builds that are installed."""
    found = []
    for build in (12, 13):
        with suppress(PackageNotFoundError):
            distribution(f"nvidia-cutlass-dsl-libs-cu{build}")
            found.append(build)
    return found


_PROGRAMS = KernelCache(_compile, _load, compiler=flavour, packed=_packed)


def compiler_output(config: Config) -> CompilerOutput:
    """Compile a variant, GPU or not, and keep what the compiler would throw away.

    Raises:
        MissingCompilerError: nvidia-cutlass-dsl or apache-tvm-ffi is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        _compile(config, f"--keep-ptx --keep-cubin --dump-dir={folder}")
        (ptx,), (cubin,) = (list(Path(folder).rglob(f"*.{kind}")) for kind in ("ptx", "cubin"))
        return CompilerOutput(ptx.read_text(), cubin.read_bytes())
