"""`optimum-cli efficient ...`: the commands of `hf-efficient`. Installed as `optimum.commands.register.hf_efficient`,
where optimum looks for the commands of other packages; the folders above hold no __init__.py, as optimum asks."""

import argparse
import sys

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo


class EfficientCommand(BaseOptimumCLICommand):
    """Hands its arguments to `hf_efficient.cli.main`."""

    COMMAND = CommandInfo("efficient", help="Makes models smaller and faster, and measures how much (hf_efficient).")

    @staticmethod
    def parse_args(parser):
        parser.add_argument("command", help="a command of hf-efficient: `hf-efficient --help` lists them")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")

    def run(self):
        from hf_efficient.cli import main

        sys.exit(main([self.args.command, *self.args.arguments]))


REGISTER_COMMANDS = [EfficientCommand]
