"""One rank: runs another script of this folder where torch and the backend smddp find NCCL, a stand-in for it.

`on_nccl.py SCRIPT ARGUMENT ...`
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.library import nccl_stand_in

nccl_stand_in.install()
sys.argv = sys.argv[1:]
runpy.run_path(str(Path(__file__).with_name(sys.argv[0])), run_name="__main__")
nccl_stand_in.forget()
