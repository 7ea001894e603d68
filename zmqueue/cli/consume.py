"""`consume`: records of a topic as lines, as JSON, or in a format of one's own. Values pass through as raw bytes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from heapq import merge
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

import click

from zmqueue.cli.cluster import EXIT_NOT_FOUND
from zmqueue.cli.names import complete_groups, complete_topics, nearest
from zmqueue.cli.options import Choices, Failed, bootstrap_option
from zmqueue.cli.records import as_line, record_fields

if TYPE_CHECKING:
    from zmqueue.model import ConsumerRecord, TopicPartition

POLL_MS = 200
PAGE = 500
Write = Callable[["ConsumerRecord"], bytes]


class Where(NamedTuple):
    """Where to begin: `at` an offset, `back` from the end, at a `time` in ms, or at one of the two ends."""

    kind: Literal["start", "end", "at", "back", "time"]
    number: int = 0


def parse_where(text: str, option: str = "-o") -> Where:
    if text in ("start", "end"):
        return Where("start" if text == "start" else "end")
    if re.fullmatch(r"[0-9]{1,18}", text):
        return Where("at", int(text))
    if re.fullmatch(r"-[0-9]{1,18}", text):
        return Where("back", int(text[1:]))
    if text.startswith("@"):
        return Where("time", parse_time_ms(text[1:], option))
    raise click.UsageError(f"{option} {text!r} is none of start, end, N, -N, @TIME")


def parse_time_ms(text: str, option: str = "-o") -> int:
    """Milliseconds since 1970, or ISO 8601; local time if it names no zone."""
    if re.fullmatch(r"[0-9]{1,15}", text):
        return int(text)
    try:
        return int(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise click.UsageError(
            f"{option} @{text}: not milliseconds and not a time such as 2025-01-31T12:00:00Z"
        ) from None


# -- formats -----------------------------------------------------------------------------------------------------

_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_FIELDS: dict[str, Write] = {
    "t": lambda record: record.topic.encode(),
    "p": lambda record: b"%d" % record.partition,
    "o": lambda record: b"%d" % record.offset,
    "k": lambda record: record.key or b"",
    "v": lambda record: record.value or b"",
    "T": lambda record: b"%d" % record.timestamp,
    "h": lambda record: b",".join(name.encode() + b"=" + (value or b"") for name, value in record.headers or ()),
}


def compile_format(text: str) -> Write:
    """`%t %p %o %k %v %T %h` and `%%`, with \\n, \\t, \\r, \\0, \\xHH and \\\\."""
    parts: list[bytes | Write] = []
    for piece in re.finditer(r"%(?P<field>.?)|\\x(?P<hex>[0-9a-fA-F]{2})|\\(?P<escape>.?)|[^%\\]+", text, re.DOTALL):
        field, escape = piece["field"], piece["escape"]
        if field is not None:
            if field != "%" and field not in _FIELDS:
                raise click.UsageError(f"-f: unknown field %{field}; there are %t %p %o %k %v %T %h %%")
            parts.append(b"%" if field == "%" else _FIELDS[field])
        elif piece["hex"] is not None:
            parts.append(bytes.fromhex(piece["hex"]))
        elif escape is not None:
            if escape not in _ESCAPES:
                raise click.UsageError(f"-f: unknown escape \\{escape}; there are \\n \\t \\r \\0 \\xHH \\\\")
            parts.append(_ESCAPES[escape])
        else:
            parts.append(piece[0].encode(errors="surrogateescape"))
    return lambda record: b"".join(part if isinstance(part, bytes) else part(record) for part in parts)


def as_json(record: ConsumerRecord) -> bytes:
    return as_line({"topic": record.topic, "partition": record.partition, **record_fields(record)})


# -- the command -------------------------------------------------------------------------------------------------


@click.command()
@click.argument("topic", shell_complete=complete_topics)
@click.option(
    "-o",
    "--offset",
    "where",
    metavar="start|end|N|-N|@TIME",
    help="Where to begin: an end, an offset, N before the end (per partition), or a time (ISO or ms).  "
    "[default: end; with --where: start]",
)
@click.option(
    "-p",
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only this partition; repeatable.  [default: all]",
)
@click.option(
    "-g",
    "--group",
    metavar="GROUP",
    shell_complete=complete_groups,
    help="Join this group: go on where it stands, share the partitions with its members, commit what was printed.",
)
@click.option("-n", "--count", type=click.IntRange(min=1), help="Stop after so many records.")
@click.option("-e", "--exit-at-end", is_flag=True, help="Stop at what was the end when the command started.")
@click.option(
    "--where",
    "value",
    metavar="VALUE",
    help="Only records with this value in the field that the topic is indexed by (index.secondary); stops at the end.",
)
@click.option(
    "--reverse", is_flag=True, help="The newest first: what lies before -o, back to the start. It stops there."
)
@click.option(
    "-f",
    "--format",
    "format_",
    default=r"%v\n",
    show_default=True,
    metavar="FORMAT|json",
    help="%t topic, %p partition, %o offset, %k key, %v value, %T timestamp, %h headers, \\n and so on.",
)
@bootstrap_option
@click.pass_obj
def consume(
    choices: Choices,
    topic: str,
    where: str | None,
    partitions: tuple[int, ...],
    group: str | None,
    count: int | None,
    exit_at_end: bool,
    value: str | None,
    reverse: bool,
    format_: str,
) -> None:
    """Print the records of TOPIC.

    With -f json, one object a line: topic, partition, offset, timestamp, key, value, headers; text where it is UTF-8,
    else {"base64": …}.

    With -g each record is printed at least once by some member of the group: what was printed is committed right after,
    and at the end (-n, -e, Ctrl-C), so a crash can print the last few records again. -o start|end says where to begin
    where nothing is committed yet; to move a group, see `zmqueue group seek`. -e then means the partitions that this
    member was given.
    """
    from zmqueue.model import check_group_name, check_topic_name

    check_topic_name(topic, internal=True)
    if value is not None and reverse:
        raise click.UsageError("--where and --reverse do not go together")
    begin = parse_where(where or ("end" if value is None else "start"))
    write = as_json if format_ == "json" else compile_format(format_)
    if group is not None:
        check_group_name(group)
        if partitions or value is not None or reverse:
            raise click.UsageError("-g reads what the group gives: -p, --where and --reverse do not go with it")
        if begin.kind not in ("start", "end"):
            raise click.UsageError(f"-g goes on where the group stands: move it by zmqueue group seek {group} --to …")
    bootstrap = choices.reachable_bootstrap()
    if group is not None:
        from zmqueue.cli.member import consume_as_member

        reset = "earliest" if begin.kind == "start" else "latest"
        consume_as_member(bootstrap, topic, group, reset, count, exit_at_end, write)
        return

    from zmqueue import Consumer

    with Consumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False) as consumer:
        assigned = chosen_partitions(consumer, topic, partitions)
        if value is not None:
            copy_matching(consumer, assigned, begin, value, count, write, sys.stdout.buffer)
            return
        if reverse:
            copy_backward(consumer, assigned, begin, count, write, sys.stdout.buffer)
            return
        consumer.assign(assigned)
        seek(consumer, assigned, begin)
        ends = consumer.end_offsets(assigned) if exit_at_end else None
        copy(consumer, assigned, ends, count, write, sys.stdout.buffer)


def chosen_partitions(consumer: Any, topic: str, partitions: tuple[int, ...]) -> list[TopicPartition]:
    """These of the topic, all of them if none are named."""
    from zmqueue.model import TopicPartition

    known = consumer.partitions_for_topic(topic)
    if not known:
        raise Failed(EXIT_NOT_FOUND, f"no topic {topic!r}{nearest(topic, consumer.topics())}")
    missing = sorted(set(partitions) - set(known))
    if missing:
        text = f"topic {topic!r} has no partition {missing[0]}: there are 0 to {max(known)}"
        raise Failed(EXIT_NOT_FOUND, text)
    return [TopicPartition(topic, number) for number in sorted(set(partitions) or set(known))]


def seek(consumer: Any, assigned: list[TopicPartition], begin: Where) -> None:
    match begin.kind:
        case "start":
            consumer.seek_to_beginning(*assigned)
        case "end":
            consumer.seek_to_end(*assigned)
        case _:
            for partition, offset in offsets_at(consumer, assigned, begin).items():
                if offset is None:  # nothing is that young
                    consumer.seek_to_end(partition)
                else:
                    consumer.seek(partition, offset)


def offsets_at(consumer: Any, assigned: list[TopicPartition], begin: Where) -> dict[TopicPartition, int | None]:
    """Offsets of a place; None is the end."""
    match begin.kind:
        case "start":
            return dict.fromkeys(assigned, 0)
        case "end":
            return dict.fromkeys(assigned, None)
        case "at":
            return dict.fromkeys(assigned, begin.number)
        case "back":
            first, ends = consumer.beginning_offsets(assigned), consumer.end_offsets(assigned)
            return {each: max(first[each], ends[each] - begin.number) for each in assigned}
        case "time":
            found = consumer.offsets_for_times(dict.fromkeys(assigned, begin.number))
            return {each: None if (at := found.get(each)) is None else at.offset for each in assigned}


def copy_matching(
    consumer: Any,
    assigned: list[TopicPartition],
    begin: Where,
    value: str,
    count: int | None,
    write: Write,
    out: IO[bytes],
) -> None:
    """Prints the records with a value, by partition."""
    wanted = value.encode(errors="surrogateescape")
    left = count
    for partition, offset in offsets_at(consumer, assigned, begin).items():
        while offset is not None and left != 0:
            limit = PAGE if left is None else min(PAGE, left)
            found = consumer.find(partition.topic, wanted, [partition.partition], limit, {partition: offset})
            out.write(b"".join(map(write, found)))
            out.flush()
            left = None if left is None else left - len(found)
            offset = found[-1].offset + 1 if len(found) == limit else None


def copy_backward(
    consumer: Any, assigned: list[TopicPartition], begin: Where, count: int | None, write: Write, out: IO[bytes]
) -> None:
    """Prints records from the newest to the oldest; those of several partitions by their timestamps."""

    def pages(partition: TopicPartition, before: int | None) -> Iterator[ConsumerRecord]:
        page = PAGE if count is None else min(PAGE, count)
        while records := consumer.read_backward(partition, before, page):
            yield from records
            before = records[-1].offset
            out.flush()

    starts = offsets_at(consumer, assigned, begin)
    newest_first = merge(*(pages(*each) for each in starts.items()), key=lambda record: -record.timestamp)
    for record in islice(newest_first, count):
        out.write(write(record))
    out.flush()


def copy(
    consumer: Any,
    assigned: list[TopicPartition],
    ends: dict[TopicPartition, int] | None,
    count: int | None,
    write: Write,
    out: IO[bytes],
) -> None:
    """Prints records until `count` of them or, where `ends` are given, until every partition has reached its own."""
    left = count
    while ends is None or any(consumer.position(partition) < ends[partition] for partition in assigned):
        polled = consumer.poll(timeout_ms=POLL_MS, max_records=left)
        for partition, records in polled.items():
            for record in records:
                if ends is not None and record.offset >= ends[partition]:
                    break
                out.write(write(record))
                if left is not None:
                    left -= 1
                    if left == 0:
                        out.flush()
                        return
        if polled:
            out.flush()
    out.flush()
