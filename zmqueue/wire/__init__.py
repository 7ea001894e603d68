"""Bytes that leave a process: record batches, typed messages, frames. Nothing here opens a socket or a file."""
