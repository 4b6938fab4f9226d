"""The part of a model on one stage: its parameters, buffers and modules, and its part of the state dict."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.core.options import warn_without_effect
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError, StepUsageError
from smdistributed.modelparallel.torch.nn.module import DistributedModule, split_of
from smdistributed.modelparallel.torch.pipeline.module_manager import ModuleManager
from smdistributed.modelparallel.torch.script.sharding import make_whole, pack_parts, place_like
from smdistributed.modelparallel.torch.script.state import TorchState, WrappedModel

_PARTIAL_KEY = "_smp_is_partial"
"""By this key AWS's library tells names of its own modules from Hugging Face's."""


class ModelParts(WrappedModel):
    """The methods of `smp.DistributedModel` about the parameters, buffers and modules of this stage and of all."""

    _state: TorchState
    _is_whole: bool
    """Whether `cpu` has gathered the tensors of other stages here."""
    _to_load: Callable[[], Any] | None
    """Loads values when the model is placed. The last one counts."""

    # --- of this stage

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters of this stage. Raises StepUsageError before the model is placed."""
        self._require_placement()
        return self.manager.local_parameters()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of this stage. Raises StepUsageError before the model is placed."""
        return (parameter for _, parameter in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and buffers of this stage. Raises StepUsageError before the model is placed."""
        self._require_placement()
        return self.manager.local_buffers()

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Yields the buffers of this stage. Raises StepUsageError before the model is placed."""
        return (buffer for _, buffer in self.local_named_buffers())

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields names and modules of this stage. Raises StepUsageError before the model is placed."""
        self._require_placement()
        return self.manager.local_modules()

    def local_modules(self) -> Iterator[nn.Module]:
        """Yields the modules of this stage. Raises StepUsageError before the model is placed."""
        return (module for _, module in self.local_named_modules())

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this stage's parameters with gradients that are averaged over DP_GROUP (AWS API 1.6)."""
        return ((name, p) for name, p in self.local_named_parameters() if split_of(p) is None)

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this stage's parameters with gradients that are averaged over RDP_GROUP (AWS API 1.6)."""
        return ((name, p) for name, p in self.local_named_parameters() if split_of(p) is not None)

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Yields the tensor-parallel modules of all stages (AWS API 1.6)."""
        return (module for module in self.module.modules() if isinstance(module, DistributedModule))

    def is_distributed_parameter(self, param: torch.Tensor) -> bool:
        """Whether tensor-parallel ranks have a share each (AWS API 1.6)."""
        return split_of(param) is not None

    def is_distributed_buffer(self, buf: torch.Tensor) -> bool:
        """Whether tensor-parallel ranks have a share each: no (AWS API 1.6)."""
        return False

    def is_scaled_batch_parameter(self, param: torch.Tensor) -> bool:
        """Whether its gradient has the different batches of all tensor-parallel ranks (AWS API 1.6)."""
        return split_of(param) is not None and not self._state.cfg.prescaled_batch

    is_scaled_batch_buffer = is_distributed_buffer

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields what the optimizer updates of this stage, without single-precision copies (AWS API 1.6)."""
        return self.local_named_parameters()

    # --- state dicts

    def local_state_dict(self) -> dict[str, Any]:
        """The part of the model's state dict that is on this rank. Raises StepUsageError before it is placed.

        With `sharded_data_parallel_degree`, it has parts of parameters, which only `load_state_dict` understands.
        """
        self._require_placement()
        return pack_parts(select_local(self.manager))  # type: ignore[no-any-return]

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The whole model's state dict, in plain PyTorch's names; all ranks of the first replica call it.

        Before the model is placed, no rank waits for other stages. With tensor parallelism all ranks of MP_GROUP call
        it, and shares are joined. With `sharded_data_parallel_degree` all ranks of the job call it.

        Args:
            *args: Ignored.
            gather_to_rank0: Whether only the first stage gets it; the others get an empty one.
            **kwargs: Ignored.

        Returns:
            Tensors on the CPU, by name.
        """
        own = select_local(self.manager) if self.partitioned else self.module.state_dict()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))  # which tell how they are split
        whole = ((key, make_whole(value, parameters.get(key))) for key, value in own.items())
        if not self.partitioned:
            return dict(whole)
        local = {key: _to_cpu(value) for key, value in whole}
        ranks, objects = self._state.group("PP_GROUP"), self._state.objects
        parts = objects.gather_to_first(local, ranks, "state") if gather_to_rank0 else objects.gather(local, ranks)
        return merge_parts(self.manager, parts)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        same_partition_load: bool = False,
    ) -> Any:
        """Loads a state dict, also into single-precision copies: at once if the model is placed, else as soon as it is.

        Args:
            state_dict: The whole model's, or at least what this stage has of it. Each stage takes its own part, and
                asks no other. It may have Hugging Face's names.
            strict: Whether missing and unexpected keys are errors.
            assign: No effect, and a warning if it is True: the parameters stay the same objects.
            same_partition_load: Whether `local_state_dict` returned it for the same partition. Either is as fast.

        Raises:
            RuntimeError: If `strict`, and keys are missing or unexpected.
        """
        if assign:
            warn_without_effect("assign=True of load_state_dict", "the optimizer knows the model's parameters")
        for _, from_other in self.manager.translate_functions:
            state_dict = from_other(state_dict)
        if not self.partitioned:
            self.load_when_placed(functools.partial(self.load_state_dict, dict(state_dict), strict))
            return None
        load_local(self.manager, state_dict, strict)
        self.refresh_copies()
        return None

    def load_when_placed(self, load: Callable[[], Any]) -> None:
        """Calls `load` at once if the model is placed; else as soon as it is, before the placement hooks."""
        if self.partitioned:
            load()
        else:
            self._to_load = load

    def refresh_copies(self) -> None:
        """Sets the single-precision copies to the parameters, which have been loaded."""
        if self._state.optimizer is not None:
            self._state.optimizer.master_weights.refresh()

    def cpu(self) -> ModelParts:
        """Gathers the parameters and buffers of all stages on every stage, on the CPU (AWS API).

        With tensor parallelism each rank keeps its shares.

        All ranks of a replica call it. `get_module()` is then the whole model, but calls of it still go to the stages:
        load its `state_dict` into another model. The next step frees the parameters of other stages again. Before the
        model is placed, it only moves the model to the CPU.
        """
        if not self.partitioned:
            return super().cpu()
        if self.shard_ranks:
            raise SMPUnsupportedError(
                "model.cpu() would gather the whole model, which 'sharded_data_parallel_degree' splits. Fix: call "
                "model.state_dict() on all ranks."
            )
        own = {name: p.detach().cpu() for name, p in (*self.local_named_parameters(), *self.local_named_buffers())}
        parts = self._state.objects.gather(own, self._state.group("PP_GROUP"))
        fill_in_parameters(self.manager, {name: tensor for part in parts for name, tensor in part.items()})
        self._is_whole = True
        return self

    # --- of the wrapped model

    def get_module(self) -> nn.Module:
        """The wrapped model."""
        return self.module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the wrapped model's names and parameters. Parameters of other stages have no elements."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the wrapped model's names and buffers. Buffers of other stages have no elements."""
        return self.module.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the wrapped model's children: names built from them are the names of `named_parameters`."""
        return self.module.named_children()

    def children(self) -> Iterator[nn.Module]:
        """Yields the wrapped model, so that `train`, `apply` and others walk down the tree."""
        return iter((self.module,))

    def _require_placement(self) -> None:
        if not self.partitioned:
            raise StepUsageError(
                "The model is not placed yet: its first call in a step does that. Fix: use "
                "register_post_partition_hook for code that needs its local parameters."
            )


def _to_cpu(value: Any) -> Any:
    return value.cpu() if hasattr(value, "cpu") else value


def select_local(manager: ModuleManager, keep_vars: bool = False) -> dict[str, Any]:
    """Returns entries of modules of this stage. Tensors share the memory of the model; `keep_vars`: its own ones."""
    local, found = {name for name, _ in manager.local_modules()}, manager.root.state_dict(keep_vars=keep_vars)
    return {key: value for key, value in found.items() if key.rpartition(".")[0] in local}


def merge_parts(manager: ModuleManager, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the parts of all stages, in the order of the model's own state dict. Other keys are left out.

    A module with several names, such as T5's embedding, is in the parts by its first one.
    """
    found = {key: value for part in parts for key, value in part.items()}
    own = manager.root.state_dict(keep_vars=True)
    known = {id(own[key]): value for key, value in found.items() if isinstance(own.get(key), torch.Tensor)}
    return {
        key: found[key] if key in found else known[id(tensor)]
        for key, tensor in own.items()
        if key in found or id(tensor) in known
    }


def load_local(manager: ModuleManager, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Ignores other ranks' entries. With `strict`, missing and unexpected keys raise RuntimeError."""
    check_keys(manager, state_dict, strict)
    local, own = set(select_local(manager)), manager.root.state_dict()
    targets = {**own, **dict(manager.root.named_parameters(remove_duplicate=False))}  # which tell how they are split
    wanted = OrderedDict((key, place_like(value, targets[key])) for key, value in state_dict.items() if key in local)
    # Without versions, torch assumes an old BatchNorm, and fills in buffers that are on other stages.
    wanted._metadata = getattr(state_dict, "_metadata", None) or own._metadata  # type: ignore[attr-defined]
    manager.root.load_state_dict(wanted, strict=False)


def check_keys(manager: ModuleManager, keys: Iterable[str], strict: bool) -> None:
    """With `strict`, raises RuntimeError if keys of this stage are missing, or others are unexpected."""
    given, aliases = set(keys), aliases_of(manager.root)
    missing = [key for key in select_local(manager) if given.isdisjoint(aliases.get(key, (key,)))]
    unexpected = sorted(given - set(manager.root.state_dict()) - {_PARTIAL_KEY})
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"load_state_dict: missing keys: {', '.join(sorted(missing)) or 'none'}; "
            f"unexpected keys: {', '.join(unexpected) or 'none'}. Fix: give strict=False to load what fits."
        )


def is_loaded_plainly(root: nn.Module, key: str) -> bool:
    """Whether load_state_dict would only copy this entry: its module has no hooks or rules of its own for that."""
    name, _, last = key.rpartition(".")
    module: Any = root.get_submodule(name)
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return (
        type(module)._load_from_state_dict is nn.Module._load_from_state_dict
        and (last in module._parameters or last in module._buffers)
        and all(hook.__module__.startswith("torch.distributed.fsdp.") for hook in hooks)  # gathered parts are freed
    )


def fill_in_parameters(manager: ModuleManager, whole: Mapping[str, Any]) -> None:
    """Every parameter must have a value. Buffers without one stay as they are. Gradients move to the CPU."""
    for name, parameter in manager.root.named_parameters():
        parameter.data = whole[name]
        if parameter.grad is not None:
            parameter.grad = parameter.grad.cpu()
    for name, module in manager.modules.items():
        for key in [key for key, buffer in module._buffers.items() if buffer is not None]:
            module._buffers[key] = whole.get(f"{name}.{key}" if name else key, module._buffers[key])


def aliases_of(module: nn.Module) -> dict[str, list[str]]:
    """All names of a parameter by each of them: files may have a tied parameter once."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: [name, *group] for group in names.values() for name in group}
