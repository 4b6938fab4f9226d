"""Libraries with checkpoints of their own resume as docs/checkpoints.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import shoal_checkpoint as contract
from shoal_checkpoint.torch import StopAgreement

SAMPLES, EPOCHS = 24, 2


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"values": torch.full((4,), index / SAMPLES)}


class Net(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))

    def forward(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(values).square().mean()}


def test_transformers_is_exact_in_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped as in the docs."""
    import transformers

    losses: list[str] = []

    class Recording(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *given: Any, **more: Any) -> Any:
            loss = super().compute_loss(*given, **more)
            losses.append(loss.item().hex())
            return loss

    class StopCallback(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self, at: int | None) -> None:
            self.at, self.stop = at, StopAgreement()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == self.at:
                monkeypatch.setattr(contract._Stop, "received", 1.0)
            if self.stop.is_last(state.global_step):
                control.should_save = control.should_training_stop = True

    def train(directory: Path, stop_at: int | None = None) -> list[str]:
        losses.clear()
        transformers.set_seed(0)
        arguments = transformers.TrainingArguments(
            directory,
            per_device_train_batch_size=4,
            num_train_epochs=EPOCHS,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        complete = directory.glob("checkpoint-*/trainer_state.json")
        newest = max(complete, key=lambda file: file.stat().st_mtime, default=None)
        trainer = Recording(Net(0.5), arguments, train_dataset=Samples(), callbacks=[StopCallback(stop_at)])
        trainer.train(resume_from_checkpoint=newest and str(newest.parent))
        monkeypatch.setattr(contract._Stop, "received", None)
        return list(losses)

    whole = train(tmp_path / "whole")
    assert len(whole) == 12
    before = train(tmp_path / "stopped", stop_at=8)
    assert len(before) == 8
    assert before + train(tmp_path / "stopped") == whole


@pytest.mark.parametrize(("dropout", "is_exact"), [(0.0, True), (0.5, False)])
def test_accelerate_in_an_epoch_is_exact_without_random_numbers(tmp_path: Path, dropout: float, is_exact: bool) -> None:
    """With skip_first_batches the batches are the right ones, and dropout is another one."""
    import accelerate

    def train(load: Path | None = None, save: Path | None = None, skip: int = 0) -> list[float]:
        accelerate.utils.set_seed(0)
        settings = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
        model = Net(dropout)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples(), 4, shuffle=True))
        if load:
            accelerator.load_state(str(load))
            loader = accelerator.skip_first_batches(loader, skip)
        losses = []
        for number, batch in enumerate(loader, 1):
            loss = model(**batch)["loss"]
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            if number == 3 and save:
                accelerator.save_state(str(save))
        return losses

    whole = train(save=tmp_path)
    resumed = train(load=tmp_path, skip=3)
    assert len(resumed) == 3
    assert (resumed == whole[3:]) is is_exact
