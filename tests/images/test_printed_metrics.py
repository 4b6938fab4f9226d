"""The metrics that frameworks and published scripts print by default, and lines with other numbers."""

from __future__ import annotations

import math
import time

import pytest

from shoal.jobs.job_log import JobLog
from shoal.jobs.printed_metrics import find_metrics

LINES = {
    # Shoal's examples
    "epoch 1/15 loss 2.0080 7763 images/s": {"loss": 2.008},
    "test accuracy 0.9944 with world size 1, model in /opt/ml/model": {"test_accuracy": 0.9944},
    "loss=0.25 lr=0.1 step=3": {"loss": 0.25, "lr": 0.1, "step": 3},
    # Keras
    "36/36 [======] - 0s 3ms/step - loss: 9.3e-05 - accuracy: 0.9117 - val_loss: 0.3 - val_accuracy: 0.9": {
        "loss": 9.3e-05,
        "accuracy": 0.9117,
        "val_loss": 0.3,
        "val_accuracy": 0.9,
    },
    "45/45 ━━━━━━━━━━━━━━━━━━━━ 1s 4ms/step - accuracy: 0.1875 - loss: 2.3026": {"accuracy": 0.1875, "loss": 2.3026},
    # transformers 4 and 5
    "{'loss': 2.2601, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 1.0}": {
        "loss": 2.2601,
        "grad_norm": 1.5,
        "learning_rate": 5e-05,
    },
    "{'loss': '2.26', 'grad_norm': '0.9', 'learning_rate': '4.5e-05', 'epoch': '1'}": {
        "loss": 2.26,
        "grad_norm": 0.9,
        "learning_rate": 4.5e-05,
    },
    "{'eval_loss': 0.41, 'eval_accuracy': 0.83, 'eval_runtime': 1.2, 'eval_samples_per_second': 330.1}": {
        "eval_loss": 0.41,
        "eval_accuracy": 0.83,
    },
    "{'train_runtime': 12.3, 'train_samples_per_second': 80.1, 'train_loss': 0.71, 'epoch': 3.0}": {"train_loss": 0.71},
    # Lightning and tqdm
    "Epoch 3: 100%|██████████| 50/50 [00:01<00:00, 45.1it/s, loss=0.251, train_acc=0.91]": {
        "loss": 0.251,
        "train_acc": 0.91,
    },
    " 30%|███       | 3/10 [00:00<00:01,  5.2it/s, loss=1.25e-03]": {"loss": 1.25e-03},
    # PyTorch's examples
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 1.823000": {"Loss": 1.823},
    "Test set: Average loss: 0.0500, Accuracy: 9833/10000 (98%)": {"test_loss": 0.05},
    "Epoch: [0][ 10/100]\tTime  0.123 ( 0.2)\tData  0.1 ( 0.1)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   3.12 (  0.39)": {
        "Loss": 6.9,
        "Acc@1": 3.12,
    },
    " * Acc@1 71.200 Acc@5 90.100": {"Acc@1": 71.2, "Acc@5": 90.1},
    "| epoch   1 |   200/ 2928 batches | lr 20.00 | ms/batch  5.60 | loss  7.63 | ppl  2066.92": {
        "lr": 20,
        "loss": 7.63,
        "ppl": 2066.92,
    },
    "[1/5][100/782] Loss_D: 0.8 Loss_G: 2.1 D(x): 0.6 D(G(z)): 0.3 / 0.1": {"Loss_D": 0.8, "Loss_G": 2.1},
    "Episode 10\tLast reward: 12.00\tAverage reward: 11.5": {"reward": 11.5},
    # nanoGPT, timm, torchtitan, fairseq, detectron2, mmengine, ultralytics, XGBoost, Fabric
    "iter 10: loss 10.9886, time 1234.00ms, mfu 12.30%": {"loss": 10.9886},
    "step 0: train loss 4.2874, val loss 4.2823": {"train_loss": 4.2874, "val_loss": 4.2823},
    "Train: 0 [   0/1251 (  0%)]  Loss: 6.95 (6.95)  Time: 3.2s,  320/s  LR: 1.000e-06  Data: 1.5 (1.5)": {
        "Loss": 6.95,
        "LR": 1e-06,
    },
    "step:  1  loss:  8.2235  grad_norm:  1.2  memory:  3.02GiB(3.18%)  tps: 3,201  mfu: 1.5%": {
        "loss": 8.2235,
        "grad_norm": 1.2,
    },
    "epoch 001:  10 / 100 loss=9.1, ppl=550.1, wps=3000, lr=0.0001, gnorm=2.1": {
        "loss": 9.1,
        "ppl": 550.1,
        "wps": 3000,
        "lr": 0.0001,
        "gnorm": 2.1,
    },
    "eta: 0:01:10  iter: 19  total_loss: 1.8  loss_cls: 0.9  time: 0.3  lr: 0.0005  max_mem: 2000M": {
        "total_loss": 1.8,
        "loss_cls": 0.9,
        "lr": 0.0005,
    },
    "Epoch(train) [1][10/100]  lr: 2.0000e-02  eta: 0:10:00  time: 0.5  memory: 3000  loss: 2.1": {
        "lr": 0.02,
        "loss": 2.1,
    },
    "[0]\tvalidation-rmse:1.25\ttrain-mae:0.5": {"validation-rmse": 1.25, "train-mae": 0.5},
    "step 10 | loss 2.3 | lr 3e-4": {"loss": 2.3, "lr": 3e-4},
    "Epoch 2, validation accuracy: 0.873, F1: 0.81": {"validation_accuracy": 0.873, "F1": 0.81},
    "eval rougeL: 0.31 bleu = 24.5": {"eval_rougeL": 0.31, "bleu": 24.5},
}
NO_METRICS = (
    "Linear(in_features=784, out_features=10, bias=True)",
    "  (0): BatchNorm2d(64, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)",
    "    (drop): Dropout(p=0.1, inplace=False)",
    "  (attn): 12 x Block(in_features=3, eps=1e-06)",
    "Python 3.11.2, torch 2.13.0, numpy 1.26.4",
    "Collecting torchvision==0.28.0",
    "Downloading rouge_score-0.1.2-py3-none-any.whl (1.5 MB)",
    "saved /opt/ml/checkpoints/loss 2.pt.part/step-10",
    "2026-11-27 08:46:53,123 INFO epoch 3 took 12.5 s",
    "Epoch 3/10",
    "rank 0 of 4 on algo-1",
    "peak memory: 3.02GiB, 1,234 images/s",
    "Loading 50000 images, 10 classes",
    "accuracy: 9833/10000",
    "listening on 127.0.0.1:8080",
    "reading loss 10:30:05",
    "lr: 1.2.3",
)


@pytest.mark.parametrize(("line", "expected"), LINES.items())
def test_a_line_with_metrics(line: str, expected: dict[str, float]) -> None:
    assert dict(find_metrics(line)) == expected


@pytest.mark.parametrize("line", NO_METRICS)
def test_a_line_without_metrics(line: str) -> None:
    assert list(find_metrics(line)) == []


@pytest.mark.parametrize(
    "line",
    [
        "loss=nan",
        "epoch 3 loss NaN 7763 images/s",
        "45/45 - 1s - accuracy: 0.1875 - loss: nan",
        "{'loss': nan, 'epoch': 1.0}",
        "{'loss': 'nan', 'learning_rate': '1e-3'}",
        "step 10 | loss inf | lr 3e-4",
        "train loss: -inf",
        "Loss: Infinity",
        "loss=1e999",
    ],
)
def test_a_value_that_is_not_finite(line: str) -> None:
    found = [value for name, value in find_metrics(line) if name.lower().endswith("loss")]
    assert len(found) == 1
    assert not math.isfinite(found[0])


@pytest.mark.parametrize("line", ["x=nan", "loss information", "loss: infra", "loss: nano", "big=1e999"])
def test_other_words_are_not_numbers(line: str) -> None:
    assert list(find_metrics(line)) == []


def test_the_last_value_counts() -> None:
    log = JobLog()
    for line in ("loss: nan", "loss: 0.5 acc: nan", "[1,algo-2] loss: 1", "[1,algo-2] loss inf"):
        log.add("algo-1", line)
    assert {key[0::2]: str(value) for key, value in log.not_finite.items()} == {
        ("acc", None): "nan",
        ("loss", 1): "inf",
    }


@pytest.mark.parametrize("piece", ["loss ", "loss: ", "train ", "loss1", "loss 1 ", "'loss' ", "loss@", "1"])
def test_long_lines_take_no_time(piece: str) -> None:
    began = time.monotonic()
    for _ in range(20):
        list(find_metrics(f"loss {piece * (4000 // len(piece))}x"))
    assert time.monotonic() - began < 2
