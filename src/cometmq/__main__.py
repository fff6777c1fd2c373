"""Run the `cometmq` command as `python -m cometmq`."""

from cometmq.cli import main

main()
