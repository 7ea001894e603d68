"""`produce`: records from arguments or from lines of stdin; where each went is printed when it is acknowledged.

Reading and printing go side by side, so that a slow reader of stdin sees its acknowledgements at once and a fast one
is held back by a bounded number of unacknowledged records.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import click

from zmqueue.cli.names import complete_topics, partitions_for
from zmqueue.cli.options import Choices, Failed, bootstrap_option, output_option

IN_FLIGHT_MAX = 10_000
INTERRUPTED_S_MAX = 2.0
LINE_BYTES_MAX = 64 * 1024 * 1024


class Record(NamedTuple):
    key: bytes | None
    value: bytes


@click.command()
@click.argument("topic", shell_complete=complete_topics)
@click.argument("values", nargs=-1, metavar="[VALUE]...")
@click.option("-k", "--key", help="The key of every record.")
@click.option(
    "--key-separator", metavar="TEXT", help="With stdin: split each line into key and value at the first TEXT."
)
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME:VALUE", help="A header; repeatable.")
@click.option("-p", "--partition", type=click.IntRange(min=0), help="[default: by key, else spread]")
@click.option(
    "--acks",
    type=click.Choice(["0", "1", "all"]),
    default="all",
    show_default=True,
    help="Who must have a record: nobody, its leader, all replicas in sync.",
)
@click.option(
    "-z",
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    default="none",
    show_default=True,
)
@bootstrap_option
@output_option
@click.pass_obj
def produce(
    choices: Choices,
    topic: str,
    values: tuple[str, ...],
    key: str | None,
    key_separator: str | None,
    headers: tuple[str, ...],
    partition: int | None,
    acks: str,
    compression: str,
) -> None:
    """Write VALUEs to TOPIC, or one record per line of stdin.

    Prints `PARTITION OFFSET` for each record once it is acknowledged (offset -1 with --acks 0). With -o json, one
    document: {"topic": …, "records": [{"partition": …, "offset": …, "timestamp": …}, …]}, with an "error" at its end if
    not everything could be written. Stops at the first record that fails.
    """
    from zmqueue.model import check_topic_name

    check_topic_name(topic)
    if key_separator is not None and (values or key is not None):
        raise click.UsageError("--key-separator is for lines of stdin, and excludes VALUE and -k")
    if key_separator == "":
        raise click.UsageError("--key-separator must not be empty")
    fixed_key = None if key is None else os.fsencode(key)
    records = (
        (Record(fixed_key, os.fsencode(value)) for value in values)
        if values
        else records_of_lines(sys.stdin.buffer, fixed_key, key_separator)
    )
    parsed = parse_headers(headers)
    bootstrap = choices.reachable_bootstrap()

    from zmqueue import Producer

    with Producer(
        bootstrap_servers=bootstrap,
        acks="all" if acks == "all" else int(acks),
        compression_type=None if compression == "none" else compression,
        # Lines of stdin may come by the million: a short wait lets them share batches.
        linger_ms=0 if values else 5,
    ) as producer:
        partitions_for(producer, choices, topic)
        printer = Printer(choices, topic)
        try:
            for record in records:
                printer.add(
                    producer.send(topic, value=record.value, key=record.key, headers=parsed, partition=partition)
                )
            producer.flush()
        except Exception as error:
            # What was sent before is still awaited and printed, so that the user knows how far it went.
            printer.finish(error)
        except KeyboardInterrupt as interrupt:
            printer.finish(interrupt, wait_s=INTERRUPTED_S_MAX)
        else:
            printer.finish()
        printer.raise_failure()


def parse_headers(texts: tuple[str, ...]) -> list[tuple[str, bytes]] | None:
    headers = []
    for text in texts:
        name, separator, value = text.partition(":")
        if not separator or not name:
            raise click.UsageError(f"-H {text!r} is not NAME:VALUE")
        headers.append((name, os.fsencode(value)))
    return headers or None


def records_of_lines(stream: IO[bytes], key: bytes | None, separator: str | None) -> Iterator[Record]:
    """The records of a stream, one per line; the last line may lack its newline."""
    mark = None if separator is None else os.fsencode(separator)
    number = 0
    while line := stream.readline(LINE_BYTES_MAX):
        number += 1
        if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
            raise Failed(1, f"line {number} is longer than {LINE_BYTES_MAX} bytes")
        line = line.removesuffix(b"\n")
        if mark is None:
            yield Record(key, line)
            continue
        found_key, found, value = line.partition(mark)
        if not found:
            raise Failed(1, f"line {number} has no key separator {separator!r}")
        yield Record(found_key, value)


class Printer:
    """Prints acknowledgements in the order of sending, in a thread of its own."""

    def __init__(self, choices: Choices, topic: str) -> None:
        self._choices = choices
        self._topic = topic
        self._futures: queue.Queue[Any] = queue.Queue(IN_FLIGHT_MAX)
        self._failure: BaseException | None = None
        self._stopped_by: BaseException | None = None
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="printer", daemon=True)
        self._thread.start()

    def add(self, future: Any) -> None:
        self.raise_failure()
        self._futures.put(future)

    def finish(self, error: BaseException | None = None, wait_s: float | None = None) -> None:
        """No more records come, because of `error` if there is one; what was sent is still awaited."""
        self._stopped_by = error
        if wait_s is not None:  # do not print what is still under way
            self._failure = self._failure or error
        self._futures.put(None)
        self._thread.join(wait_s)
        self._failure = self._failure or error

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (future := self._futures.get()) is not None:
            if self._failure is not None:
                continue  # keep taking, so that nobody waits for room
            try:
                self._print(sys.stdout, future.get())
                if self._futures.empty():
                    sys.stdout.flush()
            except Exception as error:  # handed to the thread that sends
                self._failure = error
        if self._choices.json and not isinstance(self._failure, BrokenPipeError):
            self._close_document(sys.stdout)

    def _print(self, out: IO[str], metadata: Any) -> None:
        if self._choices.json:
            out.write(self._opening() if self._count == 0 else ",\n  ")
            out.write(
                f'{{"partition": {metadata.partition}, "offset": {metadata.offset}, "timestamp": {metadata.timestamp}}}'
            )
        else:
            out.write(f"{metadata.partition} {metadata.offset}\n")
        self._count += 1

    def _opening(self) -> str:
        self._choices.printed = True
        return f'{{"topic": "{self._topic}", "records": [\n  '

    def _close_document(self, out: IO[str]) -> None:
        import json

        if self._count == 0:
            out.write(self._opening())
        out.write("\n]")
        failure = self._failure or self._stopped_by
        if failure is not None:
            name = getattr(failure, "name", type(failure).__name__)
            out.write(f', "error": {json.dumps({"name": name, "message": str(failure)})}')
        out.write("}\n")
        out.flush()
