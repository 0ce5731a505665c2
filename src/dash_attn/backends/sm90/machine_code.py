"""What the compiler makes of a kernel variant: what its kernels use, and hashes of their code.

A change that should leave the machine code alone can show that it does: hashes of all variants stand in
``tests/kernels-sm_90a.json``. They are those of one version of the compiler.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, NamedTuple

from ...errors import DashError
from ..cuda.cubin import KernelResources, code_of_cubin, resources_of_cubin
from .backward.config import BackwardConfig
from .compile import ARCH, CompilerOutput, Config, compiler_output
from .forward.config import ForwardConfig

__all__ = ["MachineCode", "code_of", "hashes_of", "machine_code", "normalised"]

_COMMENT = re.compile(r"//.*")
_KERNEL = re.compile(r"\bkernel_cutlass_\w+?(?=_param_\d+|\b)")
_TOOLS = re.compile(r"^// Cuda compilation tools, (.+)$", re.MULTILINE)


class MachineCode(NamedTuple):
    """What was compiled.

    Attributes:
        compiler: version of the package, and of the CUDA tools in it that made PTX and machine code.
        ptx: of all kernels.
        kernels: what each kernel uses, named by its role, such as "preprocess" or "backward".
        hashes: SHA-256 in hex by what it is of: "ptx" (without names of kernels and comments), and the
            instructions (SASS) of each role.
    """

    compiler: str
    ptx: str
    kernels: list[KernelResources]
    hashes: dict[str, str]


def machine_code(config: Config) -> MachineCode:
    """Compile a variant, GPU or not.

    Raises:
        MissingCompilerError: nvidia-cutlass-dsl or apache-tvm-ffi is not installed.
        DashError: as :func:`code_of`.
    """
    return code_of(config, compiler_output(config))


def code_of(config: Config, output: CompilerOutput) -> MachineCode:
    """What is in the output of the compiler for a variant.

    Raises:
        DashError: there are other kernels than one per role.
    """
    roles = config.kernels
    code = {_role(name, roles): data for name, data in code_of_cubin(output.cubin).items()}
    if sorted(code) != sorted(role.lower() for role in roles):
        raise DashError(f"expected one kernel each of {', '.join(roles)}, found {', '.join(code)}")
    texts = {"ptx": normalised(output.ptx).encode(), **{role: code[role] for role in sorted(code)}}
    hashes = {what: hashlib.sha256(text).hexdigest() for what, text in texts.items()}
    return MachineCode(_compiler(output), output.ptx, _resources(output, config), hashes)


def hashes_of(codes: Mapping[str, MachineCode]) -> dict[str, Any]:
    """What ``tests/kernels-sm_90a.json`` holds: the hashes of variants by name, and who made them."""
    compilers = {code.compiler for code in codes.values()}
    if len(compilers) != 1:
        raise DashError(f"expected code of one compiler, found {sorted(compilers)}")
    variants = {name: code.hashes for name, code in codes.items()}
    return {"arch": ARCH, "compiler": compilers.pop(), "variants": variants}


def normalised(ptx: str) -> str:
    """PTX without what may change while the code does not: names of kernels, and comments.

    >>> normalised(".entry kernel_cutlass_Backward_1(.param .b32 kernel_cutlass_Backward_1_param_0) // main")
    '.entry KERNEL(.param .b32 KERNEL_param_0) '
    """
    return _KERNEL.sub("KERNEL", _COMMENT.sub("", ptx))


def _compiler(output: CompilerOutput) -> str:
    """The package has tools of one CUDA version or another, as it was installed: the PTX says which."""
    tools = _TOOLS.search(output.ptx)
    if tools is None:
        raise DashError(f"the PTX does not say what made it; it begins with {output.ptx[:200]!r}")
    return f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}, CUDA {tools[1]}"


def _resources(output: CompilerOutput, config: Config) -> list[KernelResources]:
    named = []
    for kernel in resources_of_cubin(output.cubin):
        role = _role(kernel.name, config.kernels)
        # Only the main kernel's shared memory is sized at launch.
        shared = kernel.shared
        if isinstance(config, (BackwardConfig, ForwardConfig)) and role == config.direction:
            shared = config.shared_bytes
        named.append(replace(kernel, name=role, shared=shared))
    return named


def _role(name: str, roles: tuple[str, ...]) -> str:
    role = next((role for role in roles if f"{role}_object" in name), None)
    if role is None:
        raise DashError(f"kernel {name} is none of {', '.join(roles)}")
    return role.lower()
