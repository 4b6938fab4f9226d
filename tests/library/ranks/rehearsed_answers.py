"""No launcher, two emulated GPUs: checks what a script sees of them. Prints the names of the checks.

Without SHOAL_REHEARSE it shows whether real GPUs, also a single one, answer in the same way.
"""

# mypy: disable-error-code="no-untyped-call,attr-defined,var-annotated"
from __future__ import annotations

import copy
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812 (the customary name)
from torch.utils.checkpoint import checkpoint

CUDA = torch.device("cuda", 0)
COUNT = torch.cuda.device_count()
OTHER = torch.device("cuda", COUNT - 1)
REAL = not os.environ.get("SHOAL_REHEARSE")


def raises(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except error as raised:
        assert words in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__}: {words}")


def devices() -> None:
    assert torch.cuda.is_available()
    assert REAL or COUNT == 2
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(OTHER):
        assert torch.zeros(1).cuda().device == OTHER
    assert torch.zeros(1, device="cuda").device == CUDA
    assert str(torch.device("cuda")) == "cuda"
    assert torch.cuda.get_device_properties(0).total_memory > 0
    assert isinstance(torch.Generator("cuda"), torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert REAL or torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated(OTHER) == 0
    torch.cuda.empty_cache()
    others: tuple[Any, ...] = (torch.cuda.device(COUNT - 1), torch.cuda.device(str(OTHER)))
    for device in others:
        assert torch.cuda.get_device_capability(device) == torch.cuda.get_device_capability(OTHER)
    raises(RuntimeError, "invalid device ordinal", lambda: torch.cuda.device(COUNT).__enter__())


def ordinals() -> None:
    words = "CUDA error: invalid device ordinal"
    for call in (
        lambda: torch.cuda.set_device(5),
        lambda: torch.zeros(1).cuda(2),
        lambda: torch.zeros(1).to("cuda:2"),
        lambda: torch.zeros(1, device="cuda:9"),
        lambda: nn.Linear(2, 2).to(torch.device("cuda", 3)),
        lambda: torch.load(io.BytesIO(saved(torch.zeros(1))), map_location="cuda:2"),
    ):
        raises(RuntimeError, words, call)
    raises(AssertionError, "Invalid device id", lambda: torch.cuda.get_device_name(COUNT))


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def moves_copy() -> None:
    there = torch.zeros(3)
    moved = there.to("cuda")
    moved += 1
    assert moved.is_cuda and not moved.is_cpu and moved.get_device() == 0
    assert not there.is_cuda and there.tolist() == [0, 0, 0]
    assert moved.to(CUDA) is moved
    back = moved.cpu()
    back += 1
    assert not back.is_cuda and moved.tolist() == [1, 1, 1]
    assert there.to(moved).is_cuda
    assert there.to(0).device == CUDA
    assert there.to(device=OTHER, dtype=torch.float64).device == OTHER


def results_are_where_their_arguments_are() -> None:
    x = torch.ones(3, 3, device=CUDA, requires_grad=True)
    for made in (x + 1, x[0], x[torch.tensor([0])], torch.stack([x, x]), x.new_zeros(2), torch.zeros_like(x), x.half()):
        assert made.is_cuda, made
    assert torch.empty(2, device=x.device).is_cuda
    assert copy.deepcopy(nn.Linear(2, 2).cuda()).weight.is_cuda
    (x * 2).sum().backward()
    assert x.grad is not None and x.grad.is_cuda
    assert not torch.ones(2).is_cuda and not torch.empty(1, device="meta").is_cuda


def tensors_swap() -> None:
    """As FSDP2 does when a module on the meta device gets memory."""
    if hasattr(torch.utils, "swap_tensors"):
        one, other = torch.ones(1, device="cuda"), torch.zeros(1)
        torch.utils.swap_tensors(one, other)
        assert (one.item(), one.is_cuda, other.item(), other.is_cuda) == (0, False, 1, True)


def modules_move() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weight = model[0].weight
    assert not weight.is_cuda
    model.cuda(COUNT - 1)
    assert model[0].weight is weight and weight.device == OTHER
    assert all(buffer.is_cuda for buffer in model.buffers())
    assert not any(parameter.is_cuda for parameter in model.to("cpu").parameters())


def mixtures_are_refused() -> None:
    words = "Expected all tensors to be on the same device, but "
    model, x = nn.Linear(2, 2).cuda(), torch.ones(2, 2)
    raises(RuntimeError, words, lambda: model(x))
    raises(RuntimeError, words, lambda: F.cross_entropy(model(x.cuda()), torch.zeros(2, dtype=torch.long)))
    raises(RuntimeError, words, lambda: nn.Linear(2, 2)(x.cuda()))
    assert (x.cuda() * torch.tensor(2.0)).is_cuda, "a tensor without dimensions may be on the CPU"
    raises(TypeError, "can't convert cuda:0 device type tensor to numpy", lambda: x.cuda().numpy())
    raises(RuntimeError, "only dense CPU tensors can be pinned", lambda: x.cuda().pin_memory())
    assert x.pin_memory().is_pinned() and not x.is_pinned()
    assert torch.empty(2, pin_memory=True).is_pinned() and not torch.empty(2, pin_memory=False).is_pinned()
    raises(RuntimeError, "nly dense CPU tensors can be pinned", lambda: torch.ones(2, device="cuda", pin_memory=True))


class Twice(torch.autograd.Function):
    """A script's own function, which makes tensors on CUDA in backward too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return x * torch.full((1,), 2.0, device="cuda")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.full((1,), 2.0, device="cuda")


def functions_of_the_script() -> None:
    x, layer = torch.ones(2, 2, device=CUDA, requires_grad=True), nn.Linear(2, 2).cuda()
    doubled = Twice.apply(x)
    assert doubled.is_cuda
    layer(doubled).sum().backward()
    for reentrant in (True, False):
        checkpoint(lambda y: layer(y) + torch.ones(2, device="cuda"), x, use_reentrant=reentrant).sum().backward()
    torch.autograd.grad(Twice.apply(x).sum(), x)


def recomputed_activations() -> None:
    """What autograd saves of these is compared with what is computed anew, its device as well."""
    table, words = nn.Embedding(7, 4).cuda(), torch.tensor([1, 2, 3], device=CUDA)

    def masked(rows: torch.Tensor) -> torch.Tensor:
        positive = rows > 0
        return F.dropout(rows.masked_fill(positive, 1.0), 0.1) * torch.where(positive, rows, rows * 2)

    for function in (lambda rows: masked(table(rows)), lambda rows: F.dropout(table(rows), 0.1)):
        checkpoint(function, words, use_reentrant=False).sum().backward()
    assert table.weight.grad is not None


def printed() -> None:
    x = torch.ones(2, device=OTHER, dtype=torch.float64)
    assert repr(x) == str(x) == f"{x}" == f"tensor([1., 1.], device='{OTHER}', dtype=torch.float64)"
    assert repr(x.cpu()) == "tensor([1., 1.], dtype=torch.float64)"
    assert str([torch.ones(1).cuda()]) == "[tensor([1.], device='cuda:0')]"
    assert "device='cuda:0', requires_grad=True)" in repr(nn.Linear(1, 1).cuda().weight)
    assert f"{x.sum()}" == "2.0" and f"{x.sum():.2f}" == "2.00"


def threads() -> None:
    found: list[torch.device] = []
    thread = threading.Thread(target=lambda: found.append(torch.zeros(1, device=OTHER).device))
    thread.start()
    thread.join()
    assert found == [OTHER]


def defaults() -> None:
    torch.set_default_device("cuda")
    assert torch.zeros(1).is_cuda and nn.Linear(1, 1).weight.is_cuda
    torch.set_default_device("cpu")
    with torch.device(OTHER):
        assert torch.ones(1).device == OTHER
    assert not torch.ones(1).is_cuda


def checkpoints_keep_devices() -> None:
    model = nn.Linear(2, 2)
    before = saved(model.state_dict())
    restored = torch.load(io.BytesIO(before), map_location=OTHER)
    assert torch.equal(restored["bias"].cpu(), model.bias.detach().cpu()) and restored["bias"].device == OTHER
    values = {
        "there": torch.ones(3, device=OTHER),
        "part": nn.Parameter(torch.ones(3, device=CUDA)[1:]),
        "here": torch.ones(1),
    }
    for new in (True, False):
        packed = io.BytesIO()
        torch.save(values, packed, _use_new_zipfile_serialization=new)
        for place, expected in (
            (None, [OTHER, CUDA, torch.device("cpu")]),
            ("cpu", [torch.device("cpu")] * 3),
            (CUDA, [CUDA] * 3),
            ({str(OTHER): "cpu"}, [torch.device("cpu"), CUDA, torch.device("cpu")]),
        ):
            packed.seek(0)
            found = torch.load(packed, map_location=place)
            assert [value.device for value in found.values()] == expected, (new, place)


def legacy_types() -> None:
    assert torch.cuda.FloatTensor([1.0]).device == CUDA
    x = torch.zeros(2).type("torch.cuda.HalfTensor")
    assert x.type() == "torch.cuda.HalfTensor" and isinstance(x, torch.cuda.HalfTensor)
    assert not isinstance(x.cpu(), torch.cuda.HalfTensor)


def streams_and_events() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(2, device="cuda")
    x.record_stream(stream)
    torch.cuda.current_stream().wait_stream(stream)
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    error = RuntimeError if torch.__version__.startswith("2.0") else ValueError
    raises(error, "Both events must be recorded", lambda: first.elapsed_time(second))
    first.record()
    second.record()
    assert first.elapsed_time(second) >= 0
    raises(error, "enable_timing=True", lambda: first.elapsed_time(torch.cuda.Event()))


def mixed_precision() -> None:
    layer, x = nn.Linear(2, 2).cuda(), torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled()
        assert layer(x).dtype in (torch.float16, torch.bfloat16), "bfloat16 where the CPU has no float16 (torch 2.0)"
        with torch.autocast("cuda", enabled=False):
            assert layer(x).dtype is torch.float32
    if hasattr(torch, "accelerator"):  # from about torch 2.6 on, on CUDA
        half, sums = torch.full((2, 2), 1 + 2**-7, device="cuda").bfloat16(), torch.zeros(2, 2, device="cuda")
        expected, wide = half.float() @ half.float(), {"out_dtype": torch.float32}
        for product in (torch.mm(half, half, **wide), torch.addmm(sums, half, half, **wide)):
            assert product.is_cuda and torch.equal(product, expected)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    scaler = torch.cuda.amp.GradScaler(init_scale=4.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(x * float("inf")).sum()).backward()
    before = layer.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before), "a step of gradients that are not finite is skipped"
    assert scaler.get_scale() == 2.0


def models_in_half_precision() -> None:
    """Also where the CPU has no kernels for float16 (torch 2.0): they are computed in float32, and rounded."""
    layers = (nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(8, 3)).half().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-4)
    images, losses = torch.rand(3, 1, 4, 4).half().cuda(), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), torch.arange(3, device="cuda"))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert loss.dtype is torch.float16 and loss.is_cuda and losses[-1] < losses[0], losses
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float16}
    table, attention = nn.Embedding(5, 8).half().cuda(), nn.MultiheadAttention(8, 2).half().cuda()
    rows = table(torch.tensor([[1, 2, 3]], device="cuda"))
    found = attention(rows, rows, rows)[0] + nn.LSTM(8, 8).half().cuda()(rows)[0]
    found.softmax(-1).square().sum().backward()
    assert found.dtype is torch.float16 and found.is_cuda and table.weight.grad is not None
    half, sums = torch.full((2, 2), 1.5, device="cuda").half(), torch.zeros(2, 2, device="cuda").half()
    assert torch.mm(half, half, out=sums) is sums and sums.tolist() == [[4.5, 4.5], [4.5, 4.5]]


def on_several_gpus() -> None:
    model = nn.DataParallel(nn.Linear(2, 2).cuda())
    assert model(torch.ones(4, 2)).device == CUDA


CHECKS = (
    devices,
    ordinals,
    moves_copy,
    results_are_where_their_arguments_are,
    tensors_swap,
    modules_move,
    mixtures_are_refused,
    functions_of_the_script,
    recomputed_activations,
    printed,
    threads,
    defaults,
    checkpoints_keep_devices,
    legacy_types,
    streams_and_events,
    mixed_precision,
    models_in_half_precision,
    on_several_gpus,
)
if __name__ == "__main__":
    failed = []
    for check in CHECKS:
        try:
            check()
        except Exception:
            failed.append(check.__name__)
            traceback.print_exc()
        else:
            print(check.__name__)
    sys.exit(", ".join(failed) or None)
