"""Train on the digits with a Keras model in two stages, and two replicas.

Start it with `mpirun -np 4 python train_smp_tensorflow.py`. The API is `smdistributed.modelparallel.tensorflow`. Each
replica gets half of the images. A batch passes through the stages as a pipeline of four microbatches.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf
from digits import arguments_parser, read_digits, save_metrics

import smdistributed.modelparallel.tensorflow as smp

PARAMETERS = {"partitions": 2, "microbatches": 4, "horovod": True}
"""The hyperparameter `mp_parameters` of the job overrides these. `horovod` enables replicas; Horovod is not needed."""

loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Net(smp.DistributedModel):
    """From images (n, 8, 8), float32 from 0 to 1, to scores (n, 10). An ordinary Keras model."""

    def __init__(self) -> None:
        super().__init__()
        self.reshape = tf.keras.layers.Reshape((8, 8, 1))
        self.conv1 = tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu")
        self.conv2 = tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu")
        self.pool, self.flatten = tf.keras.layers.MaxPooling2D(), tf.keras.layers.Flatten()
        self.dropout = tf.keras.layers.Dropout(0.25)
        self.hidden = tf.keras.layers.Dense(64, activation="relu")
        self.scores = tf.keras.layers.Dense(10)

    def call(self, images: Any, training: Any = None) -> Any:
        x = self.flatten(self.pool(self.conv2(self.conv1(self.reshape(images)))))
        return self.scores(self.hidden(self.dropout(x, training=training)))


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=32, help="images per replica and step (default: 32)")
    parser.add_argument("--mp_parameters", help="read by smp.init, from SM_HP_MP_PARAMETERS")
    arguments = parser.parse_args()
    smp.init(PARAMETERS)
    tf.config.threading.set_intra_op_parallelism_threads(1)  # one thread per rank is enough for this small network
    tf.keras.utils.set_random_seed(arguments.seed)

    training, test = read_digits(arguments.data_dir)
    count = len(training.labels) // smp.dp_size() * smp.dp_size()
    samples = tf.data.Dataset.from_tensor_slices(tuple(training)).shuffle(len(training.labels), seed=arguments.seed)
    # All stages of a replica read the same batches, which must have one size.
    share = samples.take(count).shard(smp.dp_size(), smp.dp_rank())
    batches = share.batch(arguments.batch_size, drop_remainder=True)
    model = Net()  # split into stages at the first step
    optimizer = tf.keras.optimizers.Adam(arguments.lr)
    train_step, predict = make_steps(model, optimizer)

    training_seconds = 0.0
    for epoch in range(1, arguments.epochs + 1):
        start = time.perf_counter()
        losses = [float(train_step(images, labels)) for images, labels in batches]
        training_seconds += time.perf_counter() - start
        loss = sum(smp.allgather(sum(losses) / len(losses), smp.DP_GROUP)) / smp.dp_size()
        if smp.rank() == 0:
            print(f"epoch {epoch}/{arguments.epochs} iterations {len(losses)} loss {loss:.4f}", flush=True)

    tested = len(test.labels) - len(test.labels) % smp.state.cfg.microbatches
    scores = predict(test.images[:tested]).merge()
    model.save_model(str(arguments.model_dir / "1"))  # all ranks call it
    if smp.rank() == 0:
        metrics = {
            "test_accuracy": float((scores.numpy().argmax(1) == test.labels[:tested]).mean()),
            "images_per_second": count * arguments.epochs / training_seconds,
            "training_seconds": training_seconds,
            "epochs": arguments.epochs,
            "world_size": smp.size(),
        }
        save_metrics(metrics, arguments)


def make_steps(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return two functions of a batch: one trains and returns the loss, one returns scores."""

    @smp.step
    def get_grads(images: Any, labels: Any) -> Any:
        """Return the gradients and the loss of one microbatch."""
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    def train_step(images: Any, labels: Any) -> Any:
        gradients, loss = get_grads(images, labels)
        means = [gradient.accumulate() for gradient in gradients]  # over the microbatches
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))  # averages over the replicas
        return loss.reduce_mean()

    @smp.step
    def predict(images: Any) -> Any:
        return model(images, training=False)

    return tf.function(train_step), predict


if __name__ == "__main__":
    main()
