"""The distributed training libraries, by the names that scripts import.

They share `core`. `dataparallel` trains data parallel, `modelparallel` model parallel.

Importing this package, or `core`, imports no framework.
"""

__version__ = "0.1.0"
