"""Small tools for what comes from OpenRLHF and its stack, and the version they were written against."""

from __future__ import annotations

from importlib.metadata import version

SUPPORTED = "0.11.2"


def plain(actor_class: object) -> type:
    """The class under a ``@ray.remote`` decorator; Ray refuses to subclass the decorated one.

    Raises RuntimeError when Ray no longer keeps it where it is looked for.
    """
    try:
        return actor_class.__ray_metadata__.modified_class.__ray_actor_class__  # type: ignore[attr-defined]
    except AttributeError as error:
        raise RuntimeError(
            f"cannot find the plain class under {actor_class!r} in ray {version('ray')}; "
            "openrlhf_ext is written against ray 2.55.0"
        ) from error


def first_line(error: BaseException) -> str:
    """Of its message: Ray, transformers and datasets append addresses and pages of advice."""
    return str(error).strip().partition("\n")[0]


def check_version() -> None:
    """Raise RuntimeError unless the installed OpenRLHF is the one whose internals this package extends."""
    found = version("openrlhf")
    if found != SUPPORTED:
        raise RuntimeError(
            f"openrlhf {found} is installed, openrlhf_ext extends internals of {SUPPORTED}; "
            f"install openrlhf=={SUPPORTED}"
        )
