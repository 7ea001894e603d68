"""All decisions, pure: events in, effects out. No socket, file, clock, thread or global random; time is an argument."""
