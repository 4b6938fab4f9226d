"""transformers' own Trainer on tiny models made from configurations: python trainer.py DIRECTORY.

Started on several ranks with the variables of a model parallel job it trains on as many stages; started alone it is
what that is compared with. Rank 0 prints what it saw, a line of JSON for each training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import is_sagemaker_mp_enabled

PARALLEL = is_sagemaker_mp_enabled()
STEPS, SAVED, BATCH, LENGTH, WORDS = 6, 3, 4, 12, 60


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Random sentences, with their own words, or a class, as labels."""

    def __init__(self, count: int, classes: int | None, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, WORDS, (count, LENGTH), generator=draw)
        self.lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count,), generator=draw)
        self.classes = None if classes is None else torch.randint(0, classes, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        words, mask = self.words[index], torch.arange(LENGTH) < self.lengths[index]
        # Nothing predicts a first word: Trainer counts labels to average a loss, if it is not this library's.
        labels = words.where(torch.arange(LENGTH) > 0, -100) if self.classes is None else self.classes[index]
        return {"input_ids": words, "attention_mask": mask.long(), "labels": labels}


def make(name: str) -> tuple[nn.Module, int | None]:
    """The model, without dropout, whose random numbers are other ones on stages; and its number of classes."""
    torch.manual_seed(0)
    if name == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=3, n_head=2,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        ), None  # fmt: skip
    config = BertConfig(
        vocab_size=WORDS, max_position_embeddings=16, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config), 3


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    """The script's own optimizer for transformers 5, which makes none for this library (4 does)."""
    if transformers.__version__ < "5":
        return None
    inner = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.01)
    if not PARALLEL:
        return inner
    import smdistributed.modelparallel.torch as smp

    return smp.DistributedOptimizer(inner)


class Losses(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            if "grad_norm" in logs:
                self.norms.append(float(logs["grad_norm"]))


def make_trainer(name: str, directory: Path, **options: Any) -> tuple[Trainer, Losses]:
    model, classes = make(name)
    losses = Losses()
    alone = {} if PARALLEL else {"no_cuda" if transformers.__version__ < "5" else "use_cpu": True}
    arguments = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
        learning_rate=0.01, max_steps=STEPS, warmup_steps=2, weight_decay=0.01, logging_steps=1, save_steps=SAVED,
        report_to=[], disable_tqdm=True, seed=3, dataloader_num_workers=0, **alone, **options,
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(BATCH * STEPS, classes, 1),
        eval_dataset=Rows(BATCH * 2, classes, 2),
        callbacks=[losses],
        optimizers=(make_optimizer(model), None),
    )
    return trainer, losses


def see(name: str, directory: Path, resume: bool) -> None:
    """Train, evaluate, predict and save; say what was seen."""
    trainer, losses = make_trainer(name, directory)
    trainer.train(resume_from_checkpoint=str(directory / f"checkpoint-{SAVED}") if resume else None)
    metrics = trainer.evaluate()
    predictions = trainer.predict(Rows(BATCH * 2, None if name == "gpt2" else 3, 5)).predictions
    trainer.save_model(str(directory / "final"))
    seen = {
        "name": name,
        "losses": losses.losses,
        "norms": losses.norms,
        "eval_loss": metrics["eval_loss"],
        "predictions": predictions.ravel().tolist()[::29],
        "shape": list(predictions.shape),
        "rates": trainer.lr_scheduler.get_last_lr(),
    }
    if trainer.is_world_process_zero():
        print(json.dumps(seen))
    if PARALLEL:
        import smdistributed.modelparallel.torch as smp

        smp.state.model = smp.state.optimizer = None  # as in another process


if __name__ == "__main__":
    for model in ("gpt2", "bert"):
        see(model, Path(sys.argv[1]) / model, resume=False)
        if PARALLEL:
            see(model, Path(sys.argv[1]) / model, resume=True)
