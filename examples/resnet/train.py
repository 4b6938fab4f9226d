"""Train a ResNet on CIFAR-10 with mixed precision, on any number of ranks. An interrupted job resumes exactly.

Without the channel `training`, the images are stripes at ten angles, so that nothing is downloaded. The channel is a
directory with the files of CIFAR-10's Python version: data_batch_1 to data_batch_5, and test_batch.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal_checkpoint as platform
import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)
from shoal_checkpoint.torch import Checkpoint

GradScaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)  # torch.amp has it since torch 2.3


class Block(nn.Module):
    """Two convolutions, and a path around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.shortcut(x))


def resnet(blocks: int) -> nn.Sequential:
    """Return the ResNet for CIFAR-10 with 6 * blocks + 2 layers: images (n, 3, 32, 32) to scores (n, 10)."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    for stage in range(3):
        for block in range(blocks):
            first = stage > 0 and block == 0  # halves the image and doubles the channels
            outputs = 16 * 2**stage
            layers.append(Block(outputs // 2 if first else outputs, outputs, stride=2 if first else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def load_data(directory: Path | None, pattern: str, count: int) -> TensorDataset:
    """Return CIFAR-10's images, float32 (n, 3, 32, 32) around 0, and labels. Without a directory: `count` stripes."""
    if directory is None:
        generator = torch.Generator().manual_seed(count)
        labels = torch.randint(10, (count,), generator=generator)
        angle = (labels * math.pi / 10).view(-1, 1, 1, 1)
        phase = torch.rand((count, 3, 1, 1), generator=generator) * 2 * math.pi
        y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
        stripes = torch.sin(x * torch.cos(angle) + y * torch.sin(angle) + phase)
        return TensorDataset(stripes + torch.randn(stripes.shape, generator=generator) / 2, labels)
    batches = [pickle.loads(file.read_bytes(), encoding="bytes") for file in sorted(directory.glob(pattern))]
    if not batches:
        raise FileNotFoundError(f"no {pattern} in {directory}. Fix: unpack cifar-10-python.tar.gz there")
    pixels = torch.cat([torch.from_numpy(batch[b"data"]) for batch in batches])
    labels = torch.tensor([label for batch in batches for label in batch[b"labels"]])
    return TensorDataset(pixels.view(-1, 3, 32, 32) / 127.5 - 1, labels)


def main(args: argparse.Namespace) -> None:
    if "RANK" not in os.environ:  # no launcher
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("smddp")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    amp_dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    torch.manual_seed(args.seed)

    training = load_data(args.data_dir, "data_batch_*", args.images)
    test = load_data(args.data_dir, "test_batch", args.images // 4)
    sampler = DistributedSampler(training, seed=args.seed)
    loader = DataLoader(training, args.batch_size, sampler=sampler, drop_last=True)
    if not len(loader):
        raise SystemExit(
            f"--batch-size {args.batch_size}: a rank has only {len(sampler)} images. Fix: reduce it, or use fewer ranks"
        )
    model = DistributedDataParallel(resnet(args.blocks).to(device))
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    total = args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    scaler = GradScaler(enabled=amp_dtype == torch.float16)  # bfloat16 needs no loss scale
    checkpoint = Checkpoint(
        args.checkpoint_dir, every=args.save_every, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler
    )

    for epoch in checkpoint.epochs(args.epochs):
        for images, labels in checkpoint.batches(loader):
            optimizer.zero_grad()
            with torch.autocast(device.type, amp_dtype):
                loss = cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} step {checkpoint.step} loss {loss.item():.4f}", flush=True)

    if rank == 0:
        model.eval()
        with torch.no_grad():
            predictions = [model.module(images.to(device)).argmax(1).cpu() for images in test.tensors[0].split(256)]
        accuracy = (torch.cat(predictions) == test.tensors[1]).float().mean().item()
        print(f"test accuracy {accuracy:.3f}, world size {world_size}, {amp_dtype}")
        args.model_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.cpu().state_dict(), args.model_dir / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the beginning; it falls to 0")
    parser.add_argument("--blocks", type=int, default=1, help="per stage; the network has 6 * blocks + 2 layers")
    parser.add_argument("--images", type=int, default=1000, help="if the images are generated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING"))
    parser.add_argument("--checkpoint-dir", default=platform.directory(), help="where to save and resume")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="default: after each epoch")
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    main(parser.parse_args())
