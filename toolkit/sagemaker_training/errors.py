"""The errors that `entry_point.run` raises."""

from __future__ import annotations

from collections.abc import Sequence

from sagemaker_training._absent import refuse_others


class ClientError(Exception):
    """An error of the user's, not of the toolkit."""


class ExecuteUserScriptError(ClientError):
    """The user's script has failed.

    Attributes:
        cmd: Its command.
        return_code: Its exit code; negative if a signal ended it.
        output: The end of its stderr, if it was captured.
    """

    def __init__(self, cmd: Sequence[str], return_code: int | None = None, output: bytes | str | None = None) -> None:
        self.cmd = cmd
        self.return_code = return_code
        self.output = output.decode(errors="replace") if isinstance(output, bytes) else output
        super().__init__(cmd, return_code, output)

    def __str__(self) -> str:
        # The script's own error comes last: there `train` looks for the cause.
        return f"exit code {self.return_code} of {' '.join(self.cmd)}\n{self.output or ''}".rstrip()


__getattr__ = refuse_others(__name__, (), {}, "errors.ExecuteUserScriptError, or errors.ClientError for all")
