"""Recognize wines with the model of examples/keras, in plain TensorFlow: `python predict_keras.py model.tar.gz`."""

import sys
import tarfile
import tempfile

import tensorflow as tf
from sklearn.datasets import load_wine

with tempfile.TemporaryDirectory() as directory:
    with tarfile.open(sys.argv[1]) as archive:
        archive.extractall(directory)
    model = tf.saved_model.load(f"{directory}/1")

data = load_wine()
probabilities = model.serve(tf.constant(data.data[::5], tf.float32)).numpy()
for row, label in list(zip(probabilities, data.target[::5]))[::8]:
    print(f"class {row.argmax()} with probability {row.max():.3f}, in truth class {label}")
correct = probabilities.argmax(1) == data.target[::5]
print(f"{correct.sum()} of {len(correct)} are right")
