"""Lightning with DDPStrategy(process_group_backend="smddp"), on the CPU unless an accelerator is named."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import lightning
import plain
import torch
from lightning.pytorch.strategies import DDPStrategy

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = plain.new_model()

    def training_step(self, batch: Any, step: int) -> torch.Tensor:
        loss = plain.loss_of(self.network, *(rows.to(self.device) for rows in plain.share(step)))
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=plain.RATE)


trainer = lightning.Trainer(
    accelerator=sys.argv[1] if sys.argv[1:] else "cpu",
    devices=plain.LOCAL_SIZE, num_nodes=plain.SIZE // plain.LOCAL_SIZE,
    strategy=DDPStrategy(process_group_backend="smddp"), max_epochs=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(),
)  # fmt: skip
assert trainer.world_size == plain.SIZE
model = Module()
numbers: Any = range(plain.STEPS * plain.SIZE)  # of which each rank takes its part
trainer.fit(model, torch.utils.data.DataLoader(numbers))
assert torch.distributed.get_backend() == "smddp"
plain.check("lightning", model.parameters())
