"""A virtual environment with stock SGLang that runs on a CPU, made once and cached.

`router()` gives that of a small environment with sglang-router, which needs neither torch nor SGLang.
`python()` gives its interpreter, building it if it is not there (about two minutes and 3 GB). It lies below
`${XDG_CACHE_HOME:-~/.cache}/miles-disagg/sglang-<hash of what is installed>`; MILES_DISAGG_SGLANG_PYTHON names one
that exists already. SGLang's wheel wants a CUDA torch, so it is installed without its dependencies beside a CPU torch;
the kernel library that it imports is replaced by names that import and raise when called.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from miles_disagg.engine.inplace import PLUGIN_PATH

TORCH = "torch==2.13.0"
NIXL = "nixl-cu12>=1.5"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
ROUTER = "sglang-router==0.3.2"
WITHOUT_DEPENDENCIES = (
    "sglang==0.5.17",
    "xgrammar==0.2.1",
    "apache-tvm-ffi==0.1.11",
    "torchao==0.17.0",
    "kernels==0.14.1",
    "triton==3.7.1",
    "torchvision==0.28.0",
)
DEPENDENCIES = (
    "aiohttp", "anthropic>=0.20.0", "blobfile==3.0.0", "compressed-tensors", "datasets", "distro", "easydict",
    "einops", "fastapi", "gguf", "interegular", "IPython", "llguidance<2.0.0,>=1.7.6", "mistral_common>=1.11.5",
    "modelscope", "msgspec", "ninja", "numba==0.65.1", "numpy", "openai==2.6.1", "openai-harmony==0.0.4",
    "orjson", "outlines==0.1.11", "packaging", "partial_json_parser", "pillow", "prometheus-client>=0.20.0",
    "psutil", "py-spy", "pybase64", "pydantic", "python-multipart", "pyzmq>=25.1.2", "requests", "scipy",
    "sentencepiece", "setproctitle", "soundfile==0.13.1", "tiktoken", "tqdm", "transformers==5.12.1", "uvicorn",
    "uvloop", "watchfiles", "xxhash", "zstandard", "accelerate", "httpx",
)  # fmt: skip

_KERNEL_STAND_IN = '''"""Import-only stand-in for sgl_kernel on a CPU: every name imports, calling one raises."""

import sys
import types
from importlib.machinery import ModuleSpec


class _Absent:
    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} needs the real sgl_kernel, which does not run on this CPU")

    def __getattr__(self, name):
        return _absent(self.__name__, name)

    def __or__(self, other):
        return object

    __ror__ = __or__


def _absent(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(f"{owner}.{name}")


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        return _absent(self.__name__, name)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, _Finder, is_package=True) if name.startswith("sgl_kernel.") else None

    @staticmethod
    def create_module(spec):
        return _Module(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.append(_Finder)
__version__ = "0.0.0+stand-in"


def __getattr__(name):
    return _absent("sgl_kernel", name)
'''

# torchvision's operators are linked to CUDA and do not load beside a CPU torch; its import then fails where it
# registers shapes for them. Declaring the two operators (without kernels) is enough for the import.
_TORCHVISION_MARK = "# operators declared for a CPU torch\n"
_TORCHVISION_PATCH = (
    _TORCHVISION_MARK
    + """if not torchvision.extension._has_ops():
    for _operator in ("nms", "qnms"):
        torch.library.define(
            "torchvision::" + _operator, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )


"""
)


def python() -> Path:
    """Interpreter of the environment; builds it under a lock if need be."""
    if given := os.environ.get("MILES_DISAGG_SGLANG_PYTHON"):
        return Path(given)
    parts = "\n".join([TORCH, *WITHOUT_DEPENDENCIES, *DEPENDENCIES, _KERNEL_STAND_IN, _TORCHVISION_PATCH])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"sglang-{hashlib.sha256((parts + version).encode()).hexdigest()[:12]}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles-disagg"
    root.mkdir(parents=True, exist_ok=True)
    venv = root / name
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / "complete").is_file():
            shutil.rmtree(venv, ignore_errors=True)
            _build(venv)
            (venv / "complete").touch()
        if not (venv / "nixl").is_file():  # added later: an environment that is there is kept
            _run(str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", NIXL)
            (venv / "nixl").touch()
    return venv / "bin" / "python"


def kv_transfer() -> dict[str, str]:
    """What is added to the environment of servers that pass KV caches on over TCP (`mooncake_tcp`, the one backend of
    SGLang that takes memory of a CPU): the library, and the RDMA ones that it is linked to, of NIXL's wheel."""
    interpreter = python()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles-disagg"
    place = root / f"{MOONCAKE.replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}"
    place.mkdir(parents=True, exist_ok=True)
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").is_file():
            _run(str(interpreter), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), MOONCAKE)
            (place / "complete").touch()
    where = [str(interpreter), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    links = place / "rdma"
    links.mkdir(exist_ok=True)
    for library in (site / "nixl_cu12.libs").glob("lib*"):
        if library.name.startswith(("libibverbs", "libnl")):
            name = "libibverbs.so.1" if library.name.startswith("libibverbs") else library.name
            (links / name).unlink(missing_ok=True)
            (links / name).symlink_to(library)
    return {"PYTHONPATH": os.pathsep.join((str(PLUGIN_PATH), str(place))), "LD_LIBRARY_PATH": str(links)}


def router() -> Path:
    """Interpreter of an environment with sglang-router; builds it under a lock if need be."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles-disagg"
    root.mkdir(parents=True, exist_ok=True)
    venv = root / f"{ROUTER.replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}"
    with open(f"{venv}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / "complete").is_file():
            shutil.rmtree(venv, ignore_errors=True)
            _run(sys.executable, "-m", "venv", str(venv))
            _run(str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", ROUTER)
            (venv / "complete").touch()
    return venv / "bin" / "python"


def _build(venv: Path) -> None:
    _run(sys.executable, "-m", "venv", str(venv))
    interpreter = str(venv / "bin" / "python")
    pip = (interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(*pip, TORCH)
    _run(*pip, *DEPENDENCIES)
    _run(*pip, "--no-deps", *WITHOUT_DEPENDENCIES)
    where = [interpreter, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    kernel = site / "sgl_kernel"
    if not kernel.exists():
        kernel.mkdir()
        (kernel / "__init__.py").write_text(_KERNEL_STAND_IN)
    target = site / "torchvision" / "_meta_registrations.py"
    text = target.read_text()
    if _TORCHVISION_MARK not in text:
        at = text.index("@torch.library.register_fake(")
        target.write_text(text[:at] + _TORCHVISION_PATCH + text[at:])
    _run(interpreter, "-c", "import sglang")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
