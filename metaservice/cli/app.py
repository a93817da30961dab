"""Entry point of `ucm-meta`. Imports nothing but the standard library before it knows what is installed."""

import sys

SERVER_EXTRA_MISSING = 'ucm-meta needs what the server extra installs: pip install "ucm-metaservice[server]"'


def main() -> None:
    """Run the command line and exit: 0 done, 1 it did not hold or failed, 2 it was asked for wrongly or
    cannot run."""
    try:
        from metaservice.cli.commands import app  # noqa: PLC0415 - absent without the server extra
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.stderr.write(SERVER_EXTRA_MISSING + "\n")
        sys.exit(2)
    app(prog_name="ucm-meta")
