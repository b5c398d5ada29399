"""The names that the headers and the list of driver functions promise, read from their text."""

import re
import subprocess
import tempfile
from pathlib import Path

DRIVER_ROW = re.compile(
    r"^EBBTIDE_FUNCTION\((\w+), (\d+), (required|optional)(?:, (\w+), (same|adapted))?\)$", re.MULTILINE
)
DRIVER_HOOK = re.compile(r"^EBBTIDE_DRIVER_HOOK\((\w+), (\w+), (\d+), CU_GET_PROC_ADDRESS_(\w+)\)$", re.MULTILINE)
NVML_HOOK = re.compile(r"^EBBTIDE_NVML_HOOK\((\w+)\)$", re.MULTILINE)
# The simulator's exports besides the list: the way to everything else.
RESOLVERS = {"cuGetProcAddress", "cuGetProcAddress_v2"}
TYPES_PROGRAM = """#include <cuda.h>
#include <cudaTypedefs.h>
#include <cstdio>
#include <type_traits>
template <typename A, typename B>
constexpr bool same = std::is_same_v<A, B>;
int main() {"""


def read_driver_functions(functions_def: Path) -> dict[str, tuple[int, str]]:
    """Name -> (least version, "required" or "optional") as functions.def lists them."""
    text = functions_def.read_text()
    rows = DRIVER_ROW.findall(text)
    lines = [line for line in text.splitlines() if line.startswith("EBBTIDE_FUNCTION")]
    if len(rows) != len(lines):
        raise ValueError(
            f"{functions_def}: {len(lines) - len(rows)} lines do not read as EBBTIDE_FUNCTION(name, version, need)"
        )
    return {name: (int(version), need) for name, version, need, _, _ in rows}


def read_hip_functions(functions_def: Path) -> dict[str, tuple[str, str]]:
    """Name -> (HIP's name, "same" or "adapted") as functions.def lists them."""
    return {name: (hip, how) for name, _, _, hip, how in DRIVER_ROW.findall(functions_def.read_text())}


def read_hook_rows(hooks_def: Path) -> list[tuple[str, str, int, str]]:
    """Symbol, name, version and flags of each hook of the driver in hooks.def."""
    rows = DRIVER_HOOK.findall(hooks_def.read_text())
    return [(symbol, name, int(version), flags) for symbol, name, version, flags in rows]


def read_hooks(hooks_def: Path) -> set[str]:
    """Every symbol that hooks.def says is exported: the driver's and NVML's."""
    text = hooks_def.read_text()
    hooks = {symbol for symbol, *_ in read_hook_rows(hooks_def)} | set(NVML_HOOK.findall(text))
    if len(hooks) != sum("_HOOK(" in line for line in text.splitlines() if line.startswith("EBBTIDE_")):
        raise ValueError(
            f"{hooks_def}: a line does not read as EBBTIDE_DRIVER_HOOK(symbol, name, version, flags), or is there twice"
        )
    return hooks


def read_c_functions(header: Path, prefix: str) -> set[str]:
    """The functions that a C header declares: every `prefix...(` outside comments, typedefs and macros."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(), flags=re.DOTALL)
    text = re.sub(r"^\s*#.*(?:\\\n.*)*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^typedef [^;{]*\(\*?[^;]*;", "", text, flags=re.MULTILINE)
    return set(re.findall(rf"\b({prefix}\w+)\s*\(", text))


def exported_driver_names(functions: set[str], cuda_include: Path, compiler: str = "cc") -> dict[str, str]:
    """Name -> the symbol that cuda.h's macros make of it ("cuMemAlloc" -> "cuMemAlloc_v2")."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "names.c"
        source.write_text("#include <cuda.h>\n" + "".join(f"marker_{name} = {name}\n" for name in sorted(functions)))
        output = subprocess.run(
            [compiler, "-E", "-P", f"-I{cuda_include}", str(source)], check=True, capture_output=True, text=True
        ).stdout
    return dict(re.findall(r"marker_(\w+) = (\w+)", output))


def typed_versions(functions: set[str], cuda_include: Path, compiler: str = "c++") -> dict[str, int]:
    """Name -> the newest version whose type in cudaTypedefs.h is that of cuda.h's plain name (none: left out)."""
    public = (cuda_include / "cudaTypedefs.h").read_text().split("#if defined(__CUDA_API_VERSION_INTERNAL)")[0]
    typed = [(name, version) for name, version in re.findall(r"\bPFN_(\w+?)_v(\d+)\)", public) if name in functions]
    lines = [
        f'  if (same<decltype(&{name}), PFN_{name}_v{version}>) puts("{name} {version}");' for name, version in typed
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "types.cpp"
        source.write_text("\n".join([TYPES_PROGRAM, *lines, "}", ""]))
        program = Path(folder) / "types"
        subprocess.run([compiler, "-std=c++17", f"-I{cuda_include}", str(source), "-o", str(program)], check=True)
        output = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    versions: dict[str, int] = {}
    for name, version in map(str.split, output.splitlines()):
        versions[name] = max(versions.get(name, 0), int(version))
    return versions


def per_thread_versions(functions: set[str], cuda_include: Path) -> dict[str, int]:
    """Name -> the version that brought its variant for per-thread default streams (none: left out)."""
    versions: dict[str, int] = {}
    for name, version in re.findall(r"\bPFN_(\w+?)_v(\d+)_pt[ds][sz]\)", (cuda_include / "cudaTypedefs.h").read_text()):
        if name in functions:
            versions[name] = min(versions.get(name, int(version)), int(version))
    return versions
