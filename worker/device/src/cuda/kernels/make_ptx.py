#!/usr/bin/env python3
"""Compiles the kernels of this folder to PTX with NVRTC 12.0.140.

    make_ptx.py                 writes ptx/NAME.ptx for each NAME.cu
    make_ptx.py --check         compares instead, and fails if a file differs
    make_ptx.py --assemble      assembles the files in ptx/ for sm_70 and sm_90, prints registers and
                                spills, and fails on spills
    make_ptx.py --instructions  prints the instructions that the files in ptx/ use

The compiler comes from the Python packages of NVIDIA, which are downloaded to a folder (--cache) and
never part of the tree. Without them the script prints a line that begins with SKIPPED and succeeds.
"""

import argparse
import ctypes
import difflib
import pathlib
import re
import subprocess
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
NVRTC = "nvidia-cuda-nvrtc-cu12==12.0.140"
# The first version of ptxas that can be had without the whole toolkit and knows both targets.
PTXAS = "nvidia-cuda-nvcc-cu12==12.9.86"
OPTIONS = [b"--gpu-architecture=compute_70", b"--std=c++17"]


def package(requirement, cache):
    """Returns the folder of an unpacked package, or None if it cannot be had."""
    folder = cache / requirement.replace("==", "-")
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--timeout", "15"]
        command += ["--retries", "1", "--dest", str(cache), requirement]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0:
            return None
        prefix = requirement.split("==")[0].replace("-", "_")
        version = requirement.split("==")[1]
        wheel = next(cache.glob(f"{prefix}-{version}-*.whl"))
        zipfile.ZipFile(wheel).extractall(folder)
    return folder


def compile_source(nvrtc, name):
    """Returns the PTX of a source."""
    text = (HERE / "common.cuh").read_text() + "\n" + (HERE / f"{name}.cu").read_text()
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None)
    if code == 0:
        options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
        code = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    size = ctypes.c_size_t()
    if code != 0:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.exit(f"{name}.cu is refused with code {code}:\n{log.value.decode()}")
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()


def make(names, cache, check):
    folder = package(NVRTC, cache)
    if folder is None:
        print(f"SKIPPED: no PTX is compiled, {NVRTC} could not be fetched")
        return 0
    library = next(folder.glob("**/libnvrtc.so.12"))
    # The compiler finds its second library beside itself.
    ctypes.CDLL(str(next(folder.glob("**/libnvrtc-builtins.so.*"))), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(library))
    different = 0
    for name in names:
        path, ptx = HERE / "ptx" / f"{name}.ptx", compile_source(nvrtc, name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(ptx)
            continue
        found = path.read_text() if path.exists() else ""
        if found != ptx:
            different += 1
            lines = difflib.unified_diff(
                found.splitlines(), ptx.splitlines(), f"ptx/{name}.ptx", f"{name}.cu", lineterm="", n=1)
            print("\n".join(list(lines)[:20]))
    if check:
        print(f"{len(names) - different} of {len(names)} files are what their sources compile to")
    return min(different, 1)


def assemble(names, cache):
    folder = package(PTXAS, cache)
    if folder is None:
        print(f"SKIPPED: no PTX is assembled, {PTXAS} could not be fetched")
        return 0
    ptxas = next(folder.glob("**/bin/ptxas"))
    ptxas.chmod(0o755)
    failed = 0
    for target in ["sm_70", "sm_90"]:
        for name in names:
            command = [str(ptxas), "-v", f"-arch={target}", str(HERE / "ptx" / f"{name}.ptx")]
            done = subprocess.run(command + ["-o", "/dev/null"], capture_output=True, text=True)
            if done.returncode != 0:
                print(done.stderr)
                failed = 1
            entry = None
            for line in done.stderr.splitlines():
                if found := re.search(r"entry function '(\w+)'", line):
                    entry = found[1]
                if found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
                    spills = int(found[1]) + int(found[2])
                    failed |= spills > 0
                if found := re.search(r"Used (\d+) registers", line):
                    print(f"{target} {name}: {entry} uses {found[1]} registers, {spills} bytes spilled")
    return int(failed)


def instructions(names):
    used = set()
    for name in names:
        for line in (HERE / "ptx" / f"{name}.ptx").read_text().splitlines():
            line = re.sub(r"^\s*(@!?%p\d+\s+)?", "", line)
            if found := re.match(r"[a-z][a-z0-9]*(\.[a-z0-9:_]+)*(?=[\s;])", line):
                used.add(found[0])
    print("\n".join(sorted(used)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--assemble", action="store_true")
    parser.add_argument("--instructions", action="store_true")
    root = HERE.parents[4]
    parser.add_argument("--cache", type=pathlib.Path, default=root / "target" / "nvidia")
    arguments = parser.parse_args()
    names = sorted(path.stem for path in HERE.glob("*.cu"))
    arguments.cache.mkdir(parents=True, exist_ok=True)
    if arguments.instructions:
        return instructions(names)
    if arguments.assemble:
        return assemble(names, arguments.cache)
    return make(names, arguments.cache, arguments.check)


if __name__ == "__main__":
    sys.exit(main())
