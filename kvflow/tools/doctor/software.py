"""Examine what is installed: Python, the packages that kvflow needs, ZeroMQ's encryption, NIXL's variants, vLLM."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import NAME
from kvflow.integrations.vllm.versions import check_release, installed_release
from kvflow.tools.doctor.findings import Finding, failure, found, ok
from kvflow.version import __version__

TESTED_PYTHON = (3, 11)

PACKAGES = {
    "pyzmq": ("26", "27.3.0"),
    "msgspec": ("0.19", "0.22.0"),
    "numpy": ("1.26", "2.4.6"),
    "torch": ("2.5", "2.13.0"),
    "uvloop": ("0.20", "0.23.0"),
    "structlog": ("24.1", "26.1.0"),
    "nixl": ("1.5", "1.5.1"),
}
"""Package that kvflow needs -> the oldest release, and the one that is tested."""

VARIANTS = ("nixl-cu13", "nixl-cu12", "nixl-rocm", "nixl")
"""Distributions of NIXL. The last one has no library: it depends on one of the others."""

PLUGINS = "vllm.general_plugins"

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def examine(*, on_gpu: bool) -> Iterator[Finding]:
    """Yield what is to be said about the software.

    Args:
        on_gpu: whether caches of this host may lie on a GPU.
    """
    release = platform.python_version()
    evidence = f"{release}, {sys.executable}"
    is_tested = sys.version_info[:2] == TESTED_PYTHON
    yield ok("Python", evidence) if is_tested else found("release_untested", "Python", evidence)
    yield ok("kvflow", f"{__version__}, {Path(__file__).parents[1]}")
    for name, (least, tested) in PACKAGES.items():
        if name != "nixl":  # its variants have other names
            yield check_package(name, least, tested)
    yield _curve()
    yield _nixl()
    yield from _vllm()
    yield from _allocator(on_gpu=on_gpu)


def check_package(name: str, least: str, tested: str) -> Finding:
    """Compare the installed release of a package with the releases that kvflow runs with."""
    release = _release(name)
    if not release:
        return found("package_missing", name, f"not installed; kvflow needs {least} or later")
    if _numbers(release) < _numbers(least):
        remedy = f"Install {name} {least} or later."
        return found("release_unsupported", name, f"{release}; kvflow needs {least} or later", remedy=remedy)
    if _numbers(release)[:2] != _numbers(tested)[:2]:
        return found("release_untested", name, f"{release}; tests run with {tested}")
    return ok(name, release)


def _curve() -> Finding:
    try:
        from kvflow.rendezvous.issuer import draw_pair  # noqa: PLC0415 - ZeroMQ may be missing

        draw_pair()
    except ImportError as error:
        return found("package_missing", "ZeroMQ", f"it cannot be imported: {error}")
    except Exception as error:  # noqa: BLE001 - ZeroMQ's errors have no name here
        return found("curve_missing", "ZeroMQ", f"it draws no keys: {error}")
    return ok("ZeroMQ", "encrypts with CURVE")


def _nixl() -> Finding:
    installed = {name: release for name in VARIANTS if (release := _release(name))}
    modules = [name for name in ("nixl_cu13", "nixl_cu12", "nixl_rocm", "nixl") if _is_there(name)]
    shown = ", ".join(f"{name} {release}" for name, release in installed.items())
    if not modules:
        return found("nixl_missing", "NIXL", f"installed: {shown or 'nothing'}; no module of NIXL is found")
    if modules == ["nixl"] and list(installed) == ["nixl"]:
        return found("nixl_missing", "NIXL", f"{shown} is installed without the variant that has its library")
    least, tested = PACKAGES["nixl"]
    judged = [check_package(name, least, tested) for name in installed]
    wrong = [each for each in judged if each.code]
    if wrong:
        return replace(wrong[0], subject="NIXL", evidence=f"{wrong[0].subject} {wrong[0].evidence}")
    return ok("NIXL", shown or f"module {modules[0]}, not installed by pip")


def _vllm() -> Iterator[Finding]:
    release = installed_release()
    if not release:
        return
    try:
        check_release(release)
    except ConfigInvalid as error:
        yield failure(error, "vLLM")
        return
    plugins = importlib.metadata.entry_points(group=PLUGINS)
    if not any(each.value.startswith("kvflow.") for each in plugins):
        yield found("vllm_plugin_missing", "vLLM", f"{release}; no entry point of kvflow in the group {PLUGINS}")
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvflow" not in allowed.split(","):
        remedy = "Add kvflow to VLLM_PLUGINS, or unset it."
        evidence = f"{release}; VLLM_PLUGINS is {allowed!r}, which leaves kvflow out"
        yield found("vllm_plugin_missing", "vLLM", evidence, remedy=remedy)
        return
    yield ok("vLLM", f"{release}, with {NAME}")


def _allocator(*, on_gpu: bool) -> Iterator[Finding]:
    for name in ALLOCATOR_VARIABLES:
        value = os.environ.get(name, "")
        if re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
            yield found("expandable_segments", name, repr(value), status="failed" if on_gpu else "warning")


def _release(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _numbers(release: str) -> tuple[int, ...]:
    """Return the leading numbers of a release, such as ``2.13.0+cpu``."""
    found_here = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(each) for each in found_here[0].split(".")) if found_here else ()
