"""Classify tumours with the model of examples/ddp, in plain PyTorch: `python predict_torch.py model.tar.gz`."""

import sys
import tarfile
import tempfile

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn


class Net(nn.Module):
    """The network of the training script: the file has its weights only."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(30))
        self.register_buffer("std", torch.ones(30))
        self.layers = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.layers((features - self.mean) / self.std).squeeze(1)


with tempfile.TemporaryDirectory() as directory:
    with tarfile.open(sys.argv[1]) as archive:
        archive.extractall(directory)
    weights = torch.load(f"{directory}/model.pt", map_location="cpu")
net = Net()
net.load_state_dict(weights)
net.eval()

data = load_breast_cancer()
with torch.no_grad():
    probabilities = net(torch.tensor(data.data[:100]).float()).sigmoid()
for probability, label in list(zip(probabilities, data.target))[17:22]:
    print(f"benign with probability {probability:.3f}, in truth {data.target_names[label]}")
correct = (probabilities > 0.5).numpy() == data.target[:100]
print(f"{correct.sum()} of 100 are right")
