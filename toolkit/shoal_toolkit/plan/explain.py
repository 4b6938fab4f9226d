"""Formats a plan for `train --explain`, as text or JSON, with masked secrets."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from shoal_toolkit import redact
from shoal_toolkit.fast_typing import NamedTuple
from shoal_toolkit.plan.plan import LaunchPlan


class ExplainedPlan(NamedTuple):
    """The plan of a host, with masked secrets."""

    launcher: str
    hosts: Sequence[str]
    hosts_from: Mapping[str, str]
    """The `source` of the hosts, such as Slurm, and the `evidence`: the variables or the file that name them."""
    current_host: str
    first_host: str
    """The host that leads the job."""
    ranks: Mapping[str, int]
    """The number of ranks by host, without hosts outside the distribution."""
    world_size: int
    interface: str
    """The network interface between hosts."""
    cwd: str
    """The directory in which the script starts."""
    setup: Sequence[Sequence[str]]
    """The commands that this host runs before the launch."""
    sidecars: Sequence[Sequence[str]]
    """The commands that run next to the script."""
    script: Sequence[str]
    """The command of a rank."""
    command: Sequence[str]
    """The command of this host; empty if the first host starts the ranks here."""
    environment: Mapping[str, str]
    """The variables that are added to the environment."""
    notes: Sequence[str]
    """The reasons, and notes for the log."""


def plan_to_dict(plan: LaunchPlan) -> dict[str, object]:
    """Returns the plan for `train --explain --json`, with masked secrets: the fields of ExplainedPlan."""
    explained = ExplainedPlan(
        launcher=plan.launcher.name,
        hosts=list(plan.hosts),
        hosts_from={"source": plan.found.source, "evidence": plan.found.evidence},
        current_host=plan.current_host,
        first_host=plan.hosts[0],
        ranks=dict(plan.ranks),
        world_size=plan.world_size,
        interface=plan.interface,
        cwd=plan.cwd,
        setup=[redact.mask_arguments(command) for command in plan.setup],
        sidecars=[redact.mask_arguments(sidecar.command) for sidecar in plan.sidecars],
        script=redact.mask_arguments(plan.script),
        command=redact.mask_arguments(plan.command),
        environment=redact.mask_environment(plan.env),
        notes=[*plan.notes, *plan.reasons],
    )
    return dict(zip(explained._fields, explained))


def plan_to_text(plan: LaunchPlan) -> str:
    """Returns the plan for `train --explain`, with masked secrets."""
    role = "first host" if plan.is_first else f"worker of {plan.hosts[0]}"
    lines = [
        f"launcher     {plan.launcher.name}",
        f"hosts        {', '.join(f'{host} ({_describe_ranks(plan, host)})' for host in plan.hosts)}",
        f"hosts from   {plan.found.source}: {plan.found.evidence}",
        f"this host    {plan.current_host} ({role})",
        f"world size   {plan.world_size}",
        f"interface    {plan.interface}",
        f"directory    {plan.cwd}",
        *(f"set-up       {shlex.join(redact.mask_arguments(command))}" for command in plan.setup),
        *(
            f"sidecar      {sidecar.name}: {shlex.join(redact.mask_arguments(sidecar.command))}"
            for sidecar in plan.sidecars
        ),
        f"script       {shlex.join(redact.mask_arguments(plan.script))}",
        f"command      {shlex.join(redact.mask_arguments(plan.command)) or '(the first host starts the ranks here)'}",
        *(f"why          {note}" for note in (*plan.notes, *plan.reasons)),
        "environment",
        *(f"  {name}={value}" for name, value in sorted(redact.mask_environment(plan.env).items())),
    ]
    return "\n".join(lines)


def _describe_ranks(plan: LaunchPlan, host: str) -> str:
    return "outside the distribution" if host in plan.outside else f"{plan.ranks.get(host, 0)} ranks"
