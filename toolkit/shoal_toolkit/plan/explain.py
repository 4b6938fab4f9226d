"""Formats a plan for `train --explain`, as text or JSON, with masked secrets."""

from __future__ import annotations

from shoal_toolkit import redact
from shoal_toolkit.plan.plan import LaunchPlan


def plan_to_dict(plan: LaunchPlan) -> dict[str, object]:
    """Returns the plan for `train --explain --json`, with masked secrets. `notes` contains the reasons too."""
    return {
        "launcher": plan.launcher,
        "hosts": list(plan.hosts),
        "hosts_from": {"source": plan.hosts_source, "evidence": plan.hosts_evidence},
        "current_host": plan.current_host,
        "first_host": plan.hosts[0],
        "ranks": dict(plan.ranks),
        "world_size": plan.world_size,
        "interface": plan.interface,
        "cwd": plan.cwd,
        "setup": [redact.mask_arguments(command) for command in plan.setup],
        "sidecars": [redact.mask_arguments(sidecar.command) for sidecar in plan.sidecars],
        "script": redact.mask_arguments(plan.script),
        "command": redact.mask_arguments(plan.command),
        "environment": redact.mask_environment(plan.env),
        "notes": [*plan.notes, *plan.reasons],
    }


def plan_to_text(plan: LaunchPlan) -> str:
    """Returns the plan for `train --explain`, with masked secrets."""
    import shlex

    role = "first host" if plan.is_first else f"worker of {plan.hosts[0]}"
    lines = [
        f"launcher     {plan.launcher}",
        f"hosts        {', '.join(f'{host} ({_describe_ranks(plan, host)})' for host in plan.hosts)}",
        f"hosts from   {plan.hosts_source}: {plan.hosts_evidence}",
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
