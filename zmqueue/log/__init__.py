"""What a broker keeps in files: the log of each partition, and the folder that is its identity.

    files, memory, watched    the seam to disks, real, in memory or watched by tests; OSError ends there
    segment                   one file of batches and its sparse index
    recovery                  from whatever a crash left behind to a log that may be served, or quarantine
    partition_log             the log of one partition: append, read, truncate, delete, what is durable
    retention, start          which old segments go; where a log begins then, and what was known of the records before
    flusher, ticket           the thread that syncs, for all partitions of a broker together
    session                   the broker's data folder: its lock, its identity, and whether it stopped cleanly

The log is the truth; indexes, epochs and counters are rebuilt from it. Nothing here decides about replication, knows a
socket or reads a clock: the same code runs on a disk, in memory and in a simulator.
"""
