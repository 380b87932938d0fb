"""Train with OpenRLHF and the extensions: ``python -m openrlhf_ext.cli.train_ppo_ray --config FILE [--flag ...]``.

Settings are read and checked before anything heavy is imported. Exit code 2 and one line on stderr for a setting the
user has to change.
"""

from __future__ import annotations

import argparse
import signal
import sys

from openrlhf_ext.adapters.upstream_cli import build_parser, nest, validate
from openrlhf_ext.checks import check, check_reward_file, read_prompt_files
from openrlhf_ext.settings import Settings, dump_settings, help_text, refuse, resolve
from openrlhf_ext.stopping import EXIT_REQUEUE


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(EXIT_REQUEUE))  # until the trainer knows better
    try:
        settings = checked_settings(sys.argv[1:] if argv is None else argv)
        if settings is None:
            return 0
        check_reward_file(settings)
        files = read_prompt_files(settings)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from openrlhf_ext.adapters.launch import run

    return run(settings, files)


def checked_settings(argv: list[str]) -> Settings | None:
    """Checked settings, or None after an option that only prints."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.error = refuse  # type: ignore[method-assign]
    own.add_argument("--config")
    for option in ("--help", "--help-upstream", "--print-config"):
        own.add_argument(option, *(["-h"] if option == "--help" else []), action="store_true")
    options, rest = own.parse_known_args(argv)
    if options.help:
        print(help_text())
        return None
    parser = build_parser()
    if options.help_upstream:
        parser.print_help()
        return None
    settings = resolve(options.config, rest, parser, nest)
    if options.print_config:
        print(dump_settings(settings), end="")
        return None
    check(settings)
    validate(settings.upstream)
    return settings


if __name__ == "__main__":
    sys.exit(main())
