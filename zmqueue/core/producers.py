"""What each idempotent producer last wrote into one partition: a pure function of the log.

Sequences count records. A batch that continues its producer's sequence is new; one that repeats any of the last
REMEMBERED batches is a duplicate with a known offset; one that is older is a duplicate without; anything else is
refused, because accepting it would leave a hole or write twice. Leaders and followers keep the table alike as they
append, and rebuild it from the log after a truncation, so whoever leads next knows what the last leader knew.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

from zmqueue import errors
from zmqueue.wire.batch import BatchHeader

REMEMBERED = 8
PRODUCERS_MAX = 10_000


class Written(Struct, array_like=True, gc=False):
    first_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int


class Producer(Struct, array_like=True):
    epoch: int
    batches: list[Written] = field(default_factory=list)


_decoder = msgspec.msgpack.Decoder(list[tuple[int, Producer]])


class Producers:
    def __init__(self, headers: Iterable[BatchHeader] = ()) -> None:
        self._producers: dict[int, Producer] = {}  # the least recently writing one first
        for header in headers:
            self.note(header)

    def check(self, header: BatchHeader) -> Written | None:
        """None: new, append it. A `Written`: it is there already. Raises what the producer has to hear otherwise."""
        producer = self._producers.get(header.producer_id)
        if producer is None or header.producer_epoch > producer.epoch:
            if header.base_sequence != 0:
                if producer is None:
                    raise errors.UnknownProducer(f"producer {header.producer_id} is not known here")
                raise errors.OutOfOrderSequence("a new producer epoch begins at sequence 0")
            return None
        if header.producer_epoch < producer.epoch:
            raise errors.ProducerFenced(f"producer {header.producer_id} has a newer epoch, {producer.epoch}")
        last = producer.batches[-1].last_sequence
        if header.base_sequence == last + 1:
            return None
        if header.base_sequence > last + 1:
            raise errors.OutOfOrderSequence(f"sequence {header.base_sequence} follows {last}")
        if header.last_sequence > last:
            # Not to be called a duplicate, which the producer takes for success: part of it is not written.
            raise errors.OutOfOrderSequence(
                f"sequences up to {last} are written, the batch ends at {header.last_sequence}"
            )
        for written in producer.batches:
            if (written.first_sequence, written.last_sequence) == (header.base_sequence, header.last_sequence):
                return written
        raise errors.DuplicateSequence(f"sequences {header.base_sequence} to {header.last_sequence} are long written")

    def note(self, header: BatchHeader) -> None:
        """This batch, checked before or already in the log, was appended."""
        if header.producer_id < 0:
            return
        producer = self._producers.pop(header.producer_id, None)
        if producer is None or producer.epoch != header.producer_epoch:
            producer = Producer(header.producer_epoch)
        self._producers[header.producer_id] = producer
        first, base, more = header.base_sequence, header.base_offset, header.last_offset_delta
        batches = producer.batches
        batches.append(Written(first, first + more, base, base + more + 1))
        if len(batches) > REMEMBERED:
            del batches[0]
        if len(self._producers) > PRODUCERS_MAX:
            del self._producers[next(iter(self._producers))]

    def last_batches(self) -> dict[int, int]:
        """By producer, where the last batch of each begins: without it the log would not tell of that producer."""
        return {i: producer.batches[-1].base_offset for i, producer in self._producers.items()}

    def copy(self) -> Producers:
        twin = Producers()
        twin._producers = {i: Producer(p.epoch, p.batches.copy()) for i, p in self._producers.items()}
        return twin

    def replace(self, other: Producers) -> None:
        self._producers = other._producers

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(list(self._producers.items()))

    @staticmethod
    def decode(data: bytes) -> Producers:
        """What `encode` gave; an empty state for no bytes. Raises msgspec.MsgspecError."""
        found = Producers()
        if data:
            found._producers = dict(_decoder.decode(data))
        return found

    def __len__(self) -> int:
        return len(self._producers)
