"""Fine-tune a transformer of Hugging Face to classify texts, with transformers' Trainer on any number of ranks.

The data are lines of JSON, {"text": "a good film", "label": 1}, in train.jsonl and test.jsonl. An interrupted job
continues from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401 (registers the backend)

BASE_DIR = os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml" if "SM_MODEL_DIR" in os.environ else ".")


def load_texts(path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the tokens and the label of each line. A list is a data set for the Trainer."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**tokenizer(row["text"], truncation=True), "label": row["label"]} for row in rows]


def accuracy(results: Any) -> dict[str, float]:
    return {"accuracy": float((results.predictions.argmax(1) == results.label_ids).mean())}


def check_checkpoints(directory: str, newest: str | None) -> None:
    """End all ranks if they do not find the same newest checkpoint. The Trainer writes on rank 0's host only."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, newest)
    other = next((rank for rank, name in enumerate(found) if name != found[0]), None)
    if other is not None:
        raise SystemExit(
            f"--checkpoint-dir {directory}: rank 0 has {found[0] or 'no checkpoint'}, and rank {other} has "
            f"{found[other] or 'none'}. Fix: use a directory that all hosts share"
        )


def main(args: argparse.Namespace) -> None:
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("smddp")  # the Trainer uses a group that exists
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    training, test = (load_texts(args.data_dir / f"{name}.jsonl", tokenizer) for name in ("train", "test"))
    labels = {row["label"] for row in training}
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=len(labels)),
        args=TrainingArguments(
            output_dir=args.checkpoint_dir,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            seed=args.seed,
            save_strategy="epoch",
            save_total_limit=2,
            logging_strategy="epoch",
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=training,
        eval_dataset=test,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
    )
    # This model's loss is a mean over its own batch. Otherwise the Trainer multiplies it by the number of ranks.
    trainer.model_accepts_loss_kwargs = False
    last = get_last_checkpoint(args.checkpoint_dir) if Path(args.checkpoint_dir).is_dir() else None
    if dist.is_initialized():
        check_checkpoints(args.checkpoint_dir, last and Path(last).name)
    trainer.train(resume_from_checkpoint=last)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"test accuracy {metrics['eval_accuracy']:.3f}, world size {trainer.args.world_size}")
        tokenizer.save_pretrained(args.model_dir)
    trainer.save_model(args.model_dir)  # rank 0 writes
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("SM_CHANNEL_MODEL", "distilbert-base-uncased"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="texts per rank and step")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("SM_CHANNEL_TRAINING", "data"))
    parser.add_argument("--checkpoint-dir", default=f"{BASE_DIR}/checkpoints")
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "model"))
    main(parser.parse_args())
