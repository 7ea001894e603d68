"""What applications use to talk to a cluster.

    producer    send, send_many        consumer      poll, poll_batches         admin    topics, cluster
    ├ columns   records, measured      ├ questions   what needs no position
    ├ buffer    batches being filled   ├ subscription   what is read
    ├ sender    batches on their way   ├ fetcher     who is asked for what
    └ ordering  what is sent again     ├ handout     what the application gets
                (pure)                 ├ slots       one partition being read
                                       └ records     batches, opened
                aio_producer, aio_consumer   for an event loop, on aio_gate and aio_worker
                routing    which broker to ask  ─ metadata (pure)
                network    one IO thread per client object: requests, connections, timers

Callers' threads and the IO thread meet in two places only: `Network.post`, and state behind a lock that says so.
"""
