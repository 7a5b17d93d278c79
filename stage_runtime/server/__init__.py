"""The ZMQ side of a replica: sessions, credits, answers."""
