"""transformers' Trainer with ddp_backend="smddp", by the variables of a SageMaker job; on GPUs, so in a rehearsal."""

from __future__ import annotations

import tempfile
from typing import Any

import plain
import torch
from transformers import Trainer, TrainingArguments


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = plain.new_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": plain.loss_of(self.network, inputs, labels)}


class Rows(torch.utils.data.Dataset[Any]):
    """In the order in which the ranks take them: a batch for each, in turn."""

    def __init__(self) -> None:
        shares = [plain.share(step, rank) for step in range(plain.STEPS) for rank in range(plain.SIZE)]
        self.rows = [row for inputs, targets in shares for row in zip(inputs, targets)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, targets = self.rows[index]
        return {"inputs": inputs, "labels": targets}


class InOrder(Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=plain.BATCH, max_steps=plain.STEPS,
    learning_rate=plain.RATE, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0, ddp_backend="smddp",
    report_to=[], disable_tqdm=True, save_strategy="no", dataloader_num_workers=0,
)  # fmt: skip
assert arguments.world_size == plain.SIZE
assert arguments.device == torch.device("cuda", plain.LOCAL_RANK)
assert torch.distributed.get_backend() == "smddp"
trainer = InOrder(model=Regression(), args=arguments, train_dataset=Rows())
trainer.train()
plain.check("transformers", trainer.model.parameters())
