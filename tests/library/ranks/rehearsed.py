"""One rank of a training script as people write them for CUDA; with --cpu, the same script as it is written for CPUs.

Writes a JSON file a rank: its losses, and facts about its device.
"""

# mypy: disable-error-code="no-untyped-call,attr-defined,var-annotated"
from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812 (the customary name)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--amp", action="store_true")
parser.add_argument("--backend", default="nccl")
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

if "OMPI_COMM_WORLD_RANK" in os.environ:
    os.environ.update({name: os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "LOCAL_RANK")})
    os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
if args.backend == "smddp":
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))

torch.manual_seed(7)
if args.cpu:
    device = torch.device("cpu")
else:
    assert torch.cuda.is_available()
    assert local_rank < torch.cuda.device_count()
    torch.cuda.set_device(local_rank)
    torch.cuda.manual_seed_all(7)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda", local_rank)
if distributed:
    dist.init_process_group("gloo" if args.cpu else args.backend)

images, labels = torch.rand(96, 1, 12, 12), torch.arange(96) % 10
dataset = TensorDataset(images, labels)
sampler = DistributedSampler(dataset, shuffle=False) if distributed else None
loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=1, pin_memory=not args.cpu)

network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 10)).to(device)
model: nn.Module = network
if distributed and args.cpu:
    model = DistributedDataParallel(network)
elif distributed:
    model = DistributedDataParallel(network, device_ids=[local_rank], output_device=local_rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.cuda.amp.GradScaler(enabled=args.amp)

losses = []
if not args.cpu:
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
for _ in range(2):
    for batch, target in loader:
        if args.cpu:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
        else:
            batch, target = batch.cuda(non_blocking=True), target.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.amp.autocast(enabled=args.amp):
                loss = F.cross_entropy(model(batch), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
facts = {"is_cuda": loss.is_cuda, "device": str(next(model.parameters()).device), "milliseconds": 0.0}
if not args.cpu:
    ended.record()
    torch.cuda.synchronize()
    facts["milliseconds"] = started.elapsed_time(ended)

path = args.out / "model.pt"
if rank == 0:
    torch.save(network.state_dict(), path)
if distributed:
    dist.barrier()
where = "cpu" if args.cpu else {"cuda:0": f"cuda:{local_rank}"}
network.load_state_dict(torch.load(path, map_location=where))
network.eval()
with torch.no_grad():
    scores = network(images.to(device)).cpu().numpy()
(args.out / f"rank-{rank}.json").write_text(
    json.dumps({"losses": losses, "mean_score": float(scores.mean()), "devices": torch.cuda.device_count(), **facts})
)
if distributed and not args.cpu:  # NCCL, unlike gloo, compares numbers of elements, not shapes
    size = dist.get_world_size()
    gathered = torch.empty(4 * size, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((1, 4), float(rank), device=device))
    assert gathered.tolist() == [float(other) for other in range(size) for _ in range(4)]
    for op, factor in ((dist.ReduceOp.SUM, size), (dist.ReduceOp.AVG, 1)):
        scattered = torch.empty((2, 2), device=device)
        dist.reduce_scatter_tensor(scattered, gathered, op)
        assert scattered.is_cuda and scattered.tolist() == [[float(rank * factor)] * 2] * 2
    masks = [torch.zeros(2, dtype=torch.bool, device=device) for _ in range(size)]
    dist.all_gather(masks, torch.tensor([True, rank == 1], device=device))  # NCCL moves booleans
    assert [mask.tolist() for mask in masks] == [[True, other == 1] for other in range(size)]
    if args.backend == "nccl":
        dist.all_reduce(masks[0])
        assert masks[0].tolist() == [True, False] and masks[0].is_cuda
if distributed and not args.cpu:  # as BatchNorm of all ranks' batches in one
    torch.manual_seed(8)
    whole, factors = torch.rand(6 * size, 3, 2, requires_grad=True), torch.rand(6 * size, 3, 2)
    reference, synchronised = nn.BatchNorm1d(3), nn.SyncBatchNorm(3).to(device)
    (reference(whole) * factors).sum().backward()
    mine = whole.detach().chunk(size)[rank].to(device).requires_grad_()
    (synchronised(mine) * factors.chunk(size)[rank].to(device)).sum().backward()
    assert mine.grad is not None and whole.grad is not None
    torch.testing.assert_close(mine.grad.cpu(), whole.grad.chunk(size)[rank])
    for name, buffer in synchronised.named_buffers():
        torch.testing.assert_close(buffer.cpu(), reference.get_buffer(name))
if distributed and not args.cpu:  # PowerSGD's synchronises with the device of its bucket

    def on_the_device(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        assert {tensor.device for tensor in (bucket.buffer(), *bucket.gradients())} == {device}
        torch.cuda.synchronize(bucket.buffer().device)
        return allreduce_hook(everybody, bucket)

    everybody: Any = dist.group.WORLD
    hooked = DistributedDataParallel(torch.nn.Linear(2, 1).to(device), device_ids=[local_rank])
    hooked.register_comm_hook(None, lambda _, bucket: on_the_device(bucket))
    hooked(torch.ones(1, 2, device=device)).backward()
if distributed:
    dist.destroy_process_group()
