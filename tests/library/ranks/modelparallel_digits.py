"""A rank of the example digits/train_smp.py, which then compares the replicas: modelparallel_digits.py OPTION ..."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

import smdistributed.modelparallel.torch as smp

DIGITS = Path(__file__).parents[3] / "examples" / "digits"

if __name__ == "__main__":
    sys.path.insert(0, str(DIGITS))
    runpy.run_path(str(DIGITS / "train_smp.py"), run_name="__main__")
    model = smp.state.model
    assert isinstance(model, smp.DistributedModel)
    mine = model.local_state_dict()
    others = smp.allgather(mine, smp.DP_GROUP)
    assert len(others) == smp.dp_size() == smp.size() // smp.pp_size()
    assert all(torch.equal(other[name].cpu(), mine[name].cpu()) for other in others for name in mine)
    held = [name for names in smp.allgather(list(mine), smp.PP_GROUP) for name in names]
    assert sorted(held) == sorted(model.get_module().state_dict()), held
    print(f"replicas of stage {smp.pp_rank()} are equal\n", end="")
