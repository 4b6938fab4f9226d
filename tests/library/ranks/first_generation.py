"""A script with AWS's first-generation API, as published ones have it. The network is of examples/digits/train.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parent / "../../../examples/digits"))  # otherwise, train.py is beside this script
from train import Net, accuracy, arguments_parser, fit, read_digits, save


def main() -> None:
    arguments = arguments_parser(__doc__).parse_args()
    dist.init_process_group()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    training, test = read_digits(arguments.data_dir)
    model = DistributedDataParallel(Net().to(device))
    metrics = fit(model, training, arguments, device)
    found = torch.tensor([accuracy(model, test, device)], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.AVERAGE)  # of equal models
    if dist.get_rank() == 0:
        save(model.module.state_dict(), {**metrics, "test_accuracy": found.item()}, arguments)


if __name__ == "__main__":
    main()
