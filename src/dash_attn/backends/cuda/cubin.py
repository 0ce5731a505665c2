"""Resources and code of compiled kernels, read from the cubin itself (an ELF file), without any CUDA tool."""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["KernelResources", "code_of_cubin", "resources_of_cubin"]

# Attributes of .nv.info sections. The first three hold a (symbol, value) pair of 32-bit words each.
_REGISTERS, _FRAME_SIZE, _MIN_STACK_SIZE, _NAMED_BARRIERS = 0x2F, 0x11, 0x12, 0x4C


@dataclass(frozen=True)
class KernelResources:
    """What one kernel of a cubin uses.

    Attributes:
        name: mangled name.
        registers: per thread, at launch.
        stack: bytes of local memory per thread; spilled registers live there, so 0 means no spills.
        shared: bytes per block; a cubin tells only what is static, what is decided at launch is added by
            who knows the configuration.
        barriers: named barriers.
    """

    name: str
    registers: int
    stack: int
    shared: int
    barriers: int


@dataclass(frozen=True)
class _Section:
    name: str
    data: bytes
    size: int


def resources_of_cubin(cubin: bytes) -> list[KernelResources]:
    """Resources of every kernel in a cubin.

    Raises:
        ValueError: not a 64-bit little-endian ELF file.
    """
    sections = {section.name: section for section in _sections(cubin)}
    symbols = _symbols(sections)
    pairs: dict[tuple[int, str], int] = {}
    for attribute, payload in _attributes(sections[".nv.info"].data):
        if attribute in (_REGISTERS, _FRAME_SIZE, _MIN_STACK_SIZE):
            symbol, value = struct.unpack("<II", payload)
            pairs[attribute, symbols[symbol]] = value
    return [_kernel(name, sections, pairs) for name in code_of_cubin(cubin)]


def code_of_cubin(cubin: bytes) -> dict[str, bytes]:
    """The instructions (SASS) of every kernel in a cubin, by mangled name.

    Raises:
        ValueError: not a 64-bit little-endian ELF file.
    """
    sections = (section for section in _sections(cubin) if section.name.startswith(".text."))
    return {section.name.removeprefix(".text."): section.data for section in sections}


def _kernel(name: str, sections: dict[str, _Section], pairs: dict[tuple[int, str], int]) -> KernelResources:
    own = dict(_attributes(sections[f".nv.info.{name}"].data))
    shared = sections.get(f".nv.shared.{name}")
    return KernelResources(
        name=name,
        registers=pairs[_REGISTERS, name],
        stack=max(pairs[_FRAME_SIZE, name], pairs[_MIN_STACK_SIZE, name]),
        shared=shared.size if shared else 0,
        barriers=own[_NAMED_BARRIERS][0] if _NAMED_BARRIERS in own else 0,
    )


def _sections(elf: bytes) -> list[_Section]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a 64-bit little-endian ELF file: it starts with {elf[:6]!r}")
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * entry) for i in range(count)]
    names = headers[names_at]
    sections = []
    for name, kind, _, _, at, size, *_ in headers:
        start = names[4] + name
        text = elf[start : elf.index(b"\0", start)].decode()
        nobits = kind == 8
        sections.append(_Section(text, b"" if nobits else elf[at : at + size], size))
    return sections


def _symbols(sections: dict[str, _Section]) -> list[str]:
    table, strings = sections[".symtab"].data, sections[".strtab"].data
    starts = [struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), 24)]
    return [strings[start : strings.index(b"\0", start)].decode() for start in starts]


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    """(attribute, payload) of a .nv.info section; a short attribute's payload is its 16-bit value."""
    found, at = [], 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        length = value if form == 4 else 0
        found.append((attribute, data[at + 4 : at + 4 + length] if form == 4 else data[at + 2 : at + 4]))
        at += 4 + length
    return found
