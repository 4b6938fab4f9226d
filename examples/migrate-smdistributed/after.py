"""The script after: torch.distributed with the backend smddp (versions 1.4 and later)."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.003)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
args = parser.parse_args()

dist.init_process_group(backend="smddp")
rank, local_rank, world_size = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
torch.manual_seed(args.seed)
device = torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)

pixels, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
loader = DataLoader(dataset, batch_size=args.batch_size // world_size, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device))
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

for epoch in range(1, args.epochs + 1):
    sampler.set_epoch(epoch)
    total = torch.zeros(1, device=device)
    for images, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch} loss {total.item() / len(loader) / world_size:.4f}", flush=True)

if rank == 0:
    args.model_dir.mkdir(parents=True, exist_ok=True)
    torch.save(model.module.state_dict(), args.model_dir / "model.pt")
dist.barrier()
