"""A rank: what is saved of a model on stages. Arguments: a directory, `train` or `resume`.

`train` saves checkpoints and the whole model, and prints the losses of all steps; `resume` restores the second
checkpoint before the first step, and prints the losses after it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp
from smdistributed.modelparallel.backend.exceptions import SMPRuntimeError

smp.init({"partitions": 2, "microbatches": 2, "horovod": True})
directory, what = Path(sys.argv[1]), sys.argv[2]
X, Y = np.random.RandomState(0).standard_normal((8, 6)).astype(np.float32), np.arange(8) % 3


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [tf.keras.layers.Dense(16, activation="relu") for _ in range(3)]
        self.parts.append(tf.keras.layers.Dense(3, dtype="mixed_float16"))
        self.norm = tf.keras.layers.BatchNormalization()

    def call(self, x: Any, training: Any = None) -> Any:
        for part in self.parts[:2]:
            x = part(x)
        x = self.norm(x, training=training)
        for part in self.parts[2:]:
            x = part(x)
        return tf.cast(x, tf.float32)


tf.keras.utils.set_random_seed(3 if what == "train" else 4)
model, optimizer, seen = Net(), tf.keras.optimizers.Adam(1e-2), tf.Variable(0)
manager = smp.CheckpointManager(
    tf.train.Checkpoint(model=model, optimizer=optimizer, seen=seen), str(directory / "checkpoints"), max_to_keep=3
)

counts: list[int] = []
smp.register_post_partition_hook(lambda: counts.append(len(model.variables)))


@smp.step
def get_grads(x: Any, y: Any) -> Any:
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
    return optimizer.get_gradients(loss, model.trainable_variables), loss


@tf.function  # type: ignore[untyped-decorator]
def train_step(x: Any, y: Any) -> Any:
    gradients, loss = get_grads(x, y)
    optimizer.apply_gradients(zip([g.accumulate() for g in gradients], model.trainable_variables))
    return loss.reduce_mean()


@smp.step(input_signature=[tf.TensorSpec([None, 6])])  # type: ignore[untyped-decorator]
def predict(x: Any) -> Any:
    return model(x, training=False)


def send_files() -> None:
    """Those of a replica's second stage, to its first."""
    source = directory / "checkpoints"
    if smp.mp_rank() == 1:
        smp.utils.send_checkpoint_files(str(source), smp.get_mp_group()[0])
        return
    received = directory / f"received_{smp.dp_rank()}"
    smp.utils.receive_checkpoint_files(str(received), smp.get_mp_group()[1])
    names = {path.relative_to(received) for path in received.rglob("*") if path.is_file()}
    assert names == {path.relative_to(source) for path in (source / "mp_rank_1").iterdir()}, names
    assert all((received / name).read_bytes() == (source / name).read_bytes() for name in names)


def refuse_files_outside() -> None:
    """A name that leads out of the directory is not written."""
    if smp.mp_rank() == 1:
        smp.state.objects.send(["mp_rank_1/fine", "../outside"], smp.get_mp_group()[0], "files")
        return
    received = directory / f"refused_{smp.dp_rank()}"
    try:
        smp.utils.receive_checkpoint_files(str(received), smp.get_mp_group()[1])
    except SMPRuntimeError as error:
        assert "'../outside' with a place that is not under" in str(error), error
    else:
        raise AssertionError("a file was written outside")
    assert not received.exists()


def train(steps: int) -> list[str]:
    losses = []
    for _ in range(steps):
        losses.append(f"{float(train_step(X.astype(np.float64), Y)):.6f}")  # as scripts do with numpy's images
        seen.assign_add(1)
        if what == "train":
            manager.save()
    return losses


if what == "train":
    assert manager.restore() is None
    losses = train(4)
    outputs = predict(X[:4]).merge().numpy()
    model.save_model(str(directory / "model"))
    np.testing.assert_array_equal(predict(X[:4]).merge().numpy(), outputs)  # what was borrowed is not missed
    if smp.rank() == 0:
        np.save(directory / "outputs.npy", outputs)
    send_files()
    refuse_files_outside()
else:
    manager.restore("ckpt-2")
    losses = train(2)
    assert int(seen) == 4, seen
assert counts == [len(model.variables)], counts
print(f"losses {' '.join(losses)}\n", end="", flush=True)
