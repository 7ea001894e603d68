"""`export` and `import`: the records of a topic as JSON lines, and back. Both hold few records at a time.

    {"partition": 0, "offset": 7, "timestamp": 1700000000000, "key": "k", "value": "v", "headers": [["name", "value"]]}

Keys, values and headers are text where they are UTF-8, else {"base64": …}, and null where there is none: a round trip
gives back the very bytes. Nothing is left out silently: a line that is no record ends the import with its number, or is
counted if that was asked for.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from zmqueue.cli.consume import Where, chosen_partitions, copy, parse_where, seek
from zmqueue.cli.names import complete_topics, partitions_for
from zmqueue.cli.options import Choices, Failed, bootstrap_option
from zmqueue.cli.produce import IN_FLIGHT_MAX, LINE_BYTES_MAX
from zmqueue.cli.progress import Progress
from zmqueue.cli.records import Line, as_line, parse_line, record_fields

if TYPE_CHECKING:
    from zmqueue.model import ConsumerRecord, TopicPartition


# -- export ------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("topic", shell_complete=complete_topics)
@click.option(
    "-p",
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only this partition; repeatable.  [default: all]",
)
@click.option(
    "--from",
    "begin",
    default="start",
    show_default=True,
    metavar="start|N|-N|@TIME",
    help="Where to begin: an offset, N before the end (per partition), or a time (ISO or ms).",
)
@click.option(
    "--until",
    "until",
    default="end",
    show_default=True,
    metavar="end|N|-N|@TIME",
    help="Where to end, before that record: at what is the end now, or at an offset or time.",
)
@click.option("-o", "--output", "file", type=click.Path(dir_okay=False), help="Write to this file.  [default: stdout]")
@bootstrap_option
@click.pass_obj
def export(choices: Choices, topic: str, partitions: tuple[int, ...], begin: str, until: str, file: str | None) -> None:
    """Write the records of TOPIC as JSON, one object a line, up to what is the end when the command starts.

    A file has its name only when it is complete; before, it is called FILE.part.
    """
    from zmqueue.model import check_topic_name

    check_topic_name(topic, internal=True)
    first, last = parse_where(begin, "--from"), parse_where(until, "--until")
    if first.kind == "end" or last.kind == "start":
        raise click.UsageError("that exports nothing: --from is start, N, -N or @TIME, --until end, N, -N or @TIME")
    bootstrap = choices.reachable_bootstrap()

    from zmqueue import Consumer

    with Consumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        assigned = chosen_partitions(consumer, topic, partitions)
        ends = end_offsets(consumer, assigned, last)
        consumer.assign(assigned)
        seek(consumer, assigned, first)
        with Progress() as progress, opened(file) as out:
            exported = Exported(progress)
            copy(consumer, assigned, ends, None, exported.line, out)
        click.echo(
            f"exported {exported.count} records of {len(assigned)} partitions{progress.rate(exported.count)}", err=True
        )


class Exported:
    """Makes lines, and counts them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.count = 0
        self.bytes = 0

    def line(self, record: ConsumerRecord) -> bytes:
        line = as_line({"partition": record.partition, **record_fields(record)})
        self.count += 1
        self.bytes += len(line)
        if not self.count & 0xFF and self._progress.due:
            self._progress.show(f"{self.count:,} records, {self.bytes / 1e6:,.1f} MB{self._progress.rate(self.count)}")
        return line


def end_offsets(consumer: Any, assigned: list[TopicPartition], until: Where) -> dict[TopicPartition, int]:
    """Where each partition's part ends: at most at the high watermark of now."""
    ends: dict[TopicPartition, int] = consumer.end_offsets(assigned)
    match until.kind:
        case "at":
            return {partition: min(end, until.number) for partition, end in ends.items()}
        case "back":
            return {partition: max(0, end - until.number) for partition, end in ends.items()}
        case "time":
            found = consumer.offsets_for_times(dict.fromkeys(assigned, until.number))
            return {
                partition: end if found.get(partition) is None else min(end, found[partition].offset)
                for partition, end in ends.items()
            }
    return ends


@contextmanager
def opened(file: str | None) -> Iterator[IO[bytes]]:
    if file is None or file == "-":
        yield sys.stdout.buffer
        return
    part = f"{file}.part"
    with open(part, "wb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, file)


# -- import ------------------------------------------------------------------------------------------------------


class Counted(NamedTuple):
    written: int
    bad: int


@click.command("import")
@click.argument("topic", shell_complete=complete_topics)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True), default="-")
@click.option("--keep-partitions", is_flag=True, help="Into the partition that each line names, not by key.")
@click.option("--skip-bad", is_flag=True, help="Pass over lines that are no records; how many is told at the end.")
@click.option(
    "-z",
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    default="none",
    show_default=True,
)
@bootstrap_option
@click.pass_obj
def import_(choices: Choices, topic: str, file: str, keep_partitions: bool, skip_bad: bool, compression: str) -> None:
    """Write the lines of FILE, as `zmqueue export` makes them, to TOPIC.  [default: stdin]

    Keys, values, headers and timestamps stay as they are; offsets are new. Each line must have a value (or null);
    everything else may be missing. A line that is no record ends the import: what stands before it has been written.
    """
    from zmqueue.model import check_topic_name

    check_topic_name(topic)
    bootstrap = choices.reachable_bootstrap()

    from zmqueue import Producer

    codec = None if compression == "none" else compression
    with (
        open_lines(file) as stream,
        Producer(bootstrap_servers=bootstrap, acks="all", compression_type=codec, linger_ms=5) as producer,
    ):
        known = partitions_for(producer, choices, topic)
        with Progress() as progress:
            counted = Importer(producer, topic, known if keep_partitions else None, progress).run(stream, skip_bad)
        bad = f", {counted.bad} bad lines skipped" if skip_bad else ""
        click.echo(f"imported {counted.written} records{bad}{progress.rate(counted.written)}", err=True)


@contextmanager
def open_lines(file: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdin.buffer
    else:
        with open(file, "rb") as stream:
            yield stream


class Importer:
    """`partitions`: those that lines may name, if they are to be kept."""

    def __init__(self, producer: Any, topic: str, partitions: set[int] | None, progress: Progress) -> None:
        self._producer = producer
        self._topic = topic
        self._partitions = partitions
        self._progress = progress
        # Unacknowledged, oldest first: bounded, and the first that fails ends the import.
        self._futures: deque[Any] = deque()
        self._written = 0

    def run(self, stream: IO[bytes], skip_bad: bool) -> Counted:
        number = bad = 0
        while line := stream.readline(LINE_BYTES_MAX):
            number += 1
            if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
                self._stop(number, f"longer than {LINE_BYTES_MAX} bytes")
            try:
                record = self._parse(line)
            except ValueError as error:
                if not skip_bad:
                    self._stop(number, str(error))
                bad += 1
                click.echo(f"line {number}: {error}: skipped", err=True)
                continue
            self._send(record)
        self._settle(0)
        return Counted(self._written, bad)

    def _parse(self, line: bytes) -> Line:
        record = parse_line(line)
        if self._partitions is not None and record.partition not in self._partitions:
            raise ValueError(f"partition {record.partition} is not one of the topic's {len(self._partitions)}")
        return record

    def _send(self, record: Line) -> None:
        self._futures.append(
            self._producer.send(
                self._topic,
                value=record.value,
                key=record.key,
                headers=record.headers or None,
                partition=None if self._partitions is None else record.partition,
                timestamp_ms=record.timestamp,
            )
        )
        if len(self._futures) >= IN_FLIGHT_MAX:
            self._settle(IN_FLIGHT_MAX // 2)

    def _settle(self, left: int) -> None:
        """Wait for acknowledgements until only so many are out."""
        if not left:
            self._producer.flush()
        while len(self._futures) > left:
            self._futures.popleft().get()
            self._written += 1
        if self._progress.due:
            self._progress.show(f"{self._written:,} records{self._progress.rate(self._written)}")

    def _stop(self, number: int, problem: str) -> None:
        self._settle(0)
        raise Failed(1, f"line {number}: {problem}; the {self._written} records before it have been written")
