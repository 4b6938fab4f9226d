"""The short table at the end of a job."""

from __future__ import annotations

from rich.console import Console

from shoal.jobs.job import JobRequest, Outcome


def rows(request: JobRequest, outcome: Outcome, build_seconds: float | None) -> list[tuple[str, str]]:
    """Return the table's rows: what the script measured, what was launched, seconds, and where the files lie."""
    launch, metrics = outcome.launch, outcome.metrics
    known = {"test_accuracy": "test accuracy", "images_per_second": "images/s"}
    table = [(label, _number(metrics[key])) for key, label in known.items() if key in metrics]
    hosts = len(launch.get("hosts", request.host_names))
    ranks = int(launch.get("ranks") or hosts)  # null: the job was refused before it had any
    table.append(("hosts × ranks", f"{hosts} × {ranks // hosts}"))
    seconds = (
        ("build", build_seconds),
        ("launch", launch.get("launch_seconds")),
        ("training", launch.get("training_seconds")),
    )
    table += [(f"{name} (s)", f"{value:.1f}") for name, value in seconds if value is not None]
    table += [(name, str(path)) for name, path in outcome.archives.items()]
    if outcome.exit_code:
        table.append(("files", str(outcome.directory)))
    return [*table, ("exit code", str(outcome.exit_code))]


def show(console: Console, request: JobRequest, outcome: Outcome, build_seconds: float | None) -> None:
    """Print the failure, if there is one, and the table."""
    hosts_of: dict[str, list[str]] = {}
    for host, message in outcome.messages.items():
        hosts_of.setdefault(message, []).append(host)
    for message, hosts in hosts_of.items():
        console.print(f"\n{', '.join(hosts)}: {message}", markup=False, highlight=False, soft_wrap=True)
    lines = rows(request, outcome, build_seconds)
    width = max(len(name) for name, _ in lines)
    console.rule(outcome.name, align="left")
    for name, value in lines:  # not a rich table: that would break paths on a narrow terminal
        console.print(f"{name:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)


def _number(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
