"""What applications use to talk to a cluster.

    producer    send, send_many        consumer    poll, poll_batches      admin    topics, cluster
    ├ columns   records, measured      ├ fetcher   who is asked for what
    ├ buffer    batches being filled   └ records   batches, opened
    ├ sender    batches on their way
    └ ordering  what is sent again (pure)
                routing    which broker to ask  ─ metadata (pure)
                network    one IO thread per client object: requests, connections, timers

Callers' threads and the IO thread meet in two places only: `Network.post`, and state behind a lock that says so.
"""
