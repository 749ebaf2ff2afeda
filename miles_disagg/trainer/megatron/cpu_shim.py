"""Lets Megatron-core run on a machine without CUDA, with CPU tensors and gloo. A no-op where CUDA is available.

Megatron-core asks `torch.cuda` for the current device, RNG state, streams and synchronisation, and writes "cuda" as a
literal. Nothing here touches `torch` itself (replacing `torch.tensor` process-wide silently breaks transformers): an
import hook rewrites those names inside Megatron's own modules as they are loaded, so it must be installed before
the first `import megatron.core`.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_PREFIX = "megatron.core"
_CPU = torch.device("cpu")
_LITERALS = {"cuda": "cpu"} | {f"torch.cuda.{t}Tensor": f"torch.{t}Tensor" for t in ("Float", "Half", "BFloat16")}
# Modules whose functions use `.cuda()` on tensors and nothing of `torch.cuda` that `torch.cpu` lacks.
_CUDA_METHOD_MODULES = {
    f"{_PREFIX}.models.common.language_module.language_module",
    f"{_PREFIX}.dist_checkpointing.exchange_utils",
    f"{_PREFIX}.optimizer.distrib_optimizer",
    f"{_PREFIX}.utils",
}


def install() -> bool:
    """Install the import hook once. Returns False, doing nothing, where CUDA is available.

    Raises RuntimeError if Megatron-core was imported before.
    """
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return True
    early = sorted(name for name in sys.modules if name == _PREFIX or name.startswith(_PREFIX + "."))
    if early:
        raise RuntimeError(f"{early[0]} was imported before the CPU shim; call cpu_shim.install() first")
    sys.meta_path.insert(0, _MegatronFinder())
    return True


class _MegatronFinder:
    """Finds Megatron's modules as usual, and has them loaded with the names below replaced."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _PREFIX and not name.startswith(_PREFIX + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _MegatronLoader(spec.loader.name, spec.loader.path)
        return spec


class _MegatronLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType | None:
        code = super().get_code(fullname)
        return code and _rewrite(code, methods=fullname in _CUDA_METHOD_MODULES, top=True)

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = _TORCH
        fix = _FIXES.get(module.__name__)
        if fix:
            fix(module)


def _rewrite(code: types.CodeType, *, methods: bool, top: bool = False) -> types.CodeType:
    """Replace CUDA literals in `code` and all code nested in it; inside functions also `.cuda` by `.cpu`."""

    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _rewrite(value, methods=methods)
        if isinstance(value, tuple):
            return tuple(constant(v) for v in value)
        return _LITERALS.get(value, value) if isinstance(value, str) else value

    names = tuple("cpu" if name == "cuda" else name for name in code.co_names) if methods and not top else code.co_names
    return code.replace(co_consts=tuple(constant(c) for c in code.co_consts), co_names=names)


# --- what Megatron's modules see instead of torch.cuda --------------------------------------------


class _Inert:
    """A stream or an event on a device that runs everything at once: every method does nothing."""

    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inert)

    __hash__ = object.__hash__


class _Delegate(types.ModuleType):
    """A module that has some names of its own and takes all others from another module."""

    def __init__(self, target: types.ModuleType, **own: Any):
        super().__init__(target.__name__)
        self.__dict__.update(own, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


_STREAM = _Inert()
_TORCH = _Delegate(
    torch,
    cuda=_Delegate(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=_nothing,
        empty_cache=_nothing,
        current_stream=lambda *args, **kwargs: _STREAM,
        default_stream=lambda *args, **kwargs: _STREAM,
        Stream=_Inert,
        Event=_Inert,
        stream=lambda stream: contextlib.nullcontext(),
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
        manual_seed=torch.manual_seed,
    ),
)


def _fix_rng(module: Any) -> None:
    module._get_cuda_rng_state = _get_rng_state
    module._set_cuda_rng_state = _set_rng_state


def _as_on_a_gpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron makes of a CUDA tensor here: the sizes of an all-to-all must not be a tensor."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _fix_dispatcher(module: Any) -> None:
    module.maybe_move_tensor_to_cpu = _as_on_a_gpu


_FIXES: dict[str, Callable[[Any], None]] = {
    f"{_PREFIX}.tensor_parallel.random": _fix_rng,
    f"{_PREFIX}.transformer.moe.token_dispatcher": _fix_dispatcher,
}
