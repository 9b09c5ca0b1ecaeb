"""Puts chiasma.compat.flash_mla where engines look for flash_mla, and takes it away again."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPAT = "chiasma.compat.flash_mla"
_PACKAGE = "flash_mla"
_NAMES = ("flash_mla_with_kvcache", "get_mla_metadata", "FlashMLASchedMeta")
# Where the engines get these names from. Others import them from there.
_TARGETS = (
    _PACKAGE,
    f"{_PACKAGE}.flash_mla_interface",
    "vllm.third_party.flashmla.flash_mla_interface",
    "sglang.kernels.ops.attention.flash_mla_interface",
)
_MISSING = object()


class _PatchingLoader(Loader):
    """Loads a module as its own loader does, then patches it."""

    def __init__(self, loader: Loader, installation: Installation) -> None:
        self._loader = loader
        self._installation = installation

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on nobody needs to know that somebody stood between, reload() included.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._installation._patch_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(MetaPathFinder):
    """Finds only the modules to be patched, by asking the finders behind it."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _TARGETS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _PatchingLoader(spec.loader, self._installation)
                return spec
        return None


class Installation:
    """What install() changed. As a context manager, undoes it at the end of the block."""

    def __init__(self) -> None:
        self._ours: dict[str, Any] = {name: getattr(sys.modules[_COMPAT], name) for name in _NAMES}
        self._changes: list[tuple[ModuleType, str, Any, Any]] = []  # module, attribute, before, now
        self._entries: dict[str, ModuleType] = {}
        self._finder = _Finder(self)

    @property
    def patched(self) -> list[str]:
        """Names that lead to Chiasma now, such as "vllm.third_party.flashmla.flash_mla_interface.get_mla_metadata"."""
        attributes = [f"{module.__name__}.{name}" for module, name, _, _ in self._changes]
        return sorted([*self._entries, *attributes])

    def uninstall(self) -> None:
        """Puts back everything that install() replaced; what somebody else replaced since is left alone."""
        _undo(self)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.uninstall()

    def _replace(self, module: ModuleType, name: str, value: Any) -> None:
        self._changes.append((module, name, vars(module)[name], value))
        setattr(module, name, value)

    def _patch_module(self, module: ModuleType) -> dict[int, tuple[Any, Any]]:
        """Replaces the names that the module has. Returns (before, now) of each, by the identity of what was before."""
        replaced = {}
        for name, value in self._ours.items():
            original = vars(module).get(name, _MISSING)
            if original is not _MISSING and original is not value:
                replaced[id(original)] = (original, value)
                self._replace(module, name, value)
        return replaced

    def _apply(self) -> None:
        replaced: dict[int, tuple[Any, Any]] = {}
        for target in _TARGETS:
            module = sys.modules.get(target)
            if isinstance(module, ModuleType):
                replaced.update(self._patch_module(module))
        for module in list(_modules_of_others()):
            for name, value in list(vars(module).items()):
                if id(value) in replaced and replaced[id(value)][0] is value:
                    self._replace(module, name, replaced[id(value)][1])
        if _PACKAGE not in sys.modules and importlib.util.find_spec(_PACKAGE) is None:
            for name in (_PACKAGE, f"{_PACKAGE}.flash_mla_interface"):
                self._entries[name] = sys.modules[name] = sys.modules[_COMPAT]
        sys.meta_path.insert(0, self._finder)

    def _revert(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for name, module in self._entries.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        for module, name, before, now in reversed(self._changes):
            if vars(module).get(name, _MISSING) is now:
                setattr(module, name, before)
        self._entries.clear()
        self._changes.clear()


def _modules_of_others() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.split(".")[0] != "chiasma":
            yield module


_lock = threading.RLock()
_current: Installation | None = None


def install() -> Installation:
    """Makes engines that use flash_mla use Chiasma for sparse decoding, in this process. Imports no engine.

    Replaced are flash_mla_with_kvcache, get_mla_metadata and FlashMLASchedMeta
      - in the modules flash_mla, flash_mla.flash_mla_interface, vllm.third_party.flashmla.flash_mla_interface and
        sglang.kernels.ops.attention.flash_mla_interface: those that are imported now, and the others as soon as they
        are (a finder in front of sys.meta_path patches them after loading);
      - in every other module that has imported one of these from there by now, under whatever name.
    Where no flash_mla is installed, `import flash_mla` finds chiasma.compat.flash_mla. All else stays as it is,
    flash_mla_sparse_fwd (prefill) included. Not reached are functions that an object or a functools.partial already
    holds: install before an engine makes its layers. Dense decoding raises NotImplementedError while installed.

    Calling it again changes nothing and returns the same handle. To undo it: uninstall(), the handle's uninstall(), or
    the handle as a context manager. Modules that import the names while Chiasma is installed keep Chiasma's.
    """
    global _current
    with _lock:
        if _current is None:
            installation = Installation()
            installation._apply()
            _current = installation
        return _current


def uninstall() -> None:
    """Undoes install(), restoring exactly what was there; without an installation it does nothing."""
    with _lock:
        if _current is not None:
            _undo(_current)


def _undo(installation: Installation) -> None:
    global _current
    with _lock:
        installation._revert()
        if _current is installation:
            _current = None
