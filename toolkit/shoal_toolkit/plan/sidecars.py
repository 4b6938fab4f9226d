"""Builds the commands of the programs in the package `sidecars`: installing what the code needs, uploading output."""

from __future__ import annotations

from shoal_toolkit.errors import ContractError
from shoal_toolkit.job.code import S3
from shoal_toolkit.job.contract import Job
from shoal_toolkit.job.machine import Machine


def install_commands(job: Job, machine: Machine) -> list[tuple[str, ...]]:
    """Returns the command that installs the user's package and its requirements on each host; none if not needed.

    requirements.txt is installed for every kind of entry point. The package is installed if a module is named or there
    is a setup.py, but not for shell scripts. (The stock toolkit does the same, but ignores the requirements of shell
    scripts.) A project with a lock file is not installed, but imported in place, unless it has a setup.py.
    """
    lock = job.code.lock
    package = job.code.setup_py and not job.script.name.endswith(".sh")
    package = package or (job.code.package and job.script.needs_no_code and lock in ("", "pyproject.toml"))
    words = [*(["."] if package else []), *(["-r", "requirements.txt"] if job.code.requirements else [])]
    words += ["--locked", lock] if lock else []
    return [(machine.python, "-m", "shoal_toolkit.sidecars.install", *words)] if words else []


def prepare_upload(job: Job) -> list[tuple[str, ...]]:
    """Returns the command that makes output/intermediate before the launch, as the stock toolkit does.

    There is one for a file:// address too, but none if no address is configured, or the platform uploads. Raises
    ContractError if sagemaker_s3_output is wrong.
    """
    return [("mkdir", "-p", job.paths.intermediate)] if _upload_address(job) else []


def upload_command(job: Job, machine: Machine) -> tuple[str, ...]:
    """Returns the command that uploads output/intermediate while the script runs; empty if nothing is to be uploaded.

    Raises:
        ContractError: If sagemaker_s3_output is wrong.
    """
    address = _upload_address(job)
    if not address.startswith(S3):
        return ()
    parts = [address.rstrip("/"), job.environ.get("TRAINING_JOB_NAME", ""), "output", "intermediate"]
    target = "/".join(part for part in parts if part)
    return (machine.python, "-m", "shoal_toolkit.sidecars.sync", job.paths.intermediate, target)


def _upload_address(job: Job) -> str:
    """Returns the address to upload to; empty if none is configured, or the platform uploads."""
    address = str(job.toolkit.get("sagemaker_s3_output") or "")
    if not address or job.platform_syncs:
        return ""
    if not address.startswith((S3, "file://")) or address == S3:
        raise ContractError(
            f"hyperparameters.json: sagemaker_s3_output is {address!r}; allowed are s3://bucket/prefix, and file:// "
            "for no upload. Fix: set one of them."
        )
    return address
