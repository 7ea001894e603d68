"""Tests of one rule each, in tests/unit: for what no schedule shows, because another rule hides it or because it costs
availability and no record, and for what schedules show rarely. That each of them fails without its rule is proved by
tests/sim/proof.py.
"""

from __future__ import annotations

DIRECTED: dict[str, str] = {
    "no-barrier-on-take-over": "core/test_controller.py::test_before_its_barrier_is_applied_it_does_nothing",
    "no-epoch-check-on-the-wire": "core/test_replica.py::test_an_acknowledgement_of_an_older_epoch_counts_for_nothing",
    "alter-isr-without-cas": "core/test_metadata.py::test_an_isr_change_that_does_not_fit_is_refused",
    "no-broker-epoch-in-alter-isr": "core/test_metadata.py::test_an_isr_change_that_does_not_fit_is_refused",
    "proposal-rebuilt-on-retry": "core/test_proposals.py::test_a_proposal_sent_again_is_the_one_that_was_made",
    "proposal-forgotten-early": (
        "core/test_proposals.py::test_whom_a_proposal_under_way_would_add_counts_until_its_result_is_known"
    ),
    "no-resignation": (
        "core/test_replica.py::test_a_leader_that_sees_a_newer_epoch_resigns_at_once_and_answers_all_who_wait"
    ),
    "late-fetch-answer-used": (
        "core/test_follower.py::test_a_late_duplicate_of_a_diverging_answer_never_cuts_what_was_acknowledged"
    ),
    "flush-of-another-generation-counts": (
        "log/test_flusher.py::test_a_log_truncated_during_its_sync_is_not_durable_by_it"
    ),
    "no-leader-epoch-start": (
        "core/test_leader.py::test_a_follower_below_the_start_of_this_leaders_epoch_is_not_proposed"
    ),
    "no-lease": "core/test_leader.py::test_the_lease_is_checked_again_before_the_answer",
    "late-registration-silences-the-broker": (
        "core/test_metadata.py::test_a_late_registration_does_not_silence_the_present_life"
    ),
    "unclean-session-not-told": ("log/test_session.py::test_a_power_cut_loses_what_was_acknowledged_before_its_sync"),
    "replica-let-go-keeps-its-epoch": (
        "core/test_metadata.py::test_a_replica_that_was_let_go_and_is_added_again_acknowledges_in_a_new_epoch"
    ),
    "truncated-log-is-not-flushed-again": (
        "core/test_follower.py::"
        "test_what_a_truncation_leaves_is_acknowledged_although_flushes_of_before_no_longer_count"
    ),
}
