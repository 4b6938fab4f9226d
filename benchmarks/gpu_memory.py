"""Peaks of a GPU's memory in training steps of twelve models, as measured: `python benchmarks/gpu_memory.py FILE`.

FILE gets a JSON object with the card, and for each model its parameters and bytes: the most memory that torch has
allocated and reserved. `context` is all other memory in use on the card, of this process and of others. The models have
random weights, and are trained for three steps with AdamW. benchmarks/data/gpu_memory.json is such a file. Predictions
of a job's memory can be compared with it.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

STEPS = 3
Batch = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def images(count: int, side: int = 224) -> Batch:
    return lambda: (torch.randn(count, 3, side, side, device=DEVICE), torch.randint(0, 1000, (count,), device=DEVICE))


def words(count: int, length: int) -> Batch:
    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randint(0, 1000, (count, length), device=DEVICE)
        return drawn, drawn

    return draw


def rows(count: int, width: int) -> Batch:
    return lambda: (torch.randn(count, width, device=DEVICE), torch.randint(0, 1000, (count,), device=DEVICE))


def vision(name: str) -> nn.Module:
    import torchvision  # type: ignore[import-not-found, unused-ignore]

    model: nn.Module = torchvision.models.get_model(name)
    return model


def language(kind: str, **options: Any) -> nn.Module:
    """A model of transformers with the sizes of its configuration's defaults, unless given."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**options)
    names = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration"}
    model: nn.Module = getattr(transformers, names.get(kind, f"{kind}ForCausalLM"))(config)
    return model


def wide() -> nn.Module:
    layers = [layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


T5 = {"decoder_start_token_id": 0, "pad_token_id": 0}
MODELS: dict[str, tuple[Callable[[], nn.Module], Batch, bool]] = {
    "mlp, float32, 1024 rows": (wide, rows(1024, 4096), False),
    "resnet18, float32, 64 images": (lambda: vision("resnet18"), images(64), False),
    "resnet50, float32, 32 images": (lambda: vision("resnet50"), images(32), False),
    "resnet50, bfloat16, 128 images": (lambda: vision("resnet50"), images(128), True),
    "convnext_tiny, bfloat16, 64 images": (lambda: vision("convnext_tiny"), images(64), True),
    "efficientnet_b0, float32, 64 images": (lambda: vision("efficientnet_b0"), images(64), False),
    "vit_b_16, bfloat16, 64 images": (lambda: vision("vit_b_16"), images(64), True),
    "GPT-2, float32, 4 × 512 words": (lambda: language("GPT2"), words(4, 512), False),
    "GPT-2, bfloat16, 16 × 1024 words": (lambda: language("GPT2"), words(16, 1024), True),
    "BERT base, bfloat16, 32 × 512 words": (lambda: language("Bert"), words(32, 512), True),
    "T5 small, float32, 16 × 256 words": (lambda: language("T5", **T5), words(16, 256), False),
    "Llama of 300 M, bfloat16, 8 × 1024 words": (
        lambda: language(
            "Llama", hidden_size=1024, intermediate_size=2816, num_hidden_layers=18, num_attention_heads=16,
            num_key_value_heads=16, vocab_size=32000,
        ),
        words(8, 1024),
        True,
    ),
}  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """Train the model for a few steps. Returns its numbers of parameters and bytes."""
    make, batch, is_mixed = MODELS[name]
    model = make().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for _ in range(STEPS):
        inputs, targets = batch()
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=is_mixed):
            is_language = hasattr(model, "config")
            loss = model(input_ids=inputs, labels=targets).loss if is_language else None
            scores = model(inputs) if loss is None else None
        (functional.cross_entropy(scores.float(), targets) if loss is None else loss).backward()  # type: ignore
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": sum(each.numel() for each in model.parameters()), **peaks()}


def peaks() -> dict[str, int]:
    """The bytes of the card: torch's at most since the last call, and all others in use."""
    if DEVICE == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    found = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "context": total - free - torch.cuda.memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return found


def main(file: str) -> None:
    """Measure each model, one after the other."""
    card = torch.cuda.get_device_name(0) if DEVICE == "cuda" else "none"
    table: dict[str, Any] = {"card": card, "torch": torch.__version__, "models": {}}
    for name in MODELS:
        table["models"][name] = measure(name)
        print(f"{name}: {table['models'][name]}", flush=True)
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        Path(file).write_text(json.dumps(table, indent=2) + "\n")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if __name__ == "__main__":
    main(sys.argv[1])
