"""Train on the digits with torch's FullyShardedDataParallel on the backend `smddp`. train.py has the rest.

Each rank keeps a part of the parameters, gradients and optimizer state. The parameters of a layer are gathered while it
computes. Runs unchanged under `train`, mpirun and torchrun, on GPUs or CPUs, and as a single process:
`python train_fsdp.py`.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from train import Net, accuracy, arguments_parser, fit, join_job, read_digits, save

WRAP_PARAMETERS = 4096  # the smallest layers to gather on their own; use more for a large model


def main() -> None:
    arguments = arguments_parser(__doc__).parse_args()
    device = join_job(arguments.seed)
    training, test = read_digits(arguments.data_dir)
    model = FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=WRAP_PARAMETERS),
        device_id=device,
    )
    metrics = fit(model, training, arguments, device)  # makes the optimizer, which holds only this rank's part
    # All ranks must take part if the whole model is needed: otherwise rank 0 would wait forever for the others' parts.
    metrics["test_accuracy"] = accuracy(model, test, device)
    whole = FullStateDictConfig(offload_to_cpu=device.type == "cuda", rank0_only=True)  # on a CPU, torch cannot offload
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        weights = model.state_dict()
    if dist.get_rank() == 0:
        save(weights, metrics, arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
