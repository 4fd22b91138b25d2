"""Builds roundpipe/_C.so (always) and roundpipe/_C_cuda.so (when nvcc is found).

Both are plain shared libraries over torch's stable ABI, loaded with torch.ops.load_library: no PyInit, no libpython, so
one wheel serves every Python >= 3.10 and every torch >= 2.11. Everything static stands in pyproject.toml.

Switches (environment variables):
  ROUNDPIPE_CUDA=auto|0|1   kernels of csrc/cuda/*.cu: when nvcc is found (default) | never | fail without nvcc
  ROUNDPIPE_CUDA_ARCHS      default "80;90;100": machine code for each, and PTX of the last for newer GPUs
  ROUNDPIPE_WERROR=1        warnings are errors
  CXX, NVCC, MAX_JOBS       compilers, and how many of them run at once
Objects stay in build/ninja: a second build compiles only what has changed.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"  # torch 2.11, the oldest that can load us
# Only the kernels say which products and sums are one instruction. g++ 12 sees overlapping copies in std::string.
FLAGS = "-ffp-contract=off -Wall -Wextra -Wpedantic -Wno-restrict" + " -Werror" * (os.getenv("ROUNDPIPE_WERROR") == "1")

OPS = """
    activation_ops arenas checks claim_ops data_ops data_plane element_convert engine engine_ops error_record
    fact_ops fused_update handle_ops handles job job_ops library memory_ops optimizer_ops pool_ops process
    queued_update_ops unit_ops update_list update_ops update_tickets
"""
CORE = """
    activation_store address_ranges bounce_buffers cgroup_memory copy_lane event_pool gradient_pool happens_before
    host_arena host_backend host_claim host_mapping host_stream lane_request layer_clock mapping_pool memory_advice
    memory_limits memory_map optimizer_queue pin_limits proc_files read_ahead region_extents slice_pool stage_release
    stage_streamer stored_record streamed_job trace transfer_engine
"""
CPU = """
    adam convert dynamic_code lion sgd update_kernels convert_avx2 convert_avx512 convert_portable
    update_avx2 update_avx512 update_portable
"""
ROOMS = {"ops": OPS, "core": CORE, "cpu": CPU, "cuda": "cuda_backend cuda_context driver_api"}
SOURCES = [f"csrc/{room}/{name}.cpp" for room, names in ROOMS.items() for name in names.split()]
KERNELS = ["csrc/cuda/gradient_stats.cu", "csrc/ops/gradient_stats_op.cpp"]


def find_nvcc():
    if (mode := os.environ.get("ROUNDPIPE_CUDA", "auto")) not in ("auto", "0", "1"):
        raise SystemExit(f"ROUNDPIPE_CUDA must be auto, 0 or 1, not {mode!r}")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if mode == "1" and not nvcc:
        raise SystemExit("ROUNDPIPE_CUDA=1, but there is no nvcc on PATH, in CUDA_HOME or NVCC")
    return None if mode == "0" else nvcc


cxx, nvcc = os.environ.get("CXX", "g++"), find_nvcc()


def architecture_flags():
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    wanted = re.findall(r"\d+[af]?", os.environ.get("ROUNDPIPE_CUDA_ARCHS", "80;90;100"))
    archs = [arch for arch in wanted if f"compute_{arch}" in known.split()]
    if not archs:
        raise SystemExit(f"{nvcc} knows none of the architectures {wanted}; it knows: {known.split()}")
    last = f"-gencode arch=compute_{archs[-1]},code=compute_{archs[-1]}"
    return " ".join([f"-gencode arch=compute_{arch},code=sm_{arch}" for arch in archs] + [last])


class NinjaBuild(build_ext):
    """Writes a ninja file instead of using distutils' compiler: flags by file, header dependencies, parallel."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self):
        for place in [self.build_lib] + [ROOT] * bool(self.inplace or self.editable_mode):
            Path(place, "roundpipe", "_C_cuda.so").unlink(missing_ok=True)  # this build may be without kernels
        super().run()

    def build_extension(self, ext):
        if not (found := importlib.util.find_spec("torch")):
            raise SystemExit("building roundpipe needs torch's headers: pip install 'torch>=2.11', or build isolated")
        torch = Path(found.submodule_search_locations[0])
        work = ROOT / "build" / "ninja" / ext.name  # not build_temp, which editable installs throw away
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        common = f"-O3 -std=c++20 {TORCH_TARGET} -D_GLIBCXX_USE_CXX11_ABI=1 -I{ROOT}/csrc -isystem {torch}/include"
        compilers = {".cpp": f"{cxx} {common} -g1 -fPIC -pthread -fvisibility=hidden {FLAGS}"}
        if ext.sources == KERNELS:
            compilers[".cu"] = f"{nvcc} {common} -Xcompiler -fPIC,-fvisibility=hidden {architecture_flags()}"
        linker = cxx if ext.sources == SOURCES else f"{nvcc} -cudart static"
        # The linker is told which libraries of torch we use, not where they are: they are loaded before we are.
        libraries = f"-Xlinker --as-needed -Xlinker -zdefs -L{torch}/lib -ltorch -ltorch_cpu -lc10 -ldl -lpthread"
        rule = "rule compile{}\n  description = $in\n  depfile = $out.d\n  deps = gcc\n  command = {} -MMD -MF $out.d"
        lines = [rule.format(*compiler) + " -c $in -o $out" for compiler in compilers.items()]
        lines += [f"rule link\n  description = $out\n  command = {linker} -shared $in -o $out {libraries}"]
        objects = [f"{work}/{source.replace('/', '_')}.o" for source in ext.sources]
        pairs = zip(ext.sources, objects, strict=True)
        lines += [f"build {out}: compile{Path(source).suffix} {ROOT}/{source}" for source, out in pairs]
        lines += [f"build {target}: link {' '.join(objects)}", ""]
        ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent)) or "ninja"
        with open(work / "lock", "w") as lock:  # two builds in one tree take turns
            fcntl.flock(lock, fcntl.LOCK_EX)
            (work / "build.ninja").write_text("\n".join(lines))
            subprocess.run([ninja, "-C", work, "-j", os.getenv("MAX_JOBS", str(os.cpu_count()))], check=True)


class AnyPythonWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


extensions = [Extension("roundpipe._C", SOURCES)] + [Extension("roundpipe._C_cuda", KERNELS)] * bool(nvcc)
setup(ext_modules=extensions, cmdclass={"build_ext": NinjaBuild, "bdist_wheel": AnyPythonWheel})
