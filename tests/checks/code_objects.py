"""Clang's offload bundles, and the metadata of AMD's code objects in them (LLVM's AMDGPUUsage has the formats)."""

import struct
from typing import Any

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
METADATA_NOTE = 32  # NT_AMDGPU_METADATA
NOTE_SECTION, SYMBOL_SECTION = 7, 2


def read_bundle(bundle: bytes) -> dict[str, bytes]:
    """The name of each entry of a bundle -> its bytes."""
    assert bundle.startswith(MAGIC)
    (count,) = struct.unpack_from("<Q", bundle, len(MAGIC))
    place = len(MAGIC) + 8
    entries = {}
    for _ in range(count):
        offset, size, name_size = struct.unpack_from("<QQQ", bundle, place)
        place += 24 + name_size
        entries[bundle[place - name_size : place].decode()] = bundle[offset : offset + size]
    return entries


def _read_sections(elf: bytes, kind: int) -> list[tuple[bytes, int]]:
    """The bytes of each section of a kind, and the section that it links to."""
    assert elf.startswith(b"\x7fELF\x02\x01")
    (begin,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQI", elf, begin + index * size) for index in range(count)]
    return [(elf[header[4] : header[4] + header[5]], header[6]) for header in headers if header[1] == kind]


def read_metadata(elf: bytes) -> dict[str, Any]:
    """What the compiler tells the loader about a code object: amdhsa.target, amdhsa.kernels and more."""
    for notes, _ in _read_sections(elf, NOTE_SECTION):
        name_size, size, kind = struct.unpack_from("<III", notes)
        begin = 12 + (name_size + 3) // 4 * 4
        if kind == METADATA_NOTE:
            value, end = _unpack(notes[begin : begin + size], 0)
            assert end == size
            return value
    raise AssertionError("the code object has no metadata")


def read_symbols(elf: bytes) -> set[str]:
    """The names in the symbol table, in which ROCm's loader looks for kernels."""
    ((symbols, _),) = _read_sections(elf, SYMBOL_SECTION)
    names = {struct.unpack_from("<I", symbols, place)[0] for place in range(0, len(symbols), 24)}
    (begin,) = struct.unpack_from("<Q", elf, 40)
    ((_, table),) = _read_sections(elf, SYMBOL_SECTION)
    offset = struct.unpack_from("<IIQQQ", elf, begin + table * 64)[4]
    return {elf[offset + name : elf.index(b"\0", offset + name)].decode() for name in names} - {""}


_NUMBERS = {0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_TEXT_SIZES = {0xD9: "B", 0xDA: "H", 0xDB: "I"}
_LIST_SIZES = {0xDC: "H", 0xDD: "I"}
_MAP_SIZES = {0xDE: "H", 0xDF: "I"}


def _unpack(data: bytes, place: int) -> tuple[Any, int]:
    """The value of MessagePack that begins at place, and where it ends."""
    kind = data[place]
    place += 1
    if kind < 0x80 or kind in _CONSTANTS:
        return (kind if kind < 0x80 else _CONSTANTS[kind]), place
    if kind in _NUMBERS:
        return _unpack_number(data, place, _NUMBERS[kind])
    if kind in _TEXT_SIZES or 0xA0 <= kind < 0xC0:
        size, place = _unpack_size(data, place, kind - 0xA0, _TEXT_SIZES.get(kind))
        return data[place : place + size].decode(), place + size
    is_map = kind < 0x90 or kind in _MAP_SIZES
    assert is_map or kind < 0xA0 or kind in _LIST_SIZES, f"kind {kind:#x} of MessagePack"
    count, place = _unpack_size(data, place, kind & 0xF, (_MAP_SIZES if is_map else _LIST_SIZES).get(kind))
    values = []
    for _ in range(2 * count if is_map else count):
        value, place = _unpack(data, place)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if is_map else values), place


def _unpack_number(data: bytes, place: int, code: str) -> tuple[int, int]:
    return struct.unpack_from(f">{code}", data, place)[0], place + struct.calcsize(code)


def _unpack_size(data: bytes, place: int, in_kind: int, code: str | None) -> tuple[int, int]:
    return _unpack_number(data, place, code) if code else (in_kind, place)
