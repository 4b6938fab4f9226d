"""Runs a model on the meta device, without memory or arithmetic, to find out what its modules do.

It finds the order in which modules are called, what each costs, and which use parameters or buffers of others.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from smdistributed.modelparallel.torch.pipeline.activations import active_checkpointing
from smdistributed.modelparallel.torch.pipeline.packing import pack, unpack

_WITHOUT_VALUES = (torch.Tensor.dtype.__get__, torch.Tensor.device.__get__)  # type: ignore[attr-defined]
"""Attributes that a module may read of another module's parameter or buffer, even on another stage."""
_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
_MAX_READS = 10_000
"""Of values, in one run: a loop that waits for a computed value would never end."""


class Trace:
    """The results of one run of a model, by the names of its modules. Numbers are without their children.

    `order`: of first calls. `activation_bytes`: kept for backward. `uses`: the other modules that own tensors it uses.
    """

    def __init__(self) -> None:
        self.order: dict[str, int] = {}
        self.operations: dict[str, float] = defaultdict(float)
        self.activation_bytes: dict[str, float] = defaultdict(float)
        self.uses: dict[str, set[str]] = defaultdict(set)

    def of_part(self, parts: int) -> Trace:
        """Estimates one of `parts` equal parts of the batch. Shares the order and the uses with this trace."""
        part = Trace()
        part.order, part.uses = self.order, self.uses
        part.operations.update((name, operations / parts) for name, operations in self.operations.items())
        part.activation_bytes.update((name, size / parts) for name, size in self.activation_bytes.items())
        return part


def trace(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Runs a model on the meta device. A number that it reads from a tensor is 1, or true: most masks are all ones.

    Raises RuntimeError if the model reads too many values, and its own exception if it cannot run without values.
    """
    with _without_modes():
        return _trace(root, args, kwargs)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Turns off torch's function modes inside `with`: a default device, or a rehearsal's emulated GPUs."""
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        yield


def _trace(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Runs the model once on the meta device. The model and its tensors stay as they are."""
    found, stack = Trace(), list[str]()
    names = {id(module): name for name, module in root.named_modules()}
    tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
    state = {name: _on_meta(tensor) for name, tensor in tensors.items()}
    owners = _owners(root, {id(tensors[name]): id(state[name]) for name in state})
    body, given = pack((args, kwargs))
    given = [_on_meta(tensor) for tensor in given]
    args, kwargs = unpack(body, given)
    modes, kept = (
        (_Uses(found, stack, owners), _Operations(found, stack)),
        _KeptActivations(found, stack, [*state.values(), *given]),
    )
    hooks = torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor)
    with (
        _attributes_stay(root),
        _call_stack(found, stack, names),
        modes[0],
        modes[1],
        hooks,
        torch.enable_grad(),
        _checkpointed_modules_keep_less(root, kept),
    ):
        functional_call(root, state, args, kwargs)
    return found


@contextmanager
def _attributes_stay(root: nn.Module) -> Iterator[None]:
    """Restores what modules assign to themselves inside `with`, also in dicts: a forward may keep a tensor there."""
    before = [(vars(module), dict(vars(module))) for module in root.modules()]
    tables = [value for _, kept in before for value in kept.values() if type(value) in (dict, OrderedDict)]
    before += [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for attributes, kept in before:
            attributes.clear()
            attributes.update(kept)


def _owners(root: nn.Module, traced: Mapping[int, int]) -> dict[int, list[str]]:
    """The names of the modules that have each tensor, by the id of its traced copy. A shared one has several."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in root.named_modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                owners[traced[id(tensor)]].append(name)
    return owners


class _KeptActivations:
    """Adds up the memory that is kept for backward, each storage once, without parameters and the batch."""

    def __init__(self, found: Trace, stack: list[str], known: Iterable[torch.Tensor]) -> None:
        self._found, self._stack, self._depth = found, stack, 0
        self._seen = {storage_address(tensor): tensor for tensor in known}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor, unless a checkpointed module runs. Returns it, as torch's hook must."""
        if self._stack and not self._depth and storage_address(tensor) not in self._seen:
            self._seen[storage_address(tensor)] = tensor  # while it lives no other has its memory
            self._found.activation_bytes[self._stack[-1]] += tensor.untyped_storage().nbytes()
        return tensor

    def run(
        self, call: Callable[..., Any], keeps_arguments: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a checkpointed module by `call`, its forward: only its arguments are kept, if `keeps_arguments`."""
        for value in tree_flatten((args, kwargs))[0] if keeps_arguments else ():
            if isinstance(value, torch.Tensor):
                self.keep(value)
        self._depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            self._depth -= 1


@contextmanager
def _checkpointed_modules_keep_less(root: nn.Module, kept: _KeptActivations) -> Iterator[None]:
    """Replaces the forward of checkpointed modules inside `with`, so that they keep the same as a real run."""
    own = {}
    for module, keeps in _find_checkpointed(root).items():
        own[module] = module.__dict__.get("forward")
        call = functools.partial(kept.run, module.forward, keeps)
        module.__dict__["forward"] = lambda *args, _call=call, **kwargs: _call(args, kwargs)
    try:
        yield
    finally:
        for module, forward in own.items():
            del module.__dict__["forward"]
            module.__dict__.update({} if forward is None else {"forward": forward})


def _find_checkpointed(root: nn.Module) -> dict[nn.Module, bool]:
    """Returns whether each keeps its arguments: the first of a group does. A plain nn.Sequential's children count."""
    found = {}
    for module in root.modules():
        how = active_checkpointing(module)
        if how and type(module).forward is nn.Sequential.forward:
            children = list(module.children())
            found.update({child: place % (how.group or len(children)) == 0 for place, child in enumerate(children)})
        elif how:
            found[module] = True
    return found


def storage_address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's storage, which identifies it as long as it exists."""
    return int(tensor.untyped_storage()._cdata)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same shape and dtype on the meta device, which requires grad if this one does."""
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


@contextmanager
def _call_stack(found: Trace, stack: list[str], names: Mapping[int, str]) -> Iterator[None]:
    """Notes the order of first calls. A module that is not in `names` counts as the one that calls it."""

    def enter(module: nn.Module, _: Any) -> None:
        name = names.get(id(module))
        stack.append(name if name is not None else stack[-1])
        if name is not None:
            found.order.setdefault(name, len(found.order))

    def leave(*_: Any) -> None:
        stack.pop()

    handles = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Uses(TorchFunctionMode):
    """Notes which module uses tensors of which other. `owners` has the modules that have a tensor, by its id."""

    def __init__(self, found: Trace, stack: list[str], owners: Mapping[int, list[str]]) -> None:
        super().__init__()
        self._found, self._stack, self._owners = found, stack, owners

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in () if func in _WITHOUT_VALUES or not self._stack else tree_flatten((args, kwargs))[0]:
            owners = self._owners.get(id(value))
            if owners and self._stack[-1] not in owners:
                self._found.uses[self._stack[-1]].add(owners[0])
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up operations for the running module."""

    def __init__(self, found: Trace, stack: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._stack, self._reads = found, stack, 0

    def _read(self, dtype: torch.dtype) -> Any:
        """Returns 1 for a value that the model reads. Raises RuntimeError if it reads too many."""
        self._reads += 1
        if self._reads > _MAX_READS:
            raise RuntimeError(
                f"it reads more than {_MAX_READS} values, each taken as 1: a loop may wait for another one"
            )
        return torch.ones((), dtype=dtype, device="cpu").item()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self._read(args[0].dtype)
        result = func(*args, **(kwargs or {}))
        outputs = [r for r in (result if isinstance(result, (tuple, list)) else (result,)) if torch.is_tensor(r)]
        if self._stack:
            self._found.operations[self._stack[-1]] += _operations(func, args, outputs)
        return result


def _operations(func: Any, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> float:
    """Exact for matrix products, convolutions and attention. For others, each element of the result counts as one."""
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
    size = float(sum(output.numel() for output in outputs))
    if name in _MATRIX_PRODUCTS:
        left = next(arg for arg in args[-2:] if torch.is_tensor(arg))
        return 2 * size * int(left.shape[-1])
    if name == "convolution":
        return 2 * size * int(math.prod(args[1].shape[1:]))
    if "scaled_dot_product" in name:
        return 4 * float(args[0].numel()) * int(args[1].shape[-2])
    return size
