"""Models that the benchmark of partitions cuts, on the meta device, each with a batch for training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

SEQUENCES, TOKENS, IMAGES = 8, 512, 32
BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
Example = tuple[nn.Module, Mapping[str, Any]]


def gpt2(**sizes: int) -> Example:
    return _language(GPT2LMHeadModel(GPT2Config(**sizes)))


def t5_small() -> Example:
    return _language(T5ForConditionalGeneration(T5Config(decoder_start_token_id=0)))


def bert_large() -> Example:
    return _language(BertForMaskedLM(BertConfig(**BERT_LARGE)))


def resnet50() -> Example:
    return ResNet50(), {"images": torch.empty(IMAGES, 3, 224, 224)}


MODELS: dict[str, Callable[[], Example]] = {
    "gpt2-small": gpt2,
    "gpt2-xl": lambda: gpt2(n_embd=1600, n_layer=48, n_head=25),
    "resnet-50": resnet50,
    "t5-small": t5_small,
    "bert-large": bert_large,
}


def construct(name: str) -> Example:
    """The model, and the named arguments with which it is called."""
    with torch.device("meta"):
        return MODELS[name]()


def _language(model: nn.Module) -> Example:
    tokens = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


class Bottleneck(nn.Module):
    """Three convolutions and a way around them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        result: torch.Tensor = self.relu(y + (x if self.downsample is None else self.downsample(x)))
        return result


class ResNet50(nn.Module):
    """He et al., with torchvision's names: 25,557,032 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = _layer(64, 64, 3, 1)
        self.layer2 = _layer(256, 128, 4, 2)
        self.layer3 = _layer(512, 256, 6, 2)
        self.layer4 = _layer(1024, 512, 3, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        result: torch.Tensor = self.fc(self.avgpool(x).flatten(1))
        return result


def _layer(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(inputs, width, stride)
    return nn.Sequential(first, *(Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)))
