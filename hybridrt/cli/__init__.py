"""The command line: `hybridrt generate`, `chat`, `serve`, `bench`, `inspect`, `doctor`. Importing it does not import
torch."""


def main() -> None:
    """Runs the command in sys.argv and exits: 0 after success, 1 after a failure while running, 2 for a request that
    cannot be met (the message says what to change), 130 after an interrupt."""
    from hybridrt.cli.app import run

    run()
