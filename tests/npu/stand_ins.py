"""Builds stand-ins for CANN's libraries, so that the real torch_npu loads where there is no NPU.

Which libraries and symbols are wanted is read from torch_npu itself, with nm and objdump; one C
file defines them and gcc compiles it. `stand_ins.c` answers what matters: a device runtime in host
memory. Kernels succeed and compute nothing; other C functions return an error, C++ functions stop
the process, both with their name. Numbers come from `simulator`, never from here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RUNTIME = Path(__file__).with_name("stand_ins.c")
TOOLS = ("gcc", "nm", "objdump")
MAIN = "libascendcl.so"
KERNELS = "libopapi.so"
"""Where torch_npu looks kernels up by name; no file of it is linked to this library."""

_SYSTEM = re.compile(r"(libc|libm|libdl|librt|libpthread|libutil|libstdc\+\+|libgcc_s|libgomp|ld-)")
_KERNEL = re.compile(rb"aclnn[A-Z]\w+(?=\x00)")
_SIZE = "GetWorkspaceSize"
_GCC = ("gcc", "-w", "-O1", "-std=gnu11", "-shared", "-fPIC", "-fno-builtin")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What torch_npu needs that neither torch nor the system has."""

    libraries: frozenset[str]
    symbols: frozenset[str]
    kernels: frozenset[str]


def build(out: Path, torch_npu: Path, torch: Path, soc: str = "Ascend910B1") -> None:
    """Build the libraries for the packages in folders `torch_npu` and `torch` into `out`."""
    wanted = scan(torch_npu, torch)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        main, empty = Path(work, "main.c"), Path(work, "empty.c")
        main.write_text(source(wanted, soc))
        empty.write_text("")
        _compile(out / MAIN, main)
        for library in wanted.libraries - {MAIN}:  # any of them leads to the main one's symbols
            needs_main = ("-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-L{out}", "-lascendcl")
            _compile(out / library, empty, *needs_main)


def scan(torch_npu: Path, torch: Path) -> Wanted:
    """Find out what is wanted."""
    own = [*torch_npu.rglob("*.so"), *torch_npu.parent.glob("torch_npu.libs/*")]
    given = [*own, *torch.glob("lib/*.so*"), *torch.parent.glob("torch.libs/*")]
    host = _output("gcc", "-print-file-name=libc.so.6").strip()
    defined = {name for file in [*given, host] for name in _symbols(file, "--defined-only")}
    libraries, symbols, kernels = {MAIN, KERNELS}, set(), set()
    for file in own:
        libraries.update(re.findall(r"NEEDED\s+(\S+)", _output("objdump", "-p", file)))
        symbols.update(_symbols(file, "--undefined-only"))
        kernels.update(
            name.decode().removesuffix(_SIZE) for name in _KERNEL.findall(file.read_bytes())
        )
    have = {file.name for file in given}
    return Wanted(
        frozenset(x for x in libraries if x not in have and not _SYSTEM.match(x)),
        frozenset(x for x in symbols - defined if not x.startswith(("Py", "_Py"))),
        frozenset(kernels),
    )


def source(wanted: Wanted, soc: str) -> str:
    """The C text: the runtime, then an entry point for each symbol that it leaves open."""
    runtime = RUNTIME.read_text()
    answered = set(re.findall(r"\b(?:acl|Msprof)\w+", runtime))
    answered |= {f"aclDestroy{what}" for what in re.findall(r"DESTROY\((\w+)\)", runtime)}
    symbols = sorted(wanted.symbols - answered)
    return "\n".join(
        [f'#define SOC "{soc}"', runtime, *map(_unanswered, symbols), *_kernels(wanted.kernels), ""]
    )


def _unanswered(symbol: str) -> str:
    if not symbol.startswith("_Z"):
        return f'int {symbol}(void) {{ return npu_stub_missing("{symbol}"); }}'
    name = f"cxx_{symbol}"  # mangled C++: nothing sane to return
    message = f'fprintf(stderr, "npu stand-in: {symbol} was called\\n")'
    return f'void {name}(void) __asm__("{symbol}");\nvoid {name}(void) {{ {message}; abort(); }}'


def _kernels(names: Iterable[str]) -> list[str]:
    return [
        f"int {name}{_SIZE}(void) {{ return OK; }}\n"
        f'int {name}(void) {{ return npu_stub_launch("{name}"); }}'
        for name in sorted(names)
    ]


def _symbols(file: Path | str, which: str) -> set[str]:
    """Dynamic symbols; of undefined ones those that must be there, and not the system's.

    Versioned ones (`name@GLIBC_2.17`) are the system's, weak ones (w, v) may stay undefined.
    """
    rows = [line.split()[-2:] for line in _output("nm", "-D", which, file).splitlines()]
    rows = [row for row in rows if len(row) == 2]
    if which == "--undefined-only":
        return {name for kind, name in rows if kind == "U" and "@" not in name}
    return {name.split("@")[0] for _, name in rows}


def _compile(library: Path, *arguments: Path | str) -> None:
    command = [*_GCC, "-o", str(library), f"-Wl,-soname,{library.name}", *map(str, arguments)]
    subprocess.run(command, check=True)


def _output(*command: Path | str) -> str:
    return subprocess.run(map(str, command), capture_output=True, text=True).stdout
