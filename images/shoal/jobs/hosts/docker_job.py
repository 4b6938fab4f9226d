"""Runs a job in containers, one per host, and replaces lost hosts. All of it is removed when the job ends."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import docker
import docker.errors
from rich.console import Console

from shoal import docker_client
from shoal.console import print_line
from shoal.docker_client import containers, images
from shoal.errors import UsageError
from shoal.jobs import job, results, usage
from shoal.jobs.hosts import docker as docker_hosts
from shoal.jobs.hosts.docker import DockerHosts
from shoal.jobs.run import Watch
from shoal.jobs.store import JobRecord, OpenJob
from shoal.jobs.view import View

_NEVER_RAN = 1  # the exit code of `train` for a job that could not run


def run_job_in_docker(opened: OpenJob, view: View) -> job.JobResult:
    """Run a job in containers to its end, and show the hosts' logs with the host's name before each line.

    The files of each host are copied to the job's directory, and its checkpoints to their own directory, also if the
    job fails. An interrupt stops the hosts, removes them, the network and the volume, and is raised again. A second
    interrupt does not wait for the script.

    Args:
        opened: The job, which the caller has checked.
        view: Shows logs, and has the console for messages.

    Returns:
        The result. A job that failed raises nothing.

    Raises:
        DockerError: If Docker does not answer, refuses, or lacks the image.
        UsageError: If the source cannot be copied, there are fewer GPUs than hosts, or the job runs already.
    """
    client, console = docker_client.connect(), view.console
    is_filled = opened.resumed and _keep_volume(client, opened, console)
    with (
        _remove_all_at_end(client, opened, console),
        docker_hosts.create_hosts(
            client, opened.record.request, opened.name, view, opened.log, opened.identity
        ) as hosts,
    ):
        if not is_filled:
            hosts.fill(opened.checkpoints)
        watch = Watch(hosts)
        hosts.start(*hosts.by_name)
        opened.update(uncollected=True)
        opened.on_started()
        try:
            with usage.sample_usage(opened.log.usage, opened.log.began, hosts.read_usage):
                exits = watch.wait()
        except BaseException:
            end_interrupted(hosts, opened)
            raise
        for reader in hosts.readers:
            reader.join()
        trees = collect(hosts, opened)
        lost = _list_lost_files(hosts, trees, watch.exit_codes())
    notes = {host: "killed by the out-of-memory killer" for host, end in exits.items() if end.out_of_memory}
    result = results.read_result(opened.name, watch.exit_codes(), opened.directory, trees, notes)
    result = check_train(client, opened.record, trees, result)
    return replace(result, restarts=[*watch.restarts, *result.restarts], lost_files=lost)


def check_train(
    client: docker.DockerClient, record: JobRecord, trees: Mapping[str, Path], result: job.JobResult
) -> job.JobResult:
    """Return the result with a message if the job succeeded and `train` never ran. If ranks were asked for, it failed.

    `train` writes files into output/. Nothing is known of a host with an output that could not be collected.
    """
    outputs = [tree / "output" for tree in trees.values()]
    if result.exit_code or not all(output.is_dir() for output in outputs):
        return result
    if any(os.path.lexists(output / name) for output in outputs for name in ("success", "failure", "job.json")):
        return result
    image = images.find_image(client, record.request.image)
    entry = images.read_config(image).get("Entrypoint") if image else None
    other = f"its ENTRYPOINT {json.dumps(entry)}" if entry else "another program `train`"
    text = f"Shoal's `train` never ran in {record.request.image}, which started {other}"
    if record.request.asks_for_ranks:
        text += ". So the ranks that you asked for did not start: each host ran the program once"
        result = replace(result, exit_code=_NEVER_RAN)
    cause = "ENTRYPOINT" if entry else "that program"
    fix = f"Fix: remove {cause} from the Dockerfile, and add ENV SAGEMAKER_PROGRAM=train.py with your script"
    first = next(iter(trees))
    earlier = result.messages.get(first)
    return replace(result, messages={**result.messages, first: "\n".join(filter(None, (earlier, f"{text}. {fix}")))})


def end_interrupted(hosts: DockerHosts, opened: OpenJob) -> None:
    """Kill the hosts that a second interrupt did not wait for, and collect the files of their scripts.

    An impatient user interrupts three times. The third waits, and ends this if copying the files takes long.
    """
    with containers.delay_interrupts():
        hosts.kill()
        collect(hosts, opened)
        with contextlib.suppress(OSError):  # the terminal is gone
            print_line(f"interrupted; files of the hosts are in {opened.directory}", hosts.console)


def _list_lost_files(hosts: DockerHosts, trees: Mapping[str, Path], codes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the files that a script has saved beside the code, if it has succeeded and saved no model."""
    has_model = any(path.is_file() for tree in trees.values() for path in tree.glob("model/**/*"))
    if has_model or any(codes.values()):
        return ()
    with contextlib.suppress(*docker_hosts.NOT_COLLECTED):  # the container is gone: the job has its result all the same
        return tuple(hosts.list_lost_files())
    return ()


def _keep_volume(client: docker.DockerClient, opened: OpenJob, console: Console) -> bool:
    """Remove the objects of an earlier command from Docker, and return whether its volume has the newest checkpoints.

    Prints a line if it should have them, but is gone. Raises `UsageError` if the job still runs, or then has none.
    """
    is_expected = opened.record.uncollected
    if docker_hosts.remove_earlier(client, opened.name, opened.identity, keep_volume=is_expected):
        return True
    if is_expected:
        opened.update(uncollected=False)
        lost = f"the Docker volume {docker_hosts.volume_name(opened.identity)} with the newest checkpoints is gone"
        if not opened.checkpoints.has_files():
            raise UsageError(f"--resume {opened.name}: {lost}. Fix: start the job again without --resume")
        print_line(f"{lost}; continuing from {opened.checkpoints.path}", console)
    return False


@contextlib.contextmanager
def _remove_all_at_end(client: docker.DockerClient, opened: OpenJob, console: Console) -> Iterator[None]:
    """Remove all that the job has in Docker at the end. A volume with checkpoints that could not be collected stays."""
    try:
        yield
    finally:
        with containers.delay_interrupts():
            containers.remove_objects(client, opened.identity, volumes=not opened.record.uncollected)
        if opened.record.uncollected:
            volume = docker_hosts.volume_name(opened.identity)
            print_line(
                f"the newest checkpoints were not collected. They are in the Docker volume {volume}. Fix: if a disk"
                f" is full, make room for them. Then continue from them with: shoal run --resume {opened.name}",
                console,
            )


def collect(hosts: DockerHosts, opened: OpenJob) -> dict[str, Path]:
    """Copy checkpoints, models and output from the hosts, which have ended, and return the tree of each host.

    If the checkpoints cannot be copied, that is printed, the earlier ones stay, and so does the volume with the newest.
    """
    try:
        hosts.collect(opened.checkpoints)
        opened.update(uncollected=False)
    except docker_hosts.NOT_COLLECTED as error:  # the job has its result, and the volume stays
        print_line(f"the checkpoints were not collected: {error}", hosts.console)
    finally:
        trees = {host: hosts.fetch_results(host, opened.directory / host) for host in hosts.by_name}
    return trees
