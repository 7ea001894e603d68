"""`python -m zmqueue.broker --id N --data-dir DIR [--config FILE]`: one broker of an existing cluster.

Exit codes: 0 stopped on request, 1 failed, 78 configuration. The first line of an error says what is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
from pathlib import Path

from zmqueue.broker.executor import Fatal
from zmqueue.broker.server import Broker
from zmqueue.config import load, read_cluster_file, read_secret, with_cluster
from zmqueue.errors import ConfigError, FutureFormat, ZmqueueError
from zmqueue.model import MiB

EXIT_FAILED = 1
EXIT_CONFIG = 78
GC_ALLOCATIONS = 50_000
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # numbers of mallopt(3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="zmqueue broker", description="One broker of a zmqueue cluster.")
    parser.add_argument("--id", type=int, required=True, help="which member of the cluster this is")
    parser.add_argument("--data-dir", type=Path, required=True, help="the cluster's data folder")
    parser.add_argument("--config", type=Path, default=None, help="settings, as in conf/zmqueue.toml")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s broker {arguments.id} %(levelname)s %(name)s: %(message)s"
    )
    faulthandler.enable()
    try:
        return _serve(arguments.id, arguments.data_dir, arguments.config)
    except (ConfigError, FutureFormat) as error:
        print(f"zmqueue: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except (ZmqueueError, Fatal) as error:
        print(f"zmqueue: broker {arguments.id}: {error}", file=sys.stderr)
        return EXIT_FAILED


def keep_memory() -> None:
    """Have malloc keep what batches are made of. Given back each time, they cost a page fault per 4 KiB again: an
    eighth of the broker's CPU under load when it was measured. Where malloc has no such settings, nothing changes."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 32 * MiB)
        libc.mallopt(M_TRIM_THRESHOLD, 128 * MiB)
        libc.mallopt(M_TOP_PAD, 16 * MiB)


def _serve(broker_id: int, data_dir: Path, config_file: Path | None) -> int:
    cluster = read_cluster_file(data_dir)
    if cluster is None:
        raise ConfigError(f"{data_dir} holds no cluster: `zmqueue up` makes one")
    if not 0 <= broker_id < len(cluster.members):
        raise ConfigError(f"broker {broker_id} is not one of the {len(cluster.members)} of this cluster")
    config = with_cluster(load(config_file, os.environ, {}), cluster, data_dir).config
    broker = Broker(cluster, broker_id, config, data_dir, read_secret(data_dir))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: broker.stop())
    keep_memory()
    # What is alive now stays alive, and hardly anything we make is part of a cycle: the collector may look seldom.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 100)
    clean = False
    try:
        broker.run()
        clean = True
    finally:
        broker.close(clean)
    return 0


if __name__ == "__main__":
    sys.exit(main())
