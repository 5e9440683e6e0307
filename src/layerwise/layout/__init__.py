"""Where bytes live and where work happens, as values: buffers, buckets, shards, homes, exchanges, schedule. Pure."""
