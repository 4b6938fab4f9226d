"""Train on data in S3: `python train_s3.py --data s3://bucket/prefix`, or a directory, such as a job's channel.

On SageMaker, the platform copies a channel's data from S3 before the script starts. Elsewhere, the first rank of each
host downloads the data itself. The data are the files train.csv and test.csv, with the label in the last column.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)


def download(address: str, directory: Path) -> None:
    """Copy all objects under an address such as s3://bucket/prefix into a directory.

    boto3 reads credentials, the region and AWS_ENDPOINT_URL_S3 from the environment, or asks the machine for its role.
    """
    bucket, _, prefix = address[len("s3://") :].partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix else ""
    s3 = boto3.client("s3")
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            if not item["Key"].endswith("/"):  # some tools write such an object for each directory
                file = directory / item["Key"][len(prefix) :]
                file.parent.mkdir(parents=True, exist_ok=True)
                s3.download_file(bucket, item["Key"], str(file))


def find_data(address: str) -> Path:
    """Return a directory of this host with the data. All ranks must call it."""
    if not address.startswith("s3://"):
        return Path(address)
    job = os.environ.get("TRAINING_JOB_NAME", os.environ["MASTER_PORT"])
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    directory = Path(tempfile.gettempdir(), f"data-{os.getuid()}-{job}-{digest}")
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        if directory.exists():  # of an earlier run: the files in S3 can be others now
            shutil.rmtree(directory)
        download(address, directory)
    dist.barrier()  # the other ranks of the host wait for the download
    return directory


def read_csv(path: Path) -> TensorDataset:
    rows = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32))
    return TensorDataset(rows[:, :-1], rows[:, -1].long())


def main(args: argparse.Namespace) -> None:
    if "RANK" not in os.environ:  # no launcher
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("smddp")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(args.seed)

    directory = find_data(args.data)
    training, test = read_csv(directory / "train.csv"), read_csv(directory / "test.csv")
    sampler = DistributedSampler(training, seed=args.seed)
    one_is_left = len(sampler) % args.batch_size == 1  # BatchNorm1d needs two samples
    loader = DataLoader(training, args.batch_size, sampler=sampler, drop_last=one_is_left)
    columns, classes = training.tensors[0].size(1), int(training.tensors[1].max()) + 1
    net = nn.Sequential(nn.BatchNorm1d(columns), nn.Linear(columns, 32), nn.ReLU(), nn.Linear(32, classes))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for features, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(features.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/{args.epochs} loss {total / len(loader):.4f}", flush=True)

    if dist.get_rank() == 0:
        net.eval()
        with torch.no_grad():
            accuracy = (net(test.tensors[0].to(device)).argmax(1).cpu() == test.tensors[1]).float().mean().item()
        print(f"test accuracy {accuracy:.3f}, world size {dist.get_world_size()}, data from {args.data}")
        args.model_dir.mkdir(parents=True, exist_ok=True)
        torch.save(net.cpu().state_dict(), args.model_dir / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    channel = os.environ.get("SM_CHANNEL_TRAINING")
    parser.add_argument("--data", default=channel, required=channel is None, help="s3://bucket/prefix or directory")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step, 2 or more")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-dir", type=Path, default=os.environ.get("SM_MODEL_DIR", "model"))
    main(parser.parse_args())
