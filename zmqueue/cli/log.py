"""`log segments|index|dump|verify`: what lies in the folders of partitions. No broker is needed, and none disturbed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from zmqueue.cli.options import Choices, F, Failed, data_dir_option, output_option

if TYPE_CHECKING:
    from zmqueue.log.inspect import Found, IndexInfo, Place, SegmentInfo
    from zmqueue.log.secondary import FileDescription


@click.group()
@data_dir_option
def log() -> None:
    """Look into the logs of partitions on disk, and prove them."""


def where(command: F) -> F:
    """PATH and what narrows it down."""
    for option in (
        data_dir_option,
        click.option("--broker", type=click.IntRange(min=0), metavar="N", help="Only of this broker."),
        click.option("-p", "--partition", type=click.IntRange(min=0), metavar="P", help="Only this partition."),
        click.option(
            "--topic", metavar="NAME", help="Only of this topic: its name, or the beginning of its id in hex."
        ),
        click.argument("path", required=False, type=click.Path(exists=True, file_okay=False)),
    ):
        command = option(command)
    return command


class Chosen:
    """The partitions that a command line means, with the names of their topics where the brokers' folders tell."""

    def __init__(
        self, choices: Choices, path: str | None, topic: str | None, partition: int | None, broker: int | None
    ) -> None:
        from zmqueue.log.files import open_files
        from zmqueue.log.inspect import broker_folders, find

        self.files = open_files("disk", {})
        self.path = str(Path(path).absolute()) if path is not None else str(choices.data_dir)
        self.whole = topic is None and partition is None and broker is None
        self.brokers = broker_folders(self.files, self.path)
        found = find(self.files, self.path)
        if not found and not self.brokers:
            raise Failed(3, f"{self.path} is no folder of a partition, of a broker or of a cluster")
        self._names = self._topic_names(found)
        self.places = [
            place
            for place in found
            if (broker is None or place.broker == broker)
            and (partition is None or place.partition == partition)
            and (topic is None or self._is_of(place, topic))
        ]
        if not self.places and not self.whole:
            raise Failed(3, f"no such partition in {self.path}")

    def _topic_names(self, places: list[Place]) -> dict[str, str]:
        from zmqueue.broker.raft_folder import topic_names
        from zmqueue.errors import ZmqueueError

        names: dict[str, str] = {}
        for folder in sorted({place.broker_folder for place in places if place.broker_folder is not None}):
            try:
                names |= {topic_id.hex(): name for topic_id, name in topic_names(Path(folder) / "raft").items()}
            except ZmqueueError as error:
                click.echo(f"names of topics are not known from {folder}: {error}", err=True)
        return names

    def _is_of(self, place: Place, topic: str) -> bool:
        return self._names.get(place.topic_id) == topic or (len(topic) >= 4 and place.topic_id.startswith(topic))

    def name(self, place: Place) -> str:
        return self._names.get(place.topic_id, place.topic_id)

    def fields(self, place: Place) -> dict[str, Any]:
        return {
            "folder": place.folder,
            "broker": place.broker,
            "topic": self._names.get(place.topic_id),
            "topic_id": place.topic_id or None,
            "partition": place.partition,
            "in_use_by": place.holder,
        }

    def title(self, place: Place) -> str:
        used = f" (in use by process {place.holder})" if place.holder is not None else ""
        if place.partition is None:
            return f"{place.folder}{used}"
        broker = f"broker {place.broker}: " if place.broker is not None else ""
        return f"{broker}{self.name(place)}-{place.partition}, {place.folder}{used}"


def show(
    choices: Choices,
    chosen: Chosen,
    name: str,
    headers: tuple[str, ...],
    describe: Callable[[Any, str], Iterator[Any]],
    row: Callable[[Any], tuple[str, ...]],
    more: tuple[tuple[str, ...], Callable[[Any, str], list[Any]], Callable[[Any], tuple[str, ...]]] | None = None,
) -> None:
    """A table for each partition; `more`: of a second kind of file, if there is any."""
    from zmqueue.cli.output import print_json, print_table

    found = [
        (place, list(describe(chosen.files, place.folder)), more[1](chosen.files, place.folder) if more else [])
        for place in chosen.places
    ]
    choices.printed = True
    if choices.json:
        extra = [{"secondary": [other._asdict() for other in others]} if more else {} for _, _, others in found]
        print_json(
            [chosen.fields(place) | {name: infos} | add for (place, infos, _), add in zip(found, extra, strict=True)]
        )
        return
    for place, infos, others in found:
        click.echo(chosen.title(place))
        print_table(headers, [row(info) for info in infos])
        if more and others:
            print_table(more[0], [more[2](other) for other in others])


# -- segments and index ------------------------------------------------------------------------------------------


@log.command()
@where
@output_option
@click.pass_obj
def segments(choices: Choices, path: str | None, topic: str | None, partition: int | None, broker: int | None) -> None:
    """List the segments in PATH: the folder of a partition, a broker or a cluster.  [default: --data-dir]

    TAIL: bytes behind the last whole batch, which a running broker is writing or a start would cut off.
    """
    from zmqueue.log.inspect import describe_segments

    headers = ("BASE", "NEXT", "RECORDS", "BATCHES", "BYTES", "TAIL", "FIRST", "LAST", "STATE", "CODECS")
    chosen = Chosen(choices, path, topic, partition, broker)
    show(choices, chosen, "segments", headers, describe_segments, segment_row)


def segment_row(info: SegmentInfo) -> tuple[str, ...]:
    state = "active" if info.active else "sealed"
    return (
        *map(str, (info.base_offset, info.next_offset, info.records, info.batches, info.bytes, info.tail_bytes)),
        as_time(info.first_timestamp),
        as_time(info.last_timestamp),
        state if info.damage is None or (info.active and info.tail_bytes) else "damaged",
        " ".join(f"{name}:{count}" for name, count in sorted(info.codecs.items())) or "-",
    )


def as_time(timestamp_ms: int | None) -> str:
    if timestamp_ms is None or timestamp_ms < 0:
        return "-"
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    except (ValueError, OverflowError, OSError):
        return str(timestamp_ms)


@log.command()
@where
@output_option
@click.pass_obj
def index(choices: Choices, path: str | None, topic: str | None, partition: int | None, broker: int | None) -> None:
    """Show how well the segments in PATH are indexed.

    BEHIND: from the last entry to the end of the segment. GAP: the longest way between two entries, which is what a
    lookup may have to walk. The index of the active segment is in the broker's memory alone.
    """
    from zmqueue.log.inspect import describe_indexes
    from zmqueue.log.secondary import describe_index

    headers = ("BASE", "STATE", "ENTRIES", "BYTES/ENTRY", "ENTRIES/BATCH", "BEHIND", "GAP", "FILE")
    chosen = Chosen(choices, path, topic, partition, broker)
    show(choices, chosen, "indexes", headers, describe_indexes, index_row, (SECONDARY, describe_index, secondary_row))


SECONDARY = ("FROM", "END", "FIELD", "ENTRIES", "PAGES", "FILE", "STATE")


def secondary_row(found: FileDescription) -> tuple[str, ...]:
    numbers = (found.entries, found.pages, found.bytes)
    field = f"{found.kind}:{found.path}" if found.kind else "-"
    return str(found.from_offset), str(found.end_offset), field, *map(str, numbers), found.error or "ok"


def index_row(info: IndexInfo) -> tuple[str, ...]:
    def cell(value: float | int | None, form: str = "d") -> str:
        return "-" if value is None else format(value, form)

    return (
        str(info.base_offset),
        info.state,
        str(info.entries),
        cell(info.bytes_per_entry, ".0f"),
        cell(info.entries_per_batch, ".3f"),
        cell(info.behind_bytes),
        cell(info.gap_bytes_max),
        str(info.file_bytes),
    )


# -- dump --------------------------------------------------------------------------------------------------------


@log.command()
@where
@click.option("--records", is_flag=True, help="Every record instead of every batch.")
@click.option("--from", "start", type=click.IntRange(min=0), default=0, metavar="OFFSET", help="Begin there.")
@click.option("--to", "end", type=click.IntRange(min=0), metavar="OFFSET", help="End before it.")
@click.option("-n", "--count", type=click.IntRange(min=1), help="Stop after so many lines.")
@click.pass_obj
def dump(
    choices: Choices,
    path: str | None,
    topic: str | None,
    partition: int | None,
    broker: int | None,
    records: bool,
    start: int,
    end: int | None,
    count: int | None,
) -> None:
    """Print the batches in PATH, or their records, as JSON: one object a line.

    Records are text where they are UTF-8, else {"base64": …}. Damage ends the dump with exit code 1.
    """
    from zmqueue.errors import CorruptLog

    chosen = Chosen(choices, path, topic, partition, broker)
    out, left = sys.stdout.buffer, count
    for place in chosen.places:
        try:
            left = dump_place(chosen, place, records, start, end, left, out)
        except CorruptLog as error:
            out.flush()
            if place.holder is None:
                raise
            # Most likely a batch that was being written.
            click.echo(f"stopped at what is not whole yet: {error}", err=True)
        if left == 0:
            break
    out.flush()


def dump_place(
    chosen: Chosen, place: Place, records: bool, start: int, end: int | None, left: int | None, out: IO[bytes]
) -> int | None:
    from zmqueue.cli.records import as_line
    from zmqueue.log.inspect import batch_fields, batches_in

    whose = {} if len(chosen.places) == 1 else {"broker": place.broker, "topic": chosen.name(place)}
    if whose:
        whose["partition"] = place.partition
    for found in batches_in(chosen.files, place.folder, start, end, bodies=records):
        for fields in records_of(found, start, end) if records else [batch_fields(found)]:
            out.write(as_line(whose | fields))
            if left is not None:
                left -= 1
                if left == 0:
                    return 0
    return left


def records_of(found: Found, start: int, end: int | None) -> Iterator[dict[str, Any]]:
    from zmqueue.cli.records import record_fields
    from zmqueue.log.inspect import records_in

    for record in records_in(found):
        if record.offset >= start and (end is None or record.offset < end):
            yield record_fields(record)


# -- verify ------------------------------------------------------------------------------------------------------


@log.command()
@where
@output_option
@click.pass_obj
def verify(choices: Choices, path: str | None, topic: str | None, partition: int | None, broker: int | None) -> None:
    """Prove everything in PATH: checksums, offsets, epochs, indexes, small files, and that nothing else lies there.

    Prints one line for each problem; exit code 1 if there is any. With -o json one document: what was read, and the
    problems with path, position and text.
    """
    from zmqueue.cli.output import print_json
    from zmqueue.cli.progress import Progress
    from zmqueue.log.inspect import broker_of
    from zmqueue.log.verify import Verified, verify_broker, verify_partition

    chosen = Chosen(choices, path, topic, partition, broker)
    verified = Verified()
    with Progress() as progress:

        def told(so_far: Verified) -> None:
            if progress.due:
                rate = so_far.bytes / progress.elapsed_s / 1e6
                done = f"{so_far.partitions} of {len(chosen.places)} partitions"
                progress.show(
                    f"{done}, {so_far.bytes / 1e6:,.0f} MB, {rate:,.0f} MB/s, {len(so_far.problems)} problems"
                )

        for place in chosen.places:
            verify_partition(chosen.files, place, verified, told)
        for folder in chosen.brokers:
            if chosen.whole or (topic is None and partition is None and broker_of(folder) == broker):
                verify_broker(chosen.files, folder, verified)
        elapsed_s = progress.elapsed_s
    choices.printed = True
    if choices.json:
        print_json(verified)
    else:
        for problem in verified.problems:
            click.echo(str(problem))
    holders = sorted({holder for place in chosen.places if (holder := place.holder) is not None})
    used = f"; in use by {', '.join(map(str, holders))}" if holders else ""
    click.echo(
        f"{verified.partitions} partitions, {verified.segments} segments, {verified.batches} batches,"
        f" {verified.bytes} bytes in {elapsed_s:.1f} s: {len(verified.problems) or 'no'} problems{used}",
        err=True,
    )
    if verified.problems:
        raise Failed(1)
