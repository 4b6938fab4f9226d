"""Train on the digits with Keras' `Model.fit`, data parallel. The network is in train_tensorflow.py.

With `smdistributed.dataparallel.tensorflow.keras`: a wrapped optimizer, and three callbacks. Runs unchanged under
`train` and mpirun, on GPUs or CPUs, and as a single process: `python train_keras.py`. An interrupted job resumes
exactly.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf
from digits import arguments_parser, read_digits
from train_tensorflow import accuracy, make_net, save, shuffle, use_device

import shoal_checkpoint as checkpoints
import smdistributed.dataparallel.tensorflow as sdp
from shoal_checkpoint.tensorflow import Checkpoint
from smdistributed.dataparallel.tensorflow.keras import DistributedOptimizer, callbacks


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--global-batch", type=int, default=64, help="images in a step of all ranks (default: 64)")
    parser.add_argument("--checkpoint-dir", default=checkpoints.directory(), help="default: in a job, its directory")
    parser.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="default: one checkpoint per epoch")
    parser.add_argument(
        "--warmup-epochs", type=int, default=2, help="epochs in which the learning rate rises (default: 2)"
    )
    arguments = parser.parse_args()
    sdp.init()
    rank, world_size = sdp.rank(), sdp.size()
    use_device(sdp.local_rank())
    if hasattr(tf.keras.backend, "experimental"):  # Keras 2: a checkpoint then has the state of dropout
        tf.keras.backend.experimental.enable_tf_random_generator()
    tf.keras.utils.set_random_seed(arguments.seed)

    training, test = read_digits(arguments.data_dir)
    images = len(training.labels)
    model = make_net()
    model.compile(
        optimizer=DistributedOptimizer(tf.keras.optimizers.Adam(arguments.lr)),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    wanted = [
        callbacks.BroadcastGlobalVariablesCallback(0),
        callbacks.MetricAverageCallback(),  # before callbacks that read the metrics
        callbacks.LearningRateWarmupCallback(initial_lr=arguments.lr, warmup_epochs=arguments.warmup_epochs),
    ]
    if rank == 0:
        wanted.append(report_epochs(arguments.epochs, images))

    checkpoint = Checkpoint(arguments.checkpoint_dir, model=model, every=arguments.checkpoint_every, ranks=sdp)
    start, first = time.perf_counter(), checkpoint.epoch
    for epoch in checkpoint.epochs(arguments.epochs):
        samples = shuffle(training, arguments, epoch)
        checkpoint.fit(samples, global_batch=arguments.global_batch, callbacks=wanted, verbose=0)
    training_seconds = time.perf_counter() - start

    if rank == 0:
        metrics = {
            "test_accuracy": accuracy(model, test),
            "images_per_second": images * (arguments.epochs - first) / training_seconds,
            "training_seconds": training_seconds,
            "epochs": arguments.epochs,
            "world_size": world_size,
        }
        save(make_plain(model), metrics, arguments)


def make_plain(model: Any) -> Any:
    """Return the model without the distributed optimizer, so that scripts can load it without the library."""
    plain = make_net()
    plain.set_weights(model.get_weights())
    return plain


def report_epochs(epochs: int, images: int) -> Any:
    """Return a callback that prints a line per epoch."""
    began = 0.0

    def begin(epoch: int, logs: dict[str, float]) -> None:
        nonlocal began
        began = time.perf_counter()

    def end(epoch: int, logs: dict[str, float]) -> None:
        rate = images / (time.perf_counter() - began)
        print(f"epoch {epoch + 1}/{epochs} loss {logs['loss']:.4f} {rate:.0f} images/s", flush=True)

    return tf.keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)


if __name__ == "__main__":
    main()
