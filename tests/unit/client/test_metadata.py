from __future__ import annotations

import pytest

from zmqueue.client.metadata import Metadata
from zmqueue.errors import WrongCluster
from zmqueue.wire import messages

ID, OTHER_ID = b"a" * 16, b"b" * 16


def news(
    index: int, *leaders: tuple[int, int], topic_id: bytes = ID, topics: bool = True, cluster: str = "c"
) -> messages.MetadataResponse:
    """Partition n of topic t has the n-th (leader, epoch)."""
    rows = [messages.PartitionInfo(n, leader, epoch, [1, 2], [1], []) for n, (leader, epoch) in enumerate(leaders)]
    info = messages.TopicInfo("t", topic_id, 2, 1, "disk", {}, rows)
    brokers = [messages.BrokerInfo(b, "127.0.0.1", 9000 + b, 1, False) for b in (1, 2, 3)]
    return messages.MetadataResponse(cluster, 1, index, brokers, [info] if topics else [])


def known(*answers: messages.MetadataResponse) -> Metadata:
    metadata = Metadata()
    for answer in answers:
        metadata.update(answer, ["t"])
    return metadata


def test_a_newer_answer_replaces_an_older_one() -> None:
    assert known(news(1, (1, 1)), news(2, (2, 2))).leader("t", 0) == (2, 2)


def test_a_lower_leader_epoch_never_overwrites_a_higher_one() -> None:
    assert known(news(1, (2, 5)), news(2, (1, 4))).leader("t", 0) == (2, 5)


def test_a_lower_index_never_overwrites_a_higher_one() -> None:
    metadata = known(news(5, (2, 3)), news(4, (1, 3)))
    assert metadata.leader("t", 0) == (2, 3)
    assert metadata.index == 5


def test_partitions_are_judged_one_by_one() -> None:
    metadata = known(news(5, (1, 1), (1, 9)), news(6, (2, 2), (2, 8)))
    assert (metadata.leader("t", 0), metadata.leader("t", 1)) == ((2, 2), (1, 9))


def test_an_old_answer_may_still_tell_of_partitions_that_nobody_knew() -> None:
    metadata = known(news(5, (1, 1)), news(4, (2, 0), (2, 1)))
    assert metadata.leader("t", 1) == (2, 1)
    assert metadata.leader("t", 0) == (1, 1)


def test_a_hint_counts_only_if_its_epoch_is_newer() -> None:
    metadata = known(news(1, (1, 3)))
    assert not metadata.hint(ID, 0, 2, 3)
    assert metadata.hint(ID, 0, 2, 4)
    assert metadata.leader("t", 0) == (2, 4)
    metadata.update(news(2, (1, 3)), ["t"])
    assert metadata.leader("t", 0) == (2, 4), "the answer is from before the election that the hint told of"


def test_a_hint_to_an_unknown_broker_or_topic_is_no_use() -> None:
    metadata = known(news(1, (1, 3)))
    assert not metadata.hint(ID, 0, 9, 4)
    assert not metadata.hint(OTHER_ID, 0, 2, 4)


def test_a_topic_made_anew_starts_from_its_own_epochs() -> None:
    metadata = known(news(5, (1, 7)), news(6, (2, 1), topic_id=OTHER_ID))
    assert metadata.leader("t", 0) == (2, 1)
    assert ID not in metadata.names
    metadata.update(news(5, (1, 7)), ["t"])
    assert metadata.topics["t"].topic_id == OTHER_ID


def test_a_topic_goes_by_an_answer_that_was_asked_for_it_and_is_not_older() -> None:
    metadata = known(news(5, (1, 1)))
    metadata.update(news(4, topics=False), ["t"])
    metadata.update(news(6, topics=False), ["other"])
    assert "t" in metadata.topics
    metadata.update(news(6, topics=False), ["t"])
    assert "t" not in metadata.topics
    assert not metadata.names


def test_an_answer_for_all_topics_removes_those_it_lacks() -> None:
    metadata = known(news(5, (1, 1)))
    metadata.update(news(5, topics=False), None)
    assert not metadata.topics


def test_another_cluster_is_refused() -> None:
    metadata = known(news(5, (1, 1)))
    with pytest.raises(WrongCluster):
        metadata.update(news(6, (2, 2), cluster="other"), ["t"])
    assert metadata.leader("t", 0) == (1, 1)
