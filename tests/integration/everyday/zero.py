"""DeepSpeed's ZeRO, stages 1 and 2."""

from __future__ import annotations

import deepspeed
import plain
import torch

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

deepspeed.init_distributed(dist_backend="smddp")
for stage in (1, 2):
    network = plain.new_model()
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=plain.RATE),
        config={
            "train_micro_batch_size_per_gpu": plain.BATCH,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
    )
    for step in range(plain.STEPS):
        engine.backward(plain.loss_of(engine, *(rows.to(engine.device) for rows in plain.share(step))))
        engine.step()
    plain.check(f"deepspeed stage {stage}", engine.module.parameters())
torch.distributed.destroy_process_group()
