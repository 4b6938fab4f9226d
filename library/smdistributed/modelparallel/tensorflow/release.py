"""Whether model parallelism supports the TensorFlow of this process. Importing raises SMPUnsupportedError if not."""

from __future__ import annotations

import tensorflow as tf

from smdistributed.core.tensorflow.keras_release import is_keras_3
from smdistributed.modelparallel.backend.exceptions import SMPUnsupportedError

if is_keras_3():
    raise SMPUnsupportedError(
        f"smdistributed.modelparallel.tensorflow needs Keras 2, and TensorFlow {tf.__version__} here has Keras "
        f"{tf.keras.__version__}. Fix: run the script with TensorFlow 2.14 (shoal run tensorflow). Data "
        "parallel training (smdistributed.dataparallel.tensorflow) works with both."
    )
