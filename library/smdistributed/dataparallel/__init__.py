"""Data parallel training: every rank trains a copy of the model on its share of the data, and gradients are averaged.

Frameworks are imported by the packages named after them (`smdistributed.dataparallel.torch`), never here.
"""
