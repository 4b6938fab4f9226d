"""The distributed training libraries, by the names that scripts import.

`core` is what they share; `dataparallel` trains data parallel, `modelparallel` model parallel.

Importing this package, or `core`, imports no framework.
"""

__version__ = "0.1.0"
