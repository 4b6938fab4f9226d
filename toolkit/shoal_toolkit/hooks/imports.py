"""Extends modules that the processes of a job import: docs/hooks.md has a table of the hooks and their switches.

No garbage collections while a framework is imported, a GPU for each rank (`devices.py`), no hang or abort at the end.
`train` in place of an SDK's driver (`sdk_driver.py`).

`import torch` makes 250,000 objects that stay. Python collects garbage again and again meanwhile, and goes through all
of them once more when it ends. `make bench-launch` measures both, as `rank-with-ddp`. `_with_idle_threads` describes
the end. `shoal-toolkit.pth` calls `activate` when Python starts in a job.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

_FRAMEWORKS = ("torch", "tensorflow")
_PAUSED = (*_FRAMEWORKS, "torch._dynamo")  # DistributedDataParallel imports the last one, when a script has objects
_GROUPS = "torch.distributed.distributed_c10d"
_WITH_DEVICES = ("torch.cuda", "tensorflow", "jax._src.xla_bridge")  # the keys of devices.EXTENSIONS
_SDK_DRIVER = "paramiko"  # imported by the driver that `train` replaces
_earlier: set[int] = set()  # ids of objects that were alive before a framework was imported

# Each Python of a job runs this module when it starts: these imports would take longer than the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    _Execute = Callable[[ModuleType], None]


def activate() -> None:
    """Extends sys.meta_path, once: Python reads the .pth files of a virtual environment twice.

    If SHOAL_FAST_IMPORTS is 0, imports of frameworks do not pause the garbage collector. If SHOAL_SET_DEVICE is 0,
    ranks get no device.
    """
    if any(isinstance(finder, _ExtendingFinder) for finder in sys.meta_path):
        return
    extensions = [(_GROUPS, _with_idle_threads)]
    if os.environ.get("SHOAL_SET_DEVICE") != "0":
        extensions += [(name, _with_local_device) for name in _WITH_DEVICES]
    if os.environ.get("SHOAL_FAST_IMPORTS") != "0":
        extensions += [(name, _without_collections) for name in _PAUSED]
    sys.meta_path.insert(0, _ExtendingFinder(extensions))


class _ExtendingFinder:
    """Finds modules with the other finders, and extends their loaders by the functions for their names."""

    def __init__(self, extensions: Sequence[tuple[str, Callable[[_Execute], _Execute]]]) -> None:
        self._extensions = extensions
        self._names = {_SDK_DRIVER, *(name for name, _ in extensions)}
        self._searched: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns None if another finder asks this one in turn. May replace this process by `train`."""
        if name not in self._names or name in self._searched:
            return None
        self._searched.add(name)
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._searched.remove(name)
        if spec is None and name == _SDK_DRIVER:
            from shoal_toolkit.hooks.sdk_driver import replace_driver

            replace_driver()
        loader: Any = spec and spec.loader
        if hasattr(loader, "exec_module"):
            for extended, extension in self._extensions:
                if extended == name:
                    loader.exec_module = extension(loader.exec_module)
        return spec


def _without_collections(execute: _Execute) -> _Execute:
    """Pauses the garbage collector, and leaves out the framework's objects from later collections."""

    def exec_module(module: ModuleType) -> None:
        if not gc.isenabled():  # in another framework's import, or the script has turned it off
            execute(module)
            return
        if module.__name__ in _FRAMEWORKS:
            gc.collect()
            _earlier.update(map(id, gc.get_objects()))
        gc.disable()
        try:
            execute(module)
        finally:
            gc.enable()
        if module.__name__ in _FRAMEWORKS:
            gc.collect()  # unused tracebacks refer to frames of the script
            gc.freeze()  # earlier objects of the script too
            atexit.unregister(return_earlier_objects)
            atexit.register(return_earlier_objects)

    return exec_module


def return_earlier_objects() -> None:
    """Returns the objects from before the imports of frameworks to the garbage collector, when Python ends.

    Its last collection then calls destructors and writes open files of the script, as it does in any Python. If all
    objects were returned, the collector would free the framework too.
    """
    import ctypes

    found: dict[int, object] = {}
    nearest = [*gc.get_objects(), *sys.modules.values()]
    while nearest:
        referents = {id(each): each for each in gc.get_referents(*nearest) if id(each) in _earlier}
        nearest = [each for number, each in referents.items() if number not in found]
        found.update(referents)
    for each in (*sys.modules.values(), *found.values()):
        if id(each) in _earlier and gc.is_tracked(each):
            for move in (ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.PyObject_GC_Track):
                move(ctypes.c_void_p(id(each)))


def _with_local_device(execute: _Execute) -> _Execute:
    """Returns the function so that the framework uses the GPU of the local rank when the script first uses a GPU."""

    def exec_module(module: ModuleType) -> None:
        execute(module)
        from shoal_toolkit.hooks.devices import EXTENSIONS

        EXTENSIONS[module.__name__](module)

    return exec_module


def _with_idle_threads(execute: _Execute) -> _Execute:
    """Lets the threads of process groups end their work before a group, or Python, ends.

    A collective returns before the thread of gloo that ran it has released its tensors, which may need Python's lock.
    If torch destroys the group meanwhile, it waits for the thread while it holds the lock: the rank hangs. If Python
    ends meanwhile, versions before 3.14 end the thread in a destructor of C++: the rank aborts with exit code 134.

    Both can still happen if a script ends without waiting for a collective that it started with `async_op=True`.
    """

    def exec_module(module: ModuleType) -> None:
        from functools import wraps  # torch has imported it

        from shoal_toolkit.hooks.idle import wait_for_idle_threads

        execute(module)
        destroy: Callable[..., None] = module.destroy_process_group

        def wait() -> None:
            if module._world.pg_map:
                wait_for_idle_threads()

        @wraps(destroy)
        def destroy_process_group(*args: Any, **keywords: Any) -> None:
            wait()
            destroy(*args, **keywords)

        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
        atexit.register(wait)

    return exec_module
