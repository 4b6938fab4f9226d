"""Train on the digits with a model in four stages, and two replicas: `mpirun -np 8 python train_smp.py`.

The API is `smdistributed.modelparallel`; the network is the same as in the other scripts. Each replica gets 32 of a
batch's 64 images, which pass through the stages as a pipeline of four microbatches.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from digits import Digits, arguments_parser, read_digits, save_metrics
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import smdistributed.modelparallel.torch as smp

PARAMETERS = {"partitions": 4, "microbatches": 4, "ddp": True}
"""The hyperparameter `mp_parameters` of the job overrides these."""


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


@smp.step
def train_step(model: Any, images: torch.Tensor, targets: torch.Tensor) -> Any:
    loss = functional.cross_entropy(model(images), targets)
    model.backward(loss)  # not loss.backward(), as the loss may be on another stage
    return loss


@smp.step
def test_step(model: Any, images: torch.Tensor) -> Any:
    return model(images)


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=32, help="images per replica and step (default: 32)")
    parser.add_argument("--images", type=int, default=640, help="number of training images (default: 640)")
    parser.add_argument("--mp_parameters", help="read by smp.init, from SM_HP_MP_PARAMETERS")
    arguments = parser.parse_args()
    smp.init(PARAMETERS)
    if torch.cuda.is_available():
        torch.cuda.set_device(smp.local_rank())
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # one thread per rank is enough for this small network

    digits, test = map(to_tensors, read_digits(arguments.data_dir))
    training = TensorDataset(*digits[: arguments.images])
    sampler: DistributedSampler[Any] = DistributedSampler(
        training, num_replicas=smp.dp_size(), rank=smp.dp_rank(), seed=arguments.seed
    )
    loader = DataLoader(training, batch_size=arguments.batch_size, sampler=sampler, drop_last=True)
    network = Net()
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(network.parameters(), lr=arguments.lr))
    model = smp.DistributedModel(network)  # split into stages at the first step
    if smp.rank() == 0:
        print(
            f"{smp.dp_size()} replicas of {smp.pp_size()} stages, batches of {smp.dp_size() * arguments.batch_size}: "
            f"{arguments.batch_size} images per replica, in {smp.state.cfg.microbatches} microbatches",
            flush=True,
        )

    training_seconds = 0.0
    for epoch in range(1, arguments.epochs + 1):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        iterations, loss = train_epoch(model, loader, optimizer)
        training_seconds += time.perf_counter() - start
        loss = sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size()
        if smp.rank() == 0:
            print(f"epoch {epoch}/{arguments.epochs} iterations {iterations} loss {loss:.4f}", flush=True)

    test_accuracy = accuracy(model, test)
    if smp.dp_rank() == 0:
        weights = model.state_dict(gather_to_rank0=True)  # must be called by all stages of a replica
    if smp.rank() == 0:
        metrics = {
            "test_accuracy": test_accuracy,
            "images_per_second": len(sampler) * smp.dp_size() * arguments.epochs / training_seconds,
            "training_seconds": training_seconds,
            "epochs": arguments.epochs,
            "world_size": smp.size(),
        }
        arguments.model_dir.mkdir(parents=True, exist_ok=True)
        torch.save({name: value.cpu() for name, value in weights.items()}, arguments.model_dir / "model.pt")
        save_metrics(metrics, arguments)
    smp.barrier()


def to_tensors(digits: Digits) -> TensorDataset:
    return TensorDataset(torch.from_numpy(digits.images).unsqueeze(1), torch.from_numpy(digits.labels))


def train_epoch(model: Any, loader: Any, optimizer: Any) -> tuple[int, float]:
    """Train on this replica's share once; return the number of iterations and their mean loss, on all stages."""
    model.train()
    losses = []
    for images, targets in loader:
        optimizer.zero_grad()
        if torch.cuda.is_available():
            images, targets = images.cuda(), targets.cuda()
        losses.append(float(train_step(model, images, targets).reduce_mean()))
        optimizer.step()
    return len(losses), sum(losses) / len(losses)


def accuracy(model: Any, test: Any) -> float:
    """Return the accuracy on the test digits, less a remainder that does not fill the microbatches."""
    model.eval()
    images, targets = test.tensors
    count = len(images) - len(images) % smp.state.cfg.microbatches
    if torch.cuda.is_available():
        images = images.cuda()
    with torch.no_grad():
        scores = test_step(model, images[:count]).concat()
    return float((scores.argmax(1).cpu() == targets[:count]).float().mean())


if __name__ == "__main__":
    main()
