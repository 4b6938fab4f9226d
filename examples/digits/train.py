"""Train a small convolutional network on 1,797 handwritten digits, data parallel on any number of ranks.

With torch's own DistributedDataParallel on the backend `smddp`. Runs unchanged under `train`, mpirun and torchrun, on
GPUs or CPUs, and as a single process: `python train.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)


def arguments_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of hyperparameters, which arrive as `--name value`. Paths default to SM_* variables."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images that a rank takes at once (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="Adam's learning rate (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING"))
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    parser.add_argument("--output-data-dir", type=Path, default=os.environ.get("SM_OUTPUT_DATA_DIR", "output"))
    return parser


def join_job(seed: int) -> torch.device:
    """Join the other ranks, and seed torch. Return this rank's GPU, or the CPU if the host has no GPU."""
    if "RANK" not in os.environ:  # no launcher: a job of one rank
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("smddp")
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # one thread per rank is enough for this small network
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def read_digits(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test digits, from digits.npz in `data_dir` or from scikit-learn.

    Images are float32 (n, 1, 8, 8) from 0 to 1, labels int64 (n,). Every fifth image of each digit is for the test.
    """
    if data_dir is None:
        from sklearn.datasets import load_digits

        pixels, numbers = load_digits().images, load_digits().target
    else:
        path = data_dir / "digits.npz"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing. Fix: python prepare.py {data_dir}")
        with np.load(path) as file:
            pixels, numbers = file["images"], file["labels"]
    images, labels = torch.from_numpy(np.float32(pixels) / 16).unsqueeze(1), torch.from_numpy(np.int64(numbers))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        held_out[(labels == digit).nonzero()[4::5]] = True
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])


class Net(torch.nn.Module):
    """From images (n, 1, 8, 8), float32 from 0 to 1, to scores (n, 10)."""

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


def fit(
    model: torch.nn.Module, digits: TensorDataset, arguments: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Train a wrapped model on this rank's share of the digits. Return the metrics of all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler: DistributedSampler[Any] = DistributedSampler(digits, seed=arguments.seed)
    loader = DataLoader(digits, batch_size=arguments.batch_size, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    images_per_epoch = len(sampler) * world_size
    training_seconds = 0.0
    for epoch in range(1, arguments.epochs + 1):
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        mean = torch.zeros(1, device=device)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        seconds = time.perf_counter() - start
        training_seconds += seconds
        if rank == 0:
            rate = images_per_epoch / seconds
            print(f"epoch {epoch}/{arguments.epochs} loss {mean.item():.4f} {rate:.0f} images/s", flush=True)
    return {
        "images_per_second": images_per_epoch * arguments.epochs / training_seconds,
        "training_seconds": training_seconds,
        "epochs": arguments.epochs,
        "world_size": world_size,
    }


def accuracy(model: torch.nn.Module, test: TensorDataset, device: torch.device) -> float:
    model.eval()
    images, labels = test.tensors
    with torch.no_grad():
        return float((model(images.to(device)).argmax(1).cpu() == labels).float().mean())


def save(weights: dict[str, Any], metrics: dict[str, float], arguments: argparse.Namespace) -> None:
    """Write model.pt and metrics.json where the platform collects them, and print a summary. Called by one rank."""
    for directory in (arguments.model_dir, arguments.output_data_dir):
        directory.mkdir(parents=True, exist_ok=True)
    torch.save({name: value.cpu() for name, value in weights.items()}, arguments.model_dir / "model.pt")
    (arguments.output_data_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(
        f"test accuracy {metrics['test_accuracy']:.4f} with world size {metrics['world_size']}, "
        f"model in {arguments.model_dir}",
        flush=True,
    )


def main() -> None:
    arguments = arguments_parser(__doc__).parse_args()
    device = join_job(arguments.seed)
    training, test = read_digits(arguments.data_dir)
    model = DistributedDataParallel(Net().to(device))
    metrics = fit(model, training, arguments, device)
    if dist.get_rank() == 0:
        metrics["test_accuracy"] = accuracy(model.module, test, device)
        save(model.module.state_dict(), metrics, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
