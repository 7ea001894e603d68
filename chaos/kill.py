#!/usr/bin/env python3
"""`chaos/kill.py --data-dir DIR --every 5 --rounds 10`: kill a random broker of a running cluster, and start it again.

For a cluster that `zmqueue up` started, as another shell would do it (`zmqueue broker kill`, `broker start`). Nothing
is checked here. Ends after its rounds or by Ctrl-C, and leaves no broker dead that it has killed itself.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a script
    sys.path[0] = str(ROOT)

from zmqueue.config import read_cluster_file  # noqa: E402
from zmqueue.processes import BrokerFolder  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chaos/kill.py", description="Kill a random broker again and again.")
    parser.add_argument("--data-dir", type=Path, default=Path("./data"), help="of the running cluster")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between two kills")
    parser.add_argument(
        "--down", type=float, default=1.0, metavar="S", help="seconds until the broker is started again"
    )
    parser.add_argument("--rounds", type=int, default=None, help="default: until Ctrl-C")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.every <= 0 or not 0 <= options.down <= options.every or (options.rounds or 1) < 1:
        parser.error("--every must be above 0, --down between 0 and --every, --rounds at least 1")
    cluster = read_cluster_file(options.data_dir)
    if cluster is None:
        parser.error(f"{options.data_dir} holds no cluster")
    rng, wait = random.Random(options.seed), threading.Event().wait
    folders = [BrokerFolder(options.data_dir, member.id) for member in cluster.members]
    done = 0
    try:
        while options.rounds is None or done < options.rounds:
            running = [folder for folder in folders if folder.running() is not None]
            if not running:
                print("no broker runs: is the cluster up?", file=sys.stderr)
                return 1
            kill(rng.choice(running), options.down, wait)
            done += 1
            if done != options.rounds:
                wait(options.every - options.down)
    except KeyboardInterrupt:
        return 130
    return 0


def kill(folder: BrokerFolder, down_s: float, wait: Callable[[float], bool]) -> None:
    """Killed brokers stay down until somebody starts them: here that is us, also when we are interrupted."""
    try:
        folder.kill()
        print(f"killed broker {folder.broker_id}", flush=True)
        wait(down_s)
    finally:
        print(f"started broker {folder.broker_id}, pid {folder.start().pid}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
