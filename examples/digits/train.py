"""Train a small convolutional network on 1,797 handwritten digits, data parallel on any number of ranks.

Runs as it is under `train`, mpirun and torchrun, on GPUs and without, and alone: `python train.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel

GREATEST_PIXEL = 16
HELD_OUT = 5  # every fifth image of each digit is for testing


class Net(torch.nn.Module):
    """Images (n, 1, 8, 8), float32 from 0 to 1, to scores (n, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.dropout = torch.nn.Dropout(0.25)
        self.hidden = torch.nn.Linear(32 * 4 * 4, 64)
        self.scores = torch.nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.hidden(self.dropout(x.flatten(1))))
        return self.scores(self.dropout(x))  # type: ignore[no-any-return]


def parse_arguments() -> argparse.Namespace:
    """Hyperparameters arrive as `--name value`; what the platform decides, as SM_* variables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="Adam's learning rate (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING"))
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--output-data-dir", type=Path, default=os.environ.get("SM_OUTPUT_DATA_DIR", "output"))
    return parser.parse_args()


def load_digits(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """The training and the test digits, from digits.npz in the channel, else from scikit-learn."""
    if data_dir is None:
        from sklearn.datasets import load_digits as sklearn_digits

        digits = sklearn_digits()
        pixels, labels = digits.images, digits.target
    else:
        path = data_dir / "digits.npz"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: write it with `python prepare.py {data_dir}`")
        with np.load(path) as digits:
            pixels, labels = digits["images"], digits["labels"]
    images = torch.from_numpy(pixels.astype(np.float32) / GREATEST_PIXEL).unsqueeze(1)
    targets = torch.from_numpy(labels.astype(np.int64))
    held_out = torch.zeros(len(targets), dtype=torch.bool)
    for digit in range(10):
        held_out[torch.where(targets == digit)[0][HELD_OUT - 1 :: HELD_OUT]] = True
    return TensorDataset(images[~held_out], targets[~held_out]), TensorDataset(images[held_out], targets[held_out])


def train_epoch(
    model: torch.nn.Module,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> float:
    """One pass over this rank's share; the mean loss of all ranks."""
    model.train()
    total = torch.zeros(1, device=device)
    for images, targets in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), targets.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total += loss.detach() / len(loader)
    dist.all_reduce(total, op=dist.ReduceOp.AVERAGE)
    return float(total)


def accuracy(model: torch.nn.Module, test: TensorDataset, device: torch.device) -> float:
    model.eval()
    images, targets = test.tensors
    with torch.no_grad():
        return float((model(images.to(device)).argmax(1).cpu() == targets).float().mean())


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # the network is small: the cores are for the ranks
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    training, test = load_digits(arguments.data_dir)
    sampler: DistributedSampler[object] = DistributedSampler(
        training, num_replicas=world_size, rank=rank, seed=arguments.seed
    )
    loader = DataLoader(training, batch_size=arguments.batch_size, sampler=sampler)
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)

    images = len(sampler) * world_size
    training_seconds = 0.0
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        loss = train_epoch(model, loader, optimizer, device)
        seconds = time.perf_counter() - start
        training_seconds += seconds
        if rank == 0:
            print(f"epoch {epoch}/{arguments.epochs} loss {loss:.4f} {images / seconds:.0f} images/s", flush=True)

    if rank == 0:
        metrics = {
            "test_accuracy": accuracy(model, test, device),
            "images_per_second": images * arguments.epochs / training_seconds,
            "training_seconds": training_seconds,
            "epochs": arguments.epochs,
            "world_size": world_size,
        }
        save(model.module, metrics, arguments.model_dir, arguments.output_data_dir)


def save(model: torch.nn.Module, metrics: dict[str, float], model_dir: Path, output_data_dir: Path) -> None:
    for directory in (model_dir, output_data_dir):
        directory.mkdir(parents=True, exist_ok=True)
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, model_dir / "model.pt")
    (output_data_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(
        f"test accuracy {metrics['test_accuracy']:.4f} with world size {metrics['world_size']}, model in {model_dir}",
        flush=True,
    )


if __name__ == "__main__":
    main()
