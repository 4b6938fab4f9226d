"""How `train --explain` shows a plan: as text, or as JSON. Secrets are masked."""

from __future__ import annotations

from shoal_toolkit import redact
from shoal_toolkit.plan.plan import LaunchPlan


def as_dict(plan: LaunchPlan) -> dict[str, object]:
    """Return the plan for `train --explain --json`, secrets masked."""
    return {
        "launcher": plan.launcher,
        "hosts": list(plan.hosts),
        "current_host": plan.current_host,
        "first_host": plan.hosts[0],
        "ranks": dict(plan.ranks),
        "world_size": plan.world_size,
        "interface": plan.interface,
        "cwd": plan.cwd,
        "setup": [redact.arguments(command) for command in plan.setup],
        "companions": [redact.arguments(companion.command) for companion in plan.companions],
        "script": redact.arguments(plan.script),
        "command": redact.arguments(plan.command),
        "environment": redact.environment(plan.env),
        "notes": [*plan.notes, *plan.reasons],
    }


def as_text(plan: LaunchPlan) -> str:
    """Return the plan for `train --explain`, secrets masked."""
    import shlex

    role = "first host" if plan.is_first else f"worker of {plan.hosts[0]}"
    lines = [
        f"launcher     {plan.launcher}",
        f"hosts        {', '.join(f'{host} ({_part(plan, host)})' for host in plan.hosts)}",
        f"this host    {plan.current_host} ({role})",
        f"world size   {plan.world_size}",
        f"interface    {plan.interface}",
        f"directory    {plan.cwd}",
        *(f"before       {shlex.join(redact.arguments(command))}" for command in plan.setup),
        *(f"beside       {companion.name}: {shlex.join(companion.command)}" for companion in plan.companions),
        f"script       {shlex.join(redact.arguments(plan.script))}",
        f"command      {shlex.join(redact.arguments(plan.command)) or '(the first host starts the ranks here)'}",
        *(f"why          {note}" for note in (*plan.notes, *plan.reasons)),
        "environment",
        *(f"  {name}={value}" for name, value in sorted(redact.environment(plan.env).items())),
    ]
    return "\n".join(lines)


def _part(plan: LaunchPlan, host: str) -> str:
    return "outside the distribution" if host in plan.outside else f"{plan.ranks.get(host, 0)} ranks"
