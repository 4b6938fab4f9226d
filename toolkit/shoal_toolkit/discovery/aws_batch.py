"""AWS Batch: the nodes of a multi-node parallel job.

The variables are in the AWS Batch User Guide, "AWS Batch job environment variables" and "Multi-node parallel jobs".
AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is set on child nodes only, and no node knows the addresses of the
children. So the children register with the main node when the job starts: see `hosts/registration.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal_toolkit.discovery.host_list import HostList, Registration, require, show
from shoal_toolkit.errors import ContractError

_SOURCE = "AWS Batch"
_COUNT, _INDEX = "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"
_MAIN_INDEX = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
_SECRET = (
    "On AWS Batch, name a secret of AWS Secrets Manager in the job definition's `secrets`, as the variable "
    "SHOAL_JOB_SECRET."
)


def find(environ: Mapping[str, str], hostname: str, root: str) -> HostList | None:
    """Returns the nodes, the main node first, under names that last until they have registered.

    Raises:
        ContractError: If a variable is missing or wrong.
    """
    count = require(environ, _COUNT, _SOURCE, 1)
    if count == 1:
        return HostList(_SOURCE, (hostname,), 0, show(environ, _COUNT), _SECRET)
    index, main = require(environ, _INDEX, _SOURCE), require(environ, _MAIN_INDEX, _SOURCE)
    if max(index, main) >= count:
        raise ContractError(f"{_SOURCE}: {show(environ, _INDEX, _MAIN_INDEX, _COUNT)}: an index is below the number.")
    address = environ.get(_MAIN_ADDRESS, "")
    if index != main and not address:
        raise ContractError(
            f"{_SOURCE}: this is a child node, and the variable {_MAIN_ADDRESS} is missing. Fix: pass all AWS_BATCH_* "
            "variables to `train`."
        )
    order = [main, *(number for number in range(count) if number != main)]
    return HostList(
        _SOURCE,
        tuple(f"node-{number}" for number in order),
        order.index(index),
        show(environ, _COUNT, _INDEX, _MAIN_INDEX, _MAIN_ADDRESS),
        _SECRET,
        ("the names of the hosts stand for addresses that the nodes exchange when the job starts",),
        registration=Registration(
            "" if index == main else address, environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0]
        ),
    )
