"""What the toolkit needs of `typing`, without importing it: a good part of the time of a job that does nothing.

A type checker sees the names of `typing` themselves. What runs is a NamedTuple that makes its classes without
compiling code for each (the one of `typing` takes longer for a class than Python for a module of ours), and names that
stand in annotations only, which nobody evaluates.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any as Any
    from typing import NamedTuple as NamedTuple
    from typing import NoReturn as NoReturn
    from typing import Protocol as Protocol
else:
    from operator import itemgetter

    Any = NoReturn = Protocol = object

    class _Fields(type):
        """Makes properties of the annotations in the body of a class."""

        def __new__(mcs, name, bases, body):
            if bases == (tuple,):  # NamedTuple itself
                return super().__new__(mcs, name, bases, body)
            if bases != (NamedTuple,) or "__annotations__" not in body:
                raise TypeError(f"{name} must derive from NamedTuple alone, and have fields (Python 3.14: as strings)")
            fields = tuple(body["__annotations__"])
            body.update(_fields=fields, __slots__=())
            body["_field_defaults"] = {field: body.pop(field) for field in fields if field in body}
            body.update((field, property(itemgetter(index))) for index, field in enumerate(fields))
            return super().__new__(mcs, name, bases, body)

    class NamedTuple(tuple, metaclass=_Fields):
        """A tuple whose items have names: immutable, compared by value."""

        __slots__ = ()

        def __new__(cls, *values, **named):
            rest = cls._fields[len(values) :]
            items = {**cls._field_defaults, **named}
            if len(values) > len(cls._fields) or named.keys() - rest or set(rest) - items.keys():
                given = f"{len(values)} values{''.join(f', {name}=' for name in named)}"
                raise TypeError(f"{cls.__name__} has the fields {', '.join(cls._fields)}; given are {given}")
            return tuple.__new__(cls, (*values, *(items[field] for field in rest)))

        def __getnewargs__(self):  # of a copy
            return tuple(self)

        def __repr__(self):
            return f"{type(self).__name__}({', '.join(map('{}={!r}'.format, self._fields, self))})"

        def _replace(self, **named):
            """Return a copy in which these fields have other values."""
            return type(self)(**{**dict(zip(self._fields, self)), **named})
