"""Replaces the parts of `typing` that the toolkit uses: importing `typing` takes much of the time of a no-op job.

Type checkers see the names of `typing`. At run time, the NamedTuple here compiles no code. A class made by
typing.NamedTuple takes longer than importing a whole module. The other names appear only in
annotations, which are never evaluated.
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
        """Turns the annotations of a class body into properties."""

        def __new__(mcs, name, bases, body):
            if bases == (tuple,):  # NamedTuple itself
                return super().__new__(mcs, name, bases, body)
            if bases != (NamedTuple,) or "__annotations__" not in body:
                raise TypeError(
                    f"{name} must derive from NamedTuple alone and have fields (in Python 3.14: annotations as strings)"
                )
            fields = tuple(body["__annotations__"])
            body.update(_fields=fields, __slots__=())
            body["_field_defaults"] = {field: body.pop(field) for field in fields if field in body}
            body.update((field, property(itemgetter(index))) for index, field in enumerate(fields))
            return super().__new__(mcs, name, bases, body)

    class NamedTuple(tuple, metaclass=_Fields):
        """An immutable tuple with named items, compared by value."""

        __slots__ = ()

        def __new__(cls, *values, **named):
            rest = cls._fields[len(values) :]
            items = {**cls._field_defaults, **named}
            if len(values) > len(cls._fields) or named.keys() - rest or set(rest) - items.keys():
                given = f"{len(values)} values{''.join(f', {name}=' for name in named)}"
                raise TypeError(f"{cls.__name__} has the fields {', '.join(cls._fields)}, but was given {given}")
            return tuple.__new__(cls, (*values, *(items[field] for field in rest)))

        def __getnewargs__(self):  # for copies
            return tuple(self)

        def __repr__(self):
            return f"{type(self).__name__}({', '.join(map('{}={!r}'.format, self._fields, self))})"

        def _replace(self, **named):
            """Returns a copy with other values for these fields."""
            return type(self)(**{**dict(zip(self._fields, self)), **named})
