"""A rank of two replicas of two stages: what published scripts ask of Horovod. Ends with `equal`."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import smdistributed.modelparallel.tensorflow as smp

smp.init({"partitions": 2, "microbatches": 1, "horovod": True})
hvd.init()
assert (hvd.rank(), hvd.size()) == (smp.dp_rank(), 2)
assert (hvd.local_rank(), hvd.local_size()) == (smp.rank(), 4)
mine = tf.constant([float(smp.rank()), 1.0])
everybody = [[float(rank), 1.0] for rank in smp.get_dp_group()]
np.testing.assert_allclose(hvd.allreduce(mine), np.mean(everybody, 0))
np.testing.assert_allclose(hvd.allreduce(mine, average=False), np.sum(everybody, 0))
for root in range(2):
    np.testing.assert_allclose(hvd.broadcast(mine, root), everybody[root])
    variables = [tf.Variable(mine), tf.Variable(tf.reverse(mine, [0]))]
    hvd.broadcast_variables(variables, root_rank=root)
    np.testing.assert_allclose(variables[0], everybody[root])
    np.testing.assert_allclose(variables[1], everybody[root][::-1])
print("equal\n", end="", flush=True)
