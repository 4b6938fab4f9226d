"""Write scikit-learn's wines as train.csv and test.csv, to upload to S3: `python prepare_wine.py DIRECTORY`."""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_wine

directory = Path(sys.argv[1])
directory.mkdir(parents=True, exist_ok=True)
wine = load_wine()
rows = np.column_stack([wine.data, wine.target])
test = np.arange(len(rows)) % 5 == 0
for name, part in (("train", rows[~test]), ("test", rows[test])):
    header = ",".join([*wine.feature_names, "cultivar"])
    np.savetxt(directory / f"{name}.csv", part, fmt="%g", delimiter=",", header=header, comments="")
