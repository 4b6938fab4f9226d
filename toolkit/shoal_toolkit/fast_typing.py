"""Stands in for the module `typing` in modules that every `train` imports: for a job that does nothing, both are slow.

A type checker sees the names of `typing`. When the program runs, `NamedTuple` makes such classes without compiling
anything, and the other names do nothing.
"""

from __future__ import annotations

from operator import itemgetter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any as Any
    from typing import NamedTuple as NamedTuple
    from typing import NoReturn as NoReturn
    from typing import Protocol as Protocol
    from typing import TypeVar as TypeVar
else:
    Any = NoReturn = object

    def TypeVar(name: str) -> str:  # noqa: N802 (the name in typing)
        """Returns something that annotations can name."""
        return name

    class _Maker(type):
        def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
            """Returns a subclass of tuple with the annotated fields; NamedTuple itself is a class like any other."""
            if not bases:
                return super().__new__(cls, name, bases, namespace)
            fields = tuple(namespace.get("__annotations__", ()))
            namespace["_fields"] = fields
            namespace["_field_defaults"] = {field: namespace[field] for field in fields if field in namespace}
            namespace.update({field: property(itemgetter(place)) for place, field in enumerate(fields)})
            shared = {"__new__": _make, "__repr__": _format, "__getnewargs__": _list_values, "_replace": _replace}
            return type(name, (tuple,), {"__slots__": (), **shared, **namespace})

    class NamedTuple(metaclass=_Maker):
        """The base class of named tuples. Their fields are the annotations, and a value is a field's default."""

    class Protocol:
        """The base class of interfaces."""


def _make(cls: Any, *values: Any, **named: Any) -> Any:
    """Raises TypeError if an argument is missing, or has no field."""
    if named or len(values) != len(cls._fields):
        given = {**dict(zip(cls._fields, values)), **named}
        found = {**cls._field_defaults, **given}
        missing = [field for field in cls._fields if field not in found]
        if missing or len(found) != len(cls._fields) or len(given) != len(values) + len(named):
            raise TypeError(f"{cls.__name__} has the fields {', '.join(cls._fields)}; given: {values}, {named}")
        values = tuple(found[field] for field in cls._fields)
    return tuple.__new__(cls, values)


def _list_values(self: Any) -> tuple[Any, ...]:
    """Returns the arguments of the class that make a copy: for pickle and copy."""
    return tuple(self)


def _format(self: Any) -> str:
    return f"{type(self).__name__}({', '.join(f'{field}={value!r}' for field, value in zip(self._fields, self))})"


def _replace(self: Any, /, **named: Any) -> Any:
    """Raises ValueError for a name without a field."""
    values = tuple(named.pop(field, value) for field, value in zip(self._fields, self))
    if named:
        raise ValueError(f"{type(self).__name__} has no field {', '.join(named)}")
    return tuple.__new__(type(self), values)
