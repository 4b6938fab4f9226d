"""Names of AWS's toolkit that this package lacks: importing one fails with a sentence that names another way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn


def refuse_others(
    module: str, names: Iterable[str], instead: Mapping[str, str], otherwise: str
) -> Callable[[str], NoReturn]:
    """Returns the function `__getattr__` of a module.

    It raises ImportError, because Python replaces the text of an AttributeError at an import. For names in `names`,
    and names with two underscores, it raises AttributeError, as for any module.

    Args:
        module: The name of the module.
        names: The submodules, which Python imports after an AttributeError.
        instead: Name → what to use instead.
        otherwise: What to use instead of other names.
    """
    submodules = frozenset(names)

    def __getattr__(name: str) -> NoReturn:  # noqa: N807 (Python calls it)
        if name in submodules or name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise ImportError(
            f"{module}.{name} belongs to AWS's toolkit, which `train` replaces, and is not here."
            f" Fix: {instead.get(name, otherwise)}"
        )

    return __getattr__
