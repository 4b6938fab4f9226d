"""Which modules become tensor-parallel: registration, marks, and replacement when the model is wrapped (AWS API 1.6).

`tensor_parallelism` and `set_tensor_parallelism` only mark modules. `smp.DistributedModel` replaces the outermost
marked modules that are registered, in place.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from smdistributed.core.options import refuse_unknown, warn_without_effect
from smdistributed.modelparallel.backend.exceptions import SMPConfigError, SMPUnsupportedError
from smdistributed.modelparallel.torch.nn.layers import DistributedEmbedding, DistributedLinear
from smdistributed.modelparallel.torch.nn.module import DistributedModule
from smdistributed.modelparallel.torch.plan.manual_partition import note_constructions

_MARK, _ARGUMENTS, _REPLACED = "_smp_tensor_parallelism", "_smp_arguments", "_smp_replaced"
WITHOUT_EFFECT = {
    "fused_bias_gelu": "torch fuses operations itself",
    "fused_dropout": "torch fuses operations itself",
    "fused_softmax": "torch fuses operations itself",
    "flash_attention": "torch chooses the kernel",
    "query_key_layer_scaling": "torch computes the softmax in float32",
    "zero_init": "AWS has not published its effect",
}
"""Published options that have no effect here, and why."""
OPTIONS = (
    "attention_in_fp32",
    "distribute_embedding",
    "fp32_residual_addition",
    "use_alibi",
    *WITHOUT_EFFECT,
)
"""Options of tensor-parallel modules that published pages and scripts use."""
_Hook = Callable[..., Any]


@dataclass(frozen=True)
class Registration:
    """The tensor-parallel version of a class of modules, and the hooks of `tp_register`.

    `from_plain`: makes it from a module, with its weights, and from options; None: it is constructed, with new weights.
    """

    dist_module: type[nn.Module]
    init_hook: _Hook | None = None
    forward_hook: _Hook | None = None
    return_hook: _Hook | None = None
    from_plain: Callable[..., nn.Module] | None = None


@dataclass(frozen=True)
class _Marked:
    enabled: bool
    options: Mapping[str, Any]


_registered: dict[type[nn.Module], Registration] = {
    nn.Linear: Registration(DistributedLinear, from_plain=lambda plain: DistributedLinear.from_plain(plain)),
    nn.Embedding: Registration(DistributedEmbedding, from_plain=lambda plain: DistributedEmbedding.from_plain(plain)),
}
_active: list[_Marked] = []
_late_registrations: list[Callable[[nn.Module], Registration | None]] = []
"""Find registrations of libraries that may not be imported: see `huggingface`."""


# --- registration


def tp_register(
    dist_module: type[nn.Module],
    init_hook: _Hook | None = None,
    forward_hook: _Hook | None = None,
    return_hook: _Hook | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Decorates a class of modules that `dist_module` replaces under tensor parallelism (AWS API 1.6).

    Replaced modules have new weights: create optimizers and load state dicts after `smp.DistributedModel`.

    Args:
        dist_module: A subclass of `smp.nn.DistributedModule`.
        init_hook: Gets the arguments of the class, and returns `(args, kwargs)` for `dist_module`. None: the same.
        forward_hook: Does so for `forward`.
        return_hook: Gets the output of `dist_module`, and returns the output that the class would have.

    Returns:
        A decorator that returns the class itself.

    Raises:
        SMPConfigError: If `dist_module` is not a DistributedModule.
    """

    def register(module_cls: type[nn.Module]) -> type[nn.Module]:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: _Hook | None = None,
    forward_hook: _Hook | None = None,
    return_hook: _Hook | None = None,
) -> None:
    """Registers a tensor-parallel version of an existing class; see `tp_register` (AWS API 1.6).

    From now on the constructor of the class notes its arguments.

    Args:
        module_cls: Modules of this class are replaced; modules of its subclasses are not.
        dist_module: See `tp_register`.
        init_hook: See `tp_register`.
        forward_hook: See `tp_register`.
        return_hook: See `tp_register`.

    Raises:
        SMPConfigError: If `dist_module` is not a DistributedModule.
    """
    if not (inspect.isclass(dist_module) and issubclass(dist_module, DistributedModule)):
        raise SMPConfigError(
            f"tp_register of {module_cls.__name__} names {dist_module!r}, which is not tensor-parallel. Fix: give a "
            "subclass of smp.nn.DistributedModule."
        )
    keeps_weights = getattr(init_hook, "dist_module", None) is dist_module  # a hook of `huggingface`
    from_plain = getattr(init_hook, "from_plain", None) if keeps_weights else None
    _registered[module_cls] = Registration(dist_module, init_hook, forward_hook, return_hook, from_plain)
    _note_arguments(module_cls)


def register_late(find: Callable[[nn.Module], Registration | None]) -> None:
    """Adds a function that finds the registration of a module by itself; it returns None for an unknown one."""
    _late_registrations.append(find)


def _note_arguments(module_cls: type[nn.Module]) -> None:
    original: Any = module_cls.__init__
    if getattr(original, "_smp_notes", None) is module_cls:
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if type(self) is module_cls:
            self.__dict__[_ARGUMENTS] = args, kwargs

    __init__._smp_notes = module_cls  # type: ignore[attr-defined]
    module_cls.__init__ = __init__  # type: ignore[method-assign]


# --- marks


@contextmanager
def tensor_parallelism(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Marks modules that are constructed inside `with` for tensor parallelism; the innermost counts (AWS API 1.6).

    `smp.DistributedModel` replaces the outermost marked modules that have a tensor-parallel version, and keeps their
    weights. Modules stay as they are if they share parameters with others, or the degree does not divide their sizes.
    The first use patches the constructor of nn.Module.

    Args:
        enabled: False: modules inside stay as they are.
        **options: Arguments of tensor-parallel modules, which win over arguments of the replaced module.

    Raises:
        TypeError: If an option is unknown.
    """
    with mark_inside("smp.tensor_parallelism", enabled, options):
        yield


@contextmanager
def mark_inside(function: str, enabled: bool, options: Mapping[str, Any]) -> Iterator[None]:
    """Marks modules as `tensor_parallelism` does, for a function with another name."""
    marked = _Marked(enabled, _checked(function, options))
    note_constructions(_mark_constructed)
    _active.append(marked)
    try:
        yield
    finally:
        _active.pop()


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Marks a module and all modules in it, before it is wrapped; the last call counts (AWS API 1.6).

    Args:
        module: A part of the script's model.
        enabled: See `tensor_parallelism`.
        **options: See `tensor_parallelism`.

    Raises:
        TypeError: If an option is unknown.
    """
    marked = _Marked(enabled, _checked("smp.set_tensor_parallelism", options))
    for part in module.modules():
        part.__dict__[_MARK] = marked


def _mark_constructed(module: nn.Module) -> None:
    if _active:
        module.__dict__[_MARK] = _active[-1]


def _checked(function: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that have an effect. Warns of others that are on, and raises TypeError for unknown ones."""
    own = {
        name for registration in _registered.values() for name in inspect.signature(registration.dist_module).parameters
    }
    refuse_unknown(function, options, (*OPTIONS, *own, "dtype", "tensor_parallelism"))
    for name, why in WITHOUT_EFFECT.items():
        if options.get(name):
            warn_without_effect(f"{name} of {function}", why)
    return {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}


# --- replacement


def distribute(root: nn.Module) -> nn.Module:
    """Replaces marked modules of a model, in place. Returns the model, or what replaces it."""
    owners = Counter(id(p) for part in root.modules() for p in part._parameters.values() if p is not None)
    before = set(root.parameters())
    done: dict[nn.Module, nn.Module] = {}
    root = _distribute(root, owners, done)
    for parameter in before.difference(root.parameters()):
        setattr(parameter, _REPLACED, True)
    return root


def was_replaced(parameter: nn.Parameter) -> bool:
    """Whether it belonged to a module that was replaced with new parameters: an optimizer would train nothing."""
    return hasattr(parameter, _REPLACED)


def _distribute(module: nn.Module, owners: Counter[int], done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:
        return done[module]
    marked: _Marked | None = module.__dict__.get(_MARK)
    made = _make(module, marked.options, owners) if marked and marked.enabled else None
    if made is not None:
        done[module] = made
        return made
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _distribute(child, owners, done)
    return module


def _make(module: nn.Module, options: Mapping[str, Any], owners: Counter[int]) -> nn.Module | None:
    """Makes the tensor-parallel version of a module; None if it has none, or cannot be split."""
    registration = _registered.get(type(module)) or next(
        (found for find in _late_registrations if (found := find(module)) is not None), None
    )
    if registration is None or _shares_parameters(module, owners):
        return None
    try:
        if registration.from_plain is not None:
            known = _list_options(registration)
            if not isinstance(module, (nn.Linear, nn.Embedding)):
                for name in OPTIONS:
                    if options.get(name) and name not in known:
                        warn_without_effect(f"{name} for {type(module).__name__}", "its layers have no such option")
            made = registration.from_plain(module, **{k: v for k, v in options.items() if k in known})
        else:
            made = _construct(module, registration, options)
    except SMPUnsupportedError as error:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            return None  # as published: other modules of the same context are split
        raise SMPUnsupportedError(f"{type(module).__name__} cannot be tensor-parallel: {error}") from error
    return _adopt(made, module, registration)


def _list_options(registration: Registration) -> set[str]:
    """Returns the options with which a module can be made from a plain one."""
    taken = inspect.signature(registration.from_plain or registration.dist_module).parameters
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return {*taken, *inspect.signature(registration.dist_module).parameters}
    return {*taken}


def _shares_parameters(module: nn.Module, owners: Counter[int]) -> bool:
    """Whether a module outside has one of its parameters."""
    own = Counter(id(p) for part in module.modules() for p in part._parameters.values() if p is not None)
    return any(owners[key] > count for key, count in own.items())


def _construct(module: nn.Module, registration: Registration, options: Mapping[str, Any]) -> nn.Module:
    noted = module.__dict__.get(_ARGUMENTS)
    if noted is None:
        raise SMPUnsupportedError(
            f"a {type(module).__name__} was constructed before it was registered. Fix: call tp_register first."
        )
    args, kwargs = registration.init_hook(*noted[0], **noted[1]) if registration.init_hook else noted
    known = inspect.signature(registration.dist_module).parameters
    return registration.dist_module(*args, **{**kwargs, **{k: v for k, v in options.items() if k in known}})


def _adopt(made: nn.Module, module: nn.Module, registration: Registration) -> nn.Module:
    """Gives the new module the mode, hooks and marks of the old one, and the hooks of its registration."""
    made.train(module.training)
    made._forward_hooks, made._forward_pre_hooks = module._forward_hooks, module._forward_pre_hooks
    for name, value in module.__dict__.items():
        if name.startswith("_smp_") and name not in (_MARK, _ARGUMENTS):
            made.__dict__[name] = value
    forward_hook, return_hook = registration.forward_hook, registration.return_hook
    if forward_hook or return_hook:
        cls: Any = type(made)
        made.__class__ = _hooked(cls, forward_hook, return_hook)
    return made


@functools.cache
def _hooked(cls: Any, forward_hook: _Hook | None, return_hook: _Hook | None) -> type[nn.Module]:
    """Returns a subclass with another `forward`: an instance's own would keep the module from being copied."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_hook:
            args, kwargs = forward_hook(*args, **kwargs)
        output = cls.forward(self, *args, **kwargs)
        return return_hook(output) if return_hook else output

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
