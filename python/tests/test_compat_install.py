"""install() and uninstall() of chiasma.compat.flash_mla, on modules that stand in for flash_mla and the engines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chiasma.compat import flash_mla as compat

NAMES = ("flash_mla_with_kvcache", "get_mla_metadata", "FlashMLASchedMeta")
TARGETS = (
    "flash_mla",
    "flash_mla.flash_mla_interface",
    "vllm.third_party.flashmla.flash_mla_interface",
    "sglang.kernels.ops.attention.flash_mla_interface",
)
SOURCE = """
class FlashMLASchedMeta: pass
def get_mla_metadata(*args, **kwargs): return "theirs", None
def flash_mla_with_kvcache(*args, **kwargs): return "theirs", "theirs"
def flash_mla_sparse_fwd(*args, **kwargs): return "theirs"
"""


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """No installation and no stand-ins survive a test."""
    compat.uninstall()
    modules, finders = dict(sys.modules), list(sys.meta_path)
    yield
    compat.uninstall()
    assert sys.meta_path == finders
    for name in set(sys.modules) - set(modules):
        if name.split(".")[0] in ("flash_mla", "vllm", "sglang", "engine_layer"):
            del sys.modules[name]


def make_module(name: str, source: str = SOURCE) -> ModuleType:
    module = ModuleType(name)
    exec(source, vars(module))
    sys.modules[name] = module
    return module


def is_ours(module: Any) -> bool:
    return all(getattr(module, name) is getattr(compat, name) for name in NAMES)


@pytest.mark.parametrize("target", TARGETS)
def test_a_module_that_is_imported_already(target: str) -> None:
    module = make_module(target)
    before = dict(vars(module))
    handle = compat.install()
    assert is_ours(module)
    assert f"{target}.get_mla_metadata" in handle.patched
    assert module.flash_mla_sparse_fwd is before["flash_mla_sparse_fwd"]
    compat.uninstall()
    assert dict(vars(module)) == before


def test_names_that_others_imported_before() -> None:
    interface = make_module(TARGETS[2])
    layer = make_module("engine_layer", "")
    vars(layer).update(flash_mla_with_kvcache=interface.flash_mla_with_kvcache, metadata=interface.get_mla_metadata)
    bystander = make_module("engine_layer.bystander")  # a function of the same name, but of its own
    before, own = dict(vars(layer)), dict(vars(bystander))
    with compat.install():
        assert vars(layer)["flash_mla_with_kvcache"] is compat.flash_mla_with_kvcache
        assert vars(layer)["metadata"] is compat.get_mla_metadata
        assert dict(vars(bystander)) == own
    assert dict(vars(layer)) == before


def test_a_module_without_some_of_the_names_gets_no_new_ones() -> None:
    module = make_module(TARGETS[3], "def get_mla_metadata(): pass\n")
    before = dict(vars(module))
    with compat.install():
        assert module.get_mla_metadata is compat.get_mla_metadata
        assert set(vars(module)) == set(before)
    assert dict(vars(module)) == before


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """packages(name) writes an importable stand-in of that name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str) -> None:
        *parents, last = name.split(".")
        folder = tmp_path
        for parent in parents:
            folder = folder / parent
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{last}.py").write_text(SOURCE, encoding="utf-8")
        importlib.invalidate_caches()

    return write


@pytest.mark.parametrize("target", [TARGETS[0], *TARGETS[2:]])
def test_a_module_that_is_imported_later(target: str, packages: Callable[[str], None]) -> None:
    packages(target)
    compat.install()
    assert target not in sys.modules
    module = importlib.import_module(target)
    assert is_ours(module)
    assert module.flash_mla_sparse_fwd() == "theirs"
    assert module.__spec__ is not None and module.__loader__ is module.__spec__.loader
    assert type(module.__loader__).__module__ != "chiasma.compat._patching"
    compat.uninstall()
    assert module.get_mla_metadata() == ("theirs", None)
    assert module.flash_mla_with_kvcache() == ("theirs", "theirs")


def test_a_package_that_imports_from_its_own_interface(packages: Callable[[str], None], tmp_path: Path) -> None:
    packages("flash_mla.flash_mla_interface")
    (tmp_path / "flash_mla" / "__init__.py").write_text(
        "from flash_mla.flash_mla_interface import " + ", ".join((*NAMES, "flash_mla_sparse_fwd")), encoding="utf-8"
    )
    importlib.invalidate_caches()
    with compat.install():
        package = importlib.import_module("flash_mla")
        assert is_ours(package)
        assert is_ours(sys.modules["flash_mla.flash_mla_interface"])
    assert sys.modules["flash_mla.flash_mla_interface"].get_mla_metadata() == ("theirs", None)


def test_without_flash_mla_its_name_leads_here() -> None:
    if importlib.util.find_spec("flash_mla") is not None:
        pytest.skip("flash_mla is installed here")
    with compat.install() as handle:
        assert importlib.import_module("flash_mla") is compat
        assert importlib.import_module("flash_mla.flash_mla_interface") is compat
        assert "flash_mla" in handle.patched
    assert "flash_mla" not in sys.modules and "flash_mla.flash_mla_interface" not in sys.modules


def test_twice_is_once() -> None:
    module = make_module(TARGETS[0])
    before, finders = dict(vars(module)), list(sys.meta_path)
    first = compat.install()
    changed = list(first.patched)
    assert compat.install() is first
    assert first.patched == changed
    assert len(sys.meta_path) == len(finders) + 1
    compat.uninstall()
    assert dict(vars(module)) == before
    compat.uninstall()
    first.uninstall()
    assert dict(vars(module)) == before
    with compat.install():
        assert is_ours(module)
    assert dict(vars(module)) == before


def test_what_somebody_replaced_since_is_left_alone() -> None:
    module = make_module(TARGETS[0])
    with compat.install():
        module.get_mla_metadata = theirs = object()
    assert module.get_mla_metadata is theirs


def test_no_engine_is_imported(packages: Callable[[str], None]) -> None:
    for target in TARGETS[2:]:
        packages(target)
    with compat.install():
        assert not {"vllm", "sglang"} & set(sys.modules)
