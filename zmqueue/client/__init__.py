"""What applications use to talk to a cluster.

    producer    send, send_many        consumer      poll, poll_batches         admin    topics, groups, cluster
    ├ columns   records, measured      ├ questions   what needs no position
    ├ buffer    batches being filled   ├ subscription   what is read without a group
    ├ sender    batches on their way   ├ group       the application's side of a group
    ├ ordering  what is sent again     │ ├ membership   its side in the IO thread ─ member (pure)
    │           (pure)                 │ ├ commits   offsets on their way ─ a queue (pure)
    └ conversion   interceptors, then  │ ├ starts    where partitions begin
                   serializers         │ └ coordinator   which broker to ask about the group
                                       ├ fetcher     who is asked for what
                                       ├ handout     what the application gets
                                       ├ slots       one partition being read
                                       └ records     batches, opened
                serializers, avro ─ schemas, arrow   keys and values as applications have them
                aio_producer ─ aio_futures, aio_consumer ─ aio_worker   for an event loop, on aio_gate
                broker_client ─ broker_subscriptions   Message Broker's client, on all of these
                routing    which broker to ask  ─ metadata (pure)
                network    one IO thread per client object: requests, connections, timers

Callers' threads and the IO thread meet in two places only: `Network.post`, and state behind a lock that says so.
"""
