"""Train a network on scikit-learn's wines with Keras' `fit`, data parallel on any number of ranks.

The lines with `sdp` are the only changes compared with a script for one process. Runs with `shoal run` and mpirun, and
alone: `python train.py`.
"""

from __future__ import annotations

import argparse
import os

import tensorflow as tf
from sklearn.datasets import load_wine

import smdistributed.dataparallel.tensorflow as sdp
from smdistributed.dataparallel.tensorflow.keras import DistributedOptimizer, callbacks


def main(args: argparse.Namespace) -> None:
    sdp.init()  # takes the GPU of this rank, if there is one
    tf.keras.utils.set_random_seed(args.seed)

    features, labels = load_wine(return_X_y=True)  # 13 measurements of 178 wines, from 3 cultivars
    test = [index % 5 == 0 for index in range(len(labels))]
    x_test, y_test = features[test], labels[test]
    x_train, y_train = features[[not each for each in test]], labels[[not each for each in test]]

    # Each rank trains on its share. All shares have the same size, because all ranks must run the same number of steps.
    share = len(y_train) // sdp.size()
    data = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(y_train), seed=args.seed)
    data = data.take(share * sdp.size()).shard(sdp.size(), sdp.rank()).batch(args.batch_size)

    normalization = tf.keras.layers.Normalization()
    normalization.adapt(x_train)
    layers = [tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(3, activation="softmax")]
    model = tf.keras.Sequential([tf.keras.Input(shape=(13,)), normalization, *layers])
    model.compile(
        optimizer=DistributedOptimizer(tf.keras.optimizers.Adam(args.lr)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(
        data,
        epochs=args.epochs,
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),  # all ranks begin with the weights of rank 0
            callbacks.MetricAverageCallback(),
        ],
        verbose=2 if sdp.rank() == 0 else 0,
    )

    if sdp.rank() == 0:
        _, accuracy = model.evaluate(x_test, y_test, verbose=0)
        print(f"test accuracy {accuracy:.3f}, world size {sdp.size()}")
        model.export(f"{args.model_dir}/1")  # TensorFlow Serving expects a directory with a number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "model"))
    main(parser.parse_args())
